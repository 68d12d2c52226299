"""Nested inputs and outputs of layers: find the tensors inside, or replace them.

A path locates a tensor by tuple or list indices, mapping keys and dataclass fields, from the outside in. The output of
an LSTM has the paths `(0,)`, `(1, 0)` and `(1, 1)`; a plain tensor has `()`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

__all__ = ["Path", "as_arguments", "map_tensors", "tensors_in"]

Path = tuple[str | int, ...]


def tensors_in(value: Any, within: tuple[str, ...] = (), path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield (path, tensor) for every tensor inside nested tuples, lists, mappings and dataclasses.

    Args:
        value: the value to search.
        within: path, as text, of the tensor or of the part to search.
        path: path of `value` itself.
    """
    if isinstance(value, Tensor):
        if not within:
            yield path, value
        return
    for key, part in _parts(value):
        if not within or str(key) == within[0]:
            yield from tensors_in(part, within[1:], (*path, key))


def map_tensors(value: Any, function: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """Return the value with every tensor replaced by `function(path, tensor)`; the same object if nothing changed."""
    if isinstance(value, Tensor):
        return function(path, value)
    parts = list(_parts(value))
    mapped = {key: map_tensors(part, function, (*path, key)) for key, part in parts}
    if all(mapped[key] is part for key, part in parts):
        return value
    return _rebuilt(value, mapped)


def _parts(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _rebuilt(value: Any, parts: dict[str | int, Any]) -> Any:
    if isinstance(value, MappingProxyType):
        return MappingProxyType(parts)
    if isinstance(value, Mapping):
        rebuilt: Any = copy.copy(value)
        for key, part in parts.items():
            rebuilt[key] = part
        return rebuilt
    if isinstance(value, list):
        rebuilt = copy.copy(value)
        rebuilt[:] = parts.values()
        return rebuilt
    if hasattr(type(value), "n_sequence_fields"):  # torch.return_types
        return type(value)(parts.values())
    if isinstance(value, tuple):
        # The constructor of a subclass may take other arguments.
        rebuilt = tuple.__new__(type(value), parts.values())
        if hasattr(value, "__dict__"):
            vars(rebuilt).update(vars(value))
        return rebuilt
    rebuilt = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(rebuilt, str(name), part)  # works for frozen dataclasses too
    return rebuilt


def as_arguments(value: dict[Any, Any], count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, of which the first `count` are positional, from a dict by index and name."""
    return tuple(value[i] for i in range(count)), {name: part for name, part in value.items() if isinstance(name, str)}
