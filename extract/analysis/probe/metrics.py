"""How good predictions are, with the interval that the choice of test images alone leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Estimate",
    "average_precision",
    "by_class",
    "classification_metrics",
    "confusion_of",
    "expected_calibration_error",
    "mcnemar",
    "multilabel_metrics",
    "regression_metrics",
]

RESAMPLES = 1000  # of the test rows, for intervals (Efron and Tibshirani 1993, section 14.3, advise as many)
_COSTLY_RESAMPLES = 200  # where each takes a pass over all labels
_MOST_RESAMPLED = 10_000_000  # rows times labels
_BINS = 15  # of confidence, as of Guo et al. 2017


@dataclass(frozen=True)
class Estimate:
    """A number, and the ends of its 95 % interval: percentiles of it over test rows drawn with replacement.

    1,000 draws; 200 of mAP. NaN where there is no interval: of the calibration error, which each draw makes larger, and
    of mAP where rows times labels are more than ten million.
    """

    value: float
    low: float
    high: float


def classification_metrics(
    scores: NDArray[np.float32], truth: NDArray[np.int64], probabilities: NDArray[np.float32] | None, seed: int
) -> dict[str, Estimate]:
    """top1, top5, balanced_accuracy, macro_f1, and with probabilities log_loss and calibration_error.

    balanced_accuracy is the mean recall over the classes that are there; macro_f1 is the mean over the classes that are
    there or predicted; both as of scikit-learn. calibration_error is the expected one over 15 equal bins of
    confidence (Guo et al. 2017). log_loss leaves out rows of classes that training did not have, for which it has no
    finite value.

    Args:
        scores: (N, K).
        truth: (N,) classes; -1, -2, ...: those that training did not have, which are always wrong.
        probabilities: (N, K); None: the probe has none.
        seed: of the intervals.
    """
    count, k = scores.shape
    predicted = scores.argmax(1)
    own = np.take_along_axis(scores, np.maximum(truth, 0)[:, None], 1)
    # The class predicted first is that of `argmax`, so that top-1 is the same also where scores are equal.
    before = (scores > own).sum(1) + ((scores == own) & (np.arange(k) < np.maximum(truth, 0)[:, None])).sum(1)
    known = truth >= 0
    hits = {"top1": known & (before == 0)}
    if k > 5:
        hits["top5"] = known & (before < 5)
    classes, n_classes = _all_classes(truth, k)
    columns: dict[str, NDArray[Any]] = {**hits}
    if probabilities is not None:
        # From the scores: a probability of 1e-50 has none in float32.
        above = scores.astype(np.float64) - own
        columns["log_loss"] = np.where(known, np.logaddexp.reduce(above, axis=1), np.nan)
        confidence = probabilities.max(1).astype(np.float64)

    def of(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        found = {name: _mean(values[rows]) for name, values in columns.items()}
        n, recall, _, f1, there = _by_class(classes[rows], n_classes, predicted[rows])
        found["balanced_accuracy"] = float(recall[n > 0].mean())
        found["macro_f1"] = float(f1[there].mean())
        return found

    metrics = _with_intervals(of, count, seed)
    if probabilities is not None:
        error = expected_calibration_error(confidence, hits["top1"])
        metrics["calibration_error"] = Estimate(error, math.nan, math.nan)
    return metrics


def _mean(values: NDArray[Any]) -> float:
    there = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(there.mean()) if len(there) else math.nan


def multilabel_metrics(scores: NDArray[np.float32], truth: NDArray[np.float32], seed: int) -> dict[str, Estimate]:
    """mAP, the mean over labels of the average precision; labels that no row has are left out.

    Args:
        scores: (N, K).
        truth: (N, K) 0 or 1.
        seed: of the intervals.
    """
    ranking = _Ranking.of(scores, truth)

    def of(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        times = np.bincount(np.arange(len(scores))[rows], minlength=len(scores)).astype(np.float64)
        return {"mAP": _mean(ranking.average_precision(times))}

    if scores.size > _MOST_RESAMPLED:
        return {name: Estimate(value, math.nan, math.nan) for name, value in of(slice(None)).items()}
    return _with_intervals(of, len(scores), seed, _COSTLY_RESAMPLES)


def average_precision(
    scores: NDArray[np.float32], truth: NDArray[np.float32], times: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """(K,) the sum over thresholds of precision times the recall gained there, as of scikit-learn; NaN: no row has it.

    Args:
        scores: (N, K).
        truth: (N, K) 0 or 1.
        times: (N,) how often each row counts; None: once.
    """
    return _Ranking.of(scores, truth).average_precision(np.ones(len(scores)) if times is None else times)


@dataclass(frozen=True)
class _Ranking:
    """Rows by their scores for each label, from the highest on.

    Attributes:
        rows: (N, K) numbers of rows.
        truth: (N, K) theirs.
        last: (N, K) whether the next has another score.
    """

    rows: NDArray[np.int64]
    truth: NDArray[np.float32]
    last: NDArray[np.bool_]

    @staticmethod
    def of(scores: NDArray[np.float32], truth: NDArray[np.float32]) -> _Ranking:
        rows = np.argsort(-scores, axis=0, kind="stable")
        ranked = np.take_along_axis(scores, rows, 0)
        last = np.concatenate([ranked[1:] != ranked[:-1], np.ones((1, scores.shape[1]), bool)])
        return _Ranking(rows, np.take_along_axis(truth, rows, 0), last)

    def average_precision(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.full(self.rows.shape[1], np.nan)
        for label, (rows, truth, last) in enumerate(zip(self.rows.T, self.truth.T, self.last.T, strict=True)):
            counted = times[rows]
            true, everyone = np.cumsum(counted * truth)[last], np.cumsum(counted)[last]
            if true[-1] > 0:
                precision = np.divide(true, everyone, out=np.zeros_like(true), where=everyone > 0)
                found[label] = float((np.diff(true, prepend=0) * precision).sum() / true[-1])
        return found


def regression_metrics(predicted: NDArray[np.float64], truth: NDArray[np.float64], seed: int) -> dict[str, Estimate]:
    """r2, rmse and mae; of several targets, r2 is the mean of theirs, as of scikit-learn.

    Args:
        predicted: (N, K).
        truth: (N, K).
        seed: of the intervals.
    """
    off = predicted - truth

    def of(rows: NDArray[np.int64] | slice) -> dict[str, float]:
        spread = ((truth[rows] - truth[rows].mean(0)) ** 2).sum(0)
        missed = (off[rows] ** 2).sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 0, 1 - missed / spread, np.where(missed > 0, 0.0, 1.0))
        return {
            "r2": float(r2.mean()),
            "rmse": float(np.sqrt((off[rows] ** 2).mean())),
            "mae": float(np.abs(off[rows]).mean()),
        }

    return _with_intervals(of, len(truth), seed)


def expected_calibration_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """The mean distance of confidence and accuracy over 15 equal bins of confidence (Guo et al. 2017)."""
    bins = np.clip(np.ceil(confidence * _BINS).astype(np.int64) - 1, 0, _BINS - 1)
    apart = np.bincount(bins, confidence, _BINS) - np.bincount(bins, right.astype(np.float64), _BINS)
    return float(np.abs(apart).sum() / len(confidence))


def confusion_of(predicted: NDArray[np.int64], truth: NDArray[np.int64], n_classes: int) -> NDArray[np.int64]:
    """(K, K) rows of class i that were taken for class j; those of a class that training did not have are left out."""
    known = truth >= 0
    cells = np.bincount(truth[known] * n_classes + predicted[known], minlength=n_classes**2)
    return cells.reshape(n_classes, n_classes)


def by_class(predicted: NDArray[np.int64], truth: NDArray[np.int64], n_classes: int) -> dict[str, NDArray[Any]]:
    """(K,) recall, precision and f1 of each class, 0 where nothing can be said, as of scikit-learn; n: its rows."""
    n, recall, precision, f1, _ = (one[:n_classes] for one in _by_class(*_all_classes(truth, n_classes), predicted))
    return {"n": n, "recall": recall, "precision": precision, "f1": f1}


def _all_classes(truth: NDArray[np.int64], n_classes: int) -> tuple[NDArray[np.int64], int]:
    """The classes with those that training did not have behind them, and how many there are in all."""
    return np.where(truth >= 0, truth, n_classes - 1 - truth), n_classes + max(0, -int(truth.min(initial=0)))


def _by_class(
    truth: NDArray[np.int64], n_classes: int, predicted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """(K,) rows, recall, precision, f1, and whether the class is there or was predicted."""
    n, said, right = (np.bincount(one, minlength=n_classes) for one in (truth, predicted, truth[truth == predicted]))
    recall = np.divide(right, n, out=np.zeros(n_classes), where=n > 0)
    precision = np.divide(right, said, out=np.zeros(n_classes), where=said > 0)
    f1 = np.divide(2 * right, n + said, out=np.zeros(n_classes), where=n + said > 0)
    return n, recall, precision, f1, n + said > 0


def _with_intervals(
    of: Callable[[NDArray[np.int64] | slice], dict[str, float]], count: int, seed: int, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    values = of(slice(None))
    generator = np.random.default_rng(seed)
    with np.errstate(all="ignore"):  # a draw may lack a class, or have one row many times
        drawn = [of(generator.integers(0, count, count)) for _ in range(resamples)]
    found = {}
    for name, value in values.items():
        there = [one[name] for one in drawn if math.isfinite(one[name])]
        low, high = np.percentile(there, [2.5, 97.5]) if there else (math.nan, math.nan)
        found[name] = Estimate(value, float(low), float(high))
    return found


def mcnemar(right: NDArray[np.bool_], others_right: NDArray[np.bool_]) -> tuple[int, int, float]:
    """Whether one of two classifiers is better on the same images: the exact test of McNemar (1947).

    Args:
        right: (N,) where the first is right.
        others_right: (N,) where the second is.

    Returns:
        how often only the first is right, how often only the second, and the two-sided p: how probable it is that they
        are at least so far apart if both are equally good.
    """
    first, second = int((right & ~others_right).sum()), int((others_right & ~right).sum())
    count = first + second
    # Twice the lower tail of a fair coin, from logarithms of its terms, so that large counts do not overflow.
    terms = [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1)
             for i in range(min(first, second) + 1)]  # fmt: skip
    tail = float(np.exp(np.logaddexp.reduce(terms) - count * math.log(2)))
    return first, second, min(1.0, 2 * tail)
