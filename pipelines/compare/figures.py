"""Figures of a comparison: accuracy against speed, layers, and how alike features are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from extract.analysis.probe.metrics import metric_name
from pipelines.compare.comparison import Comparison
from pipelines.terminal.figures import COLOURS, drawable, new_figure, save_figure

__all__ = ["draw"]

_TITLES = {
    "cka": "linear CKA", "procrustes": "Procrustes", "mutual_knn": "mutual nearest neighbours", "rsa": "RSA",
}  # fmt: skip
_MOST_WRITTEN = 16  # features up to which numbers are written into the cells


def draw(comparison: Comparison, out: Path) -> list[Path]:
    """Draw the figures that the comparison has data for, and return the files."""
    files = []
    timed = [entry for entry in comparison.backbones if entry.value is not None and entry.images_per_s]
    if len(timed) > 1:
        files.append(save_figure(_speed(comparison), out / "accuracy-speed.png"))
    if comparison.alikeness is not None and len(comparison.features) > 1:
        files.append(save_figure(_alikeness(comparison), out / "alikeness.png"))
    return files


def _speed(comparison: Comparison) -> Figure:
    """Plot accuracy against images/s; the line joins those that no other one beats in both."""
    figure, axes = new_figure(7.5, 5.0)
    entries = [entry for entry in comparison.backbones if entry.value is not None and entry.images_per_s]
    rates = np.array([entry.images_per_s for entry in entries], np.float64)
    values, low, high = (
        100 * np.array([getattr(entry, name) for entry in entries], np.float64) for name in ("value", "low", "high")
    )
    axes.errorbar(
        rates, values, [values - low, high - values], fmt="o", color=COLOURS[0], ecolor="0.6", capsize=2, markersize=6
    )
    best = [i for i in range(len(entries)) if not ((rates > rates[i]) & (values >= values[i])).any()
            and not ((rates >= rates[i]) & (values > values[i])).any()]  # fmt: skip
    best.sort(key=lambda i: rates[i])
    axes.plot(rates[best], values[best], color=COLOURS[1], linestyle="--", label="no other is faster and better")
    for entry, rate, value in zip(entries, rates, values, strict=True):
        axes.annotate(drawable(entry.name, 32), (rate, value), (6, 5), textcoords="offset points", fontsize=7.5)
    axes.set_xscale("log")
    axes.margins(x=0.25, y=0.1)
    axes.set_xlabel("images/s of the forward on this machine")
    axes.set_ylabel(f"{metric_name(comparison.metric)}, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _alikeness(comparison: Comparison) -> Figure:
    """Draw the matrices of the four measures."""
    alike = comparison.alikeness
    assert alike is not None
    layers = {layer for _, layer in comparison.features}
    names = [drawable(backbone if len(layers) == 1 else f"{backbone}:{layer}", 26)
             for backbone, layer in comparison.features]  # fmt: skip
    side = 2.6 + 0.36 * len(names)
    figure = Figure(figsize=(2 * side + 1, 2 * side), layout="constrained")
    for axes, (measure, title) in zip(figure.subplots(2, 2).flat, _TITLES.items(), strict=True):
        matrix = getattr(alike, measure)
        image = axes.imshow(matrix, cmap="viridis", vmin=min(0.0, float(np.nanmin(matrix))), vmax=1)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        more = f", {alike.k} nearest" if measure == "mutual_knn" else ""
        axes.set_title(title + more, fontsize=9)
        if len(names) <= _MOST_WRITTEN:
            for (i, j), value in np.ndenumerate(matrix):
                colour = "black" if value > 0.6 else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure
