"""Figures of `layertap inspect`: activations and gradients, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from extract.analysis.network.activation_statistics import Statistics
from extract.analysis.network.inspection import Inspection
from extract.analysis.network.reports import TensorReport
from pipelines.terminal.figures import COLOURS, drawable, save_figure

__all__ = ["draw_inspection"]

_BINS = 120
_OUTER = 0.001  # fraction of a layer's values beyond each edge of a histogram
_ROW_IN, _LEAST_ROW_IN = 0.19, 0.13  # height of a layer; the smaller one still holds its name
_ROOMY_IN = 13.0  # rows of a taller figure are closer together
_TALLEST_IN = 400.0  # PNG files of Matplotlib have at most 65,536 pixels a side; with more layers, only some are named


def draw_inspection(inspection: Inspection, backbone: str, folder: Path, suffix: str) -> list[Path]:
    """Draw the figures that apply and return the files.

    Args:
        inspection: result with or without gradients.
        backbone: spec of the backbone, for the titles.
        folder: created if it does not exist.
        suffix: png, svg or pdf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in _PICTURES.items():
        figure = picture(inspection)
        if figure is not None:
            figure.suptitle(f"{drawable(backbone, 60)}, {inspection.images:,} images", fontsize=10)
            written.append(save_figure(figure, folder / f"{name}.{suffix}"))
    return written


def _tensors(inspection: Inspection) -> list[TensorReport]:
    """Return the reports of layers inside which no other layer ran; all reports if there are none."""
    leaves = [report for report in inspection.tensors if report.leaf]
    return leaves or inspection.tensors


def _stacked(count: int, panels: int, names: Sequence[str], width: float) -> tuple[Figure, Any]:
    """Return a figure with plots side by side that share an axis of layers, from top to bottom, named at the left."""
    height = min(1.6 + _ROW_IN * count, max(_ROOMY_IN, 1.6 + _LEAST_ROW_IN * count), _TALLEST_IN)
    figure = Figure(figsize=(2.2 + width * panels, height), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    step = -(-count // int((height - 1) / _LEAST_ROW_IN))
    axes[0].set_yticks(range(0, count, step), [drawable(name) for name in names[::step]], fontsize=7)
    axes[0].set_ylim(count - 0.5, -0.5)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.3)
    return figure, axes


def _layers(inspection: Inspection) -> Figure:
    """Plot range, mean and spread of each layer's values, and the percentages of zeros and dead channels."""
    tensors = _tensors(inspection)
    figure, (values, zeros) = _stacked(len(tensors), 2, [report.name for report in tensors], 3.6)
    places = np.arange(len(tensors))
    numbers = [report.activations for report in tensors]
    mean, std = np.array([n.mean for n in numbers]), np.array([n.std for n in numbers])
    values.hlines(places, [n.min for n in numbers], [n.max for n in numbers], color="0.75", linewidth=1)
    values.hlines(places, mean - std, mean + std, color=COLOURS[0], linewidth=3)
    values.plot(mean, places, "o", color="black", markersize=2.5)
    values.set_xscale("symlog", linthresh=1)
    values.set_title("values: range, mean ± standard deviation", fontsize=9)
    zeros.barh(places, [100 * n.zeros for n in numbers], color=COLOURS[5], height=0.8, label="zero values")
    dead = [
        100 * len(report.activations.dead) / report.activations.channels if report.by_image else 0 for report in tensors
    ]
    zeros.barh(places, dead, color=COLOURS[1], height=0.4, label="constant channels")
    zeros.set_xlim(0, 100)
    zeros.set_xlabel("%")
    zeros.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def _density(statistics_by_layer: Sequence[tuple[str, Statistics]], title: str, *, own_scale: bool) -> Figure | None:
    """Draw histograms as rows of an image, darker where there are more values.

    Args:
        statistics_by_layer: name and statistics of each layer.
        title: title of the figure.
        own_scale: whether each row spans minus to plus its own largest value (gradients differ by orders of
            magnitude); otherwise all rows share a scale.
    """
    statistics_by_layer = [(name, numbers) for name, numbers in statistics_by_layer if numbers.total]
    if not statistics_by_layer:
        return None
    reach = np.array([max(abs(n.quantile(_OUTER)), abs(n.quantile(1 - _OUTER))) for _, n in statistics_by_layer])
    reach = np.where(reach > 0, reach, 1.0)
    if not own_scale:
        reach = np.full(len(statistics_by_layer), np.quantile(reach, 0.9))
    rows = np.array([
        numbers.histogram(np.linspace(-far, far, _BINS + 1)) / numbers.total
        for (_, numbers), far in zip(statistics_by_layer, reach, strict=True)
    ])  # fmt: skip
    figure, (axes,) = _stacked(len(statistics_by_layer), 1, [name for name, _ in statistics_by_layer], 5.0)
    far = 1.0 if own_scale else float(reach[0])
    image = axes.imshow(
        np.clip(rows, 1e-5, None), aspect="auto", extent=(-far, far, len(rows) - 0.5, -0.5), cmap="magma_r",
        norm=LogNorm(1e-5, 1), interpolation="nearest",
    )  # fmt: skip
    axes.set_xlabel("value, relative to the largest of its layer" if own_scale else "value")
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, shrink=min(1.0, 12 / figure.get_size_inches()[1]), label="fraction of the values")
    return figure


def _activations(inspection: Inspection) -> Figure | None:
    statistics = [(report.name, report.activations) for report in _tensors(inspection)]
    return _density(statistics, "histograms of activations", own_scale=False)


def _gradients(inspection: Inspection) -> Figure | None:
    statistics = [(report.name, report.gradients) for report in _tensors(inspection) if report.gradients is not None]
    return _density(statistics, "histograms of gradients", own_scale=True)


def _gradient_flow(inspection: Inspection) -> Figure | None:
    """Plot the norms of gradients through the network, and of parameter gradients relative to the parameters."""
    tensors = [report for report in _tensors(inspection) if report.gradients is not None]
    if not tensors:
        return None
    places = {report.layer: place for place, report in enumerate(tensors)}
    shown = [
        parameter
        for parameter in inspection.parameters
        if parameter.layer in places and parameter.gradient_to_weight > 0
    ]
    figure, panels = _stacked(len(tensors), 2 if shown else 1, [report.name for report in tensors], 3.6)
    norms = np.array([report.gradient_norm for report in tensors])
    panels[0].plot(np.where(norms > 0, norms, np.nan), range(len(tensors)), color=COLOURS[0], marker="o", markersize=3)
    panels[0].set_title("gradient norm of the activation of an image", fontsize=9)
    for kind, colour in (("weight", COLOURS[1]), ("bias", COLOURS[2])):
        parameters = [parameter for parameter in shown if parameter.name.rpartition(".")[2] == kind]
        ratios = [parameter.gradient_to_weight for parameter in parameters]
        rows = [places[parameter.layer] for parameter in parameters]
        if rows:
            panels[-1].plot(ratios, rows, "o", color=colour, markersize=3, label=kind)
    if shown:
        panels[-1].set_title("gradient norm / norm of a parameter", fontsize=9)
        panels[-1].legend(frameon=False, fontsize=7)
    for axes in panels:
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="both", labelsize=7)
        low, high = axes.get_xlim()
        if high > 10 * low:  # the powers of ten are enough
            axes.xaxis.set_minor_formatter(NullFormatter())
    return figure


_PICTURES: dict[str, Callable[[Inspection], Figure | None]] = {
    "layers": _layers,
    "activations": _activations,
    "gradient-flow": _gradient_flow,
    "gradients": _gradients,
}
