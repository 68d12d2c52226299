"""Batches of successive shards, decoded by the same processes without a pause between shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator

from extract.extraction.plan import Plan
from extract.extraction.todo import ShardWork, batches_of
from extract.images import load_batches
from extract.images.loading import Batch, Batches

__all__ = ["Following", "ShardBatches"]

Following = Callable[[Container[int]], ShardWork | None]


class ShardBatches:
    """Decodes shards one after the other; the images of the next shard follow without a gap. Must be closed.

    Args:
        plan: the run, which says how images are decoded.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._batches: Batches | None = None  # created with the first shard that has rows
        self._coming: deque[ShardWork] = deque()  # shards whose images are being or will be decoded
        self._unread: deque[ShardWork] = deque()  # shards of which no row was given to the workers yet
        self._following: Following = lambda known: None

    def take(
        self, shard: int, work_of: Callable[[int], ShardWork], following: Following
    ) -> tuple[ShardWork, Iterator[Batch]]:
        """Return the work of a shard and its batches, which must be read to the end.

        Args:
            shard: number of the shard. If another shard was announced as the next, its decoded images are discarded.
            work_of: returns the work of this shard; called if the shard was not announced.
            following: returns the work of the next shard, other than the shards passed to it, or None if it is not
                known yet. Called when there is room for more images.
        """
        self._following = following
        if self._coming and self._coming[0].shard != shard:
            self.close()
        if not self._coming:
            self._add(work_of(shard))
        work = self._coming[0]
        if self._batches is None and len(work.rows):
            self._batches = load_batches(self._plan.images, self._lists(), self._plan.decoding)
        return work, self._of(work)

    @property
    def is_ahead(self) -> bool:
        """Whether images of later shards may have been decoded already."""
        return len(self._coming) > 1

    def close(self) -> None:
        """End the processes that decode; the next `take` starts new ones."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._coming.clear()
        self._unread.clear()

    def _of(self, work: ShardWork) -> Iterator[Batch]:
        for _ in batches_of(work.rows, self._plan):
            assert self._batches is not None
            yield next(self._batches)
        self._coming.popleft()

    def _lists(self) -> Iterator[list[int] | None]:
        """Yield the rows of each batch, or None while they are not known; read when there is room for more images."""
        while True:
            if not self._unread and (work := self._following([batches.shard for batches in self._coming])) is not None:
                self._add(work)
            if self._unread:
                yield from batches_of(self._unread.popleft().rows, self._plan)
            else:
                yield None

    def _add(self, work: ShardWork) -> None:
        self._coming.append(work)
        self._unread.append(work)
