"""Figure of `layertap search`: the query, and the images nearest to it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from extract.images.part_names import file_of, fragment_of
from extract.store.reader import FeatureReader
from pipelines.terminal.figures import drawable, save_figure
from pipelines.terminal.pictures import Pictures

__all__ = ["draw"]

_COLUMNS = 5
_MOST_DRAWN = 60  # results
_SIDE_PX = 320  # of a picture in the gallery


def draw(content: dict[str, Any], reader: FeatureReader, root: str, images: str | None, output: Path) -> str:
    """Draw the query and the results of a search into a PNG, SVG or PDF file.

    Args:
        content: results of `run_search`.
        reader: reader of the data set.
        root: location of the images as recorded in the data set.
        images: location that the user named; see `Pictures`.
        output: the file.

    Returns:
        why there are no pictures; empty: there are.
    """
    query, hits = content["query"], content["results"][:_MOST_DRAWN]
    rows = [hit["row"] for hit in [query, *hits] if hit["row"] is not None]
    pictures = Pictures(reader, root, rows, images)
    lines = -(-(len(hits) + 1) // _COLUMNS)
    figure = Figure(figsize=(2.1 * _COLUMNS, 2.55 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).reshape(-1)
    for place in axes:
        place.axis("off")
    if query["row"] is not None:
        picture, why_not = pictures.tile(query["row"], _SIDE_PX)
    else:
        picture, why_not = None if query["text"] else pictures.of_file(Path(query["path"])), ""
    _draw_tile(axes[0], picture, query["text"] or f"no picture:\n{why_not}", ["query", *_caption(query)], "bold")
    for place, hit in zip(axes[1:], hits, strict=False):
        picture, why_not = pictures.tile(hit["row"], _SIDE_PX)
        caption = [f"{hit['cosine']:.4f}", *_caption(hit)]
        _draw_tile(place, picture, f"no picture:\n{why_not}", caption, "normal")
    title = f"Nearest by cosine of {content['layer']}"
    if len(hits) < len(content["results"]):
        title += f"; the first {len(hits)} of {len(content['results'])}"
    figure.suptitle(drawable(title, len(title)), fontsize=10)
    save_figure(figure, output)
    return pictures.why_not


def _caption(image: dict[str, Any]) -> list[str]:
    """Return the name of an image's file, of which the end distinguishes images, and of its class."""
    caption = []
    if image["path"]:
        name = file_of(image["path"]).rpartition("/")[2]
        caption.append(drawable(name if len(name) <= 24 else "…" + name[-23:]))
        if fragment := fragment_of(image["path"]):
            caption.append(drawable(fragment.partition("&")[0]))
    if image["class"]:
        caption.append(f"[{drawable(image['class'])}]")
    return caption


def _draw_tile(axes: Any, picture: Image.Image | None, instead: str, caption: list[str], weight: str) -> None:
    if picture is None:
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1), aspect="equal", facecolor="0.93")
        text = textwrap.shorten(instead, 200, placeholder="…")
        axes.text(0.5, 0.5, "\n".join(map(drawable, textwrap.wrap(text, 22))), ha="center", va="center", fontsize=8)
    else:
        picture.thumbnail((_SIDE_PX, _SIDE_PX))
        axes.imshow(np.asarray(picture))
        side, middle = max(picture.size) / 2, (picture.width / 2, picture.height / 2)  # squares: pictures align
        axes.set(xlim=(middle[0] - side, middle[0] + side), ylim=(middle[1] + side, middle[1] - side))
    axes.set_title("\n".join(caption), fontsize=7.5, fontweight=weight)
