"""Metrics of predictions, their 95 % intervals for the random choice of test rows, and tests of their differences.

Intervals are exact for proportions; others are by resampling. The coverage of each kind, by exact sums and by
simulation, is in `docs/benchmarks.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "LEVEL", "Estimate", "average_precision", "bootstrap", "by_class", "classification_metrics", "confusion_of",
    "effective_rows", "exact_proportion", "expected_calibration_error", "format_metric", "holm", "mcnemar",
    "metric_name", "multilabel_metrics", "paired_tests", "rank_test", "ranking", "ranks_of", "regression_metrics",
    "resampled", "student_quantile",
]  # fmt: skip

RESAMPLES = 1000  # of the test rows, for intervals (the number advised by Efron and Tibshirani 1993, section 14.3)
_COSTLY_RESAMPLES = 200  # if each resample takes a pass over all labels
_MOST_RESAMPLED = 10_000_000  # rows times labels
_NAMES = {
    "top1": "top-1", "top5": "top-5", "balanced_accuracy": "balanced", "macro_f1": "macro F1", "log_loss": "log loss",
    "calibration_error": "ECE", "calibration_error_if_calibrated": "ECE if calibrated", "r2": "R²", "rmse": "RMSE",
    "mae": "MAE", "pixel_accuracy": "pixels", "mean_accuracy": "mean of classes",
    "abs_rel": "abs. rel.",
}  # fmt: skip
_PERCENT_METRICS = {"top1", "top5", "balanced_accuracy", "mIoU", "pixel_accuracy", "mean_accuracy", "delta1"}
_BINS = 15  # of confidence, as in Guo et al. 2017


MetricsOfRows = Callable[[NDArray[np.int64] | slice], dict[str, float]]

# Below these numbers, the coverage of a bootstrap fell below 0.92 in simulations (docs/benchmarks.md).
_FEW_ERRORS = 20  # wrong rows: most draws miss the rare large losses
_FEW_POSITIVES = 30  # test rows with a label
_FEW_NUMBERS = 50  # test rows of a regression
_FEW_IN_A_CLASS = 5  # test rows; of a class with fewer, the recall is hardly known, or the class may be missing
_CALIBRATED_DRAWS = 200


def classification_metrics(
    scores: NDArray[np.float32], truth: NDArray[np.int64], probabilities: NDArray[np.float32] | None, seed: int
) -> dict[str, Estimate]:
    """Compute top1, top5, balanced_accuracy, macro_f1, and with probabilities log_loss and the calibration error.

    top5 needs more than 5 classes. balanced_accuracy is the mean recall over the classes present; macro_f1 is the mean
    over the classes present or predicted; both as in scikit-learn. log_loss skips rows of classes missing from
    training, for which it is not finite.

    calibration_error is the expected calibration error over 15 equal bins of confidence (Guo et al. 2017). Chance alone
    makes it larger than zero, the more the fewer rows there are: calibration_error_if_calibrated is its mean over draws
    in which each prediction is right with the probability of its confidence (consistency resampling, Broecker and Smith
    2007). Neither has an interval.

    Args:
        scores: (N, K).
        truth: (N,) classes; -1, -2, ... for classes missing from training, which always count as wrong.
        probabilities: (N, K); None if the probe has no probabilities.
        seed: seed of the resampling for intervals.
    """
    count, k = scores.shape
    predicted = scores.argmax(1)
    own = np.take_along_axis(scores, np.maximum(truth, 0)[:, None], 1)
    # Rank equal scores by class, like `argmax`, so that top-1 agrees with the predicted class.
    before = (scores > own).sum(1) + ((scores == own) & (np.arange(k) < np.maximum(truth, 0)[:, None])).sum(1)
    known = truth >= 0
    hits = {f"top{n}": known & (before < n) for n in (1, 5) if n == 1 or k > n}
    classes, n_classes = _all_classes(truth, k)
    # Computed from the scores: float32 cannot represent a probability of 1e-50.
    above = scores.astype(np.float64) - own
    losses = None if probabilities is None else np.where(known, np.logaddexp.reduce(above, axis=1), np.nan)

    def compute(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        values = {} if losses is None else {"log_loss": _mean(losses[rows])}
        *_, f1, present = _by_class(classes[rows], n_classes, predicted[rows])
        return values | {"macro_f1": float(f1[present].mean())}

    metrics = {name: exact_proportion(float(hit.mean()), count) for name, hit in hits.items()}
    drawn = bootstrap(compute, count, seed, RESAMPLES)
    if losses is not None:
        metrics["log_loss"] = drawn["log_loss"]
        n_wrong = count - int(hits["top1"].sum())
        if n_wrong < _FEW_ERRORS and metrics["log_loss"].method:
            metrics["log_loss"] = too_narrow(metrics["log_loss"], f"only {n_wrong} rows are wrong")
    n, recall, *_ = _by_class(classes, n_classes, predicted)
    present = n > 0
    rows = effective_rows(n[present], recall[present])
    metrics["balanced_accuracy"] = exact_proportion(float(recall[present].mean()), rows)
    # The resampling of rows without an error has no width.
    metrics["macro_f1"] = widened(drawn["macro_f1"], exact_proportion(drawn["macro_f1"].value, rows))
    if (smallest := int(n[present].min())) < _FEW_IN_A_CLASS:
        for name in ("balanced_accuracy", "macro_f1"):
            metrics[name] = too_narrow(metrics[name], f"a class has only {smallest} test rows")
    if probabilities is not None:
        confidence = probabilities.max(1).astype(np.float64)
        # No interval: resampling rows makes this error larger, so that the interval often lay above the estimate. On
        # 100 rows, a calibrated probe has 0.05; so the mean of such a probe stands beside it.
        metrics["calibration_error"] = Estimate(expected_calibration_error(confidence, hits["top1"]))
        generator = np.random.default_rng(seed)
        draws = [expected_calibration_error(confidence, generator.random(count) < confidence)
                 for _ in range(_CALIBRATED_DRAWS)]  # fmt: skip
        metrics["calibration_error_if_calibrated"] = Estimate(float(np.mean(draws)))
    return metrics


def too_narrow(estimate: Estimate, reason: str) -> Estimate:
    """Return the estimate with the remark that its interval may be too narrow."""
    return replace(estimate, method=f"{estimate.method}; may be too narrow, since {reason}")


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def multilabel_metrics(scores: NDArray[np.float32], truth: NDArray[np.float32], seed: int) -> dict[str, Estimate]:
    """Compute mAP, the mean average precision over labels; labels without a positive row are skipped.

    Args:
        scores: (N, K).
        truth: (N, K) 0 or 1.
        seed: seed of the resampling for intervals.
    """
    precision_of = ranking(scores, truth)

    def compute(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        times = np.bincount(np.arange(len(scores))[rows], minlength=len(scores)).astype(np.float64)
        return {"mAP": _mean(precision_of(times))}

    if scores.size > _MOST_RESAMPLED:
        return {name: Estimate(value) for name, value in compute(slice(None)).items()}
    metrics = bootstrap(compute, len(scores), seed, _COSTLY_RESAMPLES)
    positives = truth.sum(0)[truth.any(0)]
    if len(positives) and (fewest := int(positives.min())) < _FEW_POSITIVES:
        metrics["mAP"] = too_narrow(metrics["mAP"], f"a label has only {fewest} test rows")
    return metrics


def average_precision(scores: NDArray[np.float32], truth: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute the average precision (K,): the sum over thresholds of precision times gained recall, as in scikit-learn.

    Labels without a positive row have NaN.

    Args:
        scores: (N, K).
        truth: (N, K) 0 or 1.
    """
    return ranking(scores, truth)(np.ones(len(scores)))


