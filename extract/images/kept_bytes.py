"""Bytes of images behind URLs, kept in a folder so that each image is fetched once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from PIL import Image

from extract import defaults
from extract.images.sources import ImageSource

__all__ = ["KeptBytes"]

_TIME_BYTES = 8  # modification time, before the bytes of the image


class KeptBytes:
    """ImageSource that keeps what another source reads from URLs. Local files are read from where they are.

    Args:
        source: the other source.
        folder: existing folder, in which each image gets a file.
    """

    def __init__(self, source: ImageSource, folder: Path):
        self._source, self._folder = source, folder

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

    def decode(
        self, data: bytes, max_pixels: int, min_decode_px: int = 0, orientation: str = defaults.ORIENTATION,
        icc: str = defaults.ICC,
    ) -> Image.Image:  # fmt: skip
        """See `ImageSource`."""
        return self._source.decode(data, max_pixels, min_decode_px, orientation, icc)

    def is_remote(self, row: int) -> bool:
        """See `ImageSource`."""
        return self._source.is_remote(row)

    def check_there(self) -> None:
        """See `ImageSource`."""
        self._source.check_there()
