"""Nearest neighbours against a brute-force computation."""

from __future__ import annotations

import numpy as np
import pytest

from extract.analysis.probe import nearest_rows
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.nearest_rows import nearest_in, neighbour_shares
from extract.errors import InputError


def unit(n, d, seed):
    x = np.random.default_rng(seed).normal(size=(n, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def brute_force(bank, labels, queries, k, n_classes):
    """Votes of the k nearest, one query after the other."""
    shares, votes = np.zeros((len(queries), n_classes)), np.zeros((len(queries), 1))
    for i, query in enumerate(queries):
        cosines = bank @ query
        nearest = sorted(range(len(bank)), key=lambda row: (-cosines[row], row))[:k]
        for row in nearest:
            vote = np.exp(np.float64(cosines[row]) / 0.07)
            shares[i] += vote * labels[row]
            votes[i] += vote
    return shares / votes


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("several_labels", [False, True])
def test_shares_of_votes_are_those_of_brute_force(monkeypatch, blocked, several_labels):
    if blocked:  # many small blocks of rows and of queries
        monkeypatch.setattr(nearest_rows, "_QUERIES", 7)
    bank, queries, generator = unit(300, 16, 0), unit(40, 16, 1), np.random.default_rng(2)
    classes = generator.integers(0, 5, 300)
    labels = (generator.random((300, 5)) < 0.4).astype(np.float32) if several_labels else np.eye(5)[classes]
    ks, memory_bytes = [1, 10, 100, 300], 8192 if blocked else 1 << 30
    given = labels if several_labels else classes
    found = neighbour_shares(FeatureRows.of(bank), given, 5, FeatureRows.of(queries), ks, memory_bytes=memory_bytes)
    for k, shares in zip(ks, found, strict=True):
        expected = brute_force(bank, labels, queries, k, 5)
        np.testing.assert_allclose(shares, expected, atol=1e-5)
        assert several_labels or (shares.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("memory_bytes", [64, 1 << 20])
def test_of_equally_near_rows_the_first_are_taken(memory_bytes):
    bank = np.zeros((12, 2), np.float32)
    bank[:, 0] = 1  # all the same
    labels = np.arange(12)
    rows = FeatureRows.of(bank)
    (shares,) = neighbour_shares(rows, labels, 12, FeatureRows.of(bank[:1]), [3], memory_bytes=memory_bytes)
    np.testing.assert_allclose(shares[0], [1 / 3] * 3 + [0] * 9, atol=1e-6)


def test_neighbours_that_are_not_finite_are_refused():
    bank, queries = unit(20, 4, 0), FeatureRows.of(unit(3, 4, 1))
    bank[7, 1] = np.nan
    with pytest.raises(InputError, match="row 7 of the features contains NaN or infinity"):
        neighbour_shares(FeatureRows.of(bank), np.zeros(20, np.int64), 2, queries, [3])


def test_neighbours_for_votes_are_those_of_the_exact_search():
    bank, queries = unit(500, 12, 0), unit(30, 12, 1)
    exact, rounded = (nearest_in(FeatureRows.of(bank), queries, 20, memory_bytes=1 << 14, exact=exact)
                      for exact in (True, False))  # fmt: skip
    np.testing.assert_allclose(rounded.cosines, exact.cosines, atol=1e-6)
    assert (rounded.rows == exact.rows).mean() > 0.99
