"""Batches of one shard after another, decoded by the same processes without a pause in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator

from extract.images import load_batches
from extract.images.loading import Batch
from extract.planning import Plan
from extract.shard_work import ShardWork, batches_of

__all__ = ["Following", "ShardBatches"]

Following = Callable[[Container[int]], ShardWork | None]


class ShardBatches:
    """As soon as there is nothing left to decode of a shard, the next one's images are; to be closed.

    Where it is not known then which shard is the next, there is none: it ends with the last that was known.

    Args:
        plan: how images are read.
        first: the first shard.
        following: the work of a shard that is to be made then, besides those that are known; None: nobody knows.
    """

    def __init__(self, plan: Plan, first: ShardWork, following: Following):
        self._plan, self._following = plan, following
        self._coming = deque([first])  # shards of which images are decoded, or will be
        self._batches = load_batches(
            plan.images,
            self._lists(),
            plan.backbone.preprocessing.prepare,
            workers=plan.workers if len(first.rows) else 0,
            batch_size=plan.batch_size,
            max_pixels=plan.max_pixels,
            at_least_px=plan.backbone.preprocessing.at_least_px,
        )

    def _lists(self) -> Iterator[list[int]]:
        """The rows of each batch; this is run where there is room for more to decode."""
        work: ShardWork | None = self._coming[0]
        has_rows = bool(len(self._coming[0].rows))
        while work is not None:
            yield from batches_of(work.rows, self._plan)
            work = self._following([one.shard for one in self._coming]) if has_rows else None
            if work is not None:
                self._coming.append(work)

    @property
    def next_shard(self) -> int | None:
        """The shard whose batches come next; None: that is not known, and others take another object."""
        return self._coming[0].shard if self._coming else None

    @property
    def is_ahead(self) -> bool:
        """Whether images of further shards may be decoded already."""
        return len(self._coming) > 1

    def take(self) -> tuple[ShardWork, Iterator[Batch]]:
        """The work of the next shard, and its batches, which are to be taken to the last."""
        work = self._coming[0]
        return work, self._of(work)

    def _of(self, work: ShardWork) -> Iterator[Batch]:
        for _ in batches_of(work.rows, self._plan):
            yield next(self._batches)
        self._coming.popleft()

    def close(self) -> None:
        """End the processes that decode."""
        self._batches.close()
