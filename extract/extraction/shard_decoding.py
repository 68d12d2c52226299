"""Batches of one shard after another, decoded by the same processes without a pause in between."""

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
    """As soon as there is nothing left to decode of a shard, the next one's images are; to be closed.

    Args:
        plan: how images are read.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._batches: Batches | None = None  # from the first shard that has rows
        self._coming: deque[ShardWork] = deque()  # shards of which images are decoded, or will be
        self._unread: deque[ShardWork] = deque()  # those of which none is, yet
        self._following: Following = lambda known: None

    def take(
        self, shard: int, work_of: Callable[[int], ShardWork], following: Following
    ) -> tuple[ShardWork, Iterator[Batch]]:
        """What is to do of a shard, and its batches, which are to be taken to the last.

        Args:
            shard: its number. If another one was said to follow, what is decoded of that is thrown away.
            work_of: asked if nobody said that this one would follow.
            following: the work of a shard that is to be made next, besides those that are known; None: nobody knows
                yet. It is asked when there is room for more images.
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
        """Whether images of further shards may be decoded already."""
        return len(self._coming) > 1

    def close(self) -> None:
        """End the processes that decode; they start again for the next shard that is taken."""
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
        """The rows of each batch, None while nobody knows; this is run where there is room for more to decode."""
        while True:
            if not self._unread and (work := self._following([one.shard for one in self._coming])) is not None:
                self._add(work)
            if self._unread:
                yield from batches_of(self._unread.popleft().rows, self._plan)
            else:
                yield None

    def _add(self, work: ShardWork) -> None:
        self._coming.append(work)
        self._unread.append(work)
