"""Workers that are processes of this machine, one or more per device."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from extract.errors import LayertapError, first_line
from pipelines.embed.cluster.worker import Done, Event, Joined, Left, Message, Rows, Start
from pipelines.terminal.progress import store_warnings_to

__all__ = ["Child", "Processes", "exit_with_parent"]

_EXIT_S = 60.0  # for a process whose pipe has ended
_ROWS_EVERY_S = 0.5
_PARENT_EVERY_S = 1.0
# Ctrl-C, and the SIGTERM of a service manager, reach all processes; only the first process acts on them.
_IGNORED = (signal.SIGINT, signal.SIGTERM)


class Child:
    """A worker in its own process, as seen by the process that started it.

    Attributes:
        pipe: connection to wait for events.
        sentinel: ready when the process has ended. The pipe is not enough: processes that decode images inherit it.
    """

    def __init__(self, start: Start):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, start, multiprocessing.get_start_method()))
        # A signal that comes before `_work` ignores it would end the process with a traceback. The process that tracks
        # resources starts first, because its start unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.sentinel = self._process.sentinel
        theirs.close()  # so that the pipe ends with the process

    def submit(self, shards: Sequence[int]) -> None:
        """See `Processes`."""
        with contextlib.suppress(OSError):  # it has ended, and `events` reports that
            self.pipe.send(shards)

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """Return the events since the last call; wait at most `timeout_s` for the first one."""
        wait([self.pipe, self.sentinel], timeout_s)
        events: list[Event] = []
        is_alive = self._process.is_alive()  # first: what a process sends before its end is read
        try:
            while self.pipe.poll():
                events.append(self.pipe.recv())
        except (EOFError, OSError):
            is_alive = False
        if not is_alive and not (events and isinstance(events[-1], Left)):
            events.append(Left(self._exit_reason()))
        return events

    def _exit_reason(self) -> str:
        self._process.join(_EXIT_S)
        code = self._process.exitcode or 0
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def kill(self) -> None:
        """Kill the process: what it has stored is safe, and processes that decode images notice it and end."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


class Processes:
    """Workers as processes; a context manager that ends them on exit.

    Args:
        starts: start function of each worker.

    Attributes:
        size: number of workers that have room to run.
    """

    def __init__(self, starts: Sequence[Start]):
        self._starts, self.size = starts, len(starts)
        self._children: dict[int, Child] = {}

    def __enter__(self) -> Self:
        for worker, start in enumerate(self._starts):
            self._children[worker] = Child(start)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.kill()

    def events(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Return (worker, event) since the last call; wait at most `timeout_s` for the first event."""
        children = list(self._children.items())
        wait([source for _, child in children for source in (child.pipe, child.sentinel)], timeout_s)
        return [(worker, event) for worker, child in children for event in child.events()]

    def submit(self, worker: int, shards: Sequence[int]) -> None:
        """Give shards to a worker that has none; without shards, have it finish the batch in flight and end."""
        self._children[worker].submit(shards)

    def replace(self, worker: int, *, start_another: bool) -> None:
        """End a worker at once, and perhaps start another in its place."""
        self._children.pop(worker).kill()
        if start_another:
            self._children[worker] = Child(self._starts[worker])


def exit_with_parent() -> None:
    """End this process at once when the process that started it has ended.

    `PR_SET_PDEATHSIG` does not serve: the kernel sends that signal when the thread that started the process ends, too.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(pipe: Connection[Any, Any], start: Start, start_method: str) -> None:
    """Run a worker in this process."""
    exit_with_parent()
    # "spawn" would also apply to processes that decode images, and each shard would wait 6 s for them.
    multiprocessing.set_start_method(start_method, force=True)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    sending = threading.Lock()  # a bucket that does not answer is reported by the thread that publishes
    stored, sent_at = 0, 0.0

    def send(event: Event) -> None:
        with sending, contextlib.suppress(OSError):  # the other end is closed: `recv` ends the worker
            pipe.send(event)

    def on_rows(shard: int, rows: int, resumed: bool) -> None:
        nonlocal stored, sent_at
        stored = rows if resumed else stored + rows
        if resumed or time.monotonic() - sent_at > _ROWS_EVERY_S:
            sent_at = time.monotonic()
            send(Rows(shard, stored, resumed))

    def say(text: str) -> None:
        send(Message(text))

    try:
        with store_warnings_to(say), start(say) as maker, contextlib.suppress(EOFError):
            send(Joined(platform.node(), maker.about))
            while shards := pipe.recv():
                # What arrives while shards are built, or the end of the pipe, asks the worker to stop.
                for shard, receipt in maker.build(shards, on_rows, pipe.poll):
                    send(Done(shard, receipt))
    except LayertapError as error:
        send(Left(str(error), error))
    except Exception as error:
        send(Left(f"{type(error).__name__}: {first_line(error)}"))
        raise
