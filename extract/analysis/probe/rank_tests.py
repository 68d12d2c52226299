"""Which of several classifiers are really different, by their ranks in several tasks (Demsar 2006)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

__all__ = ["LEVEL", "RankTest", "rank_test", "ranks_of"]

LEVEL = 0.05  # of p-values, at which classifiers are called different
_POINTS, _FARTHEST = 801, 9.0  # of the integral over the normal distribution, in standard deviations


@dataclass(frozen=True)
class RankTest:
    """Test of Nemenyi on average ranks.

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
    return RankTest(ranks, float(_quantile(LEVEL, classifiers) * error), p)


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


@functools.cache
def _quantile(level: float, count: int) -> float:
    """Return the span that the range of `count` standard normal values exceeds with probability `level`."""
    low, high = 0.0, 2 * _FARTHEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _above(np.array([middle]), count)[0] > level else (low, middle)
    return high
