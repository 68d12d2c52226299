"""Figures of `layertap probe`: by layer, by strength, by shots, confusion matrix, predicted masks and depths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from extract.analysis.probe.metrics import metric_name
from extract.analysis.probe.probing import PRIMARY
from extract.analysis.probe.protocols import standard_error
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
_PX = 384  # longer side of a drawn mask
_UNLABELLED = np.full(3, 255, np.uint8)  # colours of pixels in the map of errors
_RIGHT = np.full(3, 222, np.uint8)
_WRONG = np.full(3, 30, np.uint8)
_MOST_NAMED = 40  # classes in the legend


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


def _masks(outcome: ProbeRun) -> Figure | None:
    """Draw some test images: picture, mask, prediction of the best layer, and the pixels that are wrong."""
    if outcome.config.task != "segmentation" or not outcome.examples:
        return None
    classes = [drawable(str(name)) for name in outcome.best.result.classes.tolist()]
    colours = _colours(len(classes))
    present: set[int] = set()
    rows = []
    for example in outcome.examples:
        truth, predicted = _small(example.truth), _small(example.predicted)
        present |= {*truth.ravel().tolist(), *predicted.ravel().tolist()} - {-1}
        errors = np.where((truth == predicted)[..., None], _RIGHT, _WRONG)
        errors[(truth < 0) | (predicted < 0)] = _UNLABELLED
        rows.append((example.picture, _coloured(truth, colours), _coloured(predicted, colours), errors))
    figure, _ = _panels(outcome, rows, ("mask", "prediction", "errors"), "Masks", "mIoU", "{:.1%} mIoU")
    handles = [Patch(color=tuple(colours[i] / 255), label=classes[i]) for i in sorted(present)[:_MOST_NAMED]]
    handles += [Patch(facecolor="white", edgecolor="0.6", label="no label, or outside the crop")]
    handles += [Patch(color=tuple(_WRONG / 255), label="wrong")]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8)
    return figure


def _depths(outcome: ProbeRun) -> Figure | None:
    """Draw some test images: picture, depth map, prediction of the best layer, and their ratio."""
    if outcome.config.task != "depth" or not outcome.examples:
        return None
    maps = [(_small(example.truth), _small(example.predicted)) for example in outcome.examples]
    maps = [(np.where((truth > 0) & np.isfinite(truth), truth, np.nan), predicted) for truth, predicted in maps]
    depths = np.concatenate([truth.ravel() for truth, _ in maps])
    least, largest = np.nanpercentile(depths, (1, 99)) if not np.isnan(depths).all() else (0.0, 1.0)
    near = ScalarMappable(Normalize(float(least), float(largest)), "viridis")
    ratio = ScalarMappable(LogNorm(0.5, 2), "RdBu_r")
    rows = [
        (example.picture, near.to_rgba(truth), near.to_rgba(predicted), ratio.to_rgba(predicted / truth))
        for example, (truth, predicted) in zip(outcome.examples, maps, strict=True)
    ]
    headings = ("depth", "prediction", "prediction / depth")
    figure, panels = _panels(outcome, rows, headings, "Depths", "rmse", "RMSE {:.3g}")
    figure.colorbar(near, ax=panels[:, 1:3], location="bottom", fraction=0.04, label="depth, in the unit of the files")
    bar = figure.colorbar(ratio, ax=panels[:, 3], location="bottom", fraction=0.04, label="ratio")
    bar.set_ticks([0.5, 0.8, 1, 1.25, 2], labels=["0.5", "0.8", "1", "1.25", "2"])
    bar.minorticks_off()
    return figure


def _panels(
    outcome: ProbeRun, rows: Sequence[Sequence[Any]], headings: Sequence[str], what: str, metric: str, form: str
) -> tuple[Figure, NDArray[Any]]:
    """Draw a row of a picture and three maps for each example, with its path and metric; None is not available."""
    best = outcome.best
    images, paths = outcome.labellings[best.data_set].test.tolist(), outcome.test_paths[best.data_set]
    figure = Figure(figsize=(9.2, 0.9 + 2.1 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 4, squeeze=False)
    for row, pictures, example in zip(panels, rows, outcome.examples, strict=True):
        for axes, picture in zip(row, pictures, strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if picture is None:
                axes.text(0.5, 0.5, "not available", ha="center", va="center", fontsize=8, transform=axes.transAxes)
            else:
                axes.imshow(np.asarray(picture), interpolation="nearest")
        place = images.index(example.row)
        name = f"{paths[place]}: {form.format(best.result.per_image[metric][place])}"
        row[0].set_title(drawable(name, 60), fontsize=7, loc="left")
    for axes, heading in zip(panels[0, 1:], headings, strict=True):
        axes.set_title(heading, fontsize=9)
    figure.suptitle(_title(outcome, f"{what} by {_name(outcome, best.data_set, best.layer)}"), fontsize=10)
    return figure, panels


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
    # Neighbours in the list of classes are far apart in hue.
    shades = np.asarray(colormaps["hsv"](np.arange(count) * 0.618034 % 1))[:, :3]
    shades = shades * np.where(np.arange(count) % 2, 0.65, 1.0)[:, None]
    return np.asarray(np.round(255 * shades), np.uint8)


_FIGURES: dict[str, Callable[[ProbeRun], Figure | None]] = {
    "layers": _layers,
    "curve": _curve,
    "shots": _shots,
    "confusion": _confusion,
    "masks": _masks,
    "depths": _depths,
}
# That may be written, also for brains and behaviour.
PICTURES = tuple(f"{name}.{suffix}" for name in (*_FIGURES, "rdms", "partition") for suffix in FORMATS)
