"""Ctrl-C and SIGTERM: they end a command, or are held until the batch in flight is finished.

The same signal often arrives twice within milliseconds: `timeout` and service managers send it to a process and to its
group, and a terminal to every process of a pipeline. Signals within `defaults.AT_ONCE_S` of the first count as one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from extract import defaults
from extract.errors import LayertapError

__all__ = ["Terminated", "end_on_signals", "signals_held"]


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, so that unfinished files are removed as after Ctrl-C."""


def _raise(number: int) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


class _EndOnSignals:
    """Handler of SIGINT and SIGTERM; see `end_on_signals`."""

    received_at = -math.inf  # of the last signal that took effect, here or in `signals_held`

    def __init__(self) -> None:
        self._since, self._ends = time.monotonic(), False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - _EndOnSignals.received_at < defaults.AT_ONCE_S:
            return
        if self._ends:
            os._exit(128 + number)
        _EndOnSignals.received_at = time.monotonic()
        _raise(number)

    def end(self) -> None:
        """After a signal, raise no more, because nothing would catch it: a further signal ends the process at once."""
        self._ends = _EndOnSignals.received_at >= self._since


def end_on_signals() -> _EndOnSignals:
    """Make SIGTERM raise `Terminated`, and Ctrl-C KeyboardInterrupt; only in the main thread.

    Signals that count as one raise once, so that a repeated signal does not interrupt the removal of unfinished files.
    A SIGINT that is ignored, as in a background job of a shell script, stays ignored.

    Returns:
        the handler; call its `end` when the process is about to exit.
    """
    handler = _EndOnSignals()
    _ignore_signals_at_the_end()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)
    return handler


@functools.cache  # once for each process, and early: other functions that run at the exit come before it
def _ignore_signals_at_the_end() -> None:
    """After a signal, ignore repeated ones while the interpreter is finalized: it would be killed, without its code."""

    def ignore() -> None:
        if _EndOnSignals.received_at >= 0:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)


@contextlib.contextmanager
def signals_held(notice: str = "finishing the batch in flight ...") -> Iterator[list[int]]:
    """Context manager: hold Ctrl-C and SIGTERM, and yield a list that receives their numbers.

    The caller stops soon, as `notice` tells the user. A second signal takes effect at once. Outside the main thread,
    signals are not held and the list stays empty.

    Raises:
        KeyboardInterrupt: a second signal came; or processes that decode images have died after the first, which was
            sent to them, too.
    """
    received: list[int] = []

    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set signal handlers
        return

    received_at: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received_at and time.monotonic() - received_at[0] < defaults.AT_ONCE_S:
            return
        if received_at:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
            return
        received_at.append(time.monotonic())
        _EndOnSignals.received_at = received_at[0]
        received.append(number)
        os.write(2, f"\n{notice}\n".encode())  # not print: the interrupted code may be printing

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    except LayertapError as error:
        from extract.images.loading import DeadWorkerError  # not above: this takes long, and is rarely needed

        if received and isinstance(error, DeadWorkerError):
            _raise(received[0])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
