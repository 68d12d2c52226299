"""Nested inputs and outputs of layers: find the tensors inside, or replace them.

A path locates a tensor by indices of tuples and lists, mapping keys, and names in dataclasses, from the outside in. The
output of an LSTM has the paths `(0,)`, `(1, 0)` and `(1, 1)`; a plain tensor has `()`.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from extract.errors import InputError

__all__ = ["Path", "is_several", "map_tensors", "parts_of", "tensors_in", "unread"]

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
    for key, part in parts_of(value):
        if not within or str(key) == within[0]:
            yield from tensors_in(part, within[1:], (*path, key))


def unread(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, object) for sets, deques and objects with floating-point tensors which `tensors_in` leaves out."""
    if isinstance(value, Tensor | nn.Module | type):
        return
    for key, part in (parts := parts_of(value)):
        yield from unread(part, (*path, key))
    if not parts:
        attributes = vars(value).values() if type(value).__dictoffset__ else ()
        held = value if isinstance(value, set | frozenset | deque) else attributes
        if any(isinstance(part, Tensor) and part.is_floating_point() for part in held):
            yield path, value


def map_tensors(value: Any, function: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """Return the value with every tensor replaced by `function(path, tensor)`; the same object if nothing changed."""
    if isinstance(value, Tensor):
        return function(path, value)
    parts = value.items() if type(value) is dict else parts_of(value)
    mapped = {key: map_tensors(part, function, (*path, key)) for key, part in parts}
    for key, part in parts:
        if mapped[key] is not part:
            return mapped if type(value) is dict else _rebuilt(value, mapped)
    return value


def parts_of(value: Any) -> list[tuple[str | int, Any]]:
    """Return (key, part) for the parts of a tuple, list, mapping or dataclass; none of a long list of numbers."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        # Of a long list of numbers, the types are looked at faster than the items.
        return [] if len(value) > _MANY and _PLAIN.issuperset(map(type, value)) else list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _rebuilt(value: Any, parts: dict[str | int, Any]) -> Any:
    """Return a copy of a container with other parts.

    Raises:
        InputError: a class of the model's own cannot be made with other parts, or is a tuple or list with attributes.
    """
    kind, items = type(value), list(parts.values())
    try:
        if isinstance(value, tuple | list):
            if object.__getstate__(value):
                raise TypeError("it has attributes beside the items, which may not fit others")
            rebuilt: Any = kind._make(items) if hasattr(kind, "_make") else kind(items)  # as named tuples
            if len(rebuilt) != len(items) or not all(map(operator.is_, rebuilt, items)):
                raise TypeError("it has other items than it was made of")
        else:
            rebuilt = copy.copy(value)
            for key, part in parts.items():
                if isinstance(value, Mapping):
                    rebuilt[key] = part
                else:
                    object.__setattr__(rebuilt, str(key), part)  # works for frozen dataclasses too
        return rebuilt
    except Exception as error:  # of the code of its class
        raise InputError(
            f"a value inside {kind.__name__} is to be replaced, which this class does not allow",
            hint="name another layer, such as one inside this one",
        ) from error


def is_several(value: Any) -> bool:
    """Whether a value holds more than one tensor."""
    return not isinstance(value, Tensor) and sum(1 for _ in tensors_in(value)) > 1
