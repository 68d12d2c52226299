"""Coverage of the 95 % intervals of a probe: how often they hold the true value.

    python -m benchmarks.interval_coverage RESULT.json [--tables docs/measurements/intervals.json] [--sets 300]

Proportions: exact sums over the binomial distribution, for the interval that is used and for others. Other metrics:
simulated test sets from populations whose true value is known. `--tables` writes the tables of `docs/benchmarks.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

from benchmarks.common import parser
from extract.analysis.dense import PixelCounts, segmentation_metrics
from extract.analysis.probe import metrics
from extract.analysis.probe.metrics import exact_proportion

ROWS = (30, 50, 100, 200, 360, 1000, 3000, 10_000)
PROPORTIONS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
SIMULATED_ROWS = (30, 100, 360, 1000)
Z = 1.959964
Ends = tuple[NDArray[Any], NDArray[Any]]


def clopper_pearson(hits: NDArray[Any], n: int) -> Ends:
    """The interval that layertap computes."""
    estimates = [exact_proportion(x / n, n) for x in hits.tolist()]
    return np.array([e.low for e in estimates]), np.array([e.high for e in estimates])


def wilson(hits: NDArray[Any], n: int) -> Ends:
    """Wilson 1927."""
    p, scale = hits / n, 1 + Z**2 / n
    middle, half = (p + Z**2 / (2 * n)) / scale, Z / scale * np.sqrt(p * (1 - p) / n + Z**2 / (4 * n * n))
    return np.maximum(middle - half, 0), np.minimum(middle + half, 1)


def agresti_coull(hits: NDArray[Any], n: int) -> Ends:
    """Agresti and Coull 1998."""
    count = n + Z**2
    p = (hits + Z**2 / 2) / count
    half = Z * np.sqrt(p * (1 - p) / count)
    return np.maximum(p - half, 0), np.minimum(p + half, 1)


def jeffreys(hits: NDArray[Any], n: int) -> Ends:
    """Equal tails of the posterior under Jeffreys' prior."""
    low, high = (beta.ppf(q, hits + 0.5, n - hits + 0.5) for q in (0.025, 0.975))
    return np.where(hits > 0, low, 0), np.where(hits < n, high, 1)


def percentile_bootstrap(hits: NDArray[Any], n: int) -> Ends:
    """Percentiles over infinitely many resamples, which are quantiles of a binomial distribution."""
    return binom.ppf(0.025, n, hits / n) / n, binom.ppf(0.975, n, hits / n) / n


METHODS = {
    "Clopper-Pearson": clopper_pearson, "Wilson": wilson, "Agresti-Coull": agresti_coull, "Jeffreys": jeffreys,
    "percentile bootstrap": percentile_bootstrap,
}  # fmt: skip


def of_proportions(method: str, n: int) -> dict[str, list[float]]:
    """Coverage at each proportion, and mean width over that of Wilson's interval."""
    hits = np.arange(n + 1)
    hits = hits[binom.cdf(hits, n, min(PROPORTIONS)) > 1e-12]
    (low, high), (low_wilson, high_wilson) = METHODS[method](hits, n), wilson(hits, n)
    coverage, width = [], []
    for p in PROPORTIONS:
        weight = binom.pmf(hits, n, p)
        coverage.append(float(weight[(low <= p) & (p <= high)].sum()))
        width.append(float((weight * (high - low)).sum() / (weight * (high_wilson - low_wilson)).sum()))
    return {"coverage": coverage, "width": width}


POPULATION = 200_000


def classes_population(k: int, apart: float, uneven: bool, generator: np.random.Generator) -> tuple[Any, Any]:
    """Calibrated scores (N, K) and classes (N,); uneven: some classes are rare, and some are hard."""
    shares = np.geomspace(1, 0.05, k) if uneven else np.ones(k)
    truth = generator.choice(k, POPULATION, p=shares / shares.sum())
    each = apart * (np.linspace(1.5, 0.5, k) if uneven else np.ones(k))
    scores = generator.normal(size=(POPULATION, k))
    scores[np.arange(POPULATION), truth] += each[truth]
    return (apart * scores).astype(np.float32), truth


def simulated(
    population: tuple[Any, Any], compute: Callable[[Any, Any, int], dict[str, Any]], n: int, sets: int, seed: int
) -> dict[str, dict[str, float]]:
    """Coverage of each metric, mean of its values and true value."""
    with_draws = metrics.RESAMPLES, metrics._COSTLY_RESAMPLES
    metrics.RESAMPLES = metrics._COSTLY_RESAMPLES = 1  # the true value needs no interval
    truth = compute(*population, 0)
    metrics.RESAMPLES = metrics._COSTLY_RESAMPLES = 200
    generator = np.random.default_rng(seed)
    records: dict[str, list[tuple[float, bool, float]]] = {}
    for number in range(sets):
        rows = generator.integers(0, len(population[0]), n)
        for name, estimate in compute(population[0][rows], population[1][rows], number).items():
            held = estimate.low <= truth[name].value <= estimate.high
            records.setdefault(name, []).append((estimate.value, held, "may be too narrow" in estimate.method))
    metrics.RESAMPLES, metrics._COSTLY_RESAMPLES = with_draws
    result = {}
    for name, values in records.items():
        result[name] = {
            "true": truth[name].value,
            "mean": float(np.mean([value for value, _, _ in values])),
            "coverage": float(np.mean([held for _, held, _ in values])),
            "marked": float(np.mean([marked for *_, marked in values])),
        }
    return result


