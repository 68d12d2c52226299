"""Process-wide settings that blocks change while they are open: compiled code is off while taps are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

__all__ = ["COMPILED_CODE_OFF", "Switch"]


class Switch:
    """A process-wide setting for blocks that may overlap in any order and thread: first in, last out."""

    def __init__(self, turn: Callable[[], Callable[[], None]]):
        self._turn = turn  # changes the setting, and returns a function that restores it
        self._back: Callable[[], None] = lambda: None
        self._users = 0
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager: change the setting; the last block to end restores it."""
        with self._guard:
            if not self._users:
                self._back = self._turn()
            self._users += 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if not self._users:
                    self._back()


def _no_compiled_code() -> Callable[[], None]:
    if torch.compiler.is_dynamo_compiling():
        return lambda: None
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:  # PyTorch refuses it where compiled code runs already
        return lambda: None

    def restore() -> None:
        now = torch.compiler.set_stance("force_eager")  # knows which it replaces
        (stance if now.prev is stance.stance else now).__exit__(None, None, None)  # the user may have set another

    return restore


COMPILED_CODE_OFF = Switch(_no_compiled_code)
