"""Hooks that are not copied with the model they are registered on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ModelBoundHook"]


class ModelBoundHook:
    """Hook that does nothing in a copied or pickled model."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function and return its result."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelBoundHook, (_nothing,)

    def __deepcopy__(self, memo: Any) -> ModelBoundHook:
        return ModelBoundHook(_nothing)


def _nothing(*args: Any) -> None:
    return None
