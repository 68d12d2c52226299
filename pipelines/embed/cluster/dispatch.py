"""Assign shards to workers. The same code serves one machine and a cluster, and depends on neither.

A worker has at most two shards: one in progress, and one that waits, whose images it may already decode. Finished
shards that it is publishing do not count. A shard that fails, or whose worker dies, is given to another worker. A shard
that fails three times, and on more than one host if there are several, is reported, and the other shards continue. When
no shard is left to give out, a shard that takes far longer than others is also started on another worker: the first
worker to publish it wins.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from extract.errors import LayertapError

__all__ = [
    "Built",
    "DispatchResult",
    "Done",
    "Event",
    "Failed",
    "Joined",
    "Left",
    "Message",
    "Progressed",
    "Workers",
    "dispatch",
]

_AT_ONCE = 2  # shards per worker, besides shards that it is publishing
_ATTEMPTS = 3  # per shard
_IN_A_ROW = 3  # different shards that fail in a row on a worker before it is retired
_HOPELESS = 10  # likewise on the last worker, before the run ends with an error
_SLOW = 2.0  # multiple of the median time, after which a shard is started on another worker, too
_SLOW_S = 30.0  # minimum of this time
_REMEMBERED = 101  # shards in the median
_TICK_S = 1.0
_REPORT_S = 2.0  # wait at the end for the report of a publication by a worker that was cancelled just then
_PATIENCE_S = 600.0  # wait for starting workers if no other worker can take the remaining shards
_SAFE = "fix the cause, and run the command again; published shards are safe"


@dataclass(frozen=True)
class Joined:
    """A worker is ready.

    Attributes:
        worker: its number, which no other worker gets.
        host: machine that it runs on.
        about: device that it computes on.
        started_shards: shards that an earlier run has started there.
    """

    worker: int
    host: str
    about: str = ""
    started_shards: Sequence[int] = ()


@dataclass(frozen=True)
class Left:
    """A worker has ended, and its work in progress is lost.

    Attributes:
        worker: its number.
        why: reason, in words.
        error: the error that ended it, if layertap raised it on purpose.
    """

    worker: int
    why: str
    error: LayertapError | None = None


@dataclass(frozen=True)
class Message:
    """A message for the user, printed once even if several workers send it."""

    worker: int
    text: str


@dataclass(frozen=True)
class Progressed:
    """A worker has computed rows, or has read them from an earlier run (`resumed`)."""

    worker: int
    rows: int
    resumed: bool = False


@dataclass(frozen=True)
class Built:
    """A worker has finished a shard, and publishes it while it builds the next shard."""

    worker: int
    shard: int


@dataclass(frozen=True)
class Done:
    """A shard is published.

    Attributes:
        worker: worker that reports it.
        shard: its number.
        receipt: receipt of the shard; None: another worker was the first to publish it.
    """

    worker: int
    shard: int
    receipt: dict[str, Any] | None


@dataclass(frozen=True)
class Failed:
    """A worker failed to build a shard, and is ready for another shard."""

    worker: int
    shard: int
    why: str


Event = Joined | Left | Message | Progressed | Built | Done | Failed


class Workers(Protocol):
    """Interface of a group of workers. Workers that die are replaced, and more may join at any time."""

    def events(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait at most `timeout_s` for the first event.

        Raises:
            LayertapError: no worker can be started.
        """

    def coming(self) -> bool:
        """Return whether a worker is starting and has room to run."""

    def submit(self, worker: int, shard: int) -> None:
        """Give a shard to a worker, which builds its shards in order."""

    def cancel(self, worker: int, shard: int) -> None:
        """Cancel a shard of a worker; of its events, only `Done` with a receipt may still come."""

    def retire(self, worker: int) -> None:
        """End a worker without a replacement."""


@dataclass
class DispatchResult:
    """Result of `dispatch`.

    Attributes:
        done: number of published shards.
        own: number of these that were published by this run, and not by another writer of the same data set. If a
            worker dies after it has published a shard and before it reports that, the shard is not counted.
        failed: shard -> why each attempt failed, for shards that were given up.
        attempts: number of attempts, at any shard, that failed or were lost with their worker.
        restarted: number of shards that were also started on another worker, since they took long.
        retired: host and reason of each retired worker.
        stopped: whether `stop` ended it early.
    """

    done: int = 0
    own: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)
    attempts: int = 0
    restarted: int = 0
    retired: list[tuple[str, str]] = field(default_factory=list)
    stopped: bool = False


@dataclass
class _Worker:
    host: str
    shards: list[int] = field(default_factory=list)  # the first is in progress
    publishing: list[int] = field(default_factory=list)
    since: float = 0.0  # when the first was started
    failures: list[int] = field(default_factory=list)  # different shards that failed since the last success

    def has(self, shard: int) -> bool:
        return shard in self.shards or shard in self.publishing


