"""Images with the same bytes are computed once, and stored as often as they are there.

Only within a shard: shards are computed apart from each other, in any order and perhaps on several machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.images import Batch
from extract.status import Status
from extract.store.writer import ShardWriter

__all__ = ["Duplicates"]

# name -> (R, *shape); (R,) status; row of the data set -> why it failed
Rows = tuple[dict[str, NDArray[Any]], NDArray[np.uint8], dict[int, str]]


class Duplicates:
    """Remembers which image each row of a shard was computed from.

    Args:
        writer: of the shard; rows that are ok in it already are remembered, too.
        settle: waits until all rows that were computed are stored.

    Attributes:
        count: rows that were copied.
    """

    def __init__(self, writer: ShardWriter, settle: Callable[[], None]):
        self._writer, self._settle = writer, settle
        self.count = 0
        good = np.flatnonzero(writer.status == Status.OK)
        hashes = writer.column("source_hash")[good]
        self._row_of = {one.tobytes(): row for one, row in zip(hashes[::-1], good[::-1].tolist(), strict=True)}

    def rows_of(self, batch: Batch, compute: Callable[[Batch], Rows]) -> Rows:
        """The rows of a batch: computed, or copied from the row that has the same image.

        Args:
            batch: with all of its images.
            compute: gives the rows of a batch in which no image is twice.
        """
        hashes = [one.tobytes() for one in batch.source_hash]
        kept: list[int] = []
        within: dict[int, int] = {}  # position in the batch -> the position of the same image
        before: dict[int, int] = {}  # position in the batch -> the row of the shard with the same image
        first: dict[bytes, int] = {}
        for i, content in enumerate(hashes):
            if batch.status[i] != Status.OK:
                kept.append(i)
            elif content in self._row_of:
                before[i] = self._row_of[content]
            elif content in first:
                within[i] = first[content]
            else:
                first[content] = i
                kept.append(i)
        if len(kept) == len(hashes):
            rows = compute(batch)
        else:
            rows = self._scattered(batch, kept, within, before, compute)
            self.count += len(within) + len(before)
        local = batch.rows - self._writer.first_row
        self._row_of |= {content: int(local[i]) for content, i in first.items() if rows[1][i] == Status.OK}
        return rows

    def _scattered(
        self, batch: Batch, kept: list[int], within: dict[int, int], before: dict[int, int],
        compute: Callable[[Batch], Rows],
    ) -> Rows:  # fmt: skip
        status = np.full(len(batch.rows), Status.OK, np.uint8)
        found: dict[str, NDArray[Any]] = {}
        reasons: dict[int, str] = {}
        if kept:
            found, status[kept], reasons = compute(batch.only(kept))
        status[list(within)] = status[list(within.values())]
        features = {}
        self._settle()
        for name, values in self._writer.read(np.array(list(before.values()), np.int64)).items():
            features[name] = rows = np.empty((len(batch.rows), *values.shape[1:]), values.dtype)
            if kept:
                rows[kept] = found[name]
            rows[list(within)] = rows[list(within.values())]
            rows[list(before)] = values
        for i, twin in within.items():
            if int(batch.rows[twin]) in reasons:
                reasons[int(batch.rows[i])] = reasons[int(batch.rows[twin])]
        return features, status, reasons
