"""Which of several classifiers are really different: by the images that each classifies correctly, or by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from extract.analysis.probe.intervals import bisected
from extract.analysis.probe.metrics import mcnemar

__all__ = ["LEVEL", "RankTest", "holm", "paired_tests", "rank_test", "ranks_of"]

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
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(steps, 1)
    return corrected


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
    larger = (values[:, None] < values).sum(1)
    ranks: NDArray[np.float64] = larger + (1 + (values[:, None] == values).sum(1)) / 2
    return ranks


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
