"""Figures of `layertap probe`: by layer, by strength, by shots, confusion matrix, similarity of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from extract.analysis.probe.metrics import metric_name
from extract.analysis.probe.probing import PRIMARY
from extract.analysis.probe.strength_choice import standard_error
from pipelines.probe.example_figures import depths_figure, masks_figure
from pipelines.probe.job import ProbedFeature, ProbeRun
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

__all__ = ["FORMATS", "PICTURES", "draw"]

FORMATS = ("png", "pdf", "svg")
_PERCENT = ("top1", "mIoU", "delta1")
_IN_A_COLUMN = 20  # names in a legend column


def draw(outcome: ProbeRun, folder: Path) -> list[Path]:
    """Draw the figures that apply, in the format of the configuration, and return the files."""
    written = []
    for name, picture in _FIGURES.items():
        figure = picture(outcome)
        if figure is not None:
            written.append(save_figure(figure, folder / f"{name}.{outcome.config.format}"))
    return written


def _scale(metric: str) -> tuple[str, float]:
    """Return the axis label of a metric, and the factor of its values."""
    return (f"{metric_name(metric)}, %", 100.0) if metric in _PERCENT else (metric_name(metric), 1.0)


def _title(outcome: ProbeRun, text: str) -> str:
    data_set = f", data set {drawable(next(iter(outcome.fingerprints)))}" if len(outcome.fingerprints) == 1 else ""
    return f"{text}\n{outcome.config.protocol}{data_set}"


def _name(outcome: ProbeRun, data_set: str, layer: str) -> str:
    return drawable(layer) if len(outcome.fingerprints) == 1 else f"{drawable(data_set)} {drawable(layer)}"


def _layers(outcome: ProbeRun) -> Figure | None:
    """Plot the metric of each layer, in order, with its 95 % interval; one line per data set."""
    if not outcome.probed:
        return None
    names = list(dict.fromkeys(feature.layer for feature in outcome.probed))
    figure, axes = new_figure(min(16.0, max(5.0, 1.6 + 0.55 * len(names))), 4.2)
    first = outcome.probed[0].result
    label, factor = _scale(PRIMARY[first.task])
    for colour, name in zip(cycled(len(outcome.labellings)), outcome.labellings, strict=True):
        probed = [feature for feature in outcome.probed if feature.data_set == name]
        places = [names.index(feature.layer) for feature in probed]
        estimates = [feature.result.metrics[feature.result.primary] for feature in probed]
        values = factor * np.array([feature.value for feature in estimates])
        ends = factor * np.array([[each.value - each.low, each.high - each.value] for each in estimates]).T
        axes.errorbar(
            places, values, np.maximum(np.nan_to_num(ends), 0), color=colour, marker="o", markersize=5, capsize=3,
            linewidth=1.8, label=drawable(name),
        )  # fmt: skip
    caption = f"Bars: 95 % interval, on {first.n_test:,} test {'images' if outcome.config.is_dense else 'rows'}."
    if first.task == "classification" and first.truth.max(initial=-1) >= 0:
        share = 100 * np.bincount(first.truth[first.truth >= 0]).max() / len(first.truth)
        axes.axhline(share, color="0.5", linewidth=1, linestyle=":")
        caption += f" Dotted: always the most frequent class, {share:.1f} %."
    slope = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(names) <= 26 else {"rotation": 90}
    axes.set_xticks(range(len(names)), [drawable(name) for name in names], fontsize=8, **slope)
    axes.set_xlim(-0.5, len(names) - 0.5)
    if axes.get_ylim()[0] < -1 and factor == 1.0:
        axes.set_ylim(-1, None)  # lower values say nothing more
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    _legend(axes, len(outcome.labellings))
    add_words(figure, _title(outcome, f"{metric_name(first.primary)} by layer"), caption)
    return figure


def _curve(outcome: ProbeRun) -> Figure | None:
    """Plot the metric on the validation rows against the strength, and mark the chosen strength; one line per layer."""
    probed = [feature for feature in outcome.probed if len(feature.result.curve) > 1 and feature.result.swept]
    if not probed:
        return None
    first = probed[0].result
    figure, axes = new_figure(*_size_with_legend(len(probed)))
    metric = "top1" if outcome.config.is_dense else PRIMARY[first.task]  # of tokens, which the strength is chosen by
    label, factor = _scale(metric)
    for (name, colour, style), feature in zip(_lines(outcome, probed), probed, strict=True):
        strengths, values = np.array(sorted(feature.result.curve)).T
        if first.task == "classification":
            errors = np.array([standard_error(value, feature.result.n_val) for value in values.tolist()])
            axes.fill_between(strengths, factor * (values - errors), factor * (values + errors), color=colour,
                              alpha=0.15, linewidth=0)  # fmt: skip
        axes.plot(
            strengths, factor * values, color=colour, linestyle=style, linewidth=1.5, marker=".",
            markersize=4, label=name,
        )  # fmt: skip
        chosen = int(np.argmin(np.abs(np.log(strengths / feature.result.chosen))))
        axes.plot(strengths[chosen], factor * values[chosen], "o", color=colour, markersize=8, markeredgecolor="white")
    axes.set_xscale("log")
    if axes.get_ylim()[0] < -1 and factor == 1.0:
        axes.set_ylim(-1, None)
    if first.swept == "k":
        _name_numbers(axes, sorted({int(k) for feature in probed for k, _ in feature.result.curve}))
    axes.set_xlabel(first.swept)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    _legend(axes, len(probed))
    of_tokens = " of tokens" if outcome.config.is_dense else ""
    caption = f"On {first.chosen_on or 'validation rows'}. Dots: chosen."
    if first.task == "classification":
        caption += " Bands: ± 1 standard error."
    add_words(figure, _title(outcome, f"Validation {metric_name(metric)}{of_tokens} by {first.swept}"), caption)
    return figure


def _name_numbers(axes: Any, numbers: list[int]) -> None:
    """Write these numbers below a logarithmic axis, and no others."""
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()


def _lines(outcome: ProbeRun, probed: list[ProbedFeature]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, colour and style of each line: one colour per layer, one style per data set."""
    layers, data_sets = list(dict.fromkeys(feature.layer for feature in probed)), list(outcome.labellings)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(layers))) if len(layers) > 1 else [COLOURS[0]]
    for feature in probed:
        style = ("-", "--", "-.", ":")[data_sets.index(feature.data_set) % 4]
        yield _name(outcome, feature.data_set, feature.layer), shades[layers.index(feature.layer)], style


