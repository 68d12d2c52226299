"""Results of `layertap search`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hit", "SearchResults"]


@dataclass(frozen=True)
class Hit:
    """A result of a search.

    Attributes:
        row: row of the data set.
        cosine: cosine between its feature and the feature of the query.
        path: path of its image.
        name: name of its class; empty: unlabelled.
        split: train, val, test or empty.
    """

    row: int
    cosine: float
    path: str
    name: str
    split: str


@dataclass(frozen=True)
class SearchResults:
    """All results of a search.

    Attributes:
        out: the data set.
        layer: layer whose features were compared.
        query: query row; None if the query is a file or a text.
        path: path of the query image; empty for a text.
        text: query text; empty for an image.
        name: name of the class of the query row; empty: unlabelled, a file or a text.
        note: what else the query may mean; empty: nothing.
        hits: results, nearest first.
        searched: number of rows compared.
        no_pictures: why the figure has no pictures; empty: it has, or no figure was requested.
    """

    out: Path | str
    layer: str
    query: int | None
    path: str
    text: str
    note: str
    hits: list[Hit]
    searched: int
    no_pictures: str = ""
    name: str = ""
