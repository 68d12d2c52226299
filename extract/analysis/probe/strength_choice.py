"""How good probes of several strengths are on validation rows, and which of them is taken.

The one with the best value of the primary metric; of several, the one with the least log loss; of those, the strongest
penalty. Papers name the first criterion only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.metrics import average_precision

__all__ = ["OnVal", "best_of", "on_val", "primary"]

_SCORES = 1 << 26  # that are held at once while strengths are compared
# In nats for each validation row. Log losses that are nearer to each other count as equal: where the classes can be
# separated, the log loss falls for ever as the penalty goes to zero, by less and less.
_EQUAL_LOG_LOSS = 1e-3


def primary(scores: NDArray[Any], targets: NDArray[Any], task: str) -> float:
    """What is compared: top-1 of classes, mAP of labels, R^2 of numbers."""
    if task == "classification":
        return float((scores.argmax(1) == targets).mean())
    if task == "multilabel":
        each = average_precision(scores, targets)
        return float(np.nanmean(each)) if np.isfinite(each).any() else 0.0
    spread = ((targets - targets.mean(0)) ** 2).sum(0)
    return float(np.mean(1 - ((scores - targets) ** 2).sum(0) / np.where(spread > 0, spread, 1)))


class OnVal(NamedTuple):
    """What a strength gives on the validation rows.

    Attributes:
        value: the primary metric.
        log_loss: in nats; 0 for numbers; infinite where it is not known, as where the value is not the best.
    """

    value: float
    log_loss: float


def best_of(found: Sequence[OnVal]) -> int:
    """The position of the best strength; `found` begins with the strongest penalty."""
    top = max(one.value for one in found)
    least = min(one.log_loss for one in found if one.value == top)
    return next(i for i, one in enumerate(found) if one.value == top and one.log_loss <= least + _EQUAL_LOG_LOSS)


def _log_loss(scores: NDArray[Any], targets: NDArray[Any], task: str) -> float:
    """The mean of -log p over rows, and over labels where there are several; rows of unknown classes are left out.

    Args:
        scores: (N, K) logits.
        targets: (N,) classes, negative ones unknown; or (N, K) 0 or 1; or (N, K) numbers, which have none.
        task: as in `on_val`.
    """
    wide = scores.astype(np.float64)
    if task == "multilabel":
        return float(np.logaddexp(0, np.where(targets > 0, -wide, wide)).mean())
    known = np.flatnonzero(targets >= 0) if task == "classification" else np.zeros(0, np.int64)
    if not len(known):
        return 0.0
    return float((np.logaddexp.reduce(wide[known], axis=1) - wide[known, targets[known]]).mean())


def on_val(
    weights: NDArray[Any], biases: NDArray[Any], rows: FeatureRows, targets: NDArray[Any], task: str,
    at_least: float = -math.inf,
) -> list[OnVal]:  # fmt: skip
    """What probes give on validation rows.

    Args:
        weights: (M, K, D), one for each strength.
        biases: (M, K).
        rows: (N, D), scaled.
        targets: their classes, labels or numbers.
        task: "classification", "multilabel" or "regression".
        at_least: the log loss is computed of the best values alone, and only if they are so good.
    """
    values = _judged(weights, biases, rows, task, lambda scores: primary(scores, targets, task))
    top = max([at_least, *(value for value in values if not math.isnan(value))])
    tied = [i for i, value in enumerate(values) if value == top]
    losses = _judged(weights[tied], biases[tied], rows, task, lambda scores: _log_loss(scores, targets, task))
    known = dict(zip(tied, losses, strict=True))
    return [
        OnVal(-math.inf if math.isnan(value) else value, _or_infinite(known.get(i))) for i, value in enumerate(values)
    ]


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _judged(
    weights: NDArray[Any], biases: NDArray[Any], rows: FeatureRows, task: str, judge: Callable[[NDArray[Any]], float]
) -> list[float]:
    """What `judge` says of the (N, K) scores of each of (M, K, D) and (M, K); some are computed at a time."""
    k = weights.shape[1]
    at_once = max(1, _SCORES // (k * len(rows)))
    found = []
    for first in range(0, len(weights), at_once):
        some, shift = weights[first : first + at_once], biases[first : first + at_once]
        scores = np.empty((len(rows), len(some), k), some.dtype)
        for start, block in rows.blocks():
            scores[start : start + len(block)] = (block @ some.reshape(-1, some.shape[2]).T).reshape(
                -1, len(some), k
            ) + shift
        for i in range(len(some)):
            one = scores[:, i]
            if task == "classification" and k == 1:
                one = np.concatenate([np.zeros_like(one), one], 1)
            found.append(judge(one))
    return found
