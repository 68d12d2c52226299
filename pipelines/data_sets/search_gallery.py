"""Figure of `layertap search`: the query, and the images nearest to it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from pipelines.data_sets.search import SearchResults
from pipelines.terminal.figures import drawable, save_figure

__all__ = ["MOST_DRAWN", "draw"]

_COLUMNS = 5
MOST_DRAWN = 60  # results
_SIDE_PX = 320  # of a picture in the gallery


def draw(
    results: SearchResults,
    query: tuple[Image.Image | None, str],
    hits: Sequence[tuple[Image.Image | None, str]],
    output: Path,
) -> None:
    """Draw the query and the results.

    Args:
        results: the results.
        query: the picture of the query, or None, and why it is missing; for a text, None and "".
        hits: the picture of each of the first results, likewise; at most `MOST_DRAWN`.
        output: PNG, SVG or PDF file to write.
    """
    lines = -(-(len(hits) + 1) // _COLUMNS)
    figure = Figure(figsize=(2.1 * _COLUMNS, 2.55 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).reshape(-1)
    for tile in axes:
        tile.axis("off")
    if results.text:
        _frame(axes[0], results.text if len(results.text) <= 200 else results.text[:199] + "…", fontsize=9)
        axes[0].set_title("query", fontsize=7.5, fontweight="bold")
    else:
        _place(axes[0], query, f"query\n{_tail(results.path)}{_class_line(results.name)}", bold=True)
    for tile, hit, picture in zip(axes[1:], results.hits, hits, strict=False):
        _place(tile, picture, f"{hit.cosine:.4f}\n{_tail(hit.path)}{_class_line(hit.name)}")
    more = f"; the first {len(hits)} of {len(results.hits)}" if len(hits) < len(results.hits) else ""
    figure.suptitle(f"Nearest by cosine of {drawable(results.layer)}{more}", fontsize=10)
    save_figure(figure, output)


def _class_line(name: str) -> str:
    return f"\n[{drawable(name)}]" if name else ""


def _tail(path: str) -> str:
    """Shorten a file name to its end, which distinguishes images."""
    name = path.rpartition("/")[2]
    return drawable(name if len(name) <= 24 else "…" + name[-23:])


def _frame(axes: Any, text: str, fontsize: float = 7) -> None:
    """Draw text in place of a picture."""
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1), aspect="equal", facecolor="0.93")
    lines = [drawable(part) for line in text.splitlines() for part in textwrap.wrap(line, 22)]
    axes.text(0.5, 0.5, "\n".join(lines), ha="center", va="center", fontsize=fontsize)


def _place(axes: Any, picture: tuple[Image.Image | None, str], text: str, bold: bool = False) -> None:
    image, why = picture
    if image is None:
        _frame(axes, "no picture:\n" + why)
    else:
        small = image.copy()
        small.thumbnail((_SIDE_PX, _SIDE_PX))
        axes.imshow(np.asarray(small))
        side, middle = max(small.size) / 2, (small.width / 2, small.height / 2)  # squares, so that pictures align
        axes.set(xlim=(middle[0] - side, middle[0] + side), ylim=(middle[1] + side, middle[1] - side))
    axes.set_title(text, fontsize=7.5, fontweight="bold" if bold else "normal")
