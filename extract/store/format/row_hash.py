"""The two hashes of a row: row_hash over its features, record_hash over its path, row_hash, source and status.

Any program can compute row_hash. record_hash finds what a power failure leaves: a status without the hash of the image
file, or the new status of a retried row without its new features. It also binds features to the name and the bytes of
their image: rows that were exchanged completely, with their row_hash, do not match it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.store.format.layout import ROW_DATA
from extract.store.format.shard import Shard

__all__ = ["checked", "hash_records", "hash_rows", "wrong_rows"]

Checked = tuple[int, int, dict[str, NDArray[Any]] | None, NDArray[np.bool_]]

# Columns that record_hash covers after the path, in this order: all row data except record_hash itself.
_RECORDED = [
    (name, np.dtype(dtype), np.dtype(dtype).itemsize * math.prod(width))
    for name, width, dtype in ROW_DATA
    if name != "record_hash"
]


def hash_rows(features: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """Return the xxh3-64 of each row over all features, in sorted order of their names.

    Args:
        features: name -> (R, *shape), as stored.

    Returns:
        (R,) uint64.
    """
    columns = [np.ascontiguousarray(features[name]) for name in sorted(features)]
    n_rows = len(columns[0])
    flat = [column.reshape(n_rows, -1).view(np.uint8) for column in columns] if n_rows else []
    if len(flat) == 1:
        digest: Any = xxhash.xxh3_64_intdigest  # its type stub does not accept arrays as buffers
        return np.fromiter(map(digest, flat[0]), np.uint64, n_rows)
    hashes = np.empty(n_rows, np.uint64)
    for row in range(n_rows):
        state = xxhash.xxh3_64()
        for column in flat:
            state.update(column[row].data)
        hashes[row] = state.intdigest()
    return hashes


def hash_records(paths: Sequence[bytes], columns: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """Return the xxh3-64 of each row over path, zero byte, row_hash, source_size, source_mtime_ns, source_hash, status.

    Args:
        paths: (R,) paths as stored.
        columns: name -> (R, ...) of the other columns, as stored, little-endian.

    Returns:
        (R,) uint64.
    """
    n_rows = len(paths)
    parts = [
        np.ascontiguousarray(columns[name], dtype).view(np.uint8).reshape(n_rows, size)
        for name, dtype, size in _RECORDED
    ]
    records = np.concatenate(parts, axis=1).tobytes()
    each = len(records) // max(1, n_rows)
    return np.fromiter(
        (
            xxhash.xxh3_64_intdigest(path + b"\0" + records[start : start + each])
            for path, start in zip(paths, range(0, len(records), each or 1), strict=True)
        ),
        np.uint64,
        n_rows,
    )


def wrong_rows(shard: Shard, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the given rows (ascending, relative to the shard) that do not match their hashes."""
    return np.concatenate(
        [np.empty(0, np.int64), *(start + np.flatnonzero(~agree) for start, _, _, agree in checked(shard, rows))]
    )


def checked(shard: Shard, rows: NDArray[np.int64]) -> Iterator[Checked]:
    """Yield ascending rows in blocks: (start, stop, name -> features or None, whether each row matches its hashes).

    The features are None if the rows cannot be read; see `Shard.blocks`.
    """
    stored = {name: shard.column(name) for name, *_ in ROW_DATA}
    paths = shard.column("path")
    for start, stop, block in shard.blocks(rows):
        here = {name: column[start:stop] for name, column in stored.items()}
        agree = hash_records(paths[start:stop].tolist(), here) == here["record_hash"]
        agree &= False if block is None else hash_rows(block) == here["row_hash"]
        yield start, stop, block, agree
