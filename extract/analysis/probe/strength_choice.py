"""Choice of a penalty strength on validation rows.

The strength with the best primary metric is chosen. Ties go to the smallest log loss, then to the strongest penalty.
Papers specify only the first criterion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.metrics import average_precision

__all__ = ["ValidationScore", "position_of_best", "primary", "score_on_validation"]

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
        log_loss: in nats; 0 for regression; infinite if not computed, as for all values but the best.
    """

    value: float
    log_loss: float


def position_of_best(scores: Sequence[ValidationScore]) -> int:
    """Return the position of the best strength; `found` starts with the strongest penalty."""
    top = max(score.value for score in scores)
    least = min(score.log_loss for score in scores if score.value == top)
    return next(i for i, score in enumerate(scores) if score.value == top and score.log_loss <= least + _EQUAL_LOG_LOSS)


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
    weights: NDArray[Any], biases: NDArray[Any], rows: FeatureRows, targets: NDArray[Any], task: str,
    at_least: float = -math.inf,
) -> list[ValidationScore]:  # fmt: skip
    """Evaluate probes on validation rows.

    Args:
        weights: (M, K, D) for M strengths.
        biases: (M, K).
        rows: (N, D), scaled.
        targets: classes, labels or numbers of the rows.
        task: "classification", "multilabel" or "regression".
        at_least: the log loss is computed only for the best value, and only if that value reaches this limit.
    """
    values = _measure_each(weights, biases, rows, task, lambda scores: primary(scores, targets, task))
    top = max([at_least, *(value for value in values if not math.isnan(value))])
    tied = [i for i, value in enumerate(values) if value == top]
    losses = _measure_each(weights[tied], biases[tied], rows, task, lambda scores: _log_loss(scores, targets, task))
    known = dict(zip(tied, losses, strict=True))
    return [
        ValidationScore(-math.inf if math.isnan(value) else value, _or_infinite(known.get(i)))
        for i, value in enumerate(values)
    ]


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _measure_each(
    weights: NDArray[Any], biases: NDArray[Any], rows: FeatureRows, task: str, measure: Callable[[NDArray[Any]], float]
) -> list[float]:
    """Apply `judge` to the scores (N, K) of each of M probes, some probes at a time.

    For two classes, the scores have two columns: 0 and the score.
    """
    k = weights.shape[1]
    at_once = max(1, _SCORES // (k * len(rows)))
    measures = []
    for first in range(0, len(weights), at_once):
        chunk, shift = weights[first : first + at_once], biases[first : first + at_once]
        scores = np.empty((len(rows), len(chunk), k), chunk.dtype)
        for start, block in rows.blocks():
            scores[start : start + len(block)] = (block @ chunk.reshape(-1, chunk.shape[2]).T).reshape(
                -1, len(chunk), k
            ) + shift
        for i in range(len(chunk)):
            probe_scores = scores[:, i]
            if task == "classification" and k == 1:
                probe_scores = np.concatenate([np.zeros_like(probe_scores), probe_scores], 1)
            measures.append(measure(probe_scores))
    return measures
