"""Probe the backbones of a comparison in each task, and rank them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.significance_tests import paired_tests, rank_test
from pipelines.compare.comparison import Compared, Comparison, Disputed, Score, Task
from pipelines.compare.config import CompareConfig
from pipelines.probe.config import ProbeConfig
from pipelines.probe.job import ProbedFeature, ProbeRun
from pipelines.probe.labelling import Labelling
from pipelines.probe.report import probe_and_write

__all__ = ["add_tasks"]

_DISPUTED_IN_A_ROW = 6  # images that are shown
_DISPUTED_ROWS = 6  # of them; divided among the tasks


def add_tasks(
    comparison: Comparison, config: CompareConfig, good: Sequence[Compared], say: Callable[[str], None]
) -> list[Path]:
    """Probe all layers of all backbones in each task, and order the backbones, the best one first.

    Args:
        comparison: the comparison; gets the tasks.
        config: configuration of the run.
        good: the backbones that have features; get their scores or ranks.
        say: receives a line about each step.

    Returns:
        the written files.
    """
    files: list[Path] = []
    comparison.protocol = config.protocol
    for name, labels in config.labels_of_tasks.items():
        if config.tasks:
            say(f"task      {name}")
        task, written = _task(name, labels, config, [entry.name for entry in good], say)
        comparison.tasks.append(task)
        files += written
    if (only := comparison.only_task) is not None:
        for entry in good:
            for key, value in vars(only.scores[entry.name]).items():
                setattr(entry, key, value)
        order = [*only.scores]
    else:
        order = _add_ranks(comparison, good)
    place = {name: number for number, name in enumerate(order)}
    comparison.backbones.sort(key=lambda entry: place.get(entry.name, len(place)))
    return files


def _add_ranks(comparison: Comparison, good: Sequence[Compared]) -> list[str]:
    """Rank the backbones over all tasks; return their names, the best one first."""
    # Metrics of different tasks cannot be averaged. The test of Nemenyi corrects for all pairs by itself, without the
    # test of Friedman before it.
    test = rank_test([[task.scores[entry.name].value for entry in good] for task in comparison.tasks])
    best = int(test.ranks.argmin())
    comparison.critical_difference = test.critical_difference if len(good) > 1 else None
    for number, entry in enumerate(good):
        entry.rank = float(test.ranks[number])
        entry.p = None if number == best else float(test.p[best, number])
        layers = Counter(task.scores[entry.name].layer for task in comparison.tasks)
        entry.layer = layers.most_common(1)[0][0]
    return [good[number].name for number in np.argsort(test.ranks, kind="stable").tolist()]


def _task(
    name: str, labels: str | None, config: CompareConfig, names: Sequence[str], say: Callable[[str], None]
) -> tuple[Task, list[Path]]:
    """Probe all layers of the named backbones, choose the best layer of each, and test their differences."""
    results = config.folder / "probe" / name if config.tasks else config.folder / "probe"
    probed = ProbeConfig(
        out=[str(config.folder / backbone) for backbone in names], protocol=config.protocol, labels=labels,
        test_fraction=config.test_fraction, seed=config.seed, device=config.device, results=results,
    )  # fmt: skip
    outcome, files = probe_and_write(probed, say)
    best = {
        backbone: outcome.best_of([feature for feature in outcome.probed if feature.data_set == backbone])
        for backbone in names
    }
    metric = next(iter(best.values())).result.primary
    scores = {}
    for backbone, feature in best.items():
        estimate, chosen_by = feature.result.metrics[metric], _known(feature.result.validation)
        scores[backbone] = Score(feature.layer, estimate.value, estimate.low, estimate.high, chosen_by)
    ranked = sorted(names, key=lambda backbone: scores[backbone].value, reverse=True)
    rows, predicted = _on_common_images(outcome, {backbone: best[backbone] for backbone in ranked})
    truth = _named(outcome.labellings[ranked[0]], outcome.labellings[ranked[0]].targets[rows])
    # All pairs, not those with the best alone, which is the best partly by chance.
    tests = paired_tests({backbone: row == truth for backbone, row in zip(ranked, predicted, strict=True)})
    for other in ranked[1:]:
        scores[other].behind = scores[ranked[0]].value - scores[other].value
        scores[other].p = tests[ranked[0], other]
    chosen_on = ""
    notes = list(next(iter(outcome.labellings.values())).notes)
    if len(outcome.probed) > len(names) and not outcome.by_validation:
        notes.append("no images were left to choose layers on: the first layer of each backbone is taken")
    elif len(outcome.probed) > len(names):
        chosen_on = " or ".join(sorted({feature.result.chosen_on for feature in outcome.probed} - {""}))
    most = _DISPUTED_IN_A_ROW * max(1, _DISPUTED_ROWS // max(1, len(config.tasks)))
    return Task(
        name, metric, len(rows), chosen_on, {backbone: scores[backbone] for backbone in ranked},
        [_layer(feature) for feature in outcome.probed], _disputed(outcome, ranked, rows, predicted, most),
        notes,
    ), files  # fmt: skip


def _layer(feature: ProbedFeature) -> dict[str, Any]:
    result = feature.result
    estimate = result.metrics[result.primary]
    return {
        "backbone": feature.data_set, "layer": feature.layer, "value": estimate.value, "low": estimate.low,
        "high": estimate.high, "chosen_by": _known(result.validation),
        "chosen": {result.swept: result.chosen} if result.swept else {},
    }  # fmt: skip


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _on_common_images(outcome: ProbeRun, best: dict[str, ProbedFeature]) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Return the rows (n,) of the test images that all backbones have, and the predicted classes (backbones, n).

    Classes are names: a backbone that fails on all training images of a class has other numbers of classes.
    """
    rows = {name: outcome.labellings[name].test for name in best}
    common = reduce(np.intersect1d, rows.values())
    predicted = []
    for name, feature in best.items():
        assert feature.result.predictions is not None
        common_predictions = feature.result.predictions[np.isin(rows[name], common)]
        predicted.append(_named(outcome.labellings[name], common_predictions))
    return common, np.stack(predicted)


def _named(labelling: Labelling, numbers: NDArray[np.int64]) -> NDArray[np.str_]:
    """Return the names of classes from their numbers; those without training rows have the numbers -1, -2, ..."""
    return np.array([*map(str, labelling.classes.tolist()), *reversed(labelling.unseen)], np.str_)[numbers]


def _disputed(
    outcome: ProbeRun, names: Sequence[str], rows: NDArray[np.int64], predicted: NDArray[np.str_], most: int
) -> list[Disputed]:
    """Return at most `most` images with the largest share of pairs of backbones that predict different classes."""
    labelling, count = outcome.labellings[names[0]], len(names)
    if count < 2:
        return []
    paths = dict(zip(labelling.test.tolist(), outcome.test_paths[names[0]], strict=True))
    agreeing = sum((predicted == each).sum(0) - 1 for each in predicted) / (count * (count - 1))
    order = [place for place in np.argsort(agreeing, kind="stable").tolist() if agreeing[place] < 1][:most]
    return [
        Disputed(
            row := int(rows[place]), paths[row], str(_named(labelling, labelling.targets[row])),
            float(1 - agreeing[place]), list(zip(names, predicted[:, place].tolist(), strict=True)),
        )
        for place in order
    ]  # fmt: skip
