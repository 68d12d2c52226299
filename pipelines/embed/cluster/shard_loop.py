"""Give lists of shards to workers until each shard is published or has failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from extract.errors import DisagreementError, InputError, LayertapError
from pipelines.embed.cluster.worker import Done, Event, Joined, Left, Rows

if TYPE_CHECKING:
    from pipelines.embed.cluster.processes import Processes
    from pipelines.embed.cluster.ray_actors import RayWorkers

__all__ = ["ShardLoop"]

_TICK_S = 1.0
_JOIN_S = 1800.0  # wait for the first worker: a cluster that grows on demand takes minutes
_END_S = 60.0  # for the batches in flight, when the run stops
_ATTEMPTS = 3  # at a shard; also workers in a row that end before they are ready
_HOPELESS = 10  # shards of which an attempt failed since the last one that was built: the cause is not in the shards
_LISTS = 4  # a list is this part of a worker's share of the remaining shards, so that all workers end together


class ShardLoop:
    """The shards of a run: which are published, which a worker has, which have failed.

    Args:
        engine: the workers.
        shards: returns the shards to build; called when the first worker has joined, which creates the data set.
        on_event: called with a worker's number and its event.
        published: returns the published shards; asked when a worker dies.

    Attributes:
        done: number of published shards.
        own: number of these that were published by this run, and not by another writer of the same data set. A shard
            whose worker dies after publishing it and before reporting that is not counted.
        attempts: number of attempts that failed or were lost with their worker, at any shard.
        failed: shard -> why each attempt failed, for shards that were given up.
    """

    def __init__(
        self,
        engine: Processes | RayWorkers,
        shards: Callable[[], Iterable[int]],
        on_event: Callable[[int, Event], None] = lambda worker, event: None,
        published: Callable[[], set[int]] = set,
    ):
        self._engine, self._shards, self._on_event, self._published = engine, shards, on_event, published
        self._pending: deque[int] | None = None
        # After a worker died, each of its shards is built alone: an image of the next shard, which is decoded
        # meanwhile, may have killed it.
        self._suspect: deque[int] = deque()
        self._held: dict[int, list[int]] = {}  # worker that has joined -> its shards that are not published
        self._current: dict[int, int] = {}  # worker -> the shard that it builds
        self._reasons: dict[int, list[str]] = {}
        self._failed_starts = 0  # in a row
        self._failing: set[int] = set()  # shards of which an attempt failed since the last one that was built
        self.done = self.own = self.attempts = 0
        self.failed: dict[int, list[str]] = {}

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Have workers build the shards; `stop` is called about once a second, and ends it with True.

        Raises:
            LayertapError: the configuration is wrong, or no worker can be started.
        """
        end = time.monotonic() + _JOIN_S
        while not stop() and (self._pending is None or self._pending or self._suspect or any(self._held.values())):
            for worker, held in self._held.items():
                if not held and (shards := self._next()):
                    self._held[worker] = shards
                    self._engine.submit(worker, list(shards))
            for worker, event in self._engine.events(_TICK_S):
                self._handle(worker, event)
            if self._pending is None and time.monotonic() > end:
                raise LayertapError(f"no worker joined within {_JOIN_S / 60:.0f} minutes")
        self._end_workers()

    def _end_workers(self) -> None:
        """End the workers; a published shard is reported after the next one, so that some are reported only now."""
        working, end = set(self._held), time.monotonic() + _END_S
        for worker in working:
            self._engine.submit(worker, [])
        while working and time.monotonic() < end:
            for worker, event in self._engine.events(_TICK_S):
                if isinstance(event, Left):
                    working.discard(worker)
                    self._engine.replace(worker, start_another=False)
                elif not isinstance(event, Joined):
                    self._handle(worker, event)

    def _next(self) -> list[int]:
        """Return the shards for a worker that has none."""
        if not self._pending:
            return [self._suspect.popleft()] if self._suspect else []
        length = max(1, len(self._pending) // (_LISTS * max(self._engine.size, len(self._held))))
        return [self._pending.popleft() for _ in range(length)]

    def _handle(self, worker: int, event: Event) -> None:
        if isinstance(event, Left):
            self._lost(worker, event)
            return
        if isinstance(event, Joined):
            self._held[worker], self._failed_starts = [], 0
            if self._pending is None:
                self._pending = deque(self._shards())
        elif isinstance(event, Rows):
            self._current[worker] = event.shard
        elif isinstance(event, Done):
            self._held[worker].remove(event.shard)
            self._failing.clear()
            self.done += 1
            self.own += event.receipt is not None
        self._on_event(worker, event)

    def _lost(self, worker: int, event: Left) -> None:
        held = self._held.pop(worker, None)
        # Errors of the configuration appear before the first shard is published, on all workers: one message is enough.
        is_of_user = held is None or isinstance(event.error, InputError | DisagreementError)
        if event.error is not None and is_of_user and not self.done:
            raise event.error
        self._on_event(worker, event)
        self._failed_starts += held is None
        current = self._current.pop(worker, None)
        published = self._published() if held else set()
        for shard in held or ():
            if shard in published:
                self.done += 1
            elif shard == current:
                self._attempt_failed(shard, event.why)
            else:
                self._suspect.append(shard)
        has_room = held is not None or self._failed_starts < _ATTEMPTS
        self._engine.replace(worker, start_another=has_room)
        if not has_room and not self._held:
            raise LayertapError(f"no worker can be started: {event.why}")

    def _attempt_failed(self, shard: int, why: str) -> None:
        self.attempts += 1
        self._failing.add(shard)
        if len(self._failing) >= _HOPELESS:
            raise LayertapError(
                f"{_HOPELESS} shards failed, and none was built between them. The last error: {why}",
                hint="fix the cause, and run the command again; published shards are safe",
            )
        reasons = self._reasons.setdefault(shard, [])
        reasons.append(why)
        if len(reasons) < _ATTEMPTS:
            self._suspect.append(shard)
        else:
            self.failed[shard] = self._reasons.pop(shard)
