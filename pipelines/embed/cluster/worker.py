"""A worker: builds the shards that it is given, in order, and sends events.

It runs in a child process, either of `layertap embed` on this machine or of a Ray actor.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from extract.errors import LayertapError, first_line
from pipelines.embed.cluster.dispatch import Built, Done, Event, Failed, Joined, Left, Message, Progressed
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.progress import store_warnings_to

__all__ = ["Embed", "Maker", "Say", "Start", "Worker"]

_SEND_EVERY_S = 0.5


class Maker(Protocol):
    """Interface for building shards; see `extract.extraction.shard_maker.ShardMaker`."""

    about: str
    left_over: list[int]

    def make(
        self,
        shard: int,
        on_rows: Callable[[int, bool], None],
        stop: Callable[[], bool],
        following: Callable[[Container[int]], int | None],
    ) -> bool:
        """Build a shard; return whether it is finished and can be published, False if it was stopped."""

    def publish(self, shard: int) -> dict[str, Any] | None:
        """Publish a shard and return its receipt; None if another worker was first. Called in another thread."""

    def give_up(self, shard: int) -> None:
        """Remove the files of a shard that is no longer wanted."""


Say = Callable[[str], None]
Start = Callable[[Say], AbstractContextManager[Maker]]  # called in a worker; must be picklable


class Worker:
    """Build shards in the thread that calls `run`, and publish each while the next is built.

    The other methods may be called by any thread.

    Args:
        number: number of the worker.
        start: context manager that loads what the worker needs and yields the maker.
        send: receives the events.

    Attributes:
        ending: whether `end` was called.
    """

    def __init__(self, number: int, start: Start, send: Callable[[Event], None]):
        self._number, self._start, self._send = number, start, send
        self._waiting: deque[int] = deque()
        self._cancelled: set[int] = set()
        self.ending = False
        self._changed = threading.Condition()
        self._publishing: Future[None] | None = None

    def submit(self, shard: int) -> None:
        """Queue a shard."""
        with self._changed:
            self._cancelled.discard(shard)
            self._waiting.append(shard)
            self._changed.notify()

    def cancel(self, shard: int) -> None:
        """Remove a shard from the queue, or stop building it."""
        with self._changed:
            if shard in self._waiting:
                self._waiting.remove(shard)
            else:  # it is in progress
                self._cancelled.add(shard)

    def end(self) -> None:
        """Make `run` finish the batch in flight and return; shards in progress are left to be resumed."""
        self.ending = True
        with self._changed:
            self._changed.notify()

    def _take(self) -> int | None:
        """Wait for the next shard and return it; None if `end` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.ending)
            return None if self.ending else self._waiting.popleft()

    def _following(self, known: Container[int]) -> int | None:
        """Return the first queued shard that is not in `known`, or None."""
        with self._changed:
            return next((shard for shard in self._waiting if shard not in known), None)

    def run(self) -> None:
        """Build shards until `end` is called. An error that is not of a shard ends it and is sent as `Left`."""

        def say(text: str) -> None:
            self._send(Message(self._number, text))

        try:
            with store_warnings_to(say), self._start(say) as maker:
                self._send(Joined(self._number, platform.node(), maker.about, maker.left_over))
                with ThreadPoolExecutor(1, "publisher") as publisher:
                    while (shard := self._take()) is not None:
                        self._make(maker, shard, publisher)
        except LayertapError as error:
            self._send(Left(self._number, str(error), error))
        except Exception as error:
            self._send(Left(self._number, f"{type(error).__name__}: {first_line(error)}"))
            raise

    def _make(self, maker: Maker, shard: int, publisher: Executor) -> None:
        last_sent, rows = time.monotonic(), {True: 0, False: 0}

        def flush() -> None:
            nonlocal last_sent
            for resumed, count in rows.items():
                if count:
                    self._send(Progressed(self._number, count, resumed))
                    rows[resumed] = 0
            last_sent = time.monotonic()

        def on_rows(count: int, resumed: bool) -> None:
            rows[resumed] += count
            if time.monotonic() - last_sent >= _SEND_EVERY_S:
                flush()

        try:
            finished = maker.make(shard, on_rows, lambda: self.ending or self._is_cancelled(shard), self._following)
        except Exception as error:
            flush()
            self._failed(shard, error)
            return
        flush()
        if self._is_cancelled(shard):
            maker.give_up(shard)
        elif finished:
            self._send(Built(self._number, shard))
            if self._publishing is not None:
                self._publishing.result()  # at most one shard waits to be published
            self._publishing = publisher.submit(self._publish, maker, shard)

    def _publish(self, maker: Maker, shard: int) -> None:
        try:
            receipt = maker.publish(shard)
        except Exception as error:
            if self._is_cancelled(shard):
                maker.give_up(shard)
            self._failed(shard, error)
            return
        if receipt is not None or not self._is_cancelled(shard):
            self._send(Done(self._number, shard, receipt))

    def _failed(self, shard: int, error: Exception) -> None:
        text = str(error) if isinstance(error, LayertapError) else f"{type(error).__name__}: {first_line(error)}"
        if not self._is_cancelled(shard):
            self._send(Failed(self._number, shard, text))

    def _is_cancelled(self, shard: int) -> bool:
        with self._changed:
            return shard in self._cancelled


@dataclass(frozen=True)
class Embed:
    """Load what a worker of `layertap embed` needs: the backbone, the images, and a folder to build shards in.

    Attributes:
        config: configuration of the job.
        scratch: folder for shards in progress; None: the folder for temporary files.
        threads: threads of the forward on a CPU; None: PyTorch's choice.
    """

    config: EmbedConfig
    scratch: Path | None = None
    threads: int | None = None

    @contextlib.contextmanager
    def __call__(self, say: Say) -> Iterator[Maker]:
        """Context manager, see `Start`."""
        import torch

        from extract.extraction.shard_maker import ShardMaker, scratch_folder
        from extract.store.places.destination import destination_of
        from pipelines.embed.job import describe_computation, plan_of
        from pipelines.terminal.backbone import backbone_of

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        backbone = backbone_of(self.config, say)
        plan = plan_of(self.config, backbone)
        out = self.config.place
        place = destination_of(out)
        with (
            scratch_folder(out, place, plan.dataset, self.scratch) as folder,
            ShardMaker(
                plan,
                place,
                folder,
                on_computation=lambda computation: say(describe_computation(computation, plan.settings.precision)),
                on_note=lambda note: say(f"note: {note}"),
            ) as maker,
        ):
            yield maker
