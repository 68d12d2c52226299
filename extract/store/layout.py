"""The file format, version 1.

A data set is a folder:

    dataset.json          what it holds and what the numbers depend on (extract/store/dataset.py)
    shards/000000.h5      a finished shard: the name is the commit
    shards/000000.json    its receipt: size, sha256, rows by status, why rows failed
    shards/000001.h5.part a shard being written, or left by a run that was interrupted

A shard is plain HDF5 with rows in path order:

    /                     attributes: format="layertap", format_version=1, shard, first_row, n_rows, fingerprint,
                          images (xxh3-128 of all paths of the data set)
    /features/NAME        (N, *shape) float32 or float16; attributes: layer, pooling, axes, source_dtype
    /path                 (N,) variable-length UTF-8, relative to the image folder; the bytes of the file name
    /label                (N,) int64, index into /classes; -1 unknown
    /split                (N,) variable-length UTF-8: train, val, test or empty
    /classes              (K,) variable-length UTF-8
    /status               (N,) uint8: 0 pending, 1 ok, 2 decode error, 3 not finite, 4 missing
    /row_hash             (N,) uint64: xxh3-64 over the bytes of the row's features, in sorted order of names
    /source_size          (N,) int64 bytes; -1 no file          /source_mtime_ns  (N,) int64; -1 no file
    /source_hash          (N, 16) uint8: xxh3-128 of the file, big-endian; 0 no file
    /provenance           JSON text: what the numbers depend on, backbone, weights, configuration, versions, machine

Readers ignore attributes and data sets they do not know. Features of rows with status 2 and 4 are NaN. Everything is
created at full size before the first image is read, without compression; from then on only raw data is written, so a
killed run leaves a file that opens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import LayertapError

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "ROW_DATA",
    "StoredFeature",
    "chunk_rows",
    "create_shard",
    "row_bytes",
    "sync_folder",
    "write_json",
]

FORMAT = "layertap"
FORMAT_VERSION = 1

# Chunks of 0.5 to 1 MB, full width: measured on (80k, 1280) float16, such chunks write at disk speed and read at
# 11.8 GB/s; chunks of one row are 4 and 32 times slower, h5py's own guess 2 and 4 times.
_CHUNK_BYTES = 1 << 20

_TEXT = h5py.string_dtype("utf-8")


@dataclass(frozen=True)
class StoredFeature:
    """One data set of features: its name, the shape of a row and where it comes from.

    Attributes:
        name: in the file and for the reader.
        shape: of one row.
        dtype: "float32" or "float16".
        attributes: layer, pooling, axes, source_dtype, as written beside the data.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def row_bytes(features: Sequence[StoredFeature]) -> int:
    """Bytes of one row over all features."""
    return sum(feature.row_bytes for feature in features)


def chunk_rows(feature: StoredFeature, n_rows: int) -> int:
    """Rows in a chunk: the power of two that makes 0.5 to 1 MB, at least 1, at most all rows."""
    rows = 1 << max(0, (_CHUNK_BYTES // max(1, feature.row_bytes)).bit_length() - 1)
    return max(1, min(rows, n_rows))


def create_shard(
    path: Path,
    features: Sequence[StoredFeature],
    *,
    shard: int,
    first_row: int,
    fingerprint: str,
    images: str,
    paths: Sequence[str],
    labels: NDArray[np.int64],
    splits: Sequence[str],
    classes: Sequence[str],
    provenance: dict[str, Any],
) -> None:
    """Create a shard at its full size, every row pending, under `path` (which ends in `.part`).

    The disk space is taken here, so that a full disk shows before the first image is read. If the process dies inside
    this call, no file of that name exists.

    Raises:
        LayertapError: the disk has not enough room, or the folder cannot be written to.
    """
    n_rows = len(paths)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        _try_space(temporary, features, paths)
        with h5py.File(temporary, "w") as file:
            file.attrs.update(
                format=FORMAT,
                format_version=FORMAT_VERSION,
                shard=shard,
                first_row=first_row,
                n_rows=n_rows,
                fingerprint=fingerprint,
                images=images,
            )
            group = file.create_group("features")
            for feature in features:
                shape = (n_rows, *feature.shape)
                chunks = (chunk_rows(feature, n_rows), *feature.shape)
                data = group.create_dataset(feature.name, shape, feature.dtype, dcpl=_preallocated(chunks))
                data.attrs.update(feature.attributes)
            for name, width, dtype in ROW_DATA:
                file.create_dataset(name, (n_rows, *width), dtype, dcpl=_preallocated(None), fillvalue=0)
            file["path"] = np.array([os.fsencode(path) for path in paths], dtype=_TEXT)
            file["split"] = np.array(splits, dtype=_TEXT)
            file["label"] = labels
            file["classes"] = np.array([os.fsencode(name) for name in classes], dtype=_TEXT)
            file["provenance"] = json.dumps(provenance, indent=1)
        with temporary.open("r+b") as raw:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(raw.fileno(), 0, os.fstat(raw.fileno()).st_size)
            os.fsync(raw.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        size = row_bytes(features) * n_rows
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise LayertapError(f"cannot create {path} ({size / 1e6:,.1f} MB): {reason}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _try_space(path: Path, features: Sequence[StoredFeature], paths: Sequence[str]) -> None:
    """Take as much disk space as a shard can need, and give it back.

    HDF5 ends the process when the disk is full at the moment it closes a file; so it must not come to that.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    n_rows = len(paths)
    size = 256 * 1024  # groups, attributes, provenance
    for feature in features:
        rows = chunk_rows(feature, n_rows)
        chunks = -(-n_rows // rows)
        size += chunks * (rows * feature.row_bytes + 256)  # 256: of the index of chunks
    size += n_rows * (sum(np.dtype(dtype).itemsize * math.prod(width) for _, width, dtype in ROW_DATA) + 8)
    size += sum(2 * len(os.fsencode(name)) + 96 for name in paths)  # variable-length text: heap and references
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        finally:
            path.unlink()


ROW_DATA: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("status", (), "uint8"),
    ("row_hash", (), "uint64"),
    ("source_size", (), "int64"),
    ("source_mtime_ns", (), "int64"),
    ("source_hash", (16,), "uint8"),
)


def _preallocated(chunks: tuple[int, ...] | None) -> Any:
    """Creation properties: take the space now; with chunks, do not fill it either (each row is written before use)."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if chunks is not None:
        properties.set_chunk(chunks)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties


def sync_folder(folder: Path) -> None:
    """Make renames and links in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
