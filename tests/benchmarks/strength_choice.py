"""The choice of a penalty on few rows: layertap's protocols against scikit-learn's cross-validation by log loss.

    python tests/benchmarks/strength_choice.py RESULT.json [--probes 500] [--reference EARLIER.json]

Draws data sets of Gaussian classes: 15 to 1,000 rows, 2 to 10 classes, 2 to 256 columns, from almost equal classes to
separable ones. On each, `linear_probe` without validation rows chooses a strength and fits. So does scikit-learn's
`LogisticRegressionCV` with the same grid, five stratified folds and the scoring `neg_log_loss`. Both are judged on
20,000 rows of the same distribution. `--reference` reuses scikit-learn's part of an earlier result.

The file has the mean of accuracy and calibration error of both, the differences by number of rows and by whether the
training rows can be separated, and one record for each data set.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import StratifiedKFold

from extract.analysis.probe import linear_probe
from extract.analysis.probe.metrics import expected_calibration_error

GRIDS = {"simclr": np.logspace(-6, 5, 45), "clip": 10.0 ** -(np.arange(97) / 8 - 6)[::-1]}
TEST_ROWS = 20_000


def drawn(seed: int) -> dict[str, Any]:
    """Draw the shape of a data set and its rows."""
    generator = np.random.default_rng([7, seed])
    n = round(float(np.exp(generator.uniform(np.log(15), np.log(1000)))))
    k = int(generator.integers(2, min(10, n // 5) + 1))  # the folds of scikit-learn need five rows of each class
    d = int(generator.choice([2, 8, 32, 128, 256]))
    apart = float(np.exp(generator.uniform(np.log(0.5), np.log(8))))  # standard deviations between two means
    means = generator.normal(size=(k, d))
    means *= apart / np.sqrt(2 * d)
    scales = np.exp(generator.normal(0, 0.7, d)) * 10 ** generator.uniform(-1, 1)
    shares = generator.dirichlet(np.full(k, 20.0))

    def rows(count: int, each: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.concatenate([np.repeat(np.arange(k), each), generator.choice(k, count - each * k, p=shares)])
        return ((means[y] + generator.normal(size=(count, d))) * scales).astype(np.float32), y

    x, y = rows(n, 5)
    x_test, y_test = rows(TEST_ROWS, 0)
    return {"n": n, "k": k, "d": d, "apart": apart, "train": (x, y), "test": (x_test, y_test)}


def judged(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Accuracy, log loss and calibration error on the test rows."""
    right = probabilities.argmax(1) == y
    own = probabilities[np.arange(len(y)), y].astype(np.float64)
    return {
        "accuracy": float(right.mean()),
        "log_loss": float(-np.log(np.maximum(own, 1e-30)).mean()),
        "calibration_error": expected_calibration_error(probabilities.max(1).astype(np.float64), right),
    }


def by_scikit_learn(data: dict[str, Any], grid: np.ndarray) -> dict[str, float]:
    """Choose by cross-validated log loss, and judge."""
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    x, y = data["train"]
    options = {"l1_ratios": (0,), "use_legacy_attributes": False}
    model = LogisticRegressionCV(Cs=grid, cv=folds, scoring="neg_log_loss", max_iter=1000, **options).fit(x, y)
    probabilities = model.predict_proba(data["test"][0])
    return {"C": float(np.ravel(model.C_)[0]), **judged(probabilities, data["test"][1])}


def by_layertap(data: dict[str, Any], protocol: str) -> dict[str, float]:
    """Choose and fit by a protocol, and judge."""
    started = time.process_time()
    result = linear_probe(*data["train"], data["test"][0][:1], data["test"][1][:1], protocol=protocol)
    seconds = time.process_time() - started
    assert result.model is not None
    chosen = result.chosen if protocol == "simclr" else 1 / result.chosen
    return {"C": chosen, "seconds": seconds, **judged(result.model.predict_proba(data["test"][0]), data["test"][1])}


def compared(seed: int, reference: dict[str, float] | None = None) -> dict[str, Any]:
    """Compare one data set; protocols take turns."""
    data, protocol = drawn(seed), list(GRIDS)[seed % len(GRIDS)]
    theirs = by_scikit_learn(data, GRIDS[protocol]) if reference is None else reference
    ours = by_layertap(data, protocol)
    return {"seed": seed, "protocol": protocol, **{key: data[key] for key in ("n", "k", "d", "apart")},
            "layertap": ours, "scikit-learn": theirs}  # fmt: skip


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean differences, layertap minus scikit-learn; accuracies in points."""

    def of(chosen: list[dict[str, Any]]) -> dict[str, float]:
        def mean(key: str, who: str) -> float:
            return float(np.mean([record[who][key] for record in chosen]))

        accuracy, error, loss = (
            np.array([record["layertap"][key] - record["scikit-learn"][key] for record in chosen])
            for key in ("accuracy", "calibration_error", "log_loss")
        )
        return {
            "data sets": len(chosen),
            "accuracy, layertap": round(100 * mean("accuracy", "layertap"), 3),
            "accuracy, scikit-learn": round(100 * mean("accuracy", "scikit-learn"), 3),
            "accuracy, difference in points": round(100 * float(accuracy.mean()), 3),
            "standard error of the difference": round(100 * float(accuracy.std() / len(chosen) ** 0.5), 3),
            "worst difference": round(100 * float(accuracy.min()), 3),
            "calibration error, layertap": round(mean("calibration_error", "layertap"), 4),
            "calibration error, difference": round(float(error.mean()), 4),
            "log loss, difference": round(float(loss.mean()), 4),
            "seconds of CPU, layertap": round(mean("seconds", "layertap"), 3),
        }

    groups = {"all": records}
    for low, high in ((15, 50), (50, 150), (150, 400), (400, 1001)):
        groups[f"{low} to {high - 1} rows"] = [record for record in records if low <= record["n"] < high]
    groups["fewer rows than columns"] = [record for record in records if record["n"] <= record["d"]]
    groups["accuracy above 99 %"] = [record for record in records if record["scikit-learn"]["accuracy"] > 0.99]
    for protocol in GRIDS:
        groups[protocol] = [record for record in records if record["protocol"] == protocol]
    return {name: of(chosen) for name, chosen in groups.items() if chosen}


def main() -> None:
    """Measure, print the summary and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--probes", type=int, default=500)
    parser.add_argument("--reference", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # scikit-learn's, where it stops before it has converged
    torch.set_num_threads(1)
    known = {}
    if arguments.reference is not None:
        earlier = json.loads(arguments.reference.read_text())["records"]
        known = {record["seed"]: record["scikit-learn"] for record in earlier}
    records = []
    for seed in range(arguments.probes):
        records.append(compared(seed, known.get(seed)))
        if seed % 50 == 49:
            print(f"{seed + 1} data sets: {json.dumps(summary(records)['all'])}", file=sys.stderr, flush=True)
            arguments.result.write_text(json.dumps({"summary": summary(records), "records": records}))
    arguments.result.write_text(json.dumps({"summary": summary(records), "records": records}, indent=1) + "\n")
    print(json.dumps(summary(records), indent=1))


if __name__ == "__main__":
    main()
