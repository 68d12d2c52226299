"""Figure of `layertap search`: the query, and the images nearest to it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from pipelines.data_sets.search_results import Overlay, SearchResults
from pipelines.terminal.figures import drawable, save_figure
from pipelines.terminal.pictures import part_of

__all__ = ["MOST_DRAWN", "draw"]

_COLUMNS = 5
MOST_DRAWN = 60  # results
_SIDE_PX = 320  # of a picture in the gallery
_DARKEST = 0.7  # opacity of black over the patches that differ from the query


def draw(
    results: SearchResults,
    query: tuple[Image.Image | None, str],
    hits: Sequence[tuple[Image.Image | None, str]],
    output: Path,
    overlay: Overlay | None = None,
    overlays: Sequence[Overlay | None] = (),
) -> None:
    """Draw the query and the results.

    Args:
        results: the results.
        query: the picture of the query, or None, and why it is missing; for a text, None and "".
        hits: the picture of each of the first results, likewise; at most `MOST_DRAWN`.
        output: PNG, SVG or PDF file to write.
        overlay: of a search by patch: similarities in the query.
        overlays: likewise, of each of these results.
    """
    lines = -(-(len(hits) + 1) // _COLUMNS)
    figure = Figure(figsize=(2.1 * _COLUMNS, 2.55 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).reshape(-1)
    for tile in axes:
        tile.axis("off")
    similarities = [part.similarity.ravel() for part in (overlay, *overlays) if part is not None]
    low = float(np.median(np.concatenate(similarities))) if similarities else 0.0
    if results.text:
        _frame(axes[0], results.text if len(results.text) <= 200 else results.text[:199] + "…", fontsize=9)
        axes[0].set_title("query", fontsize=7.5, fontweight="bold")
    else:
        text = f"query\n{_tail(results.path)}{_class_line(results.name)}"
        _place(axes[0], query, text, overlay, low, bold=True)
    parts = overlays or [None] * len(hits)
    for tile, hit, picture, part in zip(axes[1:], results.hits, hits, parts, strict=False):
        _place(tile, picture, f"{hit.cosine:.4f}\n{_tail(hit.path)}{_class_line(hit.name)}", part, low)
    more = f"; the first {len(hits)} of {len(results.hits)}" if len(hits) < len(results.hits) else ""
    compared = "patches of " if results.at is not None else ""
    figure.suptitle(f"Nearest by cosine of {compared}{drawable(results.layer)}{more}", fontsize=10)
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


def _place(
    axes: Any, picture: tuple[Image.Image | None, str], text: str, overlay: Overlay | None, low: float,
    bold: bool = False,
) -> None:  # fmt: skip
    image, why = picture
    if image is None:
        _frame(axes, "no picture:\n" + why)
    else:
        if overlay is None:
            small = image.copy()
            small.thumbnail((_SIDE_PX, _SIDE_PX))
        else:
            small = part_of(image, overlay.window, _SIDE_PX)
        axes.imshow(np.asarray(small))
        if overlay is not None:
            _lay_over(axes, overlay, small.size, low)
        side, middle = max(small.size) / 2, (small.width / 2, small.height / 2)  # squares, so that pictures align
        axes.set(xlim=(middle[0] - side, middle[0] + side), ylim=(middle[1] + side, middle[1] - side))
    axes.set_title(text, fontsize=7.5, fontweight="bold" if bold else "normal")


def _lay_over(axes: Any, overlay: Overlay, size: tuple[int, int], low: float) -> None:
    """Darken patches that differ from the query, and outline the nearest.

    Args:
        axes: plot with the part of a picture that the patches cover.
        overlay: similarities.
        size: (width, height) of this part.
        low: cosine, and below, of the darkest patches; the brightest are the nearest of this picture.
    """
    high = max(float(overlay.similarity.max()), low + 1e-6)
    rows, columns = overlay.similarity.shape
    black = np.zeros((rows, columns, 4))
    black[..., 3] = _DARKEST * (1 - ((overlay.similarity - low) / (high - low)).clip(0, 1))
    axes.imshow(black, extent=(-0.5, size[0] - 0.5, size[1] - 0.5, -0.5), interpolation="bilinear")
    width, height, (row, column) = size[0] / columns, size[1] / rows, overlay.cell
    place = column * width - 0.5, row * height - 0.5
    axes.add_patch(Rectangle(place, width, height, fill=False, edgecolor="w", lw=1.5))
