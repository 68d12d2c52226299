"""Iterate over features in batches, in order or shuffled, within a fixed amount of memory.

A buffer lets rows be read in the order of the files, which suits disks and compression, but copies each row twice. Rows
of one uncompressed shard that are in the file cache are copied from its memory map to the batch: 2 to 2.4 times as
fast. Rows of several shards stay buffered: a batch from 8 shards takes as long either way, from 64 twice as long
without it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from extract.store.feature_array import FeatureArray

__all__ = ["Epoch", "Shuffle", "batches", "fitting", "prefetch", "read_piece", "row_pieces"]

Shuffle = Literal["chunks", "rows"] | None
_Batch = tuple[NDArray[Any], NDArray[np.int64]]
# Rows in pieces of neighbours, and the order in which they are yielded: positions in the joined pieces.
_Window = tuple[list[NDArray[np.int64]], NDArray[np.int64]]
_IN_ORDER_BYTES = 4 << 20  # read at once in the stored order: they stay in the caches of the processor
_LEAST = {"batch_size": 1, "seed": 0, "start": 0, "rank": 0, "world_size": 1, "memory_bytes": 0}


@dataclass(frozen=True)
class Epoch:
    """How to take samples once, in batches; or the share of one of several processes.

    Attributes:
        batch_size: samples in each batch but the last.
        shuffle: whether to mix them.
        seed: seed of the order.
        start: batches to leave out: resumes after this number of batches.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        TypeError: a value is not an int.
        ValueError: a value is out of range.
    """

    batch_size: int
    shuffle: bool = False
    seed: int = 0
    start: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in [name for name in vars(self) if name in _LEAST]:
            given, least = getattr(self, name), _LEAST[name]
            try:
                object.__setattr__(self, name, operator.index(given))  # integers of NumPy overflow
            except TypeError:
                raise TypeError(f"{name} is {given!r}; it must be an int") from None
            if given < least:
                raise ValueError(f"{name} is {given}; it must be at least {least}")
        if not isinstance(self.shuffle, bool):
            raise ValueError(f"shuffle is {self.shuffle!r}; it must be True or False")
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank is {self.rank}; it must be 0 to {self.world_size - 1}, as world_size is {self.world_size}"
            )


def batches(
    array: FeatureArray,
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
    pieces = row_pieces(array, rows)
    largest = max((len(piece) for piece in pieces), default=0)
    # A compressed piece is held twice, decompressed and in the buffer, while it is copied.
    room = memory_bytes // max(1, array.row_bytes) - largest
    if room < largest:
        raise ValueError(
            f"memory_bytes is {memory_bytes}; it must be at least {2 * largest * array.row_bytes} (two chunks)"
        )
    random = np.random.default_rng(seed)
    if shuffle == "rows":
        windows = _windows_of_rows(array, random.permutation(rows), room)
    elif shuffle == "chunks":
        shuffled = fitting([pieces[i] for i in random.permutation(len(pieces))], room)
        windows = ((window, random.permutation(sum(map(len, window)))) for window in shuffled)
    else:
        room = min(room, max(largest, _IN_ORDER_BYTES // max(1, array.row_bytes)))
        windows = ((window, np.arange(sum(map(len, window)))) for window in fitting(pieces, room))
    return _cut(array, windows, min(room, len(rows)), batch_size, len(rows))


def row_pieces(array: FeatureArray, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split ascending rows by chunk."""
    edges = np.searchsorted(rows, array.chunk_starts()[1:])
    return [piece for piece in np.split(rows, edges) if len(piece)]


def fitting(pieces: list[NDArray[np.int64]], room: int) -> Iterator[list[NDArray[np.int64]]]:
    """Yield the pieces in lists, as many at a time as have at most `room` rows, but at least one."""
    window, size = list[NDArray[np.int64]](), 0
    for piece in pieces:
        if window and size + len(piece) > room:
            yield window
            window, size = [], 0
        window.append(piece)
        size += len(piece)
    if window:
        yield window


def _windows_of_rows(array: FeatureArray, rows: NDArray[np.int64], room: int) -> Iterator[_Window]:
    """Yield as many rows at a time as fit in the buffer, in pieces: read in ascending order, as suits disks."""
    for start in range(0, len(rows), room):
        window = rows[start : start + room]
        ascending = np.sort(window)
        yield row_pieces(array, ascending), np.searchsorted(ascending, window)


def prefetch(array: FeatureArray, pieces: list[NDArray[np.int64]]) -> None:
    """Start reading pieces: a disk reads many blocks at once faster than one after the other."""
    for piece in pieces:
        array.prefetch(int(piece[0]), int(piece[-1]) + 1)


def read_piece(array: FeatureArray, piece: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Read rows of one piece, ascending; in `out` if it is given."""
    first, stop = int(piece[0]), int(piece[-1]) + 1
    values = array.between(first, stop, out) if stop - first == len(piece) else array.take(piece, out)
    array.forget(first, stop)
    return values


def _cut(array: FeatureArray, windows: Iterator[_Window], room: int, batch_size: int, n_rows: int) -> Iterator[_Batch]:
    """Yield the rows of the windows, in their order, in batches, which may span several windows."""
    buffer = np.empty((room, *array.shape[1:]), array.dtype)  # takes no memory where nothing is written
    filled, features, rows = 0, np.empty(0), np.empty(0, np.int64)
    for pieces, order in windows:
        window = np.concatenate(pieces)
        mapped = array.mapped(window)
        if mapped is None:
            _fill(array, pieces, buffer)
            source, positions = buffer, order
        else:
            source, positions = mapped, window[order] - window.min()
        window, start = window[order], 0
        while start < len(window):
            if not filled:
                size = min(batch_size, n_rows)
                features, rows = np.empty((size, *array.shape[1:]), array.dtype), np.empty(size, np.int64)
            stop = min(start + len(rows) - filled, len(window))
            end = filled + stop - start
            # "clip" writes directly into `out` (NumPy, "take").
            np.take(source, positions[start:stop], axis=0, out=features[filled:end], mode="clip")
            rows[filled:end] = window[start:stop]
            start, filled = stop, end
            if filled == len(rows):
                yield features, rows
                n_rows, filled = n_rows - filled, 0
        if mapped is not None:
            array.forget(int(window.min()), int(window.max()) + 1)


def _fill(array: FeatureArray, pieces: list[NDArray[np.int64]], out: NDArray[Any]) -> None:
    """Read pieces one after the other into `out`."""
    prefetch(array, pieces)
    size = 0
    for piece in pieces:
        read_piece(array, piece, out[size : size + len(piece)])
        size += len(piece)
