"""Iterate over features in batches, in order or shuffled, within a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowSource", "Shuffle", "batches"]

Shuffle = Literal["chunks", "rows"] | None
_Batch = tuple[NDArray[Any], NDArray[np.int64]]
# Features, their rows, and the order to yield them in; None for the order in which they are.
_Window = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64] | None]
_IN_ORDER_BYTES = 4 << 20


class RowSource(Protocol):
    """Rows of one feature, such as `extract.store.reader.FeatureArray`.

    Attributes:
        shape: (N, *shape of a row).
        dtype: dtype of the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""

    def pieces(self) -> list[tuple[int, int]]:
        """Return (start, stop), the rows of each chunk, in order."""

    def between(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return neighbouring rows; in `out` if it is given."""

    def take(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return rows in any order; in `out` if it is given."""

    def forget(self, start: int, stop: int) -> None:
        """Release memory of this process for rows that were read."""


def batches(
    array: RowSource,
    rows: NDArray[np.int64],
    batch_size: int,
    *,
    shuffle: Shuffle,
    seed: int,
    memory_bytes: int,
) -> Iterator[_Batch]:
    """Return an iterator over rows of a feature in batches (features, rows); see `FeatureReader.batches`.

    Args:
        array: the feature.
        rows: (R,) int64, ascending.
        batch_size: rows in each batch but the last.
        shuffle: None, "chunks" or "rows".
        seed: seed of the order.
        memory_bytes: maximum size of the buffer.

    Raises:
        ValueError: batch_size, shuffle, seed or memory_bytes is out of range.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if shuffle not in (None, "chunks", "rows"):
        raise ValueError(f"shuffle is {shuffle!r}; it must be None, 'chunks' or 'rows'")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0")
    pieces = _pieces(array, rows)
    largest = max((len(piece) for piece in pieces), default=0)
    # A compressed piece is held twice, decompressed and in the buffer, while it is copied.
    room = memory_bytes // max(1, array.row_bytes) - largest
    if room < largest:
        raise ValueError(
            f"memory_bytes is {memory_bytes}; it must be at least {2 * largest * array.row_bytes} (two chunks)"
        )
    random = np.random.default_rng(seed)
    if shuffle is None:  # a small buffer stays in the caches of the processor
        room = min(room, max(largest, _IN_ORDER_BYTES // max(1, array.row_bytes)))
    if shuffle == "rows":
        windows = _windows_of_rows(array, random.permutation(rows), room)
    else:
        windows = _windows_of_pieces(array, pieces, room, random if shuffle else None)
    return _cut(windows, batch_size)


def _pieces(array: RowSource, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split ascending rows by chunk."""
    edges = np.searchsorted(rows, [start for start, _ in array.pieces()][1:])
    return [piece for piece in np.split(rows, edges) if len(piece)]


def _windows_of_pieces(
    array: RowSource, pieces: list[NDArray[np.int64]], room: int, random: np.random.Generator | None
) -> Iterator[_Window]:
    """Yield as many pieces at a time as fit in the buffer; with `random`, shuffle the pieces and each window's rows."""
    if random is not None:
        pieces = [pieces[i] for i in random.permutation(len(pieces))]
    buffer = np.empty((min(room, sum(map(len, pieces))), *array.shape[1:]), array.dtype)
    while pieces:
        taken, size = 0, 0
        while taken < len(pieces) and size + len(pieces[taken]) <= room:
            piece = pieces[taken]
            first, stop = int(piece[0]), int(piece[-1]) + 1
            neighbours = stop - first == len(piece)
            space = buffer[size : size + len(piece)]
            if neighbours:
                array.between(first, stop, space)
            else:
                array.take(piece, space)
            array.forget(first, stop)
            size, taken = size + len(piece), taken + 1
        rows = np.concatenate(pieces[:taken])
        pieces = pieces[taken:]
        yield buffer, rows, None if random is None else random.permutation(size)


def _windows_of_rows(array: RowSource, rows: NDArray[np.int64], room: int) -> Iterator[_Window]:
    """Yield as many rows at a time as fit in the buffer, read in ascending order, which suits disks and caches."""
    buffer = np.empty((min(room, len(rows)), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), room):
        window = rows[start : start + room]
        ascending = np.argsort(window)
        order = np.empty_like(ascending)
        order[ascending] = np.arange(len(order))
        yield array.take(window[ascending], buffer[: len(window)]), window[ascending], order


def _cut(windows: Iterator[_Window], batch_size: int) -> Iterator[_Batch]:
    """Yield the rows of the windows, in their order, in batches."""
    parts: list[_Batch] = []  # of the next batch, which may span several windows
    missing = batch_size
    for features, rows, order in windows:
        start = 0
        while start < len(rows):
            stop = min(start + missing, len(rows))
            if order is None:
                parts.append((features[start:stop].copy(), rows[start:stop]))
            else:
                positions = order[start:stop]
                parts.append((features.take(positions, axis=0), rows[positions]))
            start, missing = stop, missing - (stop - start)
            if not missing:
                yield _joined(parts)
                parts, missing = [], batch_size
    if parts:
        yield _joined(parts)


def _joined(parts: list[_Batch]) -> _Batch:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([features for features, _ in parts]), np.concatenate([rows for _, rows in parts])