def _size_with_legend(count: int) -> tuple[float, float]:
    return (5.6, 4.2) if count < 2 else (5.6 + 2.2 * math.ceil(count / _IN_A_COLUMN), 4.4)


def _legend(axes: Any, count: int) -> None:
    if count > 1:
        columns = math.ceil(count / _IN_A_COLUMN)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns)


def _shots(outcome: ProbeRun) -> Figure | None:
    """Few-shot: plot mean and range of the draws against the training images per class; one line per layer."""
    probed = [feature for feature in outcome.probed if feature.result.shots]
    if not probed:
        return None
    figure, axes = new_figure(*_size_with_legend(len(probed)))
    for (name, colour, style), feature in zip(_lines(outcome, probed), probed, strict=True):
        shots = np.array(list(feature.result.shots))
        values = 100 * np.array([feature.result.shots[n] for n in shots.tolist()])
        axes.plot(
            shots, values.mean(1), color=colour, marker="o", markersize=5, linewidth=1.8, linestyle=style, label=name
        )
        axes.fill_between(shots, values.min(1), values.max(1), color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    _name_numbers(axes, sorted({n for feature in probed for n in feature.result.shots}))
    axes.set_xlabel("training images per class")
    axes.set_ylabel(_scale("top1")[0])
    axes.grid(alpha=0.3)
    _legend(axes, len(probed))
    add_words(figure, _title(outcome, "top-1 by shots"), "Lines: mean of the draws. Bands: their range.")
    return figure


def _confusion(outcome: ProbeRun) -> Figure | None:
    """Draw the confusion matrix of the best layer, in % of the test images (or pixels) of each class."""
    if not outcome.probed or (table := outcome.best.result.confusion) is None:
        return None
    best = outcome.best
    counts = table.sum(1)
    shares = 100 * table / np.maximum(counts[:, None], 1)
    names = [drawable(str(name)) for name in best.result.classes.tolist()]
    side = max(5.0, matrix_inches(names))
    figure, axes = new_figure(side + 0.8, side)
    with_counts = [f"{name}  n = {count:,}" for name, count in zip(names, counts.tolist(), strict=True)]
    shown = np.where(shares >= 0.5, shares, np.nan)
    add_matrix(figure, axes, shown, names, form=".0f", colours="Blues", largest=100, row_names=with_counts)
    axes.set_facecolor(colormaps["Blues"](0.0))
    is_named = bool(axes.get_yticklabels()) and axes.get_yticklabels()[0].get_text() == with_counts[0]
    axes.set_xlabel("predicted")
    axes.set_ylabel("class")
    unit = "pixels" if outcome.config.is_dense else "test images"
    caption = f"% of the {unit} of each class (n)."
    if not is_named:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        fewest, most = counts.min(), counts.max()
        number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        caption = f"% of the {unit} of each class; n is {number}. "
        caption += "Numbers: index of `classes` in results.json."
    add_words(figure, _title(outcome, f"Confusion of {_name(outcome, best.data_set, best.layer)}"), caption)
    return figure


def _similarity(outcome: ProbeRun) -> Figure | None:
    """Draw linear CKA and RSA between all layers as two matrices."""
    if outcome.similarity is None:
        return None
    names = [_name(outcome, *feature) for feature in outcome.features]
    side = max(3.8, matrix_inches(names))
    figure = Figure(figsize=(2 * side + 0.8, side), layout="constrained")
    for axes, matrix, title in zip(figure.subplots(1, 2), outcome.similarity, ("linear CKA", "RSA"), strict=True):
        add_matrix(figure, axes, matrix, names, title=title)
    caption = (f"On {outcome.compared_images:,} images. 1: the same up to rotation and scale (CKA), the same order of "
               "dissimilarities (RSA, Spearman). 0: unrelated.")  # fmt: skip
    data_set = f" of {drawable(next(iter(outcome.fingerprints)))}" if len(outcome.fingerprints) == 1 else ""
    add_words(figure, f"Similarity of layers{data_set}", caption)
    return figure


def _masks(outcome: ProbeRun) -> Figure | None:
    """Draw some test images with their masks, the predictions of the best layer, and where these are wrong."""
    if outcome.config.task != "segmentation" or not outcome.examples:
        return None
    names, title = _examples(outcome, "Masks", "mIoU", "{:.1%} mIoU")
    return masks_figure(outcome.examples, names, [str(name) for name in outcome.best.result.classes.tolist()], title)


def _depths(outcome: ProbeRun) -> Figure | None:
    """Draw some test images with their depths, and the predictions of the best layer."""
    if outcome.config.task != "depth" or not outcome.examples:
        return None
    names, title = _examples(outcome, "Depths", "rmse", "RMSE {:.3g}")
    return depths_figure(outcome.examples, names, title)


def _examples(outcome: ProbeRun, what: str, metric: str, form: str) -> tuple[list[str], str]:
    """Return the names of the examples, with a metric each, and the title of their figure."""
    best = outcome.best
    images = outcome.labellings[best.data_set].test.tolist()
    places = [images.index(example.row) for example in outcome.examples]
    paths, values = outcome.test_paths[best.data_set], best.result.per_image[metric]
    names = [f"{paths[place]}: {form.format(values[place])}" for place in places]
    return names, _title(outcome, f"{what} by {_name(outcome, best.data_set, best.layer)}")


_FIGURES: dict[str, Callable[[ProbeRun], Figure | None]] = {
    "layers": _layers,
    "curve": _curve,
    "shots": _shots,
    "confusion": _confusion,
    "similarity": _similarity,
    "masks": _masks,
    "depths": _depths,
}
PICTURES = tuple(f"{name}.{suffix}" for name in _FIGURES for suffix in FORMATS)  # all files that may be written
