"""The results of checks: lines for people, facts for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Line", "Section"]


@dataclass(frozen=True)
class Line:
    """A line of the report.

    Attributes:
        text: what was seen.
        state: "ok"; "note" if nothing is wrong but something could be better; "wrong" if something needed is missing
            or broken.
        hint: what to do; may be empty.
    """

    text: str
    state: Literal["ok", "note", "wrong"] = "ok"
    hint: str = ""


@dataclass
class Section:
    """The results of checks of one thing.

    Attributes:
        title: what was checked.
        lines: lines of the report.
        facts: name -> value, JSON-compatible.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def ok(self, text: str) -> None:
        """Add a line."""
        self.lines.append(Line(text))

    def note(self, text: str, hint: str = "") -> None:
        """Add a line about something that could be better."""
        self.lines.append(Line(text, "note", hint))

    def wrong(self, text: str, hint: str = "") -> None:
        """Add a line about something needed that is missing or broken."""
        self.lines.append(Line(text, "wrong", hint))
