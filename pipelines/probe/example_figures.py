"""Figures of predicted masks and depths: picture, truth, prediction and errors of some test images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image

from pipelines.probe.token_probes import Example
from pipelines.terminal.figures import COLOURS, drawable

__all__ = ["depths_figure", "masks_figure"]

_PX = 384  # longer side of a drawn mask
_UNLABELLED, _RIGHT, _WRONG = (np.array([grey] * 3, np.uint8) for grey in (255, 222, 30))
_MOST_NAMED = 40  # classes in the legend


def masks_figure(examples: Sequence[Example], names: Sequence[str], classes: Sequence[str], title: str) -> Figure:
    """Draw a row for each example: picture, mask, prediction, and the pixels that are wrong.

    Args:
        examples: examples.
        names: name of each, such as the path and the mean IoU.
        classes: names of the K classes.
        title: title of the figure.
    """
    colours = _colours(len(classes))
    present: set[int] = set()
    rows = []
    for example in examples:
        truth, predicted = _small(example.truth), _small(example.predicted)
        present |= set(np.unique(truth[truth >= 0]).tolist()) | set(np.unique(predicted[predicted >= 0]).tolist())
        known = (truth >= 0) & (predicted >= 0)
        errors = np.where((truth == predicted)[..., None], _RIGHT, _WRONG)
        errors[~known] = _UNLABELLED
        rows.append((example.picture, _coloured(truth, colours), _coloured(predicted, colours), errors))
    figure, _ = _panels(rows, names, ("mask", "prediction", "errors"), title)
    shown = sorted(present)[:_MOST_NAMED]
    handles = [Patch(color=tuple(colours[i] / 255), label=drawable(classes[i])) for i in shown]
    handles += [Patch(facecolor="white", edgecolor="0.6", label="no label, or outside the crop")]
    handles += [Patch(color=tuple(_WRONG / 255), label="wrong")]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8)
    return figure


def depths_figure(examples: Sequence[Example], names: Sequence[str], title: str) -> Figure:
    """Draw a row for each example: picture, depth map, prediction, and the ratio of prediction and truth.

    Args:
        examples: examples.
        names: name of each, such as the path and the error.
        title: title of the figure.
    """
    truths, guesses = [], []
    for example in examples:
        truth, predicted = _small(example.truth), _small(example.predicted)
        truths.append(np.where((truth > 0) & np.isfinite(truth), truth, np.nan))
        guesses.append(predicted)
    depths = np.concatenate([values.ravel() for values in truths])
    least, largest = np.nanpercentile(depths, (1, 99)) if not np.isnan(depths).all() else (0.0, 1.0)
    near = ScalarMappable(Normalize(float(least), float(largest)), "viridis")
    ratio = ScalarMappable(LogNorm(0.5, 2), "RdBu_r")
    rows = [
        (example.picture, near.to_rgba(truth), near.to_rgba(guess), ratio.to_rgba(guess / truth))
        for example, truth, guess in zip(examples, truths, guesses, strict=True)
    ]
    figure, panels = _panels(rows, names, ("depth", "prediction", "prediction / depth"), title)
    figure.colorbar(near, ax=panels[:, 1:3], location="bottom", fraction=0.04, label="depth, in the unit of the files")
    bar = figure.colorbar(ratio, ax=panels[:, 3], location="bottom", fraction=0.04, label="ratio")
    bar.set_ticks([0.5, 0.8, 1, 1.25, 2], labels=["0.5", "0.8", "1", "1.25", "2"])
    bar.minorticks_off()
    return figure


def _panels(
    rows: Sequence[Sequence[Any]], names: Sequence[str], headings: Sequence[str], title: str
) -> tuple[Figure, NDArray[Any]]:
    """Draw rows of a picture and three maps; None is not available."""
    figure = Figure(figsize=(9.2, 0.9 + 2.1 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 4, squeeze=False)
    for row, pictures, name in zip(panels, rows, names, strict=True):
        for axes, picture in zip(row, pictures, strict=True):
            _show(axes, picture)
        row[0].set_title(drawable(name, 60), fontsize=7, loc="left")
    for axes, heading in zip(panels[0, 1:], headings, strict=True):
        axes.set_title(heading, fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure, panels


def _show(axes: Any, picture: Image.Image | NDArray[Any] | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if picture is None:
        axes.text(0.5, 0.5, "not available", ha="center", va="center", fontsize=8, transform=axes.transAxes)
    else:
        axes.imshow(np.asarray(picture), interpolation="nearest")


def _small(mask: NDArray[Any]) -> NDArray[Any]:
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
