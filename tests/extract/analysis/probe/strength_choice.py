"""The choice of a penalty on few rows: a protocol against scikit-learn's cross-validation by log loss.

Data sets of Gaussian classes have 15 to 1,000 rows, 2 to 10 classes, 2 to 256 columns, and almost equal classes to
separable ones. On each, `linear_probe` without validation rows chooses a strength and fits. So does scikit-learn's
`LogisticRegressionCV` with the same grid, five stratified folds and the scoring `neg_log_loss`. Both are judged on
20,000 rows of the same distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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
    return {"train": (x, y), "test": (x_test, y_test)}


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
    result = linear_probe(*data["train"], data["test"][0][:1], data["test"][1][:1], protocol=protocol)
    assert result.model is not None
    chosen = result.chosen if protocol == "simclr" else 1 / result.chosen
    return {"C": chosen, **judged(result.model.predict_proba(data["test"][0]), data["test"][1])}


def compared(seed: int) -> dict[str, Any]:
    """Compare one data set; protocols take turns."""
    data, protocol = drawn(seed), list(GRIDS)[seed % len(GRIDS)]
    return {"layertap": by_layertap(data, protocol), "scikit-learn": by_scikit_learn(data, GRIDS[protocol])}
