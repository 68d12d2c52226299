"""Where the rows of a reader are: row number -> shard and row of the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from extract.store.format.shard import Shard
from extract.store.open_shards import ShardFile

__all__ = ["RowIndex"]


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

    def shard_and_row(self, row: int) -> tuple[Shard, int]:
        """Return the shard of a row, and the row's number in the shard."""
        shard_index = int(np.searchsorted(self.starts, row, "right")) - 1
        local = self.local(shard_index, np.array([row - self.starts[shard_index]]))
        return self.files[shard_index].shard, int(local[0])

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
