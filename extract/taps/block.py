"""The `with` block of `Taps`: which calls count as its own, by thread and asyncio task."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from extract.taps.torch_internals import has_function_modes

__all__ = ["Block"]

Unheard = Callable[[], contextlib.AbstractContextManager[None]]


class Block:
    """One `with` block: its thread, its asyncio task, and whether it is open; hooked tensors may outlive it.

    Args:
        unheard: see `Capture`.

    Attributes:
        thread: the thread of the block.
        is_open: whether the block has begun and not ended.
        callers: other threads that have called the model.
        task: the asyncio task that opened the block; None: it is of all tasks. All tasks of a loop run in one thread:
            while a task waits in its block, others may call the model.
        in_users_code: threads that run a `reduce`, an edit or an `on_record` of these `Taps`.
    """

    def __init__(self, unheard: Unheard) -> None:
        self.is_open = False
        self.in_users_code: set[int] = set()
        self.thread = threading.get_ident()
        self._unheard = unheard
        self.callers: set[int] = set()
        self.task = _current_task()

    @property
    def is_of_this_task(self) -> bool:
        """Whether this asyncio task opened the block; true in other threads."""
        return self.task is None or self.thread != threading.get_ident() or self.task is _current_task()

    @property
    def is_worker(self) -> bool:
        """Whether this thread may be one that the model started: it neither opened the block nor called the model."""
        return self.is_open and threading.get_ident() not in (self.thread, *self.callers)

    @property
    def is_in_users_code(self) -> bool:
        """Whether this thread runs a `reduce`, an edit or an `on_record` of these `Taps`."""
        return threading.get_ident() in self.in_users_code

    @property
    def counts_calls(self) -> bool:
        """Whether calls of the model in this thread and asyncio task are recorded now."""
        is_ours = self.is_open and threading.get_ident() == self.thread and self.is_of_this_task
        return is_ours and not self.is_in_users_code

    def users_code(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: what this thread calls meanwhile is no call of the model.

        `reduce=lambda h: model.head(h)` would otherwise be recorded as a call of `head`.
        """
        return _UsersCode(self.in_users_code, self._unheard)


class _UsersCode:
    """See `Block.users_code`; a class, since a generator takes longer than the copy of a small tensor."""

    def __init__(self, threads: set[int], unheard: Unheard):
        self._threads, self._thread = threads, threading.get_ident()
        self._unheard = unheard() if has_function_modes() else None

    def __enter__(self) -> None:
        self._outermost = self._thread not in self._threads
        self._threads.add(self._thread)
        if self._unheard is not None:
            self._unheard.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._unheard is not None:
            self._unheard.__exit__(*error)
        if self._outermost:
            self._threads.discard(self._thread)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
