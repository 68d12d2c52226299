"""Intervals and tests after the best of several layers is chosen, on features that are noise.

    python -m benchmarks.chosen_layers RESULT.json [--protocol clip ...] [--draws 10] [--layers 13]

A backbone with one layer is compared with one of one or twelve layers, as `layertap compare` does: the layer with the
best validation score, McNemar's test on the test rows, a fifth of all. All features are noise, 16 columns wide, so the
true accuracy is 1 / classes and no backbone is better: at most 5 % of the tests may be below 0.05, and at least 95 % of
the intervals of the chosen layer should hold the true accuracy. Few-shot has no test.

The labels of the test rows have no part in fits and choices, as a test of `test_protocols.py` shows for each protocol.
So those of a run may be drawn again and again: layers are probed for a few draws of features and labels, put together
to backbones in many orders, and judged by new labels each time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import parser
from extract.analysis.probe import probing, protocols
from extract.analysis.probe.metrics import exact_proportion, mcnemar

COLUMNS, TESTED, RUNS = 16, 0.2, 400  # pairs of backbones for each draw


class Layer(NamedTuple):
    """A probed layer: its validation score, and predicted classes (D, N) of the test rows by each of D probes."""

    validation: float
    predictions: NDArray[np.int64]


def probed(protocol: str, n_classes: int, rows: int, layers: int, seed: int) -> list[Layer]:
    """Return layers of noise, probed on one draw of the labels."""
    rng = np.random.default_rng(seed)
    test = np.arange(rows) < round(TESTED * rows)
    labels = rng.integers(n_classes, size=rows)
    while np.bincount(labels[~test], minlength=n_classes).min() < 2:  # few-shot refuses them
        labels = rng.integers(n_classes, size=rows)
    return [_probed(protocol, rng.standard_normal((rows, COLUMNS)).astype(np.float32), labels, test, seed)
            for _ in range(layers)]  # fmt: skip


def _probed(protocol: str, x: NDArray[np.float32], labels: NDArray[np.int64], test: NDArray[Any], seed: int) -> Layer:
    scored: list[NDArray[np.int64]] = []  # few-shot keeps no predictions: its scores are looked at as they pass
    plain, count = protocols.primary, int(test.sum())

    def primary(scores: NDArray[np.float32], *others: Any) -> float:
        if len(scores) == count and (others[0] == labels[test]).all():
            scored.append(scores.argmax(1))
        return plain(scores, *others)

    protocols.primary = primary
    try:
        how: dict[str, Any] = {"protocol": protocol, "seed": seed, "device": "cpu"}
        result = probing.linear_probe(x[~test], labels[~test], x[test], labels[test], **how)
    finally:
        protocols.primary = plain
    predictions = result.predictions if result.predictions is not None else _of_most_shots(scored)
    return Layer(result.validation, np.atleast_2d(predictions))


def _of_most_shots(scored: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return what the probes with the most rows of each class predict, of each of five draws."""
    numbers = len(scored) // 5
    return np.stack(scored[numbers - 1 :: numbers])


def compared(one: Layer, others: Sequence[Layer], labels: NDArray[np.int64], truth: float) -> tuple[bool, bool]:
    """Return whether the two backbones are called distinguishable, and whether the interval holds the truth."""
    best = max(others, key=lambda layer: -math.inf if math.isnan(layer.validation) else layer.validation)
    right = best.predictions == labels
    if len(right) > 1:
        interval = probing._over_draws(right.mean(1).tolist(), len(labels))
        return False, interval.low <= truth <= interval.high
    interval = exact_proportion(float(right.mean()), len(labels))
    return mcnemar((one.predictions == labels)[0], right[0])[2] <= 0.05, interval.low <= truth <= interval.high


def main() -> None:
    """Simulate, print each cell, and write all."""
    arguments = parser(__doc__)
    arguments.add_argument("result", type=Path)
    names = ["clip", "simclr", "dinov2-logreg", "fewshot", "knn", "centroid"]
    arguments.add_argument("--protocol", nargs="+", default=names)
    arguments.add_argument("--draws", type=int, default=10, help="of features and labels")
    arguments.add_argument("--layers", type=int, default=13, help="probed for each draw")
    given = arguments.parse_args()
    cells: list[dict[str, Any]] = []
    for protocol, rows, n_classes in itertools.product(given.protocol, (50, 200, 500, 2000), (2, 10)):
        pools = [probed(protocol, n_classes, rows, given.layers, seed) for seed in range(given.draws)]
        rng = np.random.default_rng(0)
        for layers in (1, 12):
            runs = []
            for pool, _ in itertools.product(pools, range(RUNS)):
                chosen = [pool[place] for place in rng.permutation(len(pool))[: 1 + layers]]
                labels = rng.integers(n_classes, size=round(TESTED * rows))
                runs.append(compared(chosen[0], chosen[1:], labels, 1 / n_classes))
            differ, holds = np.mean(runs, axis=0).round(4).tolist()
            cells.append({"protocol": protocol, "rows": rows, "classes": n_classes, "layers": layers,
                          "runs": len(runs), "distinguishable": differ, "held": holds})  # fmt: skip
            print(cells[-1], flush=True)
    given.result.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
