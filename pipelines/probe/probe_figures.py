"""Figures of `layertap probe`: by layer, by strength, by shots, confusion matrix, similarity of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from extract.analysis.probe.probing import PRIMARY
from extract.analysis.probe.strength_choice import standard_error
from pipelines.probe.example_figures import depths_figure, masks_figure
from pipelines.probe.job import ProbedFeature, ProbeRun
from pipelines.terminal.figures import COLOURS, cycled, drawable, new_figure, save_figure

__all__ = ["PICTURES", "draw"]

_AXIS = {
    "top1": "top-1 accuracy, %",
    "mAP": "mean average precision",
    "r2": "R²",
    "mIoU": "mean IoU, %",
    "delta1": "pixels within a factor of 1.25, %",
}
_METRIC = {"top1": "top-1", "mAP": "mAP", "r2": "R²"}
_PLATEAU = 0.1  # height of the axis of strengths below the best value, if there is no standard error
_NAMED_CLASSES = 40  # more names do not fit beside a matrix


def draw(outcome: ProbeRun, folder: Path) -> list[Path]:
    """Draw the figures that apply as PNG and return the files."""
    written = []
    for name, picture in PICTURES.items():
        figure = picture(outcome)
        if figure is not None:
            written.append(save_figure(figure, folder / name))
    return written


def _scale(metric: str) -> tuple[str, float]:
    """Return the axis label of a metric, and the factor of its values."""
    return _AXIS[metric], 100.0 if metric in ("top1", "mIoU", "delta1") else 1.0


def _title(outcome: ProbeRun, text: str) -> str:
    data_set = f", data set {drawable(next(iter(outcome.labellings)))}" if len(outcome.labellings) == 1 else ""
    return f"{text}\nprotocol {outcome.config.protocol}{data_set}"


def _layers(outcome: ProbeRun) -> Figure | None:
    """Plot the metric of each layer, in order, with its 95 % interval; one line per data set."""
    if len(outcome.probed) < 2:
        return None
    names = list(dict.fromkeys(feature.layer for feature in outcome.probed))
    figure, axes = new_figure(min(16.0, max(5.0, 1.6 + 0.55 * len(names))), 4.2)
    label, factor = _scale(PRIMARY[outcome.probed[0].result.task])
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
    _chance(outcome, axes)
    rotation, side = (40, "right") if len(names) <= 26 else (90, "center")
    axes.set_xticks(range(len(names)), [drawable(name) for name in names], rotation=rotation, ha=side, fontsize=8)
    if axes.get_ylim()[0] < -1 and factor == 1.0:
        axes.set_ylim(-1, None)  # lower values say nothing more
    axes.set_ylabel(label)
    axes.set_title(_title(outcome, "By layer"), fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    if len(outcome.labellings) > 1:
        axes.legend(frameon=False)
    return figure


def _chance(outcome: ProbeRun, axes: Any) -> None:
    """Draw a line at the accuracy of always predicting the most frequent test class."""
    result = outcome.probed[0].result
    if result.task == "classification" and result.truth.max(initial=-1) >= 0:
        share = 100 * np.bincount(result.truth[result.truth >= 0]).max() / len(result.truth)
        axes.axhline(share, color="0.5", linewidth=1, linestyle=":")
        axes.annotate("the most frequent class", (0.01, share), xycoords=("axes fraction", "data"),
                      fontsize=8, color="0.4", va="bottom")  # fmt: skip


def _curve(outcome: ProbeRun) -> Figure | None:
    """Plot the metric on the validation rows against the strength, and mark the chosen strength; one line per layer.

    The axis shows the values near the best, among which the choice is made.
    """
    probed = [feature for feature in outcome.probed if len(feature.result.curve) > 1]
    if not probed:
        return None
    figure, axes = new_figure(*_size_with_legend(len(probed)))
    task = probed[0].result.task
    metric = "top1" if outcome.config.is_dense else PRIMARY[task]  # of tokens, which the strength is chosen by
    label, factor = _scale(metric)
    lowest, highest, has_errors = np.inf, -np.inf, task == "classification"
    for (name, colour, style), feature in zip(_lines(outcome, probed), probed, strict=True):
        strengths, values = np.array(sorted(feature.result.curve)).T
        if has_errors:
            errors = np.array([standard_error(value, feature.result.n_val) for value in values.tolist()])
            axes.fill_between(strengths, factor * (values - errors), factor * (values + errors), color=colour,
                              alpha=0.15, linewidth=0)  # fmt: skip
            below, above = 6 * errors[values.argmax()], 2 * errors[values.argmax()]
        else:
            below = above = _PLATEAU
        # Include the neighbours of the best value, on curves that are steep there.
        near = values[max(0, values.argmax() - 1) : values.argmax() + 2].min()
        lowest, highest = min(lowest, values.max() - below, near), max(highest, values.max() + above)
        axes.plot(
            strengths, factor * values, color=colour, linestyle=style, linewidth=1.5, marker=".",
            markersize=4, label=name,
        )  # fmt: skip
        chosen = int(np.argmin(np.abs(np.log(strengths / feature.result.chosen))))
        axes.plot(strengths[chosen], factor * values[chosen], "o", color=colour, markersize=8, markeredgecolor="white")
    axes.set_xscale("log")
    margin = 0.03 * (highest - lowest) + 0.002
    axes.set_ylim(factor * (lowest - margin), factor * (min(highest, 1.0) + margin))
    if probed[0].result.swept == "k":
        ks = sorted({int(k) for feature in probed for k, _ in feature.result.curve})
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
    axes.set_xlabel(probed[0].result.swept)
    axes.set_ylabel(f"{label}, on {probed[0].result.chosen_on or 'validation rows'}", fontsize=9)
    legend = "dots: chosen" + ("; bands: ±1 standard error" if has_errors else "")
    of_tokens = " of tokens" if outcome.config.is_dense else ""
    title = f"Validation {_METRIC[metric]}{of_tokens} by {probed[0].result.swept}"
    axes.set_title(_title(outcome, title) + f"; {legend}", fontsize=10)
    axes.grid(alpha=0.3)
    _legend(axes, len(probed))
    return figure


def _lines(outcome: ProbeRun, probed: list[ProbedFeature]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, colour and style of each line: one colour per layer, one style per data set."""
    layers, data_sets = list(dict.fromkeys(feature.layer for feature in probed)), list(outcome.labellings)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(layers))) if len(layers) > 1 else [COLOURS[0]]
    for feature in probed:
        name = feature.layer if len(data_sets) == 1 else f"{feature.data_set} {feature.layer}"
        style = ("-", "--", "-.", ":")[data_sets.index(feature.data_set) % 4]
        yield drawable(name), shades[layers.index(feature.layer)], style


