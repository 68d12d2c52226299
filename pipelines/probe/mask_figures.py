"""Figure of predicted masks: picture, mask, prediction and errors of some test images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image

from pipelines.probe.segmentation import Example
from pipelines.terminal.figures import COLOURS, drawable

__all__ = ["examples_figure"]

_PX = 384  # longer side of a drawn mask
_UNLABELLED, _RIGHT, _WRONG = (np.array([grey] * 3, np.uint8) for grey in (255, 222, 30))
_MOST_NAMED = 40  # classes in the legend


def examples_figure(examples: Sequence[Example], names: Sequence[str], classes: Sequence[str], title: str) -> Figure:
    """Draw a row for each example: picture, mask, prediction, and the pixels that are wrong.

    Args:
        examples: examples.
        names: name of each, such as the path and the mean IoU.
        classes: names of the K classes.
        title: title of the figure.
    """
    colours = _colours(len(classes))
    figure = Figure(figsize=(9.2, 0.9 + 2.1 * len(examples)), layout="constrained")
    panels = figure.subplots(len(examples), 4, squeeze=False)
    present: set[int] = set()
    for row, example, name in zip(panels, examples, names, strict=True):
        truth, predicted = _small(example.truth), _small(example.predicted)
        present |= set(np.unique(truth[truth >= 0]).tolist()) | set(np.unique(predicted[predicted >= 0]).tolist())
        known = (truth >= 0) & (predicted >= 0)
        errors = np.where((truth == predicted)[..., None], _RIGHT, _WRONG)
        errors[~known] = _UNLABELLED
        pictures = (example.picture, _coloured(truth, colours), _coloured(predicted, colours), errors)
        for axes, picture in zip(row, pictures, strict=True):
            _show(axes, picture)
        row[0].set_title(drawable(name, 60), fontsize=7, loc="left")
    for axes, heading in zip(panels[0], ("", "mask", "prediction", "errors"), strict=True):
        if heading:
            axes.set_title(heading, fontsize=9)
    shown = sorted(present)[:_MOST_NAMED]
    handles = [Patch(color=tuple(colours[i] / 255), label=drawable(classes[i])) for i in shown]
    handles += [Patch(facecolor="white", edgecolor="0.6", label="no label, or outside the crop")]
    handles += [Patch(color=tuple(_WRONG / 255), label="wrong")]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _show(axes: Any, picture: Image.Image | NDArray[np.uint8] | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if picture is None:
        axes.text(0.5, 0.5, "not available", ha="center", va="center", fontsize=8, transform=axes.transAxes)
    else:
        axes.imshow(np.asarray(picture), interpolation="nearest")


def _small(mask: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return every n-th pixel, so that the longer side has at most `_PX`."""
    step = -(-max(mask.shape) // _PX)
    return mask[step // 2 :: step, step // 2 :: step]


def _coloured(mask: NDArray[np.int64], colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(np.where(mask[..., None] < 0, _UNLABELLED, colours[mask]), np.uint8)


def _colours(count: int) -> NDArray[np.uint8]:
    """Return (K, 3) colours of classes; the first ones are distinguishable with colour blindness."""
    if count <= len(COLOURS):
        return np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in COLOURS[:count]], np.uint8)
    if count <= 20:
        return np.round(255 * np.array(colormaps["tab20"].colors)[:count]).astype(np.uint8)  # type: ignore[attr-defined]
    # Neighbours in the list of classes are far apart in hue.
    hues = np.arange(count) * 0.618034 % 1
    shades = np.asarray(colormaps["hsv"](hues))[:, :3]
    shades = shades * np.where(np.arange(count) % 2, 0.65, 1.0)[:, None]
    return np.asarray(np.round(255 * shades), np.uint8)
