"""Metrics of predictions, with intervals for the random choice of test images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.intervals import Estimate, bootstrap, effective_rows, exact_proportion, widened

__all__ = [
    "average_precision", "by_class", "classification_metrics", "confusion_of", "expected_calibration_error",
    "format_metric", "mcnemar", "metric_name", "multilabel_metrics", "ranking", "regression_metrics", "resampled",
    "too_narrow",
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
    hits = {"top1": known & (before == 0)}
    if k > 5:
        hits["top5"] = known & (before < 5)
    classes, n_classes = _all_classes(truth, k)
    losses = None
    if probabilities is not None:
        # Computed from the scores: float32 cannot represent a probability of 1e-50.
        above = scores.astype(np.float64) - own
        losses = np.where(known, np.logaddexp.reduce(above, axis=1), np.nan)

    def compute(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        values = {} if losses is None else {"log_loss": _mean(losses[rows])}
        *_, f1, present = _by_class(classes[rows], n_classes, predicted[rows])
        return values | {"macro_f1": float(f1[present].mean())}

    metrics = {name: exact_proportion(float(hit.mean()), count) for name, hit in hits.items()}
    drawn = bootstrap(compute, count, seed, RESAMPLES)
    if losses is not None:
        metrics["log_loss"] = drawn["log_loss"]
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
        n_wrong = count - int(hits["top1"].sum())
        if n_wrong < _FEW_ERRORS and metrics["log_loss"].method:
            metrics["log_loss"] = too_narrow(metrics["log_loss"], f"only {n_wrong} rows are wrong")
        confidence = probabilities.max(1).astype(np.float64)
        # No interval: resampling rows makes this error larger, so that the interval often lay above the estimate. On
        # 100 rows, a calibrated probe has 0.05; so the mean of such a probe stands beside it.
        metrics["calibration_error"] = Estimate(expected_calibration_error(confidence, hits["top1"]))
        metrics["calibration_error_if_calibrated"] = Estimate(_error_if_calibrated(confidence, seed))
    return metrics


def too_narrow(estimate: Estimate, reason: str) -> Estimate:
    """Return the estimate with the remark that its interval may be too narrow."""
    return replace(estimate, method=f"{estimate.method}; may be too narrow, since {reason}")


def _error_if_calibrated(confidence: NDArray[np.float64], seed: int) -> float:
    generator = np.random.default_rng(seed)
    draws = [expected_calibration_error(confidence, generator.random(len(confidence)) < confidence)
             for _ in range(_CALIBRATED_DRAWS)]  # fmt: skip
    return float(np.mean(draws))


def _mean(values: NDArray[Any]) -> float:
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
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


def resampled(
    compute: Callable[[NDArray[np.int64] | slice], dict[str, float]], count: int, seed: int, few: int, what: str
) -> dict[str, Estimate]:
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
    count = first + second
    # Twice the lower tail of the binomial distribution with p = 1/2; logarithms keep large counts from overflowing.
    terms = [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1)
             for i in range(min(first, second) + 1)]  # fmt: skip
    tail = float(np.exp(np.logaddexp.reduce(terms) - count * math.log(2)))
    return first, second, min(1.0, 2 * tail)


def metric_name(metric: str) -> str:
    """Return the name of a metric for tables: "top-1", or "top-1, 5 per class" for "top1@5"."""
    base, _, shots = metric.partition("@")
    return _NAMES.get(base, base) + (f", {shots} per class" if shots else "")


def format_metric(metric: str, value: float, unit: bool = True) -> str:
    """Return the value of a metric for tables: accuracies as percentages, the others with three decimals."""
    if metric.partition("@")[0] in _PERCENT_METRICS:
        return f"{100 * value:.1f}" + (" %" if unit else "")
    return f"{value:.3f}"
