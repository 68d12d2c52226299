"""Nested inputs and outputs of layers: find the tensors inside, or replace them.

A path locates a tensor by indices of tuples, lists and deques, mapping keys, and names in dataclasses and namespaces,
from the outside in. The output of an LSTM has the paths `(0,)`, `(1, 0)` and `(1, 1)`; a plain tensor has `()`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from extract.errors import InputError

__all__ = ["Path", "is_all_tensors", "is_several", "map_tensors", "tensors_in", "unread"]

Path = tuple[str | int, ...]
_MANY = 16
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


def tensors_in(value: Any, within: tuple[str, ...] = (), path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield (path, tensor) for every tensor inside nested containers; see the top of this file.

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


def is_all_tensors(value: Any) -> bool:
    """Whether a value is a dict of tensors, as the arguments of most layers are."""
    return type(value) is dict and all(isinstance(part, Tensor) for part in value.values())


def unread(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, object) for sets and objects that hold floating-point tensors which `tensors_in` leaves out."""
    if isinstance(value, Tensor | nn.Module | type):
        return
    for key, part in (parts := _parts(value)):
        yield from unread(part, (*path, key))
    if not parts:
        attributes = vars(value).values() if type(value).__dictoffset__ else ()
        held = value if isinstance(value, set | frozenset) else attributes
        if any(isinstance(part, Tensor) and part.is_floating_point() for part in held):
            yield path, value


def map_tensors(value: Any, function: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """Return the value with every tensor replaced by `function(path, tensor)`; the same object if nothing changed."""
    if isinstance(value, Tensor):
        return function(path, value)
    parts = value.items() if type(value) is dict else _parts(value)
    mapped = {key: map_tensors(part, function, (*path, key)) for key, part in parts}
    for key, part in parts:
        if mapped[key] is not part:
            return mapped if type(value) is dict else _rebuilt(value, mapped)
    return value


def _parts(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list | deque):
        # Of a long list of numbers, the types are looked at faster than the items.
        return [] if len(value) > _MANY and _PLAIN.issuperset(map(type, value)) else list(enumerate(value))
    if isinstance(value, SimpleNamespace):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _rebuilt(value: Any, parts: dict[str | int, Any]) -> Any:
    """Return a copy of a container with other parts."""
    if isinstance(value, MappingProxyType):
        return MappingProxyType(parts)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, parts)
    if isinstance(value, tuple | list):
        return _rebuilt_sequence(value, list(parts.values()))
    rebuilt = copy.copy(value)
    if isinstance(value, deque):
        rebuilt.clear()
        rebuilt.extend(parts.values())
        return rebuilt
    for name, part in parts.items():
        object.__setattr__(rebuilt, str(name), part)  # works for frozen dataclasses too
    return rebuilt


def _rebuilt_mapping(value: Mapping[Any, Any], parts: dict[str | int, Any]) -> Any:
    rebuilt: Any = copy.copy(value)
    try:
        for key, part in parts.items():
            rebuilt[key] = part
    except TypeError as error:
        raise InputError(f"a value inside {type(value).__name__} was edited, which cannot be changed") from error
    return rebuilt


def _rebuilt_sequence(value: Any, items: list[Any]) -> Any:
    """Return a tuple or list with other items, of the same type and with the same attributes."""
    kind, attributes = type(value), getattr(value, "__dict__", {})
    try:
        rebuilt = kind._make(items) if hasattr(kind, "_make") else kind(items)  # as named tuples
    except Exception:  # the constructor takes other arguments
        rebuilt = ()
    if len(rebuilt) != len(items) or any(a is not b for a, b in zip(rebuilt, items, strict=True)):
        rebuilt = tuple.__new__(kind, items) if isinstance(value, tuple) else copy.copy(value)
        if isinstance(value, list):
            list.__setitem__(rebuilt, slice(None), items)
            getattr(rebuilt, "__dict__", {}).clear()
    of_part = {id(old): new for old, new in zip(value, items, strict=True)}
    for name, attribute in attributes.items():
        vars(rebuilt).setdefault(name, of_part.get(id(attribute), attribute))
    return rebuilt


def is_several(value: Any) -> bool:
    """Whether a value holds more than one tensor."""
    return not isinstance(value, Tensor) and sum(1 for _ in tensors_in(value)) > 1
