"""Times and sizes as users write them: 90s, 15m, 10MB."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

__all__ = ["Seconds", "finite", "n_bytes"]

_LONGEST_S = 86400.0 * 36500
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _seconds(value: Any) -> Any:
    """Return the seconds of text such as 90, 90s, 15m, 36h or 30d; other types are returned unchanged."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip(), re.ASCII)):
        return float(match[1]) * _UNITS[match[2] or "s"]
    if isinstance(value, str):
        raise ValueError("expected seconds, or a time such as 90s, 15m, 36h or 30d")
    return value


def n_bytes(value: Any) -> Any:
    """Return the bytes of text such as 500kB, 10MB or 1.5 GB; other types are returned unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?B?)", value.strip(), re.ASCII | re.IGNORECASE)
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError("expected bytes, or a size such as 500kB, 10MB or 1GB")
    return round(float(match[1]) * _BYTES[match[2].lower()])


def finite(value: float) -> float:
    """Return the value; raise ValueError if it is NaN or more than 36,500 days in seconds."""
    if not value <= _LONGEST_S:
        raise ValueError(f"expected at most {_LONGEST_S / 86400:.0f}d")
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), AfterValidator(finite)]  # as a key of a config: 90, 90s, 15m
