"""Read JSON that is not trusted: bounded in size and depth, and checked against a shape before it is used.

A shape is written like the content that it describes:

    str, bool, dict, list            a value of this type
    object                           any value
    int                              a whole number from 0 to 2**63 - 1
    float                            a finite number, whole or not
    None                             null
    TIME, Text("[0-9a-f]{64}")       text in this form
    [shape]                          a list of such values
    {str: shape}                     an object of such values, with any names; {Text(...): shape}: with names in a form
    {"name": shape, "other?": shape} an object with these names; a name that ends in "?" may be missing, and all names
                                     that the shape does not list are permitted
    (shape, shape)                   one of several

Not by pydantic: its import would cost each decoding worker, and each script that only reads features, 0.13 s of CPU.
The size is checked first, because large files make large objects: a receipt of 42 MB took `verify` 16 s.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError, first_line
from extract.system.atomic_files import open_regular

__all__ = [
    "JSON_BYTES",
    "TIME",
    "Text",
    "check_shape",
    "is_finite_number",
    "mapped",
    "parse_json",
    "read_json",
    "read_json_lines",
    "without_nan",
]

JSON_BYTES = 1 << 26  # far more than a description, or the log of a thousand runs
_DEPTH = 64  # functions that print or compare the content are recursive
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class Text:
    """Shape of a text.

    Attributes:
        form: regular expression for the whole text.
        name: what the text is, for errors.
    """

    form: str
    name: str = "text in another form"

    def fits(self, value: Any) -> bool:
        """Return whether a value is text in this form."""
        return isinstance(value, str) and re.fullmatch(self.form, value, re.ASCII) is not None


class _Time(Text):
    """Shape of a time that `datetime.fromisoformat` reads; of years that any time zone can represent."""

    def fits(self, value: Any) -> bool:
        """Return whether a value is a time."""
        try:
            return isinstance(value, str) and 1970 < datetime.fromisoformat(value).year < 9999
        except ValueError:
            return False


TIME = _Time("", "a time such as 2026-01-31T12:00:00+00:00")
_NAMES: dict[Any, str] = {str: "text", bool: "true or false", dict: "an object", list: "a list", None: "null"}


def read_json(path: Path, shape: Any = dict, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file; a link to a file is followed.

    Args:
        path: the file.
        shape: what the object must hold; see the module.
        most_bytes: size that the file may have; a larger file is not read.

    Raises:
        FileNotFoundError, NotADirectoryError: the file does not exist.
        InputError: the path is a folder, a pipe or a device; or the content is too large or has another shape.
        LayertapError: the file cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise InputError(f"{path} is damaged: it has {size:,} bytes, expected at most {most_bytes:,}")
            content = file.read(most_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror}") from error
    return parse_json(content, path, shape)


def read_json_lines(path: Path, shape: Any = dict) -> Iterator[dict[str, Any]]:
    """Yield the objects in a log, which has one JSON object on each line.

    Damaged lines and lines of another shape are skipped. Of a log larger than 64 MiB, only the end is read. Nothing is
    yielded if the file is missing, or not a regular file.

    Raises:
        LayertapError: the file cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - JSON_BYTES))
            lines = file.read(JSON_BYTES).splitlines()
    except (FileNotFoundError, NotADirectoryError, InputError):
        return
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror}") from error
    for line in lines:
        try:
            yield parse_json(line, path, shape)
        except InputError:  # a process was killed while it wrote the line
            continue


def parse_json(content: bytes, name: Path | str, shape: Any = dict) -> dict[str, Any]:
    """Return the JSON object in `content`.

    Args:
        content: UTF-8 text.
        name: name of the file, for errors.
        shape: what the object must hold; see the module.

    Raises:
        InputError: the content is not JSON, is nested more than 64 deep, or has another shape.
    """
    try:
        parsed = json.loads(content.decode())
        # Half of a surrogate pair is text only if `os.fsdecode` made it from a byte of a path.
        if re.search(rb"\\u[dD][89a-fA-F]", content):
            os.fsencode(json.dumps(parsed, ensure_ascii=False))
    except (ValueError, RecursionError) as error:  # RecursionError: [[[[...
        problem = f"it is not JSON: {first_line(error)}" if content.strip() else "it is empty"
        raise InputError(f"{name} is damaged: {problem}") from error
    if content.count(b"[") + content.count(b"{") > _DEPTH and _is_deep(parsed):
        raise InputError(f"{name} is damaged: its content is nested more than {_DEPTH} deep")
    if not isinstance(parsed, dict):
        raise InputError(f"{name} is damaged: it is {_brief(parsed)}, expected an object")
    check_shape(parsed, name, shape)
    return parsed


