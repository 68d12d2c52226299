"""Give lists of shards to workers until each shard is published or has failed."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from extract.errors import DisagreementError, InputError, LayertapError
from pipelines.embed.cluster.processes import Child, Done, Event, Joined, Left, Rows

if TYPE_CHECKING:
    from pipelines.embed.cluster.ray_actors import Actor

__all__ = ["ShardLoop"]

_TICK_S = 1.0
_JOIN_S = 1800.0  # wait for the first worker: a cluster that grows on demand takes minutes
_END_S = 60.0  # for the batches in flight, when the run stops
_ATTEMPTS = 3  # at a shard; also workers in a row that end before they are ready
_HOPELESS = 10  # shards of which an attempt failed since the last one that was built: the cause is not in the shards
_LISTS = 4  # a list is this part of a worker's share of the remaining shards, so that all workers end together


@dataclass(eq=False)
class _Worker:
    place: int
    process: Child | Actor
    held: list[int] | None = None  # its shards that are not published; None until it has joined
    current: int | None = None  # the shard that it builds


class ShardLoop:
    """The shards of a run: which are published, which a worker has, and how often each has failed.

    Args:
        starts: returns the functions that start the workers; their number may grow.
        shards: returns the shards to build; called when the first worker has joined, which creates the data set.
        on_event: called with a worker's place and its event.
        receipts: returns published shard -> its receipt, None if it may be of another run; asked when a worker dies,
            which may have published shards and not reported them.

    Attributes:
        done: number of published shards.
        own: number of these that were published by this run, and not by another writer of the same data set.
        attempts: number of attempts that failed or were lost with their worker, at any shard.
        failed: shard -> why each attempt failed, for shards that were given up.
    """

    def __init__(
        self,
        starts: Callable[[], Sequence[Callable[[], Child | Actor]]],
        shards: Callable[[], Iterable[int]],
        on_event: Callable[[int, Event], None] = lambda worker, event: None,
        receipts: Callable[[], Mapping[int, dict[str, Any] | None]] = dict,
    ):
        self._starts, self._shards, self._on_event, self._receipts = starts, shards, on_event, receipts
        self._pending: deque[int] | None = None
        # After a worker died, each of its shards is built alone: an image of the next shard, which is decoded
        # meanwhile, may have killed it.
        self._suspect: deque[int] = deque()
        self._workers: dict[int, _Worker] = {}  # place -> its worker
        self._events: queue.SimpleQueue[tuple[_Worker, Event]] = queue.SimpleQueue()
        self._reasons: dict[int, list[str]] = {}  # shard -> why each attempt failed
        self._failed_starts = 0  # in a row
        self._lost_places: set[int] = set()
        self._failing: set[int] = set()  # shards of which an attempt failed since the last one that was built
        self.done = self.own = self.attempts = 0
        self.failed: dict[int, list[str]] = {}

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Have workers build the shards; `stop` is called about once a second, and ends it with True.

        Raises:
            LayertapError: the configuration is wrong, no worker can be started, or all attempts fail.
        """
        end = time.monotonic() + _JOIN_S
        try:
            while not stop() and (self._pending is None or self._pending or self._suspect or any(self._held())):
                for place, start in enumerate(self._starts()):
                    if place not in self._workers and place not in self._lost_places:
                        self._start(place, start)
                for worker in self._workers.values():
                    if worker.held == [] and (shards := self._next()):
                        worker.held = shards
                        worker.process.submit(list(shards))
                self._next_event()
                if self._pending is None and time.monotonic() > end:
                    raise LayertapError(f"no worker joined within {_JOIN_S / 60:.0f} minutes")
            self._end_workers()
        finally:
            for worker in self._workers.values():
                worker.process.kill()

    def _start(self, place: int, start: Callable[[], Child | Actor]) -> None:
        worker = self._workers[place] = _Worker(place, start())

        def pass_on() -> None:
            for event in worker.process.events():
                self._events.put((worker, event))

        threading.Thread(target=pass_on, daemon=True).start()

    def _held(self) -> list[list[int]]:
        """Return the shards that each worker has that has joined."""
        return [worker.held for worker in self._workers.values() if worker.held is not None]

    def _next(self) -> list[int]:
        """Return the shards for a worker that has none."""
        if not self._pending:
            return [self._suspect.popleft()] if self._suspect else []
        length = max(1, len(self._pending) // (_LISTS * len(self._workers)))
        return [self._pending.popleft() for _ in range(length)]

    def _next_event(self) -> None:
        """Wait for an event, at most `_TICK_S`, and handle it."""
        with contextlib.suppress(queue.Empty):
            worker, event = self._events.get(timeout=_TICK_S)
            if self._workers.get(worker.place) is worker:  # else it was killed
                self._handle(worker, event)

    def _end_workers(self) -> None:
        """End the workers; a published shard is reported after the next one, so that some are reported only now."""
        working = {worker for worker in self._workers.values() if worker.held is not None}
        for worker in working:
            worker.process.submit([])
        end = time.monotonic() + _END_S
        while not working.isdisjoint(self._workers.values()) and time.monotonic() < end:
            self._next_event()

    def _handle(self, worker: _Worker, event: Event) -> None:
        if isinstance(event, Left):
            self._lost(worker, event)
            return
        if isinstance(event, Joined):
            worker.held, self._failed_starts = [], 0
            if self._pending is None:
                self._pending = deque(self._shards())
        elif isinstance(event, Rows):
            worker.current = event.shard
        elif isinstance(event, Done):
            if event.receipt is None:  # another process was first: perhaps a worker of this run that was lost
                event = Done(event.shard, self._receipts().get(event.shard))
            assert worker.held is not None
            worker.held.remove(event.shard)
            self._failing.clear()
            self.done += 1
            self.own += event.receipt is not None
        self._on_event(worker.place, event)

    def _lost(self, worker: _Worker, event: Left) -> None:
        del self._workers[worker.place]
        worker.process.kill()
        if not event.why:
            return
        # Errors of the configuration appear before the first shard is published, on all workers: one message is enough.
        is_of_user = worker.held is None or isinstance(event.error, InputError | DisagreementError)
        if event.error is not None and is_of_user and not self.done:
            raise event.error
        held = worker.held or []
        # A worker that ends before it begins a shard has failed at the next one: its unfinished file may be damaged.
        blamed = worker.current if worker.current in held else next(iter(held), None)
        receipts = self._receipts() if held else {}
        for shard in receipts.keys() & set(held):
            self._handle(worker, Done(shard, receipts[shard]))
        self._on_event(worker.place, event)
        for shard in held:
            if shard == blamed:
                self._attempt_failed(shard, event.why)
            else:
                self._suspect.append(shard)
        if worker.held is None:
            self._failed_starts += 1
            if self._failed_starts >= _ATTEMPTS:
                self._lost_places.add(worker.place)
                if not self._held():
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
            self.failed[shard] = reasons
