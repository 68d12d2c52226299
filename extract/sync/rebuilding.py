"""Rebuild a lost manifest from the stored passes, and list the rows of a pass."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from extract.errors import InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.sync.manifest import Manifest
from extract.sync.records import StoredRow
from extract.sync.scan import ScannedFile

__all__ = ["rebuild", "stored_rows"]

_UNKNOWN = -2  # a size that no file has, so that every file is examined


def stored_rows(dataset: DataSet) -> Iterator[StoredRow]:
    """Yield the rows of a finished pass.

    Raises:
        LayertapError: a shard is missing or cannot be read.
    """
    for shard, path in enumerate(dataset.published()):
        if path is None:
            raise LayertapError(f"{dataset.out} is unfinished: shard {shard} is missing")
        with dataset.open_shard(shard, path) as opened:
            status, sizes, times = (opened.column(name) for name in ("status", "source_size", "source_mtime_ns"))
            hashes = np.ascontiguousarray(opened.column("source_hash"))
            first = dataset.shard_range(shard).start
            for i in range(len(opened)):
                yield StoredRow(hashes[i].tobytes(), int(sizes[i]), int(times[i]), first + i, int(status[i]))


def rebuild(manifest: Manifest, out: Path, published: DataSet, now_ns: int) -> None:
    """Fill a lost manifest in one transaction: stored rows from the passes, files from the published version.

    Each file is examined again once, because its times are not known.

    Raises:
        LayertapError: a file of the data set cannot be read.
    """
    with manifest.transaction():
        manifest.clear()
        for folder in sorted((out / "passes").glob("[0-9]" * 6)):
            number = int(folder.name)
            try:
                dataset = DataSet.open(folder)
                if dataset.fingerprint != published.fingerprint:
                    continue
                with FeatureReader(folder, partial=True) as reader:
                    columns = [reader.column(f"source_{name}") for name in ("hash", "size", "mtime_ns")]
                    columns += [reader.rows, reader.status]
            except InputError:  # damaged: its images are computed again
                continue
            rows = (
                StoredRow(content.tobytes(), int(size), int(mtime_ns), int(row), int(status))
                for content, size, mtime_ns, row, status in zip(*columns, strict=True)
            )
            manifest.add_pass(number, rows, now_ns)
        with contextlib.suppress(InputError, FileNotFoundError):
            table = published.version_rows()
            hashes = table.hashes(0, len(table.paths)) if table.hashes else itertools.repeat(None)
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
