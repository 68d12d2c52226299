"""Choice of a penalty strength on validation rows, or on folds of the training rows.

The strength with the best primary metric is chosen. Ties go to the smallest log loss, then to the strongest penalty.
Papers specify only the first criterion.

A tenth of few training rows cannot tell the strengths apart: two probes that disagree on a twentieth of m rows have
accuracies whose difference has a standard error of sqrt(0.05 / m), which is a point at 500 rows. With fewer rows,
strengths are compared on five stratified folds of all training rows (Kohavi 1995), drawn again until 500 rows are
predicted, at most four times. Accuracies within one standard error of the best then count as ties (Hastie, Tibshirani
and Friedman 2009, section 7.10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.metrics import average_precision

__all__ = [
    "ENOUGH_ROWS", "N_FOLDS", "ValidationScore", "position_of_best", "primary", "score_left_out",
    "score_on_validation", "standard_error", "stratified_folds",
]  # fmt: skip

# Against scikit-learn's cross-validation by log loss, on data sets of 15 to 1,000 rows (`strength_choice.py` of the
# benchmarks), the best on a tenth loses 0.6 points of accuracy (35 on one) and 0.06 of calibration error; folds gain
# 0.09 points (standard error 0.04, at worst -3.4) and lose 0.0025. A `val` split, dinov2-logreg and fewshot define the
# rows to choose on. All folds and strengths are fitted side by side: a fold is a column of weights.
ENOUGH_ROWS = 500  # to choose on; see above
N_FOLDS = 5
_MOST_DRAWS = 4

_SCORES = 1 << 26  # held at once while strengths are compared
# In nats per validation row. Smaller differences of the log loss count as ties: for separable classes, the log loss
# keeps falling by ever smaller amounts as the penalty goes to zero.
_EQUAL_LOG_LOSS = 1e-3


def primary(scores: NDArray[Any], targets: NDArray[Any], task: str) -> float:
    """Return the primary metric: top-1 for classification, mAP for multilabel, R^2 for regression."""
    if task == "classification":
        return float((scores.argmax(1) == targets).mean())
    if task == "multilabel":
        precisions = average_precision(scores, targets)
        return float(np.nanmean(precisions)) if np.isfinite(precisions).any() else 0.0
    spread = ((targets - targets.mean(0)) ** 2).sum(0)
    return float(np.mean(1 - ((scores - targets) ** 2).sum(0) / np.where(spread > 0, spread, 1)))


class ValidationScore(NamedTuple):
    """Result of a strength on the validation rows.

    Attributes:
        value: the primary metric.
        log_loss: in nats; 0 for regression.
        margin: values that are at most this much smaller than this one, if it is the best, count as equal.
    """

    value: float
    log_loss: float
    margin: float = 0.0


def position_of_best(scores: Sequence[ValidationScore]) -> int:
    """Return the position of the best strength; `scores` starts with the strongest penalty."""
    best = max(scores)
    equal = [score.value >= best.value - best.margin for score in scores]
    least = min(score.log_loss for score, is_equal in zip(scores, equal, strict=True) if is_equal)
    return next(i for i, score in enumerate(scores) if equal[i] and score.log_loss <= least + _EQUAL_LOG_LOSS)


def standard_error(accuracy: float, count: int) -> float:
    """Return the standard error of an accuracy on `count` rows."""
    return math.sqrt(max(0.0, accuracy * (1 - accuracy)) / count)


def stratified_folds(targets: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """Assign rows to five folds, in several draws.

    Args:
        targets: (N,) classes, each of which is spread over the folds; or (N, K) labels, which are not.
        seed: seed of the draws.

    Returns:
        (N, R) fold numbers; -1 for the only row of a class, which is never left out.
    """
    count = len(targets)
    generator = np.random.default_rng(seed)
    n_draws = min(_MOST_DRAWS, -(-ENOUGH_ROWS // count))
    folds = np.empty((count, n_draws), np.int64)
    for draw in range(n_draws):
        order = generator.permutation(count)
        if targets.ndim == 1:
            order = order[np.argsort(targets[order], kind="stable")]
        folds[order, draw] = np.arange(count) % N_FOLDS
    if targets.ndim == 1:
        folds[np.bincount(targets)[targets] == 1] = -1
    return folds


def score_left_out(
    scores: NDArray[np.float32], targets: NDArray[Any], task: str, folds: NDArray[np.int64]
) -> ValidationScore:
    """Evaluate a strength by the scores (R, N, K) of rows by probes fitted without these rows, averaged over R draws.

    The margin is the standard error of an accuracy; 0 for multilabel.
    """
    left_out = folds[:, 0] >= 0
    known = targets[left_out]
    values, losses = [], []
    for draw in scores:
        own = _two_columns(draw[left_out], task)
        values.append(primary(own, known, task))
        losses.append(_log_loss(own, known, task))
    value = float(np.mean(values))
    margin = standard_error(value, len(known)) if task == "classification" else 0.0
    return ValidationScore(value, float(np.mean(losses)), margin)


def _two_columns(scores: NDArray[Any], task: str) -> NDArray[Any]:
    """Return the scores (N, K); of two classes, which have one column, 0 and the score."""
    if task == "classification" and scores.shape[1] == 1:
        return np.concatenate([np.zeros_like(scores), scores], 1)
    return scores


def _log_loss(scores: NDArray[Any], targets: NDArray[Any], task: str) -> float:
    """Return the mean of -log p over rows, and over labels for multilabel; rows of unknown classes are skipped.

    Args:
        scores: (N, K) logits.
        targets: (N,) classes, negative if unknown; or (N, K) 0 or 1; or (N, K) numbers, for which the result is 0.
        task: see `score_on_validation`.
    """
    wide = scores.astype(np.float64)
    if task == "multilabel":
        return float(np.logaddexp(0, np.where(targets > 0, -wide, wide)).mean())
    known = np.flatnonzero(targets >= 0) if task == "classification" else np.zeros(0, np.int64)
    if not len(known):
        return 0.0
    return float((np.logaddexp.reduce(wide[known], axis=1) - wide[known, targets[known]]).mean())


def score_on_validation(
    weights: NDArray[Any], biases: NDArray[Any], rows: FeatureRows, targets: NDArray[Any], task: str
) -> list[ValidationScore]:
    """Evaluate probes on validation rows, some probes at a time.

    Args:
        weights: (M, K, D) for M strengths.
        biases: (M, K).
        rows: (N, D), scaled.
        targets: classes, labels or numbers of the rows.
        task: "classification", "multilabel" or "regression".
    """
    k = weights.shape[1]
    at_once = max(1, _SCORES // (k * len(rows)))
    results = []
    for first in range(0, len(weights), at_once):
        chunk, shift = weights[first : first + at_once], biases[first : first + at_once]
        scores = np.empty((len(rows), len(chunk), k), chunk.dtype)
        for start, block in rows.blocks():
            products = (block @ chunk.reshape(-1, chunk.shape[2]).T).reshape(-1, len(chunk), k)
            scores[start : start + len(block)] = products + shift
        for i in range(len(chunk)):
            own = _two_columns(scores[:, i], task)
            value, loss = primary(own, targets, task), _log_loss(own, targets, task)
            results.append(
                ValidationScore(-math.inf if math.isnan(value) else value, math.inf if math.isnan(loss) else loss)
            )
    return results
