"""Deaths of DataLoader workers are told where a batch is waited for, and nowhere else.

PyTorch raises an error as soon as a worker has died (a handler of SIGCHLD), in whatever the main thread does just then:
while a shard is sealed, in a `finally`, in code of others. Nobody can heed that in order. Without its handler, a death
would be noticed only when the time-out of the whole loader ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from extract.errors import LayertapError, first_line

__all__ = ["DeadWorkerError", "WorkerDeaths"]

_ENDING_S = 1.0  # between a process that closes its files and its end


class DeadWorkerError(LayertapError):
    """A process that decodes images has died."""


class WorkerDeaths:
    """To be begun when workers have started, and closed when they have ended; any number may be open at once.

    Args:
        workers: their processes.
    """

    _handler: Any = None  # the one that we have set, which calls the one before it
    _before: Any = None
    _open = 0
    _waits = False  # somebody waits for a batch
    _held_back = False  # somebody has died meanwhile

    def __init__(self, workers: Sequence[BaseProcess]):
        self._workers = workers
        self._holds = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
        if not self._holds:  # only the main thread hears signals
            return
        kind = WorkerDeaths
        kind._open += 1
        if signal.getsignal(signal.SIGCHLD) is not kind._handler or kind._handler is None:
            kind._before = signal.getsignal(signal.SIGCHLD)
            kind._handler = _holding_back(kind._before)
            signal.signal(signal.SIGCHLD, kind._handler)

    @contextlib.contextmanager
    def told_here(self) -> Iterator[None]:
        """While this is open, a worker that dies, or has died before, is an error.

        Raises:
            DeadWorkerError: which process, and how.
            LayertapError: a worker sends nothing any more.
        """
        try:
            with self._heard():
                yield
        except BaseException as error:
            # Who keeps the error would keep the workers; and of a loader that is found in a cycle of references, they
            # end after ten seconds only, since its queues are closed before they are told to end.
            traceback.clear_frames(error.__traceback__)
            said = first_line(error)
            is_of_loader = isinstance(error, RuntimeError) and said.startswith("DataLoader")  # not "Caught ..."
            # The memory of an image is asked of the process that has decoded it.
            is_gone = isinstance(error, OSError | EOFError) and self._one_has_died()
            if not is_of_loader and not is_gone:
                raise
            has_died = is_gone or said.startswith("DataLoader worker")
            raise (DeadWorkerError if has_died else LayertapError)(
                f"a process that decodes images died or hangs: {said}. What was stored is safe; run again to go on. "
                "Lower workers or batch_size if memory is short, or give /dev/shm more room"
            ) from error

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """While this is open, signals are not held back; one that was is an error.

        Raises:
            RuntimeError: which process has died, and how.
        """
        kind, before = WorkerDeaths, WorkerDeaths._waits
        if not self._holds:
            yield
            return
        kind._waits = True
        try:
            if kind._held_back:  # PyTorch says it once
                for one in self._workers:
                    if one.exitcode:
                        raise RuntimeError(f"DataLoader worker (pid {one.pid}) ended with {one.exitcode}")
            yield
        finally:
            kind._waits = before

    def _one_has_died(self) -> bool:
        """Whether a worker has ended; they do so when they are told to, and that is later."""
        return bool(wait([one.sentinel for one in self._workers], timeout=_ENDING_S))

    def close(self) -> None:
        """Put the handler back that was there, when nobody is left."""
        kind = WorkerDeaths
        if not self._holds:
            return
        self._holds = False
        kind._open -= 1
        if not kind._open and threading.current_thread() is threading.main_thread():
            kind._held_back = False
            if signal.getsignal(signal.SIGCHLD) is kind._handler:  # else somebody has set another one, over ours
                signal.signal(signal.SIGCHLD, kind._before)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()


def _holding_back(before: Any) -> Callable[[int, FrameType | None], None]:
    """A handler that keeps the error of the one before it until somebody waits for a batch."""

    def heed(number: int, frame: FrameType | None) -> None:
        kind = WorkerDeaths
        if not callable(before):
            return
        try:
            before(number, frame)
        except RuntimeError:
            if kind._waits or not kind._open:
                raise
            kind._held_back = True

    return heed
