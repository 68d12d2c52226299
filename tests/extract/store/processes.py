"""Functions that run in a forked process, which may be killed or crash, or in threads; and calls that fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("fork")


def started(work: Callable[..., object], *arguments: Any) -> BaseProcess:
    """The process in which a function runs."""
    process = _CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def killed(work: Callable[..., object], *arguments: Any) -> None:
    """Let a function run that kills itself in the end."""
    process = started(work, *arguments)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def kill_itself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def result_of(work: Callable[..., Any], *arguments: Any, within_s: int = 60) -> Any:
    """What a function returns, or the exception that it raises; an error if the process crashes or takes too long."""
    receiving, sending = _CONTEXT.Pipe(duplex=False)

    def answer() -> None:
        signal.alarm(within_s)
        try:
            sending.send(work(*arguments))
        except Exception as error:
            sending.send(error)

    process = started(answer)
    sending.close()
    try:
        result = receiving.recv()
    except EOFError:
        result = None
    process.join()
    assert process.exitcode == 0, f"the process ended with {process.exitcode}"
    return result


def at_once(work: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """Call a function with each of some arguments, in as many threads."""
    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def failing(code: int) -> Callable[..., Any]:
    """A call of the system that has an error."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail
