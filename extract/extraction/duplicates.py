"""Images with the same bytes are computed once, and stored as often as they are there.

Only within a shard: shards are computed apart from each other, in any order and perhaps on several machines.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from extract.compute.forward import Rows
from extract.images import Batch
from extract.row_status import Status
from extract.store.format.writer import ShardWriter

__all__ = ["Duplicates"]


class Duplicates:
    """Remembers which image each row of a shard was computed from.

    Args:
        writer: of the shard; rows that are ok in it already are remembered, too.
        store_all: stores all rows whose computation was begun.
        wait_until_written: waits until those are stored that were waited for before.

    Attributes:
        count: rows that were copied.
    """

    def __init__(self, writer: ShardWriter, store_all: Callable[[], None], wait_until_written: Callable[[], None]):
        self._writer, self._store_all, self._wait_until_written = writer, store_all, wait_until_written
        self.count = 0
        self._computing: set[bytes] = set()  # hashes of images that are
        good = np.flatnonzero(writer.status == Status.OK)
        hashes = writer.column("source_hash")[good]
        self._row_of = {one.tobytes(): row for one, row in zip(hashes[::-1], good[::-1].tolist(), strict=True)}

    def begin(self, batch: Batch, begin: Callable[[Batch], Callable[[], Rows]]) -> Callable[[], Rows]:
        """Have the rows of a batch computed, or copied from the row that has the same image.

        Args:
            batch: with all of its images.
            begin: has the rows of a batch computed in which no image is twice, and gives what waits for them.

        Returns:
            what waits for the rows; to be called before the next batch but one is begun.
        """
        hashes = [one.tobytes() for one in batch.source_hash]
        if not self._computing.isdisjoint(hashes):
            self._store_all()  # the next rows are copies of those
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
        is_whole = len(kept) == len(hashes)
        computed = begin(batch if is_whole else batch.only(kept)) if kept else None
        self._computing |= first.keys()

        def rows() -> Rows:
            found = None if computed is None else computed()
            self._computing -= first.keys()
            if not is_whole:
                found = self._scattered(batch, kept, within, before, found)
                self.count += len(within) + len(before)
            assert found is not None
            local = batch.rows - self._writer.first_row
            self._row_of |= {content: int(local[i]) for content, i in first.items() if found.status[i] == Status.OK}
            return found

        return rows

    def _scattered(
        self, batch: Batch, kept: list[int], within: dict[int, int], before: dict[int, int], computed: Rows | None
    ) -> Rows:
        status = np.full(len(batch.rows), Status.OK, np.uint8)
        reasons: dict[int, str] = {}
        if computed is not None:
            status[kept], reasons = computed.status, computed.reasons
        status[list(within)] = status[list(within.values())]
        features = {}
        if before:
            self._wait_until_written()
        for name, values in self._writer.read(np.array(list(before.values()), np.int64)).items():
            features[name] = rows = np.empty((len(batch.rows), *values.shape[1:]), values.dtype)
            if computed is not None:
                rows[kept] = computed.features[name]
            rows[list(within)] = rows[list(within.values())]
            rows[list(before)] = values
        for i, twin in within.items():
            if int(batch.rows[twin]) in reasons:
                reasons[int(batch.rows[i])] = reasons[int(batch.rows[twin])]
        return Rows(features, status, reasons)
