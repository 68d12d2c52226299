"""Which classifiers are different, on one task or several: published examples, SciPy, and rates on simulated ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binom, binomtest

from extract.analysis.probe.metrics import holm, paired_tests, rank_test, ranks_of

# AUC of four decision trees on fourteen data sets: Table 6 of Demsar (2006), with its average ranks.
AUC = """
0.763 0.768 0.771 0.798  0.599 0.591 0.590 0.569  0.954 0.971 0.968 0.967  0.628 0.661 0.654 0.657
0.882 0.888 0.886 0.898  0.936 0.931 0.916 0.931  0.661 0.668 0.609 0.685  0.583 0.583 0.563 0.625
0.775 0.838 0.866 0.875  1.000 1.000 1.000 1.000  0.940 0.962 0.965 0.962  0.619 0.666 0.614 0.669
0.972 0.981 0.9751 0.975  0.957 0.978 0.946 0.970
"""


def test_the_published_example() -> None:
    test = rank_test(np.array(AUC.split(), float).reshape(14, 4))
    np.testing.assert_allclose(test.ranks, [3.143, 2.000, 2.893, 1.964], atol=0.0005)
    assert test.critical_difference == pytest.approx(1.25, abs=0.005)


@pytest.mark.parametrize(("tasks", "classifiers"), [(2, 2), (5, 3), (12, 11)])
def test_p_values_are_those_of_the_studentized_range(tasks: int, classifiers: int) -> None:
    values = np.random.default_rng(0).normal(size=(tasks, classifiers)).round(1)  # with equal values
    test = rank_test(values)
    np.testing.assert_allclose(test.ranks, np.mean([stats.rankdata(-line) for line in values], 0))
    error = np.sqrt(classifiers * (classifiers + 1) / (6 * tasks))
    spans = np.abs(test.ranks[:, None] - test.ranks) / error * np.sqrt(2)
    np.testing.assert_allclose(test.p, stats.studentized_range.sf(spans, classifiers, np.inf), atol=1e-9)
    quantile = stats.studentized_range.ppf(0.95, classifiers, np.inf) / np.sqrt(2)
    assert test.critical_difference == pytest.approx(quantile * error, rel=1e-6)


def test_equal_classifiers_are_seldom_called_different() -> None:
    generator, called = np.random.default_rng(1), 0
    for _ in range(50):
        called += bool((rank_test(generator.normal(size=(10, 4))).p < 0.05).any())
    assert called <= 50 * 0.05 + 3 * np.sqrt(50 * 0.05 * 0.95)


def test_a_better_classifier_is_found() -> None:
    values = np.random.default_rng(2).normal(size=(15, 5)) + np.array([5, 0, 0, 0, 0])
    test = rank_test(values)
    assert test.ranks[0] == 1
    assert (test.p[0, 1:] < 0.05).all()
    assert (np.diag(test.p) == 1).all()


def test_equal_values_share_their_ranks() -> None:
    assert ranks_of(np.array([0.5, 0.9, 0.5, 0.1])).tolist() == [2.5, 1.0, 2.5, 4.0]


# Pairs, on one task

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


def test_equal_classifiers_are_rarely_called_different_on_one_task() -> None:
    generator = np.random.default_rng(0)
    wrong = best = 0
    for _ in range(DRAWS):
        right = {str(number): generator.random(500) < 0.8 for number in range(6)}
        tests = paired_tests(right)
        wrong += any(p <= 0.05 for p in tests.values())
        first = max(right, key=lambda name: right[name].mean())
        best += any(tests[first, other] <= 0.05 for other in right if other != first)
    assert best <= wrong <= 0.05 * DRAWS


def test_a_better_classifier_is_found_on_one_task_as_often_as_theory_says() -> None:
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
