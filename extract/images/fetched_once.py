"""Bytes of images behind URLs, kept in a folder so that each image is fetched once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from extract.images.sources import ImageSource, SourceOfSource

__all__ = ["FetchedOnce"]

_TIME_BYTES = 8  # modification time, before the bytes of the image


class FetchedOnce(SourceOfSource):
    """ImageSource that keeps what another source reads from URLs. Local files are read from where they are.

    Args:
        source: the other source.
        folder: existing folder, in which each image gets a file.
    """

    def __init__(self, source: ImageSource, folder: Path):
        super().__init__(source)
        self._folder = folder

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        if not self._source.is_remote(row):
            return self._source.read(row)
        path = self._folder / str(row)
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            return content[_TIME_BYTES:], int.from_bytes(content[:_TIME_BYTES], signed=True)
        data, mtime_ns = self._source.read(row)
        new = self._folder / f"{row}.{os.getpid()}"
        try:
            new.write_bytes(mtime_ns.to_bytes(_TIME_BYTES, signed=True) + data)
            new.replace(path)
        except OSError:  # a disk without space for it: the image is fetched again
            with contextlib.suppress(OSError):
                new.unlink()
        return data, mtime_ns
