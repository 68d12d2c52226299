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
from pipelines.network.draw_figures import drawable_layer, write_title
from pipelines.terminal.figures import COLOURS, drawable, save_figure

__all__ = ["draw_inspection"]

_BINS = 120
_OUTER = 0.001  # fraction of a layer's values beyond each edge of a histogram
_ROW_IN = 0.19  # height of a layer
_AROUND_IN = 2.0  # height of the rest
_ROWS = 45  # layers of a page: the narrowest figure is then at most 1.5 times as high as wide


def draw_inspection(inspection: Inspection, backbone: str, folder: Path, suffix: str) -> list[Path]:
    """Draw the figures that apply and return the files: one each, or several pages if there are many layers.

    Args:
        inspection: result with or without gradients.
        backbone: spec of the backbone, for the titles.
        folder: created if it does not exist.
        suffix: png, svg or pdf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (title, picture) in _PICTURES.items():
        figure = picture(inspection)
        if figure is None:
            continue
        count = len(figure.axes[0].get_yticks())
        pages = -(-count // _ROWS)
        size, rows = figure.get_size_inches(), -(-count // pages)
        source = f"{drawable(backbone, 60)} on {inspection.images:,} image{'' if inspection.images == 1 else 's'}"
        for page, first in enumerate(range(0, count, rows), 1):
            last = min(first + rows, count)
            figure.axes[0].set_ylim(last - 0.5, first - 0.5)  # all pages have the range of values of all layers
            part = f"; layers {first + 1} to {last} of {count}" if pages > 1 else ""
            figure.set_size_inches(size[0], _AROUND_IN + _ROW_IN * rows)
            write_title(figure, f"{source}: {title}{part}")
            written.append(save_figure(figure, folder / f"{name}{f'-{page}' if pages > 1 else ''}.{suffix}"))
    return written


def _tensors(inspection: Inspection) -> list[TensorReport]:
    """Return the reports of layers inside which no other layer ran; all reports if there are none."""
    leaves = [report for report in inspection.tensors if report.leaf]
    return leaves or inspection.tensors


def _stacked(panels: int, names: Sequence[str], width: float) -> tuple[Figure, Any]:
    """Return a figure with plots side by side that share an axis of layers, from top to bottom, named at the left."""
    figure = Figure(figsize=(2.2 + width * panels, _AROUND_IN), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    axes[0].set_yticks(range(len(names)), [drawable_layer(name) for name in names], fontsize=7)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.3)
    return figure, axes


def _layers(inspection: Inspection) -> Figure:
    """Plot range, mean and spread of each layer's values, and the percentages of zeros and dead channels."""
    tensors = _tensors(inspection)
    figure, (values, zeros) = _stacked(2, [report.name for report in tensors], 3.6)
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


def _density(statistics_by_layer: Sequence[tuple[str, Statistics]], *, own_scale: bool) -> Figure | None:
    """Draw histograms as rows of an image, darker where there are more values.

    Args:
        statistics_by_layer: name and statistics of each layer.
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
    figure, (axes,) = _stacked(1, [name for name, _ in statistics_by_layer], 5.0)
    far = 1.0 if own_scale else float(reach[0])
    image = axes.imshow(
        np.clip(rows, 1e-5, None), aspect="auto", extent=(-far, far, len(rows) - 0.5, -0.5), cmap="magma_r",
        norm=LogNorm(1e-5, 1), interpolation="nearest",
    )  # fmt: skip
    outside = float(1 - rows.sum(1).min())
    if own_scale:
        label = f"value, relative to the {1 - _OUTER:.1%} quantile of its layer; larger ones are outside"
    elif outside > _OUTER:
        label = f"value; cut at ±{far:.3g}: at most {outside:.1%} of a layer's values lie outside"
    else:
        label = "value"
    axes.set_xlabel(label, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="fraction of the values")
    return figure


def _activations(inspection: Inspection) -> Figure | None:
    statistics = [(report.name, report.activations) for report in _tensors(inspection)]
    return _density(statistics, own_scale=False)


def _gradients(inspection: Inspection) -> Figure | None:
    statistics = [(report.name, report.gradients) for report in _tensors(inspection) if report.gradients is not None]
    return _density(statistics, own_scale=True)


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
    figure, panels = _stacked(2 if shown else 1, [report.name for report in tensors], 3.6 if shown else 5.0)
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


# File -> title, and what draws it.
_PICTURES: dict[str, tuple[str, Callable[[Inspection], Figure | None]]] = {
    "layers": ("values of each layer, zeros and constant channels", _layers),
    "activations": ("histograms of activations", _activations),
    "gradient-flow": ("gradients of each layer and of its parameters", _gradient_flow),
    "gradients": ("histograms of gradients", _gradients),
}
