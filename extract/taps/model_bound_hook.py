"""Hooks that are not copied with the model they are registered on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

__all__ = ["ModelBoundHook"]


class ModelBoundHook:
    """Hook that does nothing in a copied or pickled model, nor where PyTorch's compiler traces a module.

    The compiler traces what `torch.cond` or FlexAttention run, for example, and the code of hooks there. This module
    then runs without its hooks.

    Args:
        hook: the hook.
        traced: receives the id of each module whose call the compiler has traced.

    Attributes:
        traced: see above.
        func: the function that the hook calls, if it is a `partial`; else the hook.
    """

    __slots__ = ("_hook", "func", "traced")

    def __init__(self, hook: Callable[..., Any], traced: set[int]):
        self._hook, self.traced = hook, traced
        self.func = hook.func if isinstance(hook, partial) else hook

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Call the hook, or note that the compiler traces the call."""
        if is_dynamo_compiling():  # true for the compiler alone, which does not call the function
            return _note(self, module)
        return self._hook(module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Such a file can be loaded where layertap is not installed.
        return partial, (contextlib.nullcontext.__exit__, contextlib.nullcontext())

    def __deepcopy__(self, memo: Any) -> ModelBoundHook:
        return ModelBoundHook(_remove, set())


def _note(hook: ModelBoundHook, module: nn.Module) -> None:
    hook.traced.add(id(module))


# The compiler calls this function while it traces, and does not trace it. `torch.compiler.assume_constant_result` sets
# this attribute, but imports the compiler, which takes a second.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _remove(module: nn.Module, *args: Any) -> None:
    """Remove copied hooks from a module and those inside it, when one is called: hooks keep layers from fused code."""
    for layer in module.modules():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for number in [number for number, hook in hooks.items() if getattr(hook, "func", None) is _remove]:
                del hooks[number]
                for flags in (
                    layer._forward_pre_hooks_with_kwargs,
                    layer._forward_hooks_with_kwargs,
                    layer._forward_hooks_always_called,
                ):
                    flags.pop(number, None)
