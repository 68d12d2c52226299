"""Process-wide settings that are off while taps are open: fused attention and compiled code."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType

import torch
from torch import nn

__all__ = ["COMPILED_CODE_OFF", "FUSED_ATTENTION_OFF", "Switch", "has_compiled_code"]


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


def _no_fused_attention() -> Callable[[], None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, before)


def _no_compiled_code() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    stance.__enter__()
    return partial(stance.__exit__, None, None, None)


FUSED_ATTENTION_OFF = Switch(_no_fused_attention)
COMPILED_CODE_OFF = Switch(_no_compiled_code)


def has_compiled_code(modules: Sequence[nn.Module]) -> bool:
    """Whether one of these modules, or a method of one, is compiled, by `torch.compile` or `Module.compile`."""
    if "torch._dynamo" not in sys.modules:  # imported by each of them
        return False
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules):
        return True
    classes = {cls for kind in {type(module) for module in modules} for cls in kind.__mro__}
    return any(
        isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value)
        for owner in (*modules, *classes)
        for value in vars(owner).values()
    )
