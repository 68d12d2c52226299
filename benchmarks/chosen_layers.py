"""Intervals and tests after the best of several layers is chosen, on features that are noise.

    python -m benchmarks.chosen_layers RESULT.json [--protocol clip ...] [--runs 400] [--rows 50 200 500 2000]

A backbone with one layer is compared with one of one or twelve layers, as `layertap compare` does: the layer with the
best validation score, McNemar's test on the test rows, a fifth of all. All features are noise, 16 columns wide, so the
true accuracy is 1 / classes and no backbone is better: at most 5 % of the tests may be below 0.05, and at least 95 % of
the intervals of the chosen layer should hold the true accuracy. Few-shot has no test.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser
from extract.analysis.probe.metrics import mcnemar
from extract.analysis.probe.probing import ProbeResult, linear_probe

COLUMNS, TESTED = 16, 0.2


def one_run(protocol: str, n_classes: int, rows: int, layers: int, seed: int) -> tuple[bool, bool]:
    """Return whether the two backbones are called distinguishable, and whether the interval holds the truth."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(rows) % n_classes)
    test = np.arange(rows) < round(TESTED * rows)

    def best_of(count: int) -> ProbeResult:
        results = []
        for _ in range(count):
            x = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
            results.append(linear_probe(
                x[~test], labels[~test], x[test], labels[test], protocol=protocol, seed=seed, device="cpu"
            ))  # fmt: skip
        return max(results, key=lambda result: -math.inf if math.isnan(result.validation) else result.validation)

    one, best = best_of(1), best_of(layers)
    interval = best.metrics[best.primary]
    differ = one.right is not None and best.right is not None and mcnemar(one.right, best.right)[2] <= 0.05
    return differ, interval.low <= 1 / n_classes <= interval.high


def main() -> None:
    """Simulate, print each cell, and write all."""
    arguments = parser(__doc__)
    arguments.add_argument("result", type=Path)
    arguments.add_argument("--protocol", nargs="+", default=["clip", "simclr", "dinov2-logreg", "fewshot"])
    arguments.add_argument("--runs", type=int, default=400)
    arguments.add_argument("--rows", type=int, nargs="+", default=[50, 200, 500, 2000])
    given = arguments.parse_args()
    cells: list[dict[str, Any]] = []
    for protocol, rows, n_classes, layers in itertools.product(given.protocol, given.rows, (2, 10), (1, 12)):
        runs = [one_run(protocol, n_classes, rows, layers, seed) for seed in range(given.runs)]
        differ, holds = np.mean(runs, axis=0).round(4).tolist()
        cells.append({"protocol": protocol, "rows": rows, "classes": n_classes, "layers": layers, "runs": len(runs),
                      "distinguishable": differ, "held": holds})  # fmt: skip
        print(cells[-1], flush=True)
        given.result.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
