"""Stored layers against dissimilarities and odd-one-out choices of brains or behaviour: `layertap probe OUT -p rsa`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from extract.analysis.rsa import CHANCE, Floats, compare_rdms, images_of_pairs, odd_one_out
from extract.errors import InputError
from extract.system.dissimilarities import dissimilarities
from pipelines.probe.brain_files import read_rdms, read_stimuli, read_triplets
from pipelines.probe.config import ProbeConfig
from pipelines.probe.layer_similarity import in_order
from pipelines.probe.layer_table import LayerTable, Panel, in_all, layer_figure, opened_layers
from pipelines.terminal.figures import COLOURS, add_words, drawable
from pipelines.terminal.text_output import counted, printable

__all__ = ["compare_with_rdms"]

_MOST_IMAGES = 4_000  # whose pairs take 64 MB in each RDM
_DESCRIPTIVE = "the best layer is chosen on the images that it is measured with: its value is descriptive"
_OF_RDMS = "Bars have their 95 % interval; the noise ceiling is grey."
_OF_TRIPLETS = "Accuracies of odd-one-out choices have their standard error; chance is grey."
_DRAWN = 11  # layers whose RDMs are drawn
_KENDALL_DRAWS = 200  # each takes as long as many of the others


def compare_with_rdms(config: ProbeConfig, say: Callable[[str], None]) -> tuple[LayerTable, list[Path]]:
    """Compare the layers of data sets with given RDMs and odd-one-out choices; write tables and figures.

    Args:
        config: configuration of the run.
        say: receives a line about each step.

    Returns:
        the results, and the written files.

    Raises:
        InputError: a file cannot be used, its images are not those of the data sets, fewer than 3 are left, an RDM is
            constant, or an image has no dissimilarity in a layer.
        UnknownNameError: a layer does not exist.
    """
    rdms, names = (None, None) if config.rdm is None else read_rdms(config.rdm)
    stimuli, key = read_stimuli(config.stimuli) if config.stimuli else (names, "")
    may_be_ids = key != "path"
    with opened_layers(config, say) as (run, folder):
        panels = []
        if rdms is not None:
            say(f"comparing {counted(len(run.features), 'layer')} by {config.compare}")
            panels.append(_compare(run, rdms, stimuli, may_be_ids, str(config.rdm)))
        if config.triplets is not None:
            say(f"choosing by {counted(len(run.features), 'layer')}")
            panels.append(_choose(run, *read_triplets(config.triplets), stimuli, may_be_ids, config.triplets))
        run.remarks += [_DESCRIPTIVE] * (len(run.features) > 1)
        run.figures["layers"] = layer_figure(run.names, "Layers against brains or behaviour", panels)
        return run, run.write(folder)


def _compare(run: LayerTable, rdms: Floats, names: Sequence[str] | None, may_be_ids: bool, where: str) -> Panel:
    count, by = images_of_pairs(rdms.shape[1]), run.config.compare
    rows = run.rows_of(run.named(names, count, where), where, may_be_ids)
    kept = _checked(np.flatnonzero(in_all(rows)), where)
    place, pairs = np.zeros((count, count), np.int64), np.triu_indices(len(kept), 1)
    place[np.triu_indices(count, 1)] = np.arange(rdms.shape[1])
    given = rdms[:, (place + place.T)[np.ix_(kept, kept)][pairs]]
    of_layers = np.stack([_rdm(run, layer, rows[layer[0]][kept], "correlation")[pairs] for layer in run.features])
    draws, names = _KENDALL_DRAWS if by == "kendall" else 1_000, list(map(" ".join, run.features))
    found = compare_rdms(of_layers, given, by=by, draws=draws, seed=run.config.seed, names=names)
    run.table |= {by: found.mean.tolist(), "low": found.low.tolist(), "high": found.high.tolist()}
    run.table |= {"behind_best_low": found.behind[:, 0].tolist(), "behind_best_high": found.behind[:, 1].tolist()}
    run.content |= {"noise_ceiling": found.ceiling, "subjects": found.values.tolist()}
    run.figures["rdms"] = _matrices(run, given, of_layers)
    over = "images and subjects" if len(rdms) > 1 else "images"
    run.notes += [
        f"{counted(len(rdms), 'subject')}, {len(kept):,} images, {found.n_pairs:,} of {len(pairs[0]):,} pairs known",
        f"low, high: 95 % interval over {over}, {draws:,} samples; behind_best: that of the difference to the best",
        "noise ceiling: {:.3f} to {:.3f}".format(*found.ceiling) if len(rdms) > 1 else "one subject: no noise ceiling",
    ]
    return by, _bars(found.mean, found.high - found.mean), found.ceiling, _OF_RDMS


def _bars(values: Any, errors: Any) -> Callable[[Any], Any]:
    return lambda axes: axes.bar(range(len(values)), values, yerr=errors, color=COLOURS[0], capsize=3, width=0.7)


def _matrices(run: LayerTable, given: Floats, of_layers: Floats) -> Figure:
    names = [f"mean of {counted(len(given), 'subject')}", *map(" ".join, run.features)][: _DRAWN + 1]
    columns, images = min(4, len(names)), images_of_pairs(given.shape[1])
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.7 * lines + 0.8), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
    for axes, name, rdm in zip(panels.flat, names, [given.mean(0), *of_layers], strict=False):
        matrix = np.zeros((images, images))
        matrix[np.triu_indices(images, 1)] = rdm
        figure.colorbar(axes.imshow(matrix + matrix.T), ax=axes, shrink=0.8)
        axes.set_title(drawable(name), fontsize=9)
    left_out = len(run.features) - _DRAWN
    caption = f"The first {_DRAWN} of {len(run.features)} layers are drawn." if left_out > 0 else ""
    add_words(figure, "Dissimilarities of pairs of images", caption)
    return figure


def _choose(
    run: LayerTable, triplets: NDArray[np.int64], names: list[str] | None, stimuli: list[str] | None, may_be_ids: bool,
    where: str,
) -> Panel:  # fmt: skip
    chosen = stimuli if names is None else names
    count = len(next(iter(run.readers.values()))) if chosen is None else len(chosen)
    if triplets.min() < 0 or triplets.max() >= count:
        raise InputError(f"{where}: images {triplets.min()} to {triplets.max()}; expected 0 to {count - 1}")
    rows = run.rows_of(run.named(chosen, count, where), where, may_be_ids or names is not None)
    there = in_all(rows)[triplets]
    if names is not None and not there[0].any():  # a header
        triplets, there = triplets[1:], there[1:]
    used = triplets[there.all(1)]
    images, places = np.unique(used, return_inverse=True)
    _checked(images, where)
    note = f"{where}: {len(used):,} of {len(triplets):,} triplets have all images"
    run.notes.append(f"{note}; odd_one_out: accuracy by cosine, chance {CHANCE:.3f}")
    scores = [
        odd_one_out(_rdm(run, layer, rows[layer[0]][images], "cosine"), places.reshape(-1, 3)) for layer in run.features
    ]
    accuracies, errors = zip(*scores, strict=True)
    run.table |= {"odd_one_out": accuracies, "standard_error": errors}
    return "odd one out", _bars(accuracies, errors), (CHANCE, CHANCE), _OF_TRIPLETS


def _checked(images: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    if not 3 <= len(images) <= _MOST_IMAGES:
        raise InputError(f"{where}: {len(images):,} of its images have features; expected 3 to {_MOST_IMAGES:,}")
    return images


def _rdm(run: LayerTable, layer: tuple[str, str], rows: NDArray[np.int64], metric: str) -> Floats:
    features = in_order(run.features[layer], rows)
    matrix = dissimilarities(features.between(0, len(features)), metric)
    if (missing := np.isnan(np.diag(matrix))).any():
        path = printable(run.readers[layer[0]].paths[int(rows[missing.argmax()])])
        hint = "leave the image out (--without FILE), or name other layers with -l"
        what = f"{layer[1]} of {layer[0]}: {path} has no {metric} with others"
        raise InputError(f"{what}: its values are all equal, 0 or not finite", hint=hint)
    return matrix
