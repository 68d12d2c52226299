"""The nearest rows by cosine, against all cosines in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import FeatureReader, InputError, LayertapError, Status, UnknownNameError
from extract.analysis.probe import nearest_rows
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.nearest_rows import layer_to_search, nearest, nearest_in, neighbour_shares, overlap
from tests.extract.store.rows import VALUES, complete_data_set


def brute(bank, queries, k, among=None, without=None):
    """(rows, cosines) of each query: all in float64, to 12 decimals; rows that are not finite are left out."""
    x, q = (np.asarray(features).reshape(len(features), -1).astype(np.float64) for features in (bank, queries))
    among = np.arange(len(x)) if among is None else np.asarray(among)
    among = among[np.isfinite(x[among]).all(1)]
    neighbours = []
    for number, query in enumerate(q):
        rows = among if without is None else among[among != without[number]]
        lengths = np.sqrt((query**2).sum()) * np.sqrt((x[rows] ** 2).sum(1))
        cosines = np.round(np.divide((query * x[rows]).sum(1), lengths, out=np.zeros(len(rows)), where=lengths > 0), 12)
        order = np.lexsort((rows, -cosines))
        neighbours.append((rows[order], cosines[order], min(k, len(rows))))
    return neighbours


def same(neighbours, expected, exact=False):
    """Equal; where rounding in float64 decides, any of the rows whose cosines are equal but for that."""
    for rows, cosines, (others, near, count) in zip(neighbours.rows, neighbours.cosines, expected, strict=True):
        assert (rows[count:] == -1).all()
        assert np.isnan(cosines[count:]).all()
        rows, cosines = rows[:count], cosines[:count]
        if exact:
            assert rows.tolist() == others[:count].tolist()
        assert len(set(rows.tolist())) == count
        np.testing.assert_allclose(cosines, near[:count], atol=2e-12)
        of = dict(zip(others.tolist(), near.tolist(), strict=True))
        np.testing.assert_allclose(cosines, [of[row] for row in rows.tolist()], atol=2e-12)
        tied = cosines[1:] == cosines[:-1]
        assert (rows[1:][tied] > rows[:-1][tied]).all()


# Small whole numbers make ties and zero vectors; their products are exact in float64.
@settings(max_examples=80, deadline=None)
@given(data=st.data(), width=st.sampled_from([1, 2, 5, 40]), n=st.integers(1, 40), k=st.integers(1, 50))
def test_it_is_what_all_cosines_in_float64_give(data: st.DataObject, width: int, n: int, k: int) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from([np.float32, np.float16]))
    bank = generator.integers(-1, 2, (n, width)).astype(dtype)
    bank[generator.random(n) < 0.3] *= 4
    bank[generator.random(n) < 0.2] = np.nan
    bank[generator.random(n) < 0.1] = np.inf
    queries = generator.integers(-1, 2, (3, width)).astype(np.float32)
    among = np.flatnonzero(generator.random(n) < 0.8) if data.draw(st.booleans()) else None
    without = generator.integers(0, n, 3) if data.draw(st.booleans()) else None
    memory = data.draw(st.sampled_from([1, 5_000, 1 << 20]))  # one row at a time, some, all
    neighbours = nearest(bank, queries, k, among=among, without=without, memory_bytes=memory)
    same(neighbours, brute(bank, queries, k, among, without), exact=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.sampled_from([3, 64, 300]))
def test_rows_that_float32_cannot_tell_apart_are_told_apart(seed: int, width: int) -> None:
    generator = np.random.default_rng(seed)
    centre = generator.normal(size=width)
    bank = (centre + 1e-5 * generator.normal(size=(60, width))).astype(np.float32)
    bank[30] = bank[7]  # a tie
    same(nearest(bank, bank[:5], 12, memory_bytes=50_000), brute(bank, bank[:5], 12))


def test_lengths_that_float32_cannot_square_do_not_matter() -> None:
    generator = np.random.default_rng(0)
    bank = generator.normal(size=(50, 8)).astype(np.float32)
    scales = np.array([1e-44, 1e-30, 1e-20, 1, 1e20, 3e37], np.float32)[np.arange(50) % 6, None]
    with np.errstate(under="ignore"):
        scaled = bank * scales
    scaled[3] = 0
    queries = scaled[[1, 2, 4, 5, 3]]
    same(nearest(scaled, queries, 50), brute(scaled, queries, 50))


def test_where_all_rows_are_equal_the_first_are_nearest() -> None:
    bank = np.full((3000, 6), 0.1, np.float32)
    neighbours = nearest(bank, bank[:40], 5, without=np.arange(40))  # more candidates than are computed pair by pair
    assert neighbours.rows[10].tolist() == [0, 1, 2, 3, 4]
    assert neighbours.rows[2].tolist() == [0, 1, 3, 4, 5]
    assert (neighbours.cosines == 1).all()


def test_many_candidates_are_computed_at_once_and_give_the_same() -> None:
    generator = np.random.default_rng(1)
    bank = (1 + 1e-6 * generator.normal(size=(2000, 5))).astype(np.float32)
    same(nearest(bank, bank[:50], 7), brute(bank, bank[:50], 7))


def test_features_of_a_data_set_over_several_shards_as_vectors_and_as_maps(tmp_path: Path) -> None:
    out = complete_data_set(tmp_path / "out", failed=(3, 11)).out
    with FeatureReader(out) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        for layer in ("vector", "map:none"):
            neighbours = nearest(reader[layer], VALUES[layer][[5, 20]], 30, among=good, without=np.array([5, 20]))
            assert neighbours.rows.shape == (2, 21)
            assert (neighbours.rows[:, 20] == -1).all()
            assert not np.isin(neighbours.rows, [3, 11]).any()
            same(neighbours, brute(VALUES[layer], VALUES[layer][[5, 20]], 30, good, [5, 20]))


def test_zeros_are_near_to_everything_nothing_is_found_among_no_rows_and_wrong_queries_are_refused() -> None:
    bank = np.eye(4, dtype=np.float32)
    neighbours = nearest(bank, np.zeros((1, 4)), 9)
    assert (neighbours.rows.tolist(), neighbours.cosines.tolist()) == ([[0, 1, 2, 3]], [[0, 0, 0, 0]])
    assert nearest(bank, np.ones((2, 4)), 3, among=np.empty(0, np.int64)).rows.shape == (2, 0)
    assert nearest(bank, np.ones((1, 4)), 3, among=np.array([2]), without=np.array([2])).rows.tolist() == [[-1]]
    for queries, k, message in (
        (np.zeros((1, 4)), 0, "k is 0"),
        (np.zeros((1, 5)), 1, "queries have 5 values each, but rows have 4"),
        (np.full((1, 4), np.nan), 1, "a query contains NaN"),
    ):
        with pytest.raises(InputError, match=message):
            nearest(bank, queries, k)


def test_the_layer_is_the_embedding_or_the_only_one() -> None:
    assert layer_to_search(["a", "embedding"], None, "x") == "embedding"
    assert layer_to_search(["a"], None, "x") == "a"
    assert layer_to_search(["a", "embedding"], "a", "x") == "a"
    with pytest.raises(InputError, match="x has 2 layers but no embedding; name a layer: -l a, -l b"):
        layer_to_search(["a", "b"], None, "x")
    with pytest.raises(UnknownNameError, match="layer 'c' not found in x"):
        layer_to_search(["a", "b"], "c", "x")
    with pytest.raises(LayertapError):
        layer_to_search([], None, "x")


def test_the_overlap_counts_shared_neighbours() -> None:
    assert overlap(np.array([[1, 2], [3, 4]]), np.array([[2, 1], [4, 5]])).tolist() == [1, 0.5]


# Votes of neighbours


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
