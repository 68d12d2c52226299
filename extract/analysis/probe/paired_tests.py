"""Which of several classifiers are really different, by the images that each of them classifies correctly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.probe.metrics import mcnemar

__all__ = ["PairedTest", "holm", "paired_tests"]


@dataclass(frozen=True)
class PairedTest:
    """Exact test of McNemar between two classifiers.

    Attributes:
        only_first: number of images that only the first classifies correctly.
        only_second: number of images that only the second classifies correctly.
        p: two-sided p-value.
        corrected: p-value corrected by Holm for all pairs of classifiers.
    """

    only_first: int
    only_second: int
    p: float
    corrected: float


def paired_tests(right: Mapping[str, NDArray[np.bool_]]) -> dict[tuple[str, str], PairedTest]:
    """Test all pairs of classifiers.

    If all are equally good, the probability that any corrected p-value is at most 0.05 is at most 5 %, also that of the
    best classifier and another.

    Args:
        right: name -> (N,) whether the classifier is right; the same images in the same order.

    Returns:
        (first, second) -> test, for every pair in both orders.
    """
    pairs = list(combinations(right, 2))
    tested = [mcnemar(right[first], right[second]) for first, second in pairs]
    corrected = holm([p for _, _, p in tested]).tolist()
    tests = {}
    for (first, second), (only_first, only_second, p), adjusted in zip(pairs, tested, corrected, strict=True):
        tests[first, second] = PairedTest(only_first, only_second, p, adjusted)
        tests[second, first] = PairedTest(only_second, only_first, p, adjusted)
    return tests


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Return p-values (M,) corrected for M tests by the method of Holm (1979)."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    steps = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(steps, 1)
    return corrected
