"""Have an engine build shards until each is published or has failed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from extract.errors import DisagreementError, InputError, LayertapError
from pipelines.embed.cluster.processes import Done, Event, Failed

if TYPE_CHECKING:
    from pipelines.embed.cluster.processes import Processes
    from pipelines.embed.cluster.ray_tasks import RayTasks

__all__ = ["ShardLoop"]

_TICK_S = 1.0
_JOIN_S = 1800.0  # wait for the first worker: a cluster that grows on demand takes minutes
_ATTEMPTS = 3  # at a shard
_HOPELESS = 10  # shards of which an attempt failed since the last one that was built: the cause is not in the shards


class ShardLoop:
    """The shards of a run: how many are published, and how often each has failed.

    Args:
        engine: builds shards, in any order and several at once.
        on_event: called with each event.

    Attributes:
        done: number of published shards.
        attempts: number of attempts that failed or were lost with their worker, at any shard.
        failed: shard -> why each attempt failed, for shards that were given up.
    """

    def __init__(self, engine: Processes | RayTasks, on_event: Callable[[Event], None] = lambda event: None):
        self._engine, self._on_event = engine, on_event
        self._reasons: defaultdict[int | None, list[str]] = defaultdict(list)  # why each attempt at a shard failed
        self._failing: set[int | None] = set()  # shards of which an attempt failed since the last one that was built
        self._left: set[int | None] = set()
        self.done = self.attempts = 0
        self.failed: dict[int, list[str]] = {}

    def join(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a worker is ready and has created or opened the data set; return False if stopped before.

        Raises:
            LayertapError: the configuration is wrong, or no worker can be started.
        """
        end = time.monotonic() + _JOIN_S
        self.build([None], lambda: stop() or time.monotonic() > end)
        if self._left and not stop():
            raise LayertapError(f"no worker joined within {_JOIN_S / 60:.0f} minutes")
        return not self._left

    def build(self, shards: Iterable[int | None], stop: Callable[[], bool] = lambda: False) -> None:
        """Have the shards built; `stop` is called about once a second, and ends it with True.

        Raises:
            LayertapError: the configuration is wrong, or all attempts fail.
        """
        self._left = set(shards)
        for shard in shards:
            self._engine.submit(shard)
        while self._left and not stop():
            for event in self._engine.events(_TICK_S):
                if isinstance(event, Failed):
                    self._attempt_failed(event)
                elif isinstance(event, Done):
                    self._left.discard(event.shard)
                    self._failing.clear()
                    self.done += event.shard is not None
                self._on_event(event)

    def _attempt_failed(self, event: Failed) -> None:
        # Errors of the configuration appear before the first shard is published, on all workers: one message is enough.
        is_of_user = event.shard is None or isinstance(event.error, InputError | DisagreementError)
        if event.error is not None and is_of_user and not self.done:
            raise event.error
        reasons = self._reasons[event.shard]
        reasons.append(event.why)
        self.attempts += 1
        self._failing.add(event.shard)
        if len(self._failing) >= _HOPELESS:
            raise LayertapError(
                f"{_HOPELESS} shards failed, and none was built between them. The last error: {event.why}",
                hint="fix the cause, and run the command again; published shards are safe",
            )
        if len(reasons) < _ATTEMPTS:
            self._engine.submit(event.shard)  # after those that wait
        elif event.shard is None:
            raise LayertapError(f"no worker can be started: {event.why}")
        else:
            self.failed[event.shard] = reasons
            self._left.discard(event.shard)
