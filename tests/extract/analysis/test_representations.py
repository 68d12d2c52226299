"""Likeness of representations: what it must be by definition, and an independent computation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr

from extract.analysis.similarity import linear_cka, rsa
from extract.errors import InputError, UnknownNameError
from extract.system.dissimilarities import METRICS, dissimilarities


def features(n, d, seed):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def test_a_layer_is_like_itself_rotated_scaled_and_moved():
    x = features(100, 20, 0)
    rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(20, 20)))
    assert linear_cka(x, x) == pytest.approx(1, abs=1e-9)
    assert rsa(x, x) == pytest.approx(1, abs=1e-9)
    assert linear_cka(x, 3 * x @ rotation.astype(np.float32) + 7) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("width", [20, 2000])
def test_noise_is_like_nothing_however_wide_it_is(width):
    assert abs(linear_cka(features(200, 20, 0), features(200, width, 1))) < 0.05
    assert abs(rsa(features(200, 20, 0), features(200, width, 1))) < 0.05


def test_cka_is_that_of_the_estimator_written_out():
    x, y = features(12, 5, 0), features(12, 9, 1) + np.repeat(features(12, 1, 2), 9, 1)

    def hsic(a, b):  # Song et al. 2012, equation 5
        n = len(a)
        k, m = (features.astype(np.float64) @ features.astype(np.float64).T for features in (a, b))
        np.fill_diagonal(k, 0)
        np.fill_diagonal(m, 0)
        product = k @ m
        ones = np.ones(n)
        inner = (
            np.trace(product)
            + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
            - 2 / (n - 2) * ones @ product @ ones
        )
        return inner / (n * (n - 3))

    assert linear_cka(x, y) == pytest.approx(hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y)), rel=1e-5)


def test_rsa_is_that_of_scipy():
    x, y = features(40, 6, 0), features(40, 8, 1)
    y[:, 0] += 3 * x[:, 0]
    expected = spearmanr(pdist(x, "correlation"), pdist(y, "correlation")).statistic
    assert rsa(x, y) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_dissimilarities_are_those_of_scipy(metric):
    x = features(30, 7, 0) + 100  # far from zero
    matrix = dissimilarities(x, metric)
    assert (matrix.dtype, matrix.shape) == (np.float64, (30, 30))
    np.testing.assert_allclose(matrix, squareform(pdist(x.astype(np.float64), metric)), atol=1e-12)
    assert (np.diag(matrix) == 0).all()
    np.testing.assert_array_equal(matrix, matrix.T)
    with pytest.raises(UnknownNameError, match="metric 'cosin' not found"):
        dissimilarities(x, "cosin")


def test_rows_of_equal_values_have_no_correlation():
    x = features(6, 5, 0)
    x[2] = 0.1
    matrix = dissimilarities(x)
    assert np.isnan(matrix[2]).all()
    assert np.isnan(matrix[:, 2]).all()
    kept = np.delete(np.arange(6), 2)
    np.testing.assert_allclose(matrix[np.ix_(kept, kept)], 1 - np.corrcoef(x[kept].astype(np.float64)), atol=1e-12)


def test_other_numbers_of_images_are_refused():
    with pytest.raises(InputError, match="features have 5, 6 rows"):
        linear_cka(features(5, 2, 0), features(6, 2, 0))
    with pytest.raises(InputError, match="at least 4"):
        rsa(features(3, 2, 0), features(3, 2, 0))
    one = squareform(pdist(features(9, 2, 0)))
    for similarity in (rsa, linear_cka):
        with pytest.raises(InputError, match=r"expected features \(N, D\), got the dissimilarity matrix .*spearmanr"):
            similarity(features(9, 5, 0), one)
