"""Results of `layertap search`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Box", "Hit", "Overlay", "SearchResults"]

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of a picture


@dataclass(frozen=True)
class Hit:
    """A result of a search.

    Attributes:
        row: row of the data set.
        cosine: cosine between its feature and the feature of the query.
        path: path of its image.
        name: name of its class; empty: unlabelled.
        split: train, val, test or empty.
        cell: of a search by patch, row and column of the nearest patch in the grid of the image; else None.
        box: the part of the picture that this patch covers; None if the size of the picture is not available.
        at: pixel in the middle of this part.
    """

    row: int
    cosine: float
    path: str
    name: str
    split: str
    cell: tuple[int, int] | None = None
    box: Box | None = None
    at: tuple[int, int] | None = None


@dataclass(frozen=True)
class Overlay:
    """Similarity of the patches of a picture to the query.

    Attributes:
        similarity: (h, w) cosines.
        window: the part of the picture that the patches cover, in its pixels.
        cell: row and column of the nearest patch.
    """

    similarity: NDArray[np.float64]
    window: Box
    cell: tuple[int, int]


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
        at: x and y of the pixel whose patch was searched for; None: whole images were compared.
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
    at: tuple[int, int] | None = None
