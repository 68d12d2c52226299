"""Iterate over features in batches, in order or shuffled, within a fixed amount of memory.

A buffer lets rows be read in the order of the files, which suits disks and compression, but copies each row twice. Rows
of one uncompressed shard that are in the file cache are copied from its memory map to the batch: 2 to 2.4 times as
fast. Rows of several shards stay buffered: a batch from 8 shards takes as long either way, from 64 twice as long
without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from extract.store.feature_array import FeatureArray

__all__ = ["Shuffle", "batches", "prefetch", "read_piece", "row_pieces"]

Shuffle = Literal["chunks", "rows"] | None
_Batch = tuple[NDArray[Any], NDArray[np.int64]]
_IN_ORDER_BYTES = 4 << 20
_MAPPED_BYTES = 64 << 20  # mapped rows that are read in order before their pages are released


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
        windows = _windows_of_pieces(array, [pieces[i] for i in random.permutation(len(pieces))], room, random)
    else:
        windows = _windows_in_order(array, pieces, room, largest)
    return _cut(windows, batch_size, array, len(rows))


@dataclass(frozen=True)
class _Window:
    """Rows that are yielded one after the other.

    Attributes:
        rows: (R,) int64, the rows in the order in which they are yielded.
        features: (M, *shape of a row), these rows and perhaps others: a buffer, or an array over a memory map.
        positions: (R,) int64, position of each row in `features`; None for 0 to R - 1.
    """

    rows: NDArray[np.int64]
    features: NDArray[Any]
    positions: NDArray[np.int64] | None = None

    def read(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Copy the features of `rows[start:stop]` into `out`."""
        if self.positions is None:
            out[...] = self.features[start:stop]
        else:  # "clip" writes directly into `out` (NumPy, "take")
            np.take(self.features, self.positions[start:stop], axis=0, out=out, mode="clip")


class _Buffer:
    """Memory for the rows of one window, which is allocated when it is first used: mapped rows do not need it."""

    def __init__(self, array: FeatureArray, size: int):
        self._array, self.size = array, size

    @cached_property
    def features(self) -> NDArray[Any]:
        """(size, *shape of a row)."""
        return np.empty((self.size, *self._array.shape[1:]), self._array.dtype)


def row_pieces(array: FeatureArray, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split ascending rows by chunk."""
    edges = np.searchsorted(rows, [start for start, _ in array.pieces()][1:])
    return [piece for piece in np.split(rows, edges) if len(piece)]


def _windows_in_order(
    array: FeatureArray, pieces: list[NDArray[np.int64]], room: int, largest: int
) -> Iterator[_Window]:
    """Yield the pieces, as many at a time as are mapped, or as fit in the caches of the processor."""
    row_bytes = max(1, array.row_bytes)
    buffer = _Buffer(array, min(room, max(largest, _IN_ORDER_BYTES // row_bytes)))
    while pieces:
        for at_most in (max(largest, _MAPPED_BYTES // row_bytes), buffer.size):
            window = _fitting(pieces, at_most)
            rows = np.concatenate(window)
            mapped = array.mapped(rows)
            if mapped is not None:
                yield _Window(rows, mapped, None if len(rows) == len(mapped) else rows - rows[0])
                array.forget(int(rows[0]), int(rows[-1]) + 1)
                break
        else:
            _fill(array, window, buffer.features)
            yield _Window(rows, buffer.features)
        pieces = pieces[len(window) :]


def _windows_of_pieces(
    array: FeatureArray, pieces: list[NDArray[np.int64]], room: int, random: np.random.Generator
) -> Iterator[_Window]:
    """Yield as many pieces at a time as fit in the buffer, with their rows shuffled."""
    buffer = _Buffer(array, min(room, sum(map(len, pieces))))
    while pieces:
        window = _fitting(pieces, buffer.size)
        pieces = pieces[len(window) :]
        rows = np.concatenate(window)
        order = random.permutation(len(rows))
        mapped = array.mapped(rows)
        if mapped is None:
            _fill(array, window, buffer.features)
            yield _Window(rows[order], buffer.features, order)
        else:
            first, last = int(rows.min()), int(rows.max())
            yield _Window(rows[order], mapped, rows[order] - first)
            array.forget(first, last + 1)


def _windows_of_rows(array: FeatureArray, rows: NDArray[np.int64], room: int) -> Iterator[_Window]:
    """Yield as many rows at a time as fit in the buffer."""
    buffer = _Buffer(array, min(room, len(rows)))
    for start in range(0, len(rows), room):
        window = rows[start : start + room]
        mapped = array.mapped(window)
        if mapped is None:  # read in ascending order, which suits disks and compression
            ascending = np.argsort(window)
            positions = np.empty_like(ascending)
            positions[ascending] = np.arange(len(positions))
            array.take(window[ascending], buffer.features[: len(window)])
            yield _Window(window, buffer.features, positions)
        else:
            yield _Window(window, mapped, window - window.min())


def _fitting(pieces: list[NDArray[np.int64]], room: int) -> list[NDArray[np.int64]]:
    """Return the first pieces, as many as have at most `room` rows."""
    taken, size = 0, 0
    while taken < len(pieces) and size + len(pieces[taken]) <= room:
        size, taken = size + len(pieces[taken]), taken + 1
    return pieces[:taken]


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


def _fill(array: FeatureArray, pieces: list[NDArray[np.int64]], out: NDArray[Any]) -> None:
    """Read pieces one after the other into `out`."""
    prefetch(array, pieces)
    size = 0
    for piece in pieces:
        read_piece(array, piece, out[size : size + len(piece)])
        size += len(piece)


def _cut(windows: Iterator[_Window], batch_size: int, array: FeatureArray, n_rows: int) -> Iterator[_Batch]:
    """Yield the rows of the windows, in their order, in batches, which may span several windows."""
    filled, features, rows = 0, np.empty(0), np.empty(0, np.int64)
    for window in windows:
        start = 0
        while start < len(window.rows):
            if not filled:
                size = min(batch_size, n_rows)
                features, rows = np.empty((size, *array.shape[1:]), array.dtype), np.empty(size, np.int64)
            stop = min(start + len(rows) - filled, len(window.rows))
            end = filled + stop - start
            window.read(start, stop, features[filled:end])
            rows[filled:end] = window.rows[start:stop]
            start, filled = stop, end
            if filled == len(rows):
                yield features, rows
                n_rows, filled = n_rows - filled, 0
