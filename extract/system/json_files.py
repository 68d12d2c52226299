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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError
from extract.system.atomic_files import open_regular

__all__ = [
    "JSON_BYTES",
    "TIME",
    "Text",
    "check_shape",
    "is_finite_number",
    "parse_json",
    "read_json",
    "read_json_lines",
    "without_nan",
]

JSON_BYTES = 1 << 26  # far more than a description, or the log of a thousand runs
_DEPTH = 64  # functions that print or compare the content are recursive
_LARGEST = (1 << 63) - 1

# A place in the content: an entry of an object is its name; an item of a list, or of an object with any names, is a
# tuple of its index or name. It becomes text only in an error, because receipts have thousands of values.
_Place = tuple[Any, ...]
_A_NAME = object()


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
        raise InputError(f"{name} is damaged: {type(error).__name__}: {error}") from error
    if content.count(b"[") + content.count(b"{") > _DEPTH and _is_deep(parsed):
        raise InputError(f"{name} is damaged: its content is nested more than {_DEPTH} deep")
    if not isinstance(parsed, dict):
        raise InputError(f"{name} is damaged: {_fault(parsed, dict, ())}")
    check_shape(parsed, name, shape)
    return parsed


def check_shape(content: dict[str, Any], name: Path | str, shape: Any) -> None:
    """Check the content of a JSON file; `name` is its name for errors.

    Raises:
        InputError: the content has another shape.
    """
    if fault := _fault(content, shape, ()):
        raise InputError(f"{name} is damaged: {fault}")


def _is_deep(content: Any) -> bool:
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(_DEPTH):
        inside = (value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer))
        level = [value for value in inside if isinstance(value, dict | list)]
    return bool(level)


def _fault(value: Any, shape: Any, where: _Place) -> str | None:
    """Return in what a value differs from a shape; None if it does not. `where` is the value's place in the content."""
    if shape is int:
        fits, expected = type(value) is int and 0 <= value <= _LARGEST, "a whole number from 0"
    elif isinstance(shape, Text):
        fits, expected = shape.fits(value), shape.name
    elif isinstance(shape, tuple):
        faults = [_fault(value, option, where) for option in shape]
        return None if None in faults else faults[0]
    elif isinstance(shape, list):
        return _fault(value, list, where) or _first_fault(value, shape[0], where)
    elif isinstance(shape, dict):
        return _fault(value, dict, where) or _fault_in_object(value, shape, where)
    elif shape is float:
        fits, expected = is_finite_number(value), "a finite number"
    else:
        fits, expected = value is None if shape is None else isinstance(value, shape), _NAMES.get(shape, "a value")
    return None if fits else f"{_name_of(where)} is {_brief(value)}, expected {expected}"


def _first_fault(values: list[Any], shape: Any, where: _Place) -> str | None:
    faults = (_fault(value, shape, (*where, (i,))) for i, value in enumerate(values))
    return next((fault for fault in faults if fault), None)


def _fault_in_object(content: dict[str, Any], shape: dict[Any, Any], where: _Place) -> str | None:
    for name, inner in shape.items():
        if isinstance(name, str):
            key = name.removesuffix("?")
            if key in content:
                fault = _fault(content[key], inner, (*where, key))
            else:
                fault = None if key != name else f"{_name_of(where)} has no {key!r}"
        else:
            faults = (_fault(key, name, (*where, _A_NAME)) or _fault(each, inner, (*where, (key,)))
                      for key, each in content.items())  # fmt: skip
            fault = next((fault for fault in faults if fault), None)
        if fault:
            return fault
    return None


def _name_of(where: _Place) -> str:
    """Return a place in the content as text: 'features'[0].'name'."""
    text = "it"
    for part in where:
        if part is _A_NAME:
            text = f"a name in {text}"
        elif isinstance(part, tuple):
            text += f"[{_brief(part[0])}]"
        else:
            text = repr(part) if text == "it" else f"{text}.{part!r}"
    return text


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


def without_nan(content: Any) -> Any:
    """Return JSON-compatible data with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(content, dict):
        return {str(key): without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
