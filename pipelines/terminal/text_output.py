"""Text for the terminal that several jobs print."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["SHOWN", "print_failures", "printable"]

SHOWN = 10  # lines of a list on the terminal; --json has all of them


def print_failures(failures: Sequence[tuple[str, str, str]], out: Path, echo: Callable[[str], None]) -> None:
    """The first of the (path, status, reason) given, and how many there are."""
    if not failures:
        return
    counts = Counter(status for _, status, _ in failures)
    kinds = ", ".join(f"{count:,} {status}" for status, count in counts.items())
    echo(f"{len(failures):,} row{'s' if len(failures) > 1 else ''} without features ({kinds}):")
    for path, status, reason in failures[:SHOWN]:
        echo(f"  {printable(path)}: {status}: {reason}")
    if len(failures) > SHOWN:
        echo(f"  ... and {len(failures) - SHOWN:,} more: layertap show {shlex.quote(str(out))} --json")


def printable(path: str) -> str:
    """A path that cannot break the terminal or the line: control characters and undecodable bytes are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in path)
