"""Figure of `layertap search`: the query, and the images nearest to it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from pipelines.terminal.figures import drawable, save_figure

__all__ = ["MOST_DRAWN", "Tile", "draw"]

_COLUMNS = 5
MOST_DRAWN = 60  # results
_SIDE_PX = 320  # of a picture in the gallery


class Tile(NamedTuple):
    """A picture of the gallery, with its caption.

    Attributes:
        picture: the picture; None: `instead` is written in its place.
        instead: why there is no picture, or the text of the query.
        heading: first line of the caption.
        path: path of the image; empty for a text.
        name: name of its class; empty: unlabelled.
    """

    picture: Image.Image | None
    instead: str
    heading: str
    path: str
    name: str


def draw(title: str, query: Tile, hits: Sequence[Tile], output: Path) -> None:
    """Draw the query and the results into a PNG, SVG or PDF file."""
    lines = -(-(len(hits) + 1) // _COLUMNS)
    figure = Figure(figsize=(2.1 * _COLUMNS, 2.55 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).reshape(-1)
    for place in axes:
        place.axis("off")
    for place, tile in zip(axes, [query, *hits], strict=False):
        _draw_tile(place, tile, "bold" if tile is query else "normal")
    figure.suptitle(drawable(title, len(title)), fontsize=10)
    save_figure(figure, output)


def _draw_tile(axes: Any, tile: Tile, weight: str) -> None:
    if tile.picture is None:
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1), aspect="equal", facecolor="0.93")
        text = tile.instead if len(tile.instead) <= 200 else tile.instead[:199] + "…"
        lines = [drawable(part) for line in text.splitlines() for part in textwrap.wrap(line, 22)]
        axes.text(0.5, 0.5, "\n".join(lines), ha="center", va="center", fontsize=8)
    else:
        small = tile.picture.copy()
        small.thumbnail((_SIDE_PX, _SIDE_PX))
        axes.imshow(np.asarray(small))
        side, middle = max(small.size) / 2, (small.width / 2, small.height / 2)  # squares, so that pictures align
        axes.set(xlim=(middle[0] - side, middle[0] + side), ylim=(middle[1] + side, middle[1] - side))
    caption = [tile.heading]
    if tile.path:
        name = tile.path.rpartition("/")[2]
        caption.append(drawable(name if len(name) <= 24 else "…" + name[-23:]))  # the end distinguishes images
    if tile.name:
        caption.append(f"[{drawable(tile.name)}]")
    axes.set_title("\n".join(caption), fontsize=7.5, fontweight=weight)
