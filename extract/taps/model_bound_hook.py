"""Hooks that are not copied with the model they are registered on."""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = ["ModelBoundHook"]


class ModelBoundHook(partial[Any]):
    """Hook that does nothing in a copied or pickled model. Like any `partial`, it adds no Python call to each call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelBoundHook, (_nothing,)

    def __deepcopy__(self, memo: Any) -> ModelBoundHook:
        return ModelBoundHook(_nothing)


def _nothing(*args: Any) -> None:
    return None
