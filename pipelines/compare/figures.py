"""Figures of a comparison: accuracy against speed, layers, and the similarity of features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from extract.analysis.probe.metrics import metric_name
from pipelines.compare.comparison import Compared, Comparison
from pipelines.terminal.figures import (
    COLOURS,
    add_matrix,
    add_words,
    cycled,
    drawable,
    matrix_inches,
    new_figure,
    save_figure,
)

__all__ = ["draw"]

_TITLES = {
    "cka": "linear CKA", "procrustes": "Procrustes", "mutual_knn": "mutual nearest neighbours", "rsa": "RSA",
}  # fmt: skip
_MARKERS = "osD^vPX"


def draw(comparison: Comparison, out: Path) -> list[Path]:
    """Draw the figures that the comparison has data for, and return the files."""
    files = []
    timed = [entry for entry in comparison.backbones if _quality(entry) is not None and entry.images_per_s]
    if len(timed) > 1:
        files.append(save_figure(_speed(comparison, timed), out / "accuracy-speed.png"))
    if comparison.similarity is not None and len(comparison.features) > 1:
        files.append(save_figure(_similarity(comparison), out / "alikeness.png"))
    return files


def _quality(entry: Compared) -> float | None:
    """Return the metric in percent, or the average rank over several tasks; None without labels."""
    return entry.rank if entry.value is None else 100 * entry.value


def _speed(comparison: Comparison, entries: list[Compared]) -> Figure:
    """Plot accuracy, or rank, against images/s; the line joins the backbones that no other one beats in both."""
    figure, axes = new_figure(8.5, 5.0)
    task = comparison.only_task
    rates = np.array([entry.images_per_s for entry in entries], np.float64)
    values = np.array([_quality(entry) for entry in entries], np.float64)
    errors = np.zeros((2, len(entries)))
    if task is not None:
        low, high = (100 * np.array([getattr(entry, name) for entry in entries]) for name in ("low", "high"))
        errors = np.stack([values - low, high - values])
    else:
        axes.invert_yaxis()
    good = -values if task is None else values
    best = [i for i in range(len(entries)) if not ((rates > rates[i]) & (good >= good[i])).any()
            and not ((rates >= rates[i]) & (good > good[i])).any()]  # fmt: skip
    best.sort(key=lambda i: rates[i])
    axes.plot(rates[best], values[best], color="0.6", linestyle="--", zorder=0, label="no other is faster and better")
    for number, (entry, colour) in enumerate(zip(entries, cycled(len(entries)), strict=True)):
        axes.errorbar(
            rates[number], values[number], errors[:, [number]], fmt=_MARKERS[number // len(COLOURS) % len(_MARKERS)],
            color=colour, markersize=6, capsize=2, elinewidth=1, label=drawable(entry.name, 32),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if rates.max() > 4 * rates.min() else MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("images/s of the forward on this machine")
    axes.set_ylabel(f"{metric_name(task.metric)}, %" if task else f"average rank in {len(comparison.tasks)} tasks")
    axes.grid(alpha=0.3)
    # Names beside the points would lie on the error bars of others.
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    caption = f"Bars: 95 % interval, on {task.n_test:,} test images." if task else ""
    add_words(figure, f"Accuracy and speed of {len(entries)} backbones" if task else "Rank and speed", caption)
    return figure


def _similarity(comparison: Comparison) -> Figure:
    """Draw the matrices of the four measures."""
    similarity = comparison.similarity
    assert similarity is not None
    layers = {layer for _, layer in comparison.features}
    names = [drawable(backbone if len(layers) == 1 else f"{backbone}:{layer}", 26)
             for backbone, layer in comparison.features]  # fmt: skip
    side = matrix_inches(names)
    figure = Figure(figsize=(2 * side + 1, 2 * side), layout="constrained")
    for axes, (measure, title) in zip(figure.subplots(2, 2).flat, _TITLES.items(), strict=True):
        more = f", {similarity.k} nearest" if measure == "mutual_knn" else ""
        add_matrix(figure, axes, getattr(similarity, measure), names, title=title + more)
    add_words(figure, "Similarity of features")
    return figure
