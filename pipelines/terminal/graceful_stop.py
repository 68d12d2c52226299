"""Hold Ctrl-C and SIGTERM until the batch in flight is finished."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["signals_held"]

_AT_ONCE_S = 0.5


@contextlib.contextmanager
def signals_held() -> Iterator[list[int]]:
    """Context manager: hold Ctrl-C and SIGTERM, and yield a list that receives their numbers.

    The caller finishes the batch in flight and stops. A second signal takes effect at once. Outside the main thread,
    signals are not held and the list stays empty.
    """
    received: list[int] = []

    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set signal handlers
        return

    received_at: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received_at and time.monotonic() - received_at[0] < _AT_ONCE_S:
            return  # the same signal, sent to the process and to its group
        if received_at:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
            return
        received_at.append(time.monotonic())
        received.append(number)
        os.write(2, b"\nfinishing the batch in flight ...\n")  # not print: the interrupted code may be printing

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
