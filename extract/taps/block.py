"""The `with` block of `Taps`: its thread and asyncio task, and the user's own code that runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextvars import ContextVar

from extract.taps.functions import unwatched

__all__ = ["OPENED", "Block"]

# Marks of the blocks opened in this context and in those it was copied from. Each asyncio task has its own context.
OPENED: ContextVar[frozenset[object]] = ContextVar("opened", default=frozenset())


class Block:
    """One `with` block: its thread, its cleanup, and whether it is open; hooked tensors may outlive it.

    Attributes:
        mark: is in `OPENED` in the asyncio task that opened the block; None if no task did, so it is of all tasks.
        ran_in_other_tasks: whether other tasks have called the model.
        callers: other threads that have called the model.
        in_users_code: threads that run a `reduce`, an edit or an `on_record` of these `Taps`.
    """

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self.open = True
        self.thread = threading.get_ident()
        self.mark = object() if _is_in_task() else None
        self.ran_in_other_tasks = False
        self.callers: set[int] = set()
        self.in_users_code: set[int] = set()
        self._undo = undo
        if self.mark is not None:
            OPENED.set(OPENED.get() | {self.mark})

    @property
    def is_of_this_task(self) -> bool:
        """Whether this asyncio task opened the block, or was created inside it; true in other threads."""
        return self.mark is None or self.thread != threading.get_ident() or self.mark in OPENED.get()

    @property
    def is_worker(self) -> bool:
        """Whether this thread may be one that the model started: it neither opened the block nor called the model."""
        return (thread := threading.get_ident()) != self.thread and thread not in self.callers

    def users_code(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: what this thread calls meanwhile is no call of the model."""
        return _UsersCode(self.in_users_code)

    def close(self) -> None:
        """Undo what was set up for the block."""
        self.open = False
        OPENED.set(OPENED.get() - {self.mark})
        self._undo.close()


class _UsersCode(unwatched):
    """See `Block.users_code`; a class, since a generator takes longer than the copy of a small tensor."""

    def __init__(self, threads: set[int]) -> None:
        self._threads, self._thread = threads, threading.get_ident()

    def __enter__(self) -> None:
        self._outermost = self._thread not in self._threads
        self._threads.add(self._thread)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._outermost:
            self._threads.discard(self._thread)


def _is_in_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs
        return False
