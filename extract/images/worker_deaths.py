"""Report deaths of DataLoader workers only while a batch is awaited.

PyTorch raises an error as soon as a worker dies (in a SIGCHLD handler), in any code that the main thread runs at that
moment: while it seals a shard, in a `finally`, in another library. Such code cannot handle the error: in nine runs with
such a death on a busy machine, one ended with an uncaught error. The time-out of the loader does not replace the
handler: a death would be noticed when it ends, after 4.5 to 5.0 s with one of 5 s, against 0.04 s.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from extract.errors import LayertapError, first_line

__all__ = ["DeadWorkerError", "WorkerDeaths"]

_ENDING_S = 1.0  # from a process closing its files to its exit


class DeadWorkerError(LayertapError):
    """A process that decodes images died."""


class WorkerDeaths:
    """Hold back the errors of dead workers until a batch is awaited.

    Create it after the workers have started, and close it after they have ended. Any number may be open at once.

    Args:
        workers: processes of the workers.
        timeout_s: `timeout` of their loader.
    """

    _handler: Any = None  # the SIGCHLD handler set here, which calls the previous handler
    _before: Any = None
    _open = 0
    _waits = False  # a batch is awaited
    _held_back = False  # a worker died while no batch was awaited

    def __init__(self, workers: Sequence[BaseProcess], timeout_s: float):
        self._workers, self._timeout_s = workers, timeout_s
        self._holds = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
        if not self._holds:  # only the main thread receives signals
            return
        kind = WorkerDeaths
        kind._open += 1
        if signal.getsignal(signal.SIGCHLD) is not kind._handler or kind._handler is None:
            kind._before = signal.getsignal(signal.SIGCHLD)
            kind._handler = _holding_back(kind._before)
            signal.signal(signal.SIGCHLD, kind._handler)

    @contextlib.contextmanager
    def reported_here(self) -> Iterator[None]:
        """Context manager: raise an error if a worker dies inside, or has died before.

        Raises:
            DeadWorkerError: a worker died; the message states which and how.
            LayertapError: a worker stopped sending.
        """
        begin = time.monotonic()
        try:
            with self._not_held_back():
                yield
        except BaseException as error:
            # The error's traceback would keep the workers alive. If the loader is garbage collected in a cycle of
            # references, its queues close before the workers are asked to end, which then takes 10 s, not 0.1 s.
            traceback.clear_frames(error.__traceback__)
            # By the state of the workers and the clock, not by texts of PyTorch. OSError: the shared memory of an image
            # is requested from the process that decoded it.
            has_died = isinstance(error, RuntimeError | OSError | EOFError) and self._has_dead_worker()
            hangs = isinstance(error, RuntimeError) and time.monotonic() - begin >= self._timeout_s
            if not has_died and not hangs:
                raise
            raise (DeadWorkerError if has_died else LayertapError)(
                f"a process that decodes images died or hangs: {first_line(error)}. Stored rows are safe",
                hint="run again to resume. Lower workers or batch_size if memory is short, or make /dev/shm larger",
            ) from error

    @contextlib.contextmanager
    def _not_held_back(self) -> Iterator[None]:
        """Context manager: do not hold back errors of dead workers; raise an error that was held back.

        Raises:
            RuntimeError: a worker died; the message states which and how.
        """
        kind, before = WorkerDeaths, WorkerDeaths._waits
        if not self._holds:
            yield
            return
        kind._waits = True
        try:
            if kind._held_back:  # PyTorch reports a death only once
                for worker in self._workers:
                    if worker.exitcode:
                        raise RuntimeError(f"worker (pid {worker.pid}) ended with {worker.exitcode}")
            yield
        finally:
            kind._waits = before

    def _has_dead_worker(self) -> bool:
        """Return whether a worker has ended, which none should before the loader is closed."""
        return bool(wait([worker.sentinel for worker in self._workers], timeout=_ENDING_S))

    def close(self) -> None:
        """Restore the previous handler when the last instance is closed."""
        kind = WorkerDeaths
        if not self._holds:
            return
        self._holds = False
        kind._open -= 1
        if not kind._open and threading.current_thread() is threading.main_thread():
            kind._held_back = False
            if signal.getsignal(signal.SIGCHLD) is kind._handler:  # else another handler has replaced it
                signal.signal(signal.SIGCHLD, kind._before)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()


def _holding_back(before: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that calls `before` and holds its error back until a batch is awaited."""

    def handle(number: int, frame: FrameType | None) -> None:
        kind = WorkerDeaths
        if not callable(before):
            return
        try:
            before(number, frame)
        except RuntimeError:
            if kind._waits or not kind._open:
                raise
            kind._held_back = True

    return handle
