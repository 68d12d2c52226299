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

from pipelines.data_sets.search_results import Box, Overlay, SearchResults
from pipelines.terminal.figures import drawable, save_figure

__all__ = ["draw"]

_COLUMNS = 5
_SHOWN = 60  # most results drawn
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
        hits: the picture of each result, likewise.
        output: PNG, SVG or PDF file to write.
        overlay: of a search by patch: similarities in the query.
        overlays: likewise, of each result.
    """
    shown = list(zip(results.hits, hits, overlays or [None] * len(hits), strict=True))[:_SHOWN]
    known = np.concatenate([[0.0], *(part.similarity.ravel() for part in (overlay, *overlays) if part is not None)])
    low = float(np.nanmedian(known))
    lines = -(-(len(shown) + 1) // _COLUMNS)
    figure = Figure(figsize=(2.1 * _COLUMNS, 2.55 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).reshape(-1)
    for tile in axes:
        tile.axis("off")
    if results.text:
        _frame(axes[0], results.text if len(results.text) <= 200 else results.text[:199] + "…", fontsize=9)
        axes[0].set_title("query", fontsize=7.5, fontweight="bold")
    else:
        _place(axes[0], query, f"query\n{_tail(results.path)}{_class_line(results.name)}", bold=True)
    for tile, (hit, picture, _) in zip(axes[1:], shown, strict=False):
        _place(tile, picture, f"{hit.cosine:.4f}\n{_tail(hit.path)}{_class_line(hit.name)}")
    for tile, (drawn, _), part in zip(axes, [query, *hits], [overlay, *overlays], strict=False):
        if drawn is not None and part is not None:
            _lay_over(tile, part, low)
    more = f"; the first {len(shown)} of {len(results.hits)}" if len(shown) < len(results.hits) else ""
    compared = "patches of " if results.at is not None else ""
    figure.suptitle(f"Nearest by cosine of {compared}{drawable(results.layer)}{more}", fontsize=10)
    save_figure(figure, output)


def _lay_over(axes: Any, overlay: Overlay, low: float) -> None:
    """Show the part of a picture that patches cover, darken those that differ from the query, outline the nearest.

    Args:
        axes: plot with the picture.
        overlay: similarities.
        low: cosine, and below, of the darkest patches; the brightest are the nearest of this picture.
    """
    (image,) = axes.get_images()
    left, right, bottom, top = image.get_extent()
    across, down = (right - left) / overlay.size[0], (bottom - top) / overlay.size[1]

    def placed(box: Box) -> Box:
        return left + box[0] * across, top + box[1] * down, left + box[2] * across, top + box[3] * down

    high = float(np.nanmax(overlay.similarity, initial=low + 1e-6))
    share = np.nan_to_num(((overlay.similarity - low) / (high - low)).clip(0, 1))
    black = np.zeros((*share.shape, 4))
    black[..., 3] = _DARKEST * (1 - share)
    start_x, start_y, end_x, end_y = placed(overlay.window)
    axes.imshow(black, extent=(start_x, end_x, end_y, start_y), interpolation="bilinear")
    side, middle = max(end_x - start_x, end_y - start_y) / 2, ((start_x + end_x) / 2, (start_y + end_y) / 2)
    axes.set(xlim=(middle[0] - side, middle[0] + side), ylim=(middle[1] + side, middle[1] - side))
    start_x, start_y, end_x, end_y = placed(overlay.box)
    axes.add_patch(Rectangle((start_x, start_y), end_x - start_x, end_y - start_y, fill=False, edgecolor="w", lw=1.5))


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
