"""Differences between the descriptions of two data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["changes", "differences"]


# Dotted key -> its meaning, for keys that a user of the command line does not know.
_MEANINGS = {
    "images.labels_xxh3": "labels, splits, ids or kept columns of the images (images.labels_xxh3)",
    "images.paths_xxh3": "names of the images (images.paths_xxh3)",
}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences of two nested dicts, one line for each leaf."""
    return [f"{_MEANINGS.get(key, key)}: stored {stored}, now {now}" for key, stored, now in changes(old, new)]


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old, new) of the leaves in which two nested dicts differ."""
    return list(_changed(old, new))


def _shortened(value: Any) -> Any:
    """Return a value for a message: the start of a hash, any other value unchanged."""
    return value[:12] + "..." if isinstance(value, str) and len(value) in (32, 64) else value


def _changed(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _changed(old.get(name, "nothing"), new.get(name, "nothing"), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, _shortened(old), _shortened(new)
