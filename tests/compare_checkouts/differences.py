"""How two recordings differ."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .described_files import Blobs

__all__ = ["compare"]

SHOWN = 12  # lines of a difference


def compare(old: Path, new: Path) -> bool:
    """Print how two recordings differ, a line for each command; returns whether they are the same."""
    recordings = [
        {one["name"]: one for one in json.loads((path / "recording.json").read_text())} for path in (old, new)
    ]
    stores = Blobs(old / "blobs"), Blobs(new / "blobs")
    names = list(recordings[0]) + [name for name in recordings[1] if name not in recordings[0]]
    same = 0
    for name in names:
        one, other = (recording.get(name) for recording in recordings)
        if one is None or other is None:
            print(f"{name}: only in {new if one is None else old}")
            continue
        lines = list(_differences(one, other, stores))
        same += not lines
        print(f"{name}: " + ("same" if not lines else f"DIFFERENT   {other['command']}"))
        for line in lines:
            print(f"    {line}")
    print(f"{same} of {len(names)} commands are the same")
    return same == len(names)


def _differences(one: dict[str, Any], other: dict[str, Any], stores: tuple[Blobs, Blobs]) -> Iterator[str]:
    for key in ("command", "exit code", "removed"):
        if one[key] != other[key]:
            yield f"{key}: {one[key]} -> {other[key]}"
    for key in ("stdout", "stderr"):
        if one[key] != other[key]:
            yield f"{key}:"
            yield from _line_differences(one[key], other[key])
    for name in sorted(one["files"].keys() | other["files"].keys()):
        parts, others = one["files"].get(name), other["files"].get(name)
        if parts is None or others is None:
            yield f"{name}: {'written now' if parts is None else 'no longer written'}"
            continue
        for part in sorted(parts.keys() | others.keys()):
            value, changed = parts.get(part), others.get(part)
            if value != changed:
                yield from _value_differences(f"{name} [{part}]", value, changed, stores)


def _value_differences(where: str, one: str | None, other: str | None, stores: tuple[Blobs, Blobs]) -> Iterator[str]:
    """How one part of a file differs; of arrays by how much, of texts by lines."""
    first, second = (store.get(value) if value else None for store, value in zip(stores, (one, other), strict=True))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.shape == second.shape:
        yield f"{where}: {_array_difference(first, second)}"
    elif isinstance(first, str) and isinstance(second, str):
        yield f"{where}:"
        yield from _line_differences(first.splitlines(), second.splitlines())
    elif one and other and "\n" in one + other:
        yield f"{where}:"
        yield from _line_differences(one.splitlines(), other.splitlines())
    else:
        yield f"{where}: {(one or 'missing')[:100]} -> {(other or 'missing')[:100]}"


def _array_difference(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> str:
    hashes = first.dtype == np.uint64
    numbers = first.dtype.kind in "fiub" and second.dtype.kind in "fiub" and not hashes
    differs = (first != second) & ~(np.not_equal(first, first) & np.not_equal(second, second))
    rows = int(differs.reshape(len(first), -1).any(1).sum()) if first.ndim else 1
    text = f"{rows:,} of {len(first) if first.ndim else 1:,} rows differ"
    if not rows:
        return f"equal values, but {first.dtype} -> {second.dtype} or other bits of NaN"
    if not numbers:
        return text
    off = np.abs(first.astype(np.float64) - second.astype(np.float64))
    return f"{text}, by at most {np.nanmax(off):.3g}; largest value {np.nanmax(np.abs(first.astype(np.float64))):.3g}"


def _line_differences(one: list[str], other: list[str]) -> Iterator[str]:
    lines = [
        line for line in difflib.unified_diff(one, other, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))
    ]
    for line in lines[:SHOWN]:
        yield f"  {line[:240]}"
    if len(lines) > SHOWN:
        yield f"  ... and {len(lines) - SHOWN} more lines"
