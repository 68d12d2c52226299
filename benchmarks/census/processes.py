"""Run a function in a process of its own, with limits on its time and memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("fork")  # the libraries are imported once, which takes longer than most networks


class LimitError(Exception):
    """The process was stopped: it took too long or too much memory, or it died."""


def run_limited(
    function: Callable[..., None], *args: Any, seconds: float, memory_bytes: int, update: Callable[[Any], None]
) -> None:
    """Call `function(tell, *args)` in a process; whatever it tells is passed to `update`.

    Raises:
        LimitError: the process was stopped; the message gives the reason.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_call, args=(sender, function, args))
    process.start()
    sender.close()
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                if receiver.poll(0.1):
                    update(receiver.recv())
                    continue
            except EOFError:
                break
            if time.monotonic() > deadline:
                raise LimitError(f"more than {seconds:g} s")
            if resident_bytes(process.pid) > memory_bytes:
                raise LimitError(f"more than {memory_bytes / 1e9:g} GB of memory")
    finally:
        receiver.close()
        process.join(5 if sys.exc_info()[0] is None else 0)
        process.kill()
        process.join()
    if process.exitcode:
        raise LimitError(f"the process died with exit code {process.exitcode}")


def _call(sender: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        function(sender.send, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    sender.close()
    os._exit(0)  # the parent's exit handlers are not for this process


def resident_bytes(pid: int | None) -> int:
    """Return the memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
