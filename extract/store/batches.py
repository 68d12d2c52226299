"""A pass over features in batches, in order or shuffled, within a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowSource", "Shuffle", "batches"]

Shuffle = Literal["chunks", "rows"] | None
_Batch = tuple[NDArray[Any], NDArray[np.int64]]
_Window = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]  # features, their rows, the order to give them in


class RowSource(Protocol):
    """What a pass reads from: the rows of one feature, as `extract.store.reader.FeatureArray` gives them.

    Attributes:
        shape: (N, *shape of a row).
        dtype: of the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""

    def pieces(self) -> list[tuple[int, int]]:
        """First row and end of each chunk, in order."""

    def between(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Neighbouring rows; into `out` if it is given."""

    def take(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Rows in any order; into `out` if it is given."""

    def forget(self, start: int, stop: int) -> None:
        """Take rows that have been read out of the memory of this process."""


def batches(
    array: RowSource,
    rows: NDArray[np.int64],
    batch_size: int,
    *,
    shuffle: Shuffle,
    seed: int,
    memory_bytes: int,
) -> Iterator[_Batch]:
    """Those rows of a feature in batches of (features, rows); arguments and errors as of `FeatureReader.batches`.

    Args:
        array: the feature.
        rows: (R,) int64, ascending.
        batch_size: rows in each batch but the last.
        shuffle: None, "chunks" or "rows".
        seed: of the order.
        memory_bytes: of the buffer.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if shuffle not in (None, "chunks", "rows"):
        raise ValueError(f"shuffle is {shuffle!r}; it must be None, 'chunks' or 'rows'")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0")
    pieces = _pieces(array, rows)
    largest = max((len(piece) for piece in pieces), default=0)
    # A compressed piece that has just been read is there a second time until it is in the buffer.
    room = memory_bytes // max(1, array.row_bytes) - largest
    if room < largest:
        raise ValueError(
            f"memory_bytes is {memory_bytes}; it must be at least {2 * largest * array.row_bytes}, two chunks"
        )
    random = np.random.default_rng(seed)
    if shuffle == "rows":
        windows = _windows_of_rows(array, random.permutation(rows), room)
    else:
        windows = _windows_of_pieces(array, pieces, room, random if shuffle else None)
    return _cut(windows, batch_size)


def _pieces(array: RowSource, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The rows, by the chunk that they lie in."""
    edges = np.searchsorted(rows, [start for start, _ in array.pieces()][1:])
    return [piece for piece in np.split(rows, edges) if len(piece)]


def _windows_of_pieces(
    array: RowSource, pieces: list[NDArray[np.int64]], room: int, random: np.random.Generator | None
) -> Iterator[_Window]:
    """As many pieces at a time as there is room for; with `random`, pieces and the rows in a window are shuffled."""
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
        yield buffer, rows, np.arange(size) if random is None else random.permutation(size)


def _windows_of_rows(array: RowSource, rows: NDArray[np.int64], room: int) -> Iterator[_Window]:
    """As many rows at a time as there is room for, read in ascending order, which disks and caches like."""
    buffer = np.empty((min(room, len(rows)), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), room):
        window = rows[start : start + room]
        ascending = np.argsort(window)
        order = np.empty_like(ascending)
        order[ascending] = np.arange(len(order))
        yield array.take(window[ascending], buffer[: len(window)]), window[ascending], order


def _cut(windows: Iterator[_Window], batch_size: int) -> Iterator[_Batch]:
    """The rows of the windows in their order, so many at a time."""
    parts: list[_Batch] = []  # of the next batch, which may begin at the end of one window and end in the next
    missing = batch_size
    for features, rows, order in windows:
        start = 0
        while start < len(order):
            here = order[start : start + missing]
            parts.append((features[here], rows[here]))
            start, missing = start + len(here), missing - len(here)
            if not missing:
                yield _joined(parts)
                parts, missing = [], batch_size
    if parts:
        yield _joined(parts)


def _joined(parts: list[_Batch]) -> _Batch:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([features for features, _ in parts]), np.concatenate([rows for _, rows in parts])