_IN_A_COLUMN = 20  # names in a legend column


def _size_with_legend(count: int) -> tuple[float, float]:
    return (5.6, 4.2) if count < 2 else (5.6 + 1.7 * -(-count // _IN_A_COLUMN), 4.4)


def _legend(axes: Any, count: int) -> None:
    if count > 1:
        columns = -(-count // _IN_A_COLUMN)
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
    axes.set_xticks(shots, [str(n) for n in shots])
    axes.minorticks_off()
    axes.set_xlabel("training images per class")
    axes.set_ylabel(_AXIS["top1"])
    axes.set_title(_title(outcome, "By shots, mean and range of draws"), fontsize=11)
    axes.grid(alpha=0.3)
    _legend(axes, len(probed))
    return figure


def _confusion(outcome: ProbeRun) -> Figure | None:
    """Draw the confusion matrix of the best layer, in % of the test images (or pixels) of each class."""
    best = outcome.best
    if best.result.confusion is None:
        return None
    table = best.result.confusion
    shares = 100 * table / np.maximum(table.sum(1, keepdims=True), 1)
    names = [drawable(str(name)) for name in best.result.classes.tolist()]
    side = min(11.0, max(4.6, 2.2 + 0.36 * len(names)))
    figure, axes = new_figure(side + 0.8, side)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    if len(names) <= _NAMED_CLASSES:
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    if len(names) <= 15:
        for i, j in np.ndindex(table.shape):
            if shares[i, j] >= 0.5:
                axes.text(j, i, f"{shares[i, j]:.0f}", ha="center", va="center", fontsize=8,
                          color="white" if shares[i, j] > 55 else "black")  # fmt: skip
    number = "" if len(names) <= _NAMED_CLASSES else ", as index of `classes` in results.json"
    axes.set_xlabel("predicted" + number)
    axes.set_ylabel("class" + number)
    name = best.layer if len(outcome.labellings) == 1 else f"{best.data_set} {best.layer}"
    axes.set_title(_title(outcome, f"Confusion of {drawable(name)}, % of each class"), fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.7)
    return figure


def _similarity(outcome: ProbeRun) -> Figure | None:
    """Draw linear CKA and RSA between all layers as two heat maps."""
    if outcome.similarity is None:
        return None
    several = len(outcome.labellings) > 1
    names = [
        drawable(f"{feature.data_set} {feature.layer}" if several else feature.layer) for feature in outcome.probed
    ]
    side = min(9.0, max(3.6, 1.8 + 0.34 * len(names)))
    figure = Figure(figsize=(2 * side + 0.8, side), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, matrix, title in zip(panels, outcome.similarity, ("linear CKA", "RSA (Spearman)"), strict=True):
        image = axes.imshow(matrix, cmap="magma", vmin=min(0.0, float(np.nanmin(matrix))), vmax=1)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        if len(names) <= 12:
            for i, j in np.ndindex(matrix.shape):
                axes.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=7,
                          color="black" if matrix[i, j] > 0.6 else "white")  # fmt: skip
        axes.set_title(title, fontsize=11)
        figure.colorbar(image, ax=axes, shrink=0.7)
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
    layer = best.layer if len(outcome.labellings) == 1 else f"{best.data_set} {best.layer}"
    images = outcome.labellings[best.data_set].test.tolist()
    places = [images.index(example.row) for example in outcome.examples]
    paths, values = outcome.test_paths[best.data_set], best.result.per_image[metric]
    names = [f"{paths[place]}: {form.format(values[place])}" for place in places]
    return names, _title(outcome, f"{what} by {drawable(layer)}")


PICTURES: dict[str, Callable[[ProbeRun], Figure | None]] = {
    "layers.png": _layers,
    "curve.png": _curve,
    "shots.png": _shots,
    "confusion.png": _confusion,
    "similarity.png": _similarity,
    "masks.png": _masks,
    "depths.png": _depths,
}
