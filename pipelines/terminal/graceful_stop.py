"""Ctrl-C and SIGTERM: they end a command, or are held until the batch in flight is finished.

The same signal often arrives twice within milliseconds: `timeout` and service managers send it to a process and to its
group, and a terminal to every process of a pipeline. Signals within `defaults.AT_ONCE_S` of the first count as one.
"""

from __future__ import annotations

import atexit
import contextlib
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


class _Handler:
    """Handler of SIGINT and SIGTERM in this process.

    Attributes:
        received_at: time of the last signal that took effect; -inf: none did in this command.
        held: receives the number of the first signal; None: signals are not held.
        notice: tells the user that a signal is held.
        exiting: whether the process is about to exit.
    """

    def __init__(self) -> None:
        self.received_at = -math.inf
        self.held: list[int] | None = None
        self.notice = ""
        self.exiting = False
        atexit.register(self._ignore_repeated)

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if time.monotonic() - self.received_at < defaults.AT_ONCE_S:
            return
        self.received_at = time.monotonic()
        if self.exiting:
            os._exit(128 + number)
        if self.held is None or self.held:
            _raise(number)
        self.held.append(number)
        os.write(2, f"\n{self.notice}\n".encode())  # not print: the interrupted code may be printing

    def _ignore_repeated(self) -> None:
        """Ignore repeated signals while the interpreter is finalized: it would be killed, without its exit code."""
        if self.received_at > -math.inf:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _raise(number: int) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANDLER = _Handler()


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Context manager, or decorator: let SIGTERM raise `Terminated`, and Ctrl-C KeyboardInterrupt, in the main thread.

    Signals that count as one raise once, so that a repeated signal does not interrupt the removal of unfinished files.
    A SIGINT that is ignored, as in a background job of a shell script, stays ignored. After the block, when the process
    is about to exit, nothing would catch what is raised: a further signal ends the process at once.
    """
    _HANDLER.received_at, _HANDLER.exiting = -math.inf, False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _HANDLER)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _HANDLER)
    try:
        yield
    finally:
        _HANDLER.exiting = _HANDLER.received_at > -math.inf


@contextlib.contextmanager
def signals_held(notice: str = "finishing the batch in flight ...") -> Iterator[list[int]]:
    """Context manager: hold Ctrl-C and SIGTERM, and yield a list that receives the number of the first.

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
    before: dict[int, Any] = {number: signal.signal(number, _HANDLER) for number in _SIGNALS}
    outer = _HANDLER.held, _HANDLER.notice  # of a command that holds them around another
    _HANDLER.received_at, _HANDLER.held, _HANDLER.notice = -math.inf, received, notice
    try:
        yield received
    except LayertapError as error:
        from extract.images.loading import DeadWorkerError  # not above: this takes long, and is rarely needed

        if received and isinstance(error, DeadWorkerError):
            _raise(received[0])
        raise
    finally:
        _HANDLER.held, _HANDLER.notice = outer
        for number, handler in before.items():
            signal.signal(number, handler)
