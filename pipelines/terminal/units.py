"""Times as users write them: 90s, 15m."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

__all__ = ["Seconds", "finite"]

_LONGEST_S = 86400.0 * 36500
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    """Return the seconds of text such as 90, 90s, 15m, 36h or 30d; other types are returned unchanged."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip(), re.ASCII)):
        return float(match[1]) * _UNITS[match[2] or "s"]
    if isinstance(value, str):
        raise ValueError("expected seconds, or a time such as 90s, 15m, 36h or 30d")
    return value


def finite(value: float) -> float:
    """Return the value; raise ValueError if it is NaN or more than 36,500 days in seconds."""
    if not value <= _LONGEST_S:
        raise ValueError(f"expected at most {_LONGEST_S / 86400:.0f}d")
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), AfterValidator(finite)]  # as a key of a config: 90, 90s, 15m