def ranking(
    scores: NDArray[np.float32], truth: NDArray[np.float32]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return a function of the numbers of times (N,) that rows count, which computes the `average_precision`."""
    order = np.argsort(-scores, axis=0, kind="stable")  # of the rows for each label
    ranked, of_rows = np.take_along_axis(scores, order, 0), np.take_along_axis(truth, order, 0)
    # Whether the next row has another score.
    is_last = np.concatenate([ranked[1:] != ranked[:-1], np.ones((1, scores.shape[1]), bool)])

    def precision_of(times: NDArray[np.float64]) -> NDArray[np.float64]:
        precisions = np.full(scores.shape[1], np.nan)
        for label, (rows, positive, last) in enumerate(zip(order.T, of_rows.T, is_last.T, strict=True)):
            counted = times[rows]
            n_positives, n_rows = np.cumsum(counted * positive)[last], np.cumsum(counted)[last]
            if n_positives[-1] > 0:
                precision = np.divide(n_positives, n_rows, out=np.zeros_like(n_positives), where=n_rows > 0)
                precisions[label] = float((np.diff(n_positives, prepend=0) * precision).sum() / n_positives[-1])
        return precisions

    return precision_of


def regression_metrics(predicted: NDArray[np.float64], truth: NDArray[np.float64], seed: int) -> dict[str, Estimate]:
    """Compute r2, rmse and mae; with several targets, r2 is the mean over targets, as in scikit-learn.

    Args:
        predicted: (N, K).
        truth: (N, K).
        seed: seed of the resampling for intervals.
    """
    errors = predicted - truth

    def compute(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        spread = ((truth[rows] - truth[rows].mean(0)) ** 2).sum(0)
        squared_errors = (errors[rows] ** 2).sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 0, 1 - squared_errors / spread, np.where(squared_errors > 0, 0.0, 1.0))
        return {
            "r2": float(r2.mean()),
            "rmse": float(np.sqrt((errors[rows] ** 2).mean())),
            "mae": float(np.abs(errors[rows]).mean()),
        }

    return resampled(compute, len(truth), seed, _FEW_NUMBERS, "rows")


def resampled(compute: MetricsOfRows, count: int, seed: int, few: int, what: str) -> dict[str, Estimate]:
    """Return metrics with bootstrap intervals, which may be too narrow if there are less than `few` rows or images."""
    metrics = bootstrap(compute, count, seed, RESAMPLES)
    if count >= few:
        return metrics
    return {name: too_narrow(metric, f"there are only {count} {what}") for name, metric in metrics.items()}


def expected_calibration_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Return the mean distance between confidence and accuracy over 15 equal bins of confidence (Guo et al. 2017)."""
    bins = np.clip(np.ceil(confidence * _BINS).astype(np.int64) - 1, 0, _BINS - 1)
    apart = np.bincount(bins, confidence, _BINS) - np.bincount(bins, right.astype(np.float64), _BINS)
    return float(np.abs(apart).sum() / len(confidence))


def confusion_of(predicted: NDArray[np.int64], truth: NDArray[np.int64], n_classes: int) -> NDArray[np.int64]:
    """Count the rows (K, K) of class i predicted as class j; rows of classes missing from training are skipped."""
    known = truth >= 0
    cells = np.bincount(truth[known] * n_classes + predicted[known], minlength=n_classes**2)
    return cells.reshape(n_classes, n_classes)


def by_class(predicted: NDArray[np.int64], truth: NDArray[np.int64], n_classes: int) -> dict[str, NDArray[Any]]:
    """Compute recall, precision and f1 (K,) of each class, 0 if undefined, as in scikit-learn; n: number of rows."""
    columns = _by_class(*_all_classes(truth, n_classes), predicted)
    n, recall, precision, f1, _ = (column[:n_classes] for column in columns)
    return {"n": n, "recall": recall, "precision": precision, "f1": f1}


def _all_classes(truth: NDArray[np.int64], n_classes: int) -> tuple[NDArray[np.int64], int]:
    """Renumber the classes missing from training to follow the others; return (N,) classes and their number."""
    return np.where(truth >= 0, truth, n_classes - 1 - truth), n_classes + max(0, -int(truth.min(initial=0)))


def _by_class(
    truth: NDArray[np.int64], n_classes: int, predicted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return (K,) numbers of rows, recall, precision, f1, and whether the class is present or predicted."""
    right = truth[truth == predicted]
    n, n_predicted, n_right = (np.bincount(classes, minlength=n_classes) for classes in (truth, predicted, right))
    recall = np.divide(n_right, n, out=np.zeros(n_classes), where=n > 0)
    precision = np.divide(n_right, n_predicted, out=np.zeros(n_classes), where=n_predicted > 0)
    f1 = np.divide(2 * n_right, n + n_predicted, out=np.zeros(n_classes), where=n + n_predicted > 0)
    return n, recall, precision, f1, n + n_predicted > 0


def mcnemar(right: NDArray[np.bool_], others_right: NDArray[np.bool_]) -> tuple[int, int, float]:
    """Test whether one of two classifiers is better on the same images: exact test of McNemar (1947).

    Args:
        right: (N,) whether the first classifier is right.
        others_right: (N,) whether the second classifier is right.

    Returns:
        the number of images where only the first is right, the number where only the second is right, and the two-sided
        p: the probability of a difference at least this large if both are equally good.
    """
    first, second = int((right & ~others_right).sum()), int((others_right & ~right).sum())
    fewer, more = sorted((first, second))
    # Twice the lower tail of the binomial distribution with p = 1/2 (DLMF 8.17.5).
    return first, second, min(1.0, 2 * _beta_below(0.5, more, fewer + 1)) if more else 1.0


def metric_name(metric: str) -> str:
    """Return the name of a metric for tables: "top-1", or "top-1, 5 per class" for "top1@5"."""
    base, _, shots = metric.partition("@")
    return _NAMES.get(base, base) + (f", {shots} per class" if shots else "")


def format_metric(metric: str, value: float, unit: bool = True) -> str:
    """Return the value of a metric for tables: accuracies as percentages, the others with three decimals."""
    if metric.partition("@")[0] in _PERCENT_METRICS:
        return f"{100 * value:.1f}" + (" %" if unit else "")
    return f"{value:.3f}"


# Clopper and Pearson's is the only one of seven whose coverage stays above 94 % on a fine grid of accuracies (Wilson's
# falls to 84 %, mid-p to 92 %), and it is at most 11 % wider than Wilson's. For means of skewed losses, BCa covers 75
# to 83 % where percentiles cover 71 to 82 %, and bootstrap-t gives thousands of nats: such results have a warning
# instead.
_TAIL = 0.025  # probability beyond each end
_BISECTIONS = 60
_CLOSE = 1e-15  # relative change at which a continued fraction has converged
_TINY = 1e-300  # in place of zero denominators


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95 % interval.

    Attributes:
        value: the metric on the test rows.
        low: lower end; NaN without an interval.
        high: upper end; NaN without an interval.
        method: how the interval was computed, and whether it is known to be too narrow; empty without an interval.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    method: str = ""


def exact_proportion(value: float, rows: float) -> Estimate:
    """Return a proportion with its exact interval (Clopper and Pearson 1934).

    The coverage is at least 95 % for every number of rows and every true proportion. With an effective number of rows
    in place of the number, this is the interval of Korn and Graubard 1998.

    Args:
        value: the proportion, 0 to 1.
        rows: number of rows, above zero; need not be whole.
    """
    hits = value * rows
    misses = rows - hits
    low = _beta_quantile(_TAIL, hits, misses + 1) if hits > 1e-9 * rows else 0.0
    high = _beta_quantile(1 - _TAIL, hits + 1, misses) if misses > 1e-9 * rows else 1.0
    method = "Clopper-Pearson" + ("" if rows == round(rows) else f", {rows:.1f} effective rows")
    return Estimate(value, low, high, method)


def effective_rows(rows: NDArray[np.int64], recalls: NDArray[np.float64]) -> float:
    """Return the number of rows on which a plain proportion would vary as much as the mean recall of K classes.

    It is the smaller of two estimates: for equal true recalls, K^2 / sum(1 / n_k); for the recalls seen,
    b (1 - b) K^2 / sum(r_k (1 - r_k) / n_k), where b is the mean recall. The second uses recalls that are smoothed by
    one row on each side, since a class whose two test rows are right may well have wrong ones.

    Args:
        rows: (K,) numbers n_k of test rows, above zero.
        recalls: (K,) shares r_k that are classified correctly.
    """
    k = len(rows)
    smooth = (recalls * rows + 1) / (rows + 2)
    mean = float(smooth.mean())
    seen = mean * (1 - mean) * k**2 / float((smooth * (1 - smooth) / rows).sum())
    return min(k**2 / float((1 / rows).sum()), seen)


def widened(estimate: Estimate, other: Estimate) -> Estimate:
    """Return the estimate with the outer ends of its own interval and of another."""
    low, high = min(estimate.low, other.low), max(estimate.high, other.high)
    return replace(estimate, low=low, high=high, method=f"wider of {estimate.method} and {other.method}")


def bootstrap(compute: MetricsOfRows, count: int, seed: int, draws: int) -> dict[str, Estimate]:
    """Return metrics with the 2.5 % and 97.5 % percentiles over rows drawn with replacement (Efron 1979).

    Args:
        compute: computes the metrics of selected rows.
        count: number of rows.
        seed: seed of the draws.
        draws: number of draws.
    """
    values = compute(slice(None))
    generator = np.random.default_rng(seed)
    with np.errstate(all="ignore"):  # a draw may lack a class, or repeat a row many times
        drawn = [compute(generator.integers(0, count, count)) for _ in range(draws)]
    estimates = {name: Estimate(value) for name, value in values.items()}
    for name, value in values.items():
        if finite := [draw[name] for draw in drawn if math.isfinite(draw[name])]:
            low, high = np.percentile(finite, [100 * _TAIL, 100 * (1 - _TAIL)]).tolist()
            estimates[name] = Estimate(value, low, high, "percentile bootstrap")
    return estimates


def bisected(is_below: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Return two neighbouring numbers from `low` to `high`: the function is true up to the first, then false."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, by that of the beta distribution."""
    return math.sqrt(degrees * (1 / _beta_quantile(2 * _TAIL, degrees / 2, 0.5) - 1))


def _beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the quantile of the beta distribution with the parameters a and b, above zero."""
    return sum(bisected(lambda x: _beta_below(x, a, b) < probability, 0.0, 1.0)) / 2


def _beta_below(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta_below(1 - x, b, a)
    factor = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    ) / a  # fmt: skip
    # The modified method of Lentz (Thompson and Barnett 1986), after the first term, which is 1.
    upper, lower, fraction = 2.0, 1.0, 2.0
    for i in range(1, 10_000):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + term * lower) or _TINY)
        upper = (1 + term / upper) or _TINY
        fraction *= upper * lower
        if abs(upper * lower - 1) < _CLOSE:
            break
    return factor * (fraction - 1)


LEVEL = 0.05  # of p-values, at which classifiers are called different
_POINTS = 801  # of the integral over the normal distribution
_FARTHEST = 9.0  # of these points, in standard deviations


def paired_tests(right: Mapping[str, NDArray[np.bool_]]) -> dict[tuple[str, str], float]:
    """Test all pairs of classifiers by the exact test of McNemar, corrected by Holm for all pairs.

    If all are equally good, the probability that any p-value is at most 0.05 is at most 5 %, also that of the best
    classifier and another.

    Args:
        right: name -> (N,) whether the classifier is right; the same images in the same order.

    Returns:
        (first, second) -> two-sided p-value, for every pair in both orders.
    """
    pairs = list(combinations(right, 2))
    corrected = holm([mcnemar(right[first], right[second])[2] for first, second in pairs]).tolist()
    tests = dict(zip(pairs, corrected, strict=True))
    return tests | {(second, first): p for (first, second), p in tests.items()}


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Return p-values (M,) corrected for M tests by the method of Holm (1979)."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    steps = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    return np.minimum(steps, 1)[np.argsort(order)]


@dataclass(frozen=True)
class RankTest:
    """Test of Nemenyi on average ranks (Demsar 2006).

    Attributes:
        ranks: (K,) average rank of each classifier; 1 is the best, and equal values share the mean of their ranks.
        critical_difference: classifiers whose average ranks differ by more are different, with p below 0.05.
        p: (K, K) p-values of the differences, corrected for all pairs; 1 on the diagonal.
    """

    ranks: NDArray[np.float64]
    critical_difference: float
    p: NDArray[np.float64]


def rank_test(values: ArrayLike) -> RankTest:
    """Test all pairs of classifiers by their average ranks.

    If all are equally good in every task, the probability that any p-value is at most 0.05 is about 5 %; with few
    tasks, it is less.

    Args:
        values: (T, K) metric of each of K >= 2 classifiers in each of T tasks; larger is better. The metrics of tasks
            need not be comparable.
    """
    matrix = np.asarray(values, np.float64)
    tasks, classifiers = matrix.shape
    ranks = np.mean([ranks_of(line) for line in matrix], 0)
    error = np.sqrt(classifiers * (classifiers + 1) / (12 * tasks))
    differences = np.abs(ranks[:, None] - ranks)
    p = np.stack([_above(line / error, classifiers) for line in differences])
    # The span that the range of K standard normal values exceeds with probability 0.05.
    _, span = bisected(lambda span: float(_above(np.array([span]), classifiers)[0]) > LEVEL, 0.0, 2 * _FARTHEST)
    return RankTest(ranks, float(span * error), p)


def ranks_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks (K,) of values (K,), the largest first; equal values share the mean of their ranks."""
    _, place, counts = np.unique(-values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])


def _above(spans: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the probabilities (M,) that the range of `count` standard normal values exceeds spans (M,).

    This is the studentized range distribution with infinitely many degrees of freedom: the smallest value is x, and
    all others lie between x and x + span.
    """
    x = torch.linspace(-_FARTHEST, _FARTHEST, _POINTS, dtype=torch.float64)[:, None]
    density = torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5
    between = torch.special.ndtr(x + torch.from_numpy(spans)) - torch.special.ndtr(x)
    inside = torch.trapezoid(count * density * between ** (count - 1), x, dim=0)
    above: NDArray[np.float64] = 1 - np.minimum(1.0, inside.numpy())
    return above