def softmax(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Probabilities."""
    shifted = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True), np.float32)


def masks_population(generator: np.random.Generator) -> NDArray[np.int64]:
    """Pixels (N, 3, 6) of images: right, truth, predicted, by class. An image has few classes and its own accuracy."""
    present = generator.random((POPULATION, 6)) < (1, 0.5, 0.3, 0.3, 0.2, 0.1)
    truth = generator.gamma(1, 1, (POPULATION, 6)) * present
    truth = np.rint(truth / truth.sum(1, keepdims=True) * 1000).astype(np.int64)
    accuracy = generator.beta(3, 1.5, (POPULATION, 1)) + generator.normal(0, 0.15, (POPULATION, 6))
    right = np.rint(truth * accuracy.clip(0, 1)).astype(np.int64)
    predicted = right.copy()
    for k in range(6):
        predicted += generator.multinomial(truth[:, k] - right[:, k], generator.dirichlet(np.full(6, 0.5), POPULATION))
    return np.stack([right, truth, predicted], 1)


def of_masks(pixels: NDArray[np.int64], _: NDArray[Any], seed: int) -> dict[str, Any]:
    """Metrics of a segmentation."""
    counts = PixelCounts(len(pixels), pixels.shape[2])
    counts.right, counts.truth, counts.predicted = pixels.swapaxes(0, 1)
    return segmentation_metrics(counts, seed)


def of_metrics(sets: int) -> dict[str, dict[str, Any]]:
    """Coverage by population and number of rows."""
    generator = np.random.default_rng(0)
    populations: dict[str, tuple[Any, Any]] = {}
    for name, k, apart, uneven in (
        ("2 classes, 76 % right", 2, 1.0, False), ("2 classes, 98 % right", 2, 2.9, False),
        ("10 classes, 90 % right", 10, 3.0, False), ("10 classes, 99 % right", 10, 4.2, False),
        ("10 uneven classes", 10, 2.5, True),
    ):  # fmt: skip
        population = classes_population(k, apart, uneven, generator)
        populations[name] = population, lambda s, y, seed: metrics.classification_metrics(s, y, softmax(s), seed)
    labels = (generator.random((POPULATION // 4, 5)) < 0.2).astype(np.float32)
    label_scores = (generator.normal(size=labels.shape) + 1.5 * labels).astype(np.float32)
    populations["5 labels"] = (label_scores, labels), metrics.multilabel_metrics
    numbers = generator.normal(size=(POPULATION, 1))
    for name, noise in (("numbers", 0.7), ("numbers, errors of heavy tails", 0.3)):
        errors = (
            generator.standard_t(4, size=numbers.shape) if "tails" in name else generator.normal(size=numbers.shape)
        )
        populations[name] = (numbers + noise * errors, numbers), metrics.regression_metrics
    populations["masks of 6 classes, rows are images"] = (masks_population(generator), np.zeros(POPULATION)), of_masks
    results = {}
    for name, (population, compute) in populations.items():
        results[name] = {str(n): simulated(population, compute, n, sets, n) for n in SIMULATED_ROWS}
        print(name, json.dumps({n: {m: round(v["coverage"], 3) for m, v in by.items()}
                                for n, by in results[name].items()}), flush=True)  # fmt: skip
    return results


def table(head: list[str], rows: list[list[str]]) -> list[dict[str, str]]:
    """The rows of a table, each by the names of its columns."""
    return [dict(zip(head, row, strict=True)) for row in rows]


def tables(result: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """The tables behind `docs/benchmarks.md`.

    A proportion has the least coverage, and the largest mean width in units of the mean width of Wilson's interval. Any
    other metric has its coverage, and in brackets the share of the intervals with a remark.
    """
    of = result["proportions"]
    proportions = [
        [f"{n:,}"] + [f"{min(by[str(n)]['coverage']):.3f}, {max(by[str(n)]['width']):.2f}" for by in of.values()]
        for n in ROWS
    ]
    rows, calibration = [], []
    for population, by_rows in result["metrics"].items():
        for metric, first in by_rows[str(SIMULATED_ROWS[0])].items():
            if not metric.startswith("calibration_error"):
                cells = [f"{by[metric]['coverage']:.3f} ({by[metric]['marked']:.0%})" for by in by_rows.values()]
                rows.append(
                    [population, metric, f"{first['true']:.3f}", *(cell.removesuffix(" (0%)") for cell in cells)]
                )
        for n, by in by_rows.items():
            if "calibration_error" in by:
                error, calibrated = by["calibration_error"], by["calibration_error_if_calibrated"]
                numbers = (error["true"], error["mean"], calibrated["mean"])
                calibration.append([population, f"{int(n):,}", *(f"{number:.3f}" for number in numbers)])
    sizes = [f"{n:,} rows" for n in SIMULATED_ROWS]
    of_calibration = ["population", "test rows", "true value", "mean error", "mean if calibrated"]
    return {
        "proportions": table(["test rows", *METHODS], proportions),
        "metrics": table(["population", "metric", "true value", *sizes], rows),
        "calibration": table(of_calibration, calibration),
    }


def main() -> None:
    """Compute, and write the files."""
    options = parser(__doc__)
    options.add_argument("result", type=Path)
    options.add_argument("--tables", type=Path)
    options.add_argument("--sets", type=int, default=300)
    arguments = options.parse_args()
    result = {
        "sets": arguments.sets,
        "proportions": {method: {str(n): of_proportions(method, n) for n in ROWS} for method in METHODS},
        "metrics": of_metrics(arguments.sets),
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.tables is not None:
        arguments.tables.write_text(json.dumps(tables(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