def dispatch(
    shards: Iterable[int],
    workers: Workers,
    *,
    joined: Iterable[Joined] = (),
    on_event: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> DispatchResult:
    """Have workers build all of these shards.

    Args:
        shards: shard numbers, ascending; read from the iterable when they are given out, so that a million of them need
            no memory.
        workers: workers that build them.
        joined: workers that have already joined.
        on_event: called with every event of `workers`.
        stop: called about once a second; True ends the dispatch and leaves shards in progress to be resumed.
        clock: returns seconds.

    Raises:
        LayertapError: no worker can be started, or all of them fail.
    """
    dispatch = _Dispatch(shards, workers, on_event, clock)
    for event in joined:
        dispatch.handle(event)
    return dispatch.run(stop)


class _Dispatch:
    def __init__(
        self,
        shards: Iterable[int],
        workers: Workers,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
    ):
        self._fresh, self._engine, self._on_event, self._clock = iter(shards), workers, on_event, clock
        self._again: deque[int] = deque()  # shards to give out again
        self._suspect: list[int] = []  # shards that failed three times on a single host, which may be the cause
        self._given: Counter[int] = Counter()  # shard -> number of workers that have it now
        self._why: dict[int, list[tuple[str, str]]] = {}  # shard -> host and reason of each failed attempt
        self._workers: dict[int, _Worker] = {}
        self._started: dict[int, list[int]] = {}  # worker -> shards that an earlier run has started there
        self._ahead: int | None = None  # the next shard of `_fresh`, already read
        self._last = -1  # the last shard of `_fresh` that was given out in order
        self._early: set[int] = set()  # shards that were given out before their turn
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._waiting_since: float | None = None
        self._disputed: set[int] = set()  # published by another worker: one of this run, or another writer
        self._result = DispatchResult()

    def run(self, stop: Callable[[], bool]) -> DispatchResult:
        while not stop():
            self._give()
            if not self._given and not self._again and not self._more():
                if not self._suspect or not self._wait():
                    self._give_up()
                    self._wait_for_reports()
                    return self._result
            elif not self._workers and self._result.retired and not self._wait():
                host, why = self._result.retired[-1]
                raise LayertapError(f"no usable worker is left; the last, on {host}, was retired: {why}", hint=_SAFE)
            self._handle_events()
        self._result.stopped = True
        return self._result

    def _handle_events(self) -> None:
        for event in self._engine.events(_TICK_S):
            self._on_event(event)
            self.handle(event)

    def _wait_for_reports(self) -> None:
        end = self._clock() + _REPORT_S
        while self._disputed and self._workers and self._clock() < end:
            self._handle_events()

    def _wait(self) -> bool:
        """Return whether to wait for a worker that is being started, for at most `_PATIENCE_S`."""
        if not self._engine.coming():
            return False
        self._waiting_since = self._waiting_since or self._clock()
        return self._clock() - self._waiting_since < _PATIENCE_S

    # Events

    def handle(self, event: Event) -> None:
        """Update the state after an event."""
        if isinstance(event, Joined):
            self._workers[event.worker] = _Worker(event.host)
            self._waiting_since = None
            self._started[event.worker] = sorted(event.started_shards, reverse=True)
        elif isinstance(event, Left):
            self._lost(event)
        elif isinstance(event, Built):
            self._built(event.worker, event.shard)
        elif isinstance(event, Done):
            self._done(event)
        elif isinstance(event, Failed):
            worker = self._workers.get(event.worker)
            if worker is not None and self._take_back(event.worker, event.shard):
                self._attempt_failed(event.shard, worker.host, event.why)
                worker.failures = [failed for failed in worker.failures if failed != event.shard] + [event.shard]
                if len(worker.failures) >= _IN_A_ROW:
                    self._retire(event.worker, event.why)

    def _built(self, number: int, shard: int) -> None:
        worker = self._workers.get(number)
        if worker is not None and shard in worker.shards:
            if worker.shards[0] == shard:
                self._times.append(self._clock() - worker.since)
                worker.since = self._clock()
            worker.shards.remove(shard)
            worker.publishing.append(shard)

    def _done(self, event: Done) -> None:
        if event.receipt is not None:  # also of a worker whose attempt was cancelled just then
            self._result.own += 1
            self._disputed.discard(event.shard)
        worker = self._workers.get(event.worker)
        if worker is None or not worker.has(event.shard):
            return
        self._built(event.worker, event.shard)
        worker.failures.clear()
        for number, other in list(self._workers.items()):
            if other.has(event.shard):
                self._take_back(number, event.shard)
                if number != event.worker:
                    self._engine.cancel(number, event.shard)
                    if event.receipt is None:
                        self._disputed.add(event.shard)
        for waiting in (self._again, self._suspect):
            if event.shard in waiting:
                waiting.remove(event.shard)
        self._why.pop(event.shard, None)
        self._result.done += 1

    def _lost(self, event: Left) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        for place, shard in enumerate(worker.shards + worker.publishing):
            self._take_back(event.worker, shard)
            if place == 0:  # the shard in progress may have killed the worker
                self._attempt_failed(shard, worker.host, event.why)
            elif shard not in self._given:
                self._again.appendleft(shard)
        del self._workers[event.worker]
        self._started.pop(event.worker, None)

    def _attempt_failed(self, shard: int, host: str, why: str) -> None:
        self._result.attempts += 1
        reasons = self._why.setdefault(shard, [])
        reasons.append((host, why))
        if shard in self._given:
            return  # another worker is building it, too
        if len(reasons) < _ATTEMPTS:
            self._again.append(shard)
        elif len({failed_host for failed_host, _ in reasons}) > 1:
            self._result.failed[shard] = [f"{failed_host}: {text}" for failed_host, text in self._why.pop(shard)]
        else:
            self._suspect.append(shard)

    def _give_up(self) -> None:
        """Report the suspect shards as failed: no other host has joined."""
        for shard in self._suspect:
            self._result.failed[shard] = [f"{failed_host}: {text}" for failed_host, text in self._why.pop(shard)]

    def _retire(self, number: int, why: str) -> None:
        """Retire a worker on which shard after shard fails: it would use up the attempts of all shards."""
        worker = self._workers[number]
        if len(self._workers) == 1 and not self._engine.coming():
            if len(worker.failures) >= _HOPELESS:
                count = len(worker.failures)
                raise LayertapError(
                    f"{count} shards in a row failed, and no other worker is left. The last error: {why}", hint=_SAFE
                )
            return
        for shard in worker.shards + worker.publishing:
            self._take_back(number, shard)
            if shard not in self._given:
                self._again.appendleft(shard)
        del self._workers[number]
        self._result.retired.append((worker.host, why))
        self._engine.retire(number)

    def _take_back(self, number: int, shard: int) -> bool:
        """Take a shard from a worker; return whether the worker had it."""
        worker = self._workers[number]
        if not worker.has(shard):
            return False
        if worker.shards[:1] == [shard]:
            worker.since = self._clock()
        (worker.shards if shard in worker.shards else worker.publishing).remove(shard)
        self._given[shard] -= 1
        if not self._given[shard]:
            del self._given[shard]
        return True

    # Assignment

    def _give(self) -> None:
        for at_once in range(1, _AT_ONCE + 1):  # each worker gets a first shard before any gets a second
            for number, worker in self._workers.items():
                if len(worker.shards) < at_once and (shard := self._next(number)) is not None:
                    self._submit(number, shard)
        for number, worker in self._workers.items():
            if not worker.shards and (late := self._late()) is not None:
                owner, shard = late
                if self._workers[owner].shards[0] != shard:  # it waits there: move it
                    self._take_back(owner, shard)
                    self._engine.cancel(owner, shard)
                else:
                    self._result.restarted += 1
                self._submit(number, shard)

    def _submit(self, number: int, shard: int) -> None:
        worker = self._workers[number]
        if not worker.shards:
            worker.since = self._clock()
        worker.shards.append(shard)
        self._given[shard] += 1
        self._engine.submit(number, shard)

    def _next(self, number: int) -> int | None:
        """Return a shard for a worker, or None: started there earlier, failed elsewhere, or the next in order."""
        started, host = self._started.get(number, []), self._workers[number].host
        while started:
            shard = started.pop()
            if shard > self._last and shard not in self._early:  # not given out yet
                self._early.add(shard)
                return shard
        hosts = {worker.host for worker in self._workers.values()}
        for failed in self._again:
            tried = {failed_host for failed_host, _ in self._why.get(failed, ())}
            if host not in tried or hosts <= tried:
                self._again.remove(failed)
                return failed
        if not self._more():
            elsewhere = [
                shard for shard in self._suspect if all(failed_host != host for failed_host, _ in self._why[shard])
            ]
            if elsewhere:
                self._suspect.remove(elsewhere[0])
            return elsewhere[0] if elsewhere else None
        assert self._ahead is not None
        self._last, self._ahead = self._ahead, None
        return self._last

    def _more(self) -> bool:
        """Return whether there are shards that were not given out yet, and read the next into `_ahead`."""
        while self._ahead is None:
            self._ahead = next(self._fresh, None)
            if self._ahead is None:
                return False
            if self._ahead in self._early:
                self._early.remove(self._ahead)
                self._ahead = None
        return True

    def _late(self) -> tuple[int, int] | None:
        """Return a worker and its shard that another worker should build, since it waits or takes too long, or None."""
        waiting = [
            (self._clock() - worker.since, number) for number, worker in self._workers.items() if len(worker.shards) > 1
        ]
        if waiting:
            number = max(waiting)[1]
            return number, self._workers[number].shards[-1]
        if not self._times:
            return None
        limit = max(_SLOW_S, _SLOW * statistics.median(self._times))
        slow = [
            (self._clock() - worker.since, number)
            for number, worker in self._workers.items()
            if worker.shards and self._given[worker.shards[0]] == 1 and self._clock() - worker.since > limit
        ]
        if not slow:
            return None
        number = max(slow)[1]
        return number, self._workers[number].shards[0]
