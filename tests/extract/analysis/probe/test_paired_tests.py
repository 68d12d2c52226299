"""Which classifiers are different: error rates on simulated ones, and Holm's method as published."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from extract.analysis.probe.metrics import holm, paired_tests

DRAWS = 500


def test_the_correction_is_that_of_holm() -> None:
    # By hand: 0.01 x 4, 0.03 x 3, 0.04 x 2 raised to the one before, 0.2 x 1 raised likewise.
    assert holm([0.03, 0.01, 0.2, 0.04]) == pytest.approx([0.09, 0.04, 0.2, 0.09])
    assert holm([0.9, 0.8]).tolist() == [1, 1]
    assert len(holm([])) == 0


def test_each_pair_is_tested_on_the_images_that_tell_them_apart() -> None:
    right = {"a": np.array([1, 1, 1, 1, 1, 1, 1, 0], bool), "b": np.array([0, 0, 0, 0, 0, 0, 1, 1], bool)}
    tests = paired_tests(right)
    assert tests["a", "b"] == tests["b", "a"] == pytest.approx(binomtest(6, 7).pvalue)


def test_equal_classifiers_are_rarely_called_different() -> None:
    generator = np.random.default_rng(0)
    wrong = best = 0
    for _ in range(DRAWS):
        right = {str(number): generator.random(500) < 0.8 for number in range(6)}
        tests = paired_tests(right)
        wrong += any(p <= 0.05 for p in tests.values())
        first = max(right, key=lambda name: right[name].mean())
        best += any(tests[first, other] <= 0.05 for other in right if other != first)
    assert best <= wrong <= 0.05 * DRAWS


def test_a_better_classifier_is_found_as_often_as_theory_says() -> None:
    generator = np.random.default_rng(1)
    n, better, other = 1500, 0.83, 0.80
    found = sum(
        paired_tests({"a": generator.random(n) < better, "b": generator.random(n) < other})["a", "b"] <= 0.05
        for _ in range(DRAWS)
    )
    # Given the number of images on which they differ, those that only the better one has right are binomial.
    differ = better * (1 - other) + other * (1 - better)
    power = 0.0
    for count, probability in enumerate(binom.pmf(np.arange(n + 1), n, differ)):
        if probability > 1e-7:
            wins = np.arange(count + 1)
            p = np.minimum(1, 2 * np.minimum(binom.cdf(wins, count, 0.5), binom.sf(wins - 1, count, 0.5)))
            power += probability * binom.pmf(wins, count, better * (1 - other) / differ)[p <= 0.05].sum()
    assert 0.4 < power < 0.7
    assert abs(found / DRAWS - power) < 4 * np.sqrt(power * (1 - power) / DRAWS)


def test_pairs_are_in_both_orders() -> None:
    right = {name: np.ones(4, bool) for name in "abc"}
    assert set(paired_tests(right)) == set(itertools.permutations("abc", 2))