def check_shape(content: dict[str, Any], name: Path | str, shape: Any) -> None:
    """Check the content of a JSON file; `name` is its name for errors.

    Raises:
        InputError: the content has another shape.
    """
    if fault := _fault(content, shape):
        place, problem = fault
        raise InputError(f"{name} is damaged: {place[1:] or 'it'} {problem}")


def _is_deep(content: Any) -> bool:
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(_DEPTH):
        inside = (value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer))
        level = [value for value in inside if isinstance(value, dict | list)]
    return bool(level)


def _fault(value: Any, shape: Any) -> tuple[str, str] | None:
    """Return where a value differs from a shape, such as ".'features'[0].'name'", and how; None if it does not."""
    if isinstance(shape, tuple):
        faults = [_fault(value, option) for option in shape]
        return None if None in faults else faults[0]
    if isinstance(shape, list):
        return _fault(value, list) or _fault_in_members(enumerate(value), shape[0])
    if isinstance(shape, dict):
        return _fault(value, dict) or _fault_in_object(value, shape)
    if shape is int:
        fits, expected = type(value) is int and 0 <= value <= _LARGEST, "a whole number from 0"
    elif isinstance(shape, Text):
        fits, expected = shape.fits(value), shape.name
    elif shape is float:
        fits, expected = is_finite_number(value), "a finite number"
    else:
        fits, expected = value is None if shape is None else isinstance(value, shape), _NAMES.get(shape, "a value")
    return None if fits else ("", f"is {_brief(value)}, expected {expected}")


def _fault_in_members(members: Iterable[tuple[Any, Any]], shape: Any) -> tuple[str, str] | None:
    for index, value in members:
        if fault := _fault(value, shape):
            return f"[{_brief(index)}]{fault[0]}", fault[1]
    return None


def _fault_in_object(content: dict[str, Any], shape: dict[Any, Any]) -> tuple[str, str] | None:
    for name, inner in shape.items():
        if not isinstance(name, str):
            if wrong := [key for key in content if _fault(key, name)]:
                return "", f"has the name {_brief(wrong[0])}, expected {_NAMES.get(name) or name.name}"
            if fault := _fault_in_members(content.items(), inner):
                return fault
        elif (key := name.removesuffix("?")) in content:
            if fault := _fault(content[key], inner):
                return f".{key!r}{fault[0]}", fault[1]
        elif key == name:
            return "", f"has no {key!r}"
    return None


def is_finite_number(value: Any) -> bool:
    """Return whether a value of JSON is a number, and not infinite or NaN."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond 1e308
        return False


def _brief(value: Any) -> str:
    """Return a value as in JSON, shortened, and in ASCII."""
    if isinstance(value, dict):
        return f"an object of {len(value):,}"
    if isinstance(value, list):
        return f"a list of {len(value):,}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 80:
        return f"a number of {value.bit_length():,} bits"
    return json.dumps(value if not isinstance(value, str) else reprlib.repr(value)[1:-1])


def mapped(content: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return JSON-compatible data in which a function has replaced each value of a type, in objects and lists too."""
    if isinstance(content, dict):
        return {str(key): mapped(value, kind, change) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [mapped(value, kind, change) for value in content]
    return change(content) if isinstance(content, kind) else content


def without_nan(content: Any) -> Any:
    """Return JSON-compatible data with null in place of NaN and infinity, which JSON does not have."""
    return mapped(content, float, lambda value: value if math.isfinite(value) else None)
