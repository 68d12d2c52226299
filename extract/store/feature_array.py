"""Where the rows of a reader are, and one feature of them, indexed as a NumPy array."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.store.format.layout import StoredFeature, chunk_rows
from extract.store.format.shard import Shard
from extract.store.format.value_types import decoded
from extract.store.row_selection import ShardFile

__all__ = ["FeatureArray", "RowIndex", "numbers_of"]

_INTEGERS = (int, np.int64, np.int32)  # but not bool
_DECODED_BYTES = 1 << 22  # values decoded at once
_SAMPLE = 64  # rows that are looked for in the file cache, at most, and one of each megabyte


class RowIndex:
    """The rows of a reader, by shard.

    Args:
        files: the shards.
        chosen: rows of each shard that the reader has, (N,) int64, ascending; None for all rows.
        counts: number of rows of each shard that the reader has.

    Attributes:
        files: the shards.
        chosen: as above.
        starts: (shards + 1,) int64, first row of each shard, and the number of rows.
    """

    def __init__(self, files: Sequence[ShardFile], chosen: Sequence[NDArray[np.int64] | None], counts: Sequence[int]):
        self.files, self.chosen = files, chosen
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def local(self, shard_index: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert numbers of the rows that the reader has of a shard to row numbers of the shard."""
        chosen = self.chosen[shard_index]
        return rows if chosen is None else chosen[rows]

    def by_shard(self, rows: NDArray[np.int64]) -> Iterator[tuple[Shard, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (shard, positions in `rows`, rows of the shard) for each shard that has some of the rows."""
        order = np.argsort(rows, kind="stable")
        edges = np.searchsorted(rows[order], self.starts).tolist()
        for shard_index, (first, stop) in enumerate(pairwise(edges)):
            if first < stop:
                positions = order[first:stop]
                local = self.local(shard_index, rows[positions] - self.starts[shard_index])
                yield self.files[shard_index].shard, positions, local

    def ranges_between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard index, start, stop), the range of rows `start` to `stop` in each shard that has some of them."""
        starts = self.starts
        for shard_index in range(int(np.searchsorted(starts, start, "right")) - 1, len(starts) - 1):
            if starts[shard_index] >= stop:
                return
            first, last = max(start, int(starts[shard_index])), min(stop, int(starts[shard_index + 1]))
            if first < last:
                yield shard_index, first - int(starts[shard_index]), last - int(starts[shard_index])


def numbers_of(index: Any, count: int, noun: str) -> NDArray[np.int64]:
    """Return the numbers, from 0, that an index of an array stands for; without a dimension for an int.

    Args:
        index: an int, a slice, a boolean mask, or ints in any order.
        count: length of the array.
        noun: what it consists of, for errors.

    Raises:
        IndexError: the index is something else, or out of range.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(count))
    numbers = np.asarray(index)
    if numbers.dtype == bool and numbers.ndim:
        if numbers.shape != (count,):
            raise IndexError(f"the mask has shape {numbers.shape}, expected ({count},)")
        return np.flatnonzero(numbers)
    if isinstance(index, tuple) or numbers.ndim > 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise IndexError(f"expected an int, a slice, a list of ints or a mask, got {index!r}")
    if numbers.size and (outside := numbers[(numbers < -count) | (numbers >= count)]).size:
        raise IndexError(f"{outside.flat[0]} is out of range for {count} {noun}")
    numbers = numbers.astype(np.int64)
    return np.asarray(np.where(numbers < 0, numbers + count, numbers))


class FeatureArray:
    """One feature over all shards; indexing reads rows.

    The index is an int, a slice, a boolean mask, or an array of rows in any order, with or without repeats. The result
    is a NumPy array.
    """

    def __init__(
        self, index: RowIndex, feature: StoredFeature, verify: Callable[[NDArray[np.int64]], None] | None = None
    ):
        """Hold a feature of the rows of a reader; `verify` is called with the rows before they are read."""
        self._index, self._feature, self._verify = index, feature, verify
        self.name: str = feature.name
        self.dtype: np.dtype[Any] = np.dtype(feature.value_dtype)
        self._is_encoded = feature.dtype != feature.value_dtype
        self.shape: tuple[int, ...] = (len(index), *feature.shape)
        self._edges: list[int] = index.starts.tolist()  # first row of each shard, and the end

    @property
    def attributes(self) -> dict[str, str]:
        """HDF5 attributes of the feature: layer, pooling, axes, source_dtype."""
        return dict(self._feature.attributes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of values in memory."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> str:
        """Type of the values in the files: `dtype`, or one that readers turn into float32, such as "int8"."""
        return self._feature.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"FeatureArray({self._feature.name!r}, {self.shape}, {self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        is_row = type(rows) in _INTEGERS and 0 <= rows < self.shape[0]
        if is_row and self._verify is None:  # fast path for a loop over rows
            shard_index = bisect_right(self._edges, rows) - 1
            chosen, local = self._index.chosen[shard_index], rows - self._edges[shard_index]
            row = int(local if chosen is None else chosen[local])
            return self.values(self._index.files[shard_index].shard.read(self._feature.name, row, row + 1)[0])
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self.between(start, stop)
        numbers = numbers_of(rows, len(self), "rows")
        values = self.take(np.atleast_1d(numbers))
        return values if numbers.ndim else values[0]

    def chunk_starts(self) -> list[int]:
        """Return the first row of each chunk: of about a megabyte of neighbouring rows in one file."""
        steps = [chunk_rows(self._feature, file.n_rows) for file in self._index.files]
        ranges = zip(pairwise(self._edges), steps, strict=True)
        return [first for (start, stop), step in ranges for first in range(start, stop, step)]

    def mapped(self, rows: NDArray[np.int64]) -> NDArray[Any] | None:
        """Return the rows from the least to the greatest of `rows` without a copy; None if some order of them is slow.

        Any order is fast if the rows are in one shard, not compressed, and in the kernel's file cache (a sample of them
        is tested), and kept as values.
        """
        if self._is_encoded:
            return None
        start, stop = int(rows.min()), int(rows.max()) + 1
        shard_index, first, last = next(self._index.ranges_between(start, stop))
        if last - first != stop - start or self._index.chosen[shard_index] is not None:
            return None
        size = min(_SAMPLE, 1 + (len(rows) * self.row_bytes >> 20))
        sample = rows[:: -(-len(rows) // size)] - self._edges[shard_index]
        view = self._index.files[shard_index].shard.mapped(self._feature.name, sample)
        if view is not None and self._verify is not None:
            self._verify(rows)
        return None if view is None else view[first:last]

    def parts(self) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield (start, stop, values) of the rows of each shard: a read-only view of the file, or else a copy.

        On Linux, values are views if they are neither compressed nor encoded, and all rows of the shard are read.
        """
        for shard_index, (start, stop) in enumerate(pairwise(self._edges)):
            if start == stop:
                continue
            view = None
            if not self._is_encoded and self._index.chosen[shard_index] is None:
                view = self._index.files[shard_index].shard.mapped(self._feature.name, np.empty(0, np.int64))
            if view is None:
                yield start, stop, self.between(start, stop)
            else:
                if self._verify is not None:
                    self._verify(np.arange(start, stop))
                yield start, stop, view

    def prefetch(self, start: int, stop: int) -> None:
        """Start reading rows into the kernel's cache, and return at once."""
        for shard_index, first, last in self._index.ranges_between(start, stop):
            if self._index.chosen[shard_index] is None:
                self._index.files[shard_index].shard.prefetch(self._feature.name, first, last)

    def forget(self, start: int, stop: int) -> None:
        """Release memory-mapped pages of rows that were read; the file stays in the kernel's cache."""
        for shard_index, first, last in self._index.ranges_between(start, stop):
            opened = self._index.files[shard_index].opened
            if opened is not None and self._index.chosen[shard_index] is None:
                opened.forget(self._feature.name, first, last)

    def between(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return (stop - start, *shape), neighbouring rows, all in range; in `out` if it is given."""
        if self._is_encoded:
            return self.take(np.arange(start, stop), out)
        if self._verify is not None:
            self._verify(np.arange(start, stop))
        if out is None:
            out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        n_read = 0
        for shard_index, first, last in self._index.ranges_between(start, stop):
            shard, chosen = self._index.files[shard_index].shard, self._index.chosen[shard_index]
            space = out[n_read : n_read + last - first]
            if chosen is None:
                shard.read(self._feature.name, first, last, space)
            else:
                shard.take(self._feature.name, chosen[first:last], space)
            n_read += last - first
        return out

    def take(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return (len(rows), *shape), rows in any order, all in range; in `out` if it is given."""
        if self._verify is not None:
            self._verify(rows)
        if not self._is_encoded:
            return self.kept(rows, out)
        if out is None:
            out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        at_once = max(1, _DECODED_BYTES // max(1, self.row_bytes))
        for start in range(0, len(rows), at_once):
            out[start : start + at_once] = self.values(self.kept(rows[start : start + at_once]))
        return out

    def kept(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return rows in any order as they are kept in files, not verified; in `out` if it is given."""
        if out is None:
            out = np.empty((len(rows), *self._feature.kept_shape), self._feature.kept_dtype)
        index, name = self._index, self._feature.name
        if len(index.files) == 1:
            return index.files[0].shard.take(name, index.local(0, rows), out)
        for shard, positions, local in index.by_shard(rows):
            out[positions] = shard.take(name, local)
        return out

    def values(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the values of rows that are given as they are kept in files."""
        return decoded(rows, self._feature.dtype)
