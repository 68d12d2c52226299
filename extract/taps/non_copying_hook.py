"""Hooks that stay with the model that they were registered on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["UncopiedHook"]


class UncopiedHook:
    """A hook that a copy of the model does not take along: copied or pickled, it does nothing."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncopiedHook, (_nothing,)

    def __deepcopy__(self, memo: Any) -> UncopiedHook:
        return UncopiedHook(_nothing)


def _nothing(*args: Any) -> None:
    return None
