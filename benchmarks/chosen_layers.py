"""Intervals and tests after the best of several layers is chosen, on features that are noise.

    python -m benchmarks.chosen_layers RESULT.json [--protocol clip ...] [--draws 100] [--layers 52]

A backbone with one layer is compared with one of one or twelve layers, as `layertap compare` does: the layer with the
best validation score, McNemar's test on the test rows, a fifth of all. All features are noise, 16 columns wide, so the
true accuracy is 1 / classes and no backbone is better: at most 5 % of the tests may be below 0.05, and at least 95 % of
the intervals of the chosen layer should hold the true accuracy. Few-shot has no test.

Layers of noise are exchangeable. So for each draw of the labels, many layers are probed once, and put together to
backbones in many orders. `backbones` in the result counts the pairs of backbones of one order. The standard error is
that of the draws: layers of one draw that predict the same class are right on the same rows.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser
from extract.analysis.probe.metrics import mcnemar
from extract.analysis.probe.probing import ProbeResult, linear_probe

COLUMNS, TESTED, ORDERS = 16, 0.2, 20


def probed(protocol: str, n_classes: int, rows: int, layers: int, seed: int) -> list[ProbeResult]:
    """Return the probes of layers of noise on one draw of the labels."""
    rng = np.random.default_rng(seed)
    # Independent: of a fixed number of each class, the most frequent one in training would be rare in the test rows.
    test = np.arange(rows) < round(TESTED * rows)
    labels = rng.integers(n_classes, size=rows)
    while np.bincount(labels[~test], minlength=n_classes).min() < 2:  # few-shot refuses them
        labels = rng.integers(n_classes, size=rows)
    results: list[ProbeResult] = []
    for _ in range(layers):
        x = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
        results.append(linear_probe(
            x[~test], labels[~test], x[test], labels[test], protocol=protocol, seed=seed, device="cpu"
        ))  # fmt: skip
    return results


def compared(one: ProbeResult, others: Sequence[ProbeResult], truth: float) -> tuple[bool, bool]:
    """Return whether the two backbones are called distinguishable, and whether the interval holds the truth."""
    best = max(others, key=lambda result: -math.inf if math.isnan(result.validation) else result.validation)
    interval = best.metrics[best.primary]
    differ = one.right is not None and best.right is not None and mcnemar(one.right, best.right)[2] <= 0.05
    return differ, interval.low <= truth <= interval.high


def main() -> None:
    """Simulate, print each cell, and write all."""
    arguments = parser(__doc__)
    arguments.add_argument("result", type=Path)
    arguments.add_argument("--protocol", nargs="+", default=["clip", "simclr", "dinov2-logreg", "fewshot"])
    arguments.add_argument("--draws", type=int, default=100, help="of the labels")
    arguments.add_argument("--layers", type=int, default=52, help="probed for each draw")
    arguments.add_argument("--rows", type=int, nargs="+", default=[50, 200, 500, 2000])
    arguments.add_argument("--classes", type=int, nargs="+", default=[2, 10])
    given = arguments.parse_args()
    cells: list[dict[str, Any]] = []
    for protocol, rows, n_classes in itertools.product(given.protocol, given.rows, given.classes):
        pools = [probed(protocol, n_classes, rows, given.layers, seed) for seed in range(given.draws)]
        rng = np.random.default_rng(0)
        for layers in (1, 12):
            side, of_draws = 1 + layers, []
            for pool in pools:
                orders = [[pool[place] for place in rng.permutation(len(pool))] for _ in range(ORDERS)]
                starts = range(0, len(pool) - layers, side)
                runs = [
                    compared(order[at], order[at + 1 : at + side], 1 / n_classes) for order in orders for at in starts
                ]
                of_draws.append(np.mean(runs, axis=0))
            differ, holds = np.mean(of_draws, axis=0).round(4).tolist()
            errors = (np.std(of_draws, axis=0, ddof=1) / math.sqrt(len(pools))).round(4).tolist()
            cells.append({"protocol": protocol, "rows": rows, "classes": n_classes, "layers": layers,
                          "backbones": sum(len(pool) // side for pool in pools), "distinguishable": differ,
                          "held": holds, "standard_errors": errors})  # fmt: skip
            print(cells[-1], flush=True)
            given.result.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
