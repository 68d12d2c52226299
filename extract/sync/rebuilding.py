"""Rebuild a lost manifest from the stored passes, and list the rows of a pass."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from extract.errors import InputError
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.sync.manifest import Manifest, StoredRow
from extract.sync.scan import ScannedFile

__all__ = ["rebuild", "stored_rows"]

_UNKNOWN = -2  # a size that no file has, so that every file is examined


def stored_rows(folder: Path, *, partial: bool = False) -> Iterator[StoredRow]:
    """Yield the rows of a pass.

    Args:
        folder: folder of the pass.
        partial: whether it may be unfinished.

    Raises:
        LayertapError: a shard is missing or cannot be read.
    """
    with FeatureReader(folder, partial=partial) as reader:
        columns = [reader.column(f"source_{name}") for name in ("hash", "size", "mtime_ns")]
        columns += [reader.rows, reader.status]
    for content, size, mtime_ns, row, status in zip(*columns, strict=True):
        yield StoredRow(content.tobytes(), int(size), int(mtime_ns), int(row), int(status))


def rebuild(manifest: Manifest, out: Path, published: DataSet, now_ns: int) -> None:
    """Fill a lost manifest in one transaction: stored rows from the passes, files from the published version.

    Each file is examined again once, because its times are not known.

    Raises:
        LayertapError: a file of the data set cannot be read.
    """
    with manifest.transaction():
        for folder in sorted((out / "passes").glob("[0-9]" * 6)):
            number = int(folder.name)
            with contextlib.suppress(InputError):  # of a damaged pass: its images are computed again
                if DataSet.open(folder).fingerprint == published.fingerprint:
                    manifest.add_pass(number, stored_rows(folder, partial=True), now_ns)
        with contextlib.suppress(InputError, FileNotFoundError):
            table = published.version_rows()
            hashes = itertools.repeat(None) if table.hashes is None else table.hashes
            positions = zip(table.paths, map(int, table.passes), map(int, table.rows), hashes, strict=False)
            manifest.set_files(
                (ScannedFile(os.fsencode(path), _UNKNOWN, 0, 0), False, stored[0])
                for path, number, row, content in positions
                # A file whose row belongs to another image is examined as a new one.
                if (stored := manifest.find_row(number, row)) and (content is None or content.tobytes() == stored[1])
            )
        manifest.record_unused(now_ns)
        assert published.version is not None
        manifest.version = published.version.number
