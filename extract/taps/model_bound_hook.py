"""Hooks that are not copied with the model they are registered on."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from torch import nn

__all__ = ["ModelBoundHook"]


class ModelBoundHook(partial[Any]):
    """Hook that does nothing in a copied or pickled model. Like any `partial`, it adds no Python call to each call."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Such a file can be loaded where layertap is not installed.
        return partial, (contextlib.nullcontext.__exit__, contextlib.nullcontext())

    def __deepcopy__(self, memo: Any) -> ModelBoundHook:
        return ModelBoundHook(_remove)


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
