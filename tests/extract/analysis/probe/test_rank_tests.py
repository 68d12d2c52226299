"""Ranks over tasks: the published example, SciPy, and how often equal classifiers are called different."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from extract.analysis.probe.metrics import rank_test, ranks_of

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
