"""What `layertap search` finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Found", "Hit"]


@dataclass(frozen=True)
class Hit:
    """A row that was found.

    Attributes:
        row: of the data set.
        cosine: of its feature and that of the query.
        path: of its image.
        name: of its class; empty: it has none.
        split: train, val, test or empty.
    """

    row: int
    cosine: float
    path: str
    name: str
    split: str


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        out: the data set.
        layer: whose features were compared.
        query: the row that was searched with; or None, and the file is `path`, or it was a text.
        path: of the image of the query; empty: a text.
        text: of the query; empty: an image.
        note: what else the words of the query might have meant; empty: nothing.
        hits: the nearest first.
        searched: rows that were compared.
    """

    out: Path | str
    layer: str
    query: int | None
    path: str
    text: str
    note: str
    hits: list[Hit]
    searched: int
