"""Similarity of features, against independent computations: N x N matrices, SciPy, and the published code's steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr
from sklearn.decomposition import PCA

from extract.analysis import similarity as module
from extract.analysis.probe import feature_matrix
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.projection import axes_of_sample, project, tsne
from extract.analysis.similarity import feature_similarity, linear_cka, rsa
from extract.errors import InputError, UnknownNameError
from extract.system.dissimilarities import METRICS, dissimilarities

N = 60


@pytest.fixture(scope="module")
def features() -> list[np.ndarray]:
    """Features that share some directions, of several widths, one with more columns than rows and one with maps."""
    generator = np.random.default_rng(0)
    common = generator.normal(size=(N, 6))
    shared = [common @ generator.normal(size=(6, width)) for width in (5, 12, 90)]
    noisy = [
        values + generator.normal(0, scale, values.shape) for values, scale in zip(shared, (0.1, 2, 4), strict=True)
    ]
    maps = generator.normal(5, 1, (N, 2, 3, 4))
    return [values.astype(np.float32) for values in (*noisy, maps)]


def flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1).astype(np.float64)


def unbiased_cka(x: np.ndarray, y: np.ndarray) -> float:
    """The estimator of Song et al. 2012, equation 5, from N x N matrices."""

    def hsic(k: np.ndarray, other: np.ndarray) -> float:
        n = len(k)
        k, other = k - np.diag(np.diag(k)), other - np.diag(np.diag(other))
        ones = np.ones(n)
        middle = (ones @ k @ ones) * (ones @ other @ ones) / ((n - 1) * (n - 2))
        return float((np.trace(k @ other) + middle - 2 / (n - 2) * (ones @ k @ other @ ones)) / (n * (n - 3)))

    k, other = flat(x) @ flat(x).T, flat(y) @ flat(y).T
    return hsic(k, other) / np.sqrt(hsic(k, k) * hsic(other, other))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    return float(spearmanr(pdist(flat(x), "correlation"), pdist(flat(y), "correlation")).statistic)


def mutual_knn(x: np.ndarray, y: np.ndarray, k: int) -> float:
    """As in the code of Huh et al. 2024 (`metrics.py`): masks of the k nearest by inner product of unit vectors."""
    masks = []
    for values in (flat(x), flat(y)):
        unit = values / np.linalg.norm(values, axis=1, keepdims=True)
        products = unit @ unit.T
        np.fill_diagonal(products, -1e8)
        mask = np.zeros((len(unit), len(unit)))
        np.put_along_axis(mask, np.argsort(-products, axis=1)[:, :k], 1.0, axis=1)
        masks.append(mask)
    return float(((masks[0] * masks[1]).sum(1) / k).mean())


@pytest.mark.parametrize("memory_bytes", [20_000, 1 << 29])
def test_all_measures_are_those_of_other_implementations(features: list[np.ndarray], memory_bytes: int) -> None:
    found = feature_similarity(features, k=5, memory_bytes=memory_bytes)
    assert linear_cka(features[0], features[2]) == pytest.approx(unbiased_cka(features[0], features[2]), rel=1e-5)
    assert rsa(features[0], features[2]) == pytest.approx(spearman(features[0], features[2]), abs=1e-6)
    for i, x in enumerate(features):
        centred = flat(x) - flat(x).mean(0)
        shares = np.linalg.svd(centred, compute_uv=False)
        shares /= shares.sum()
        entropy = -(shares[shares > 1e-12] * np.log(shares[shares > 1e-12])).sum()
        assert found.effective_rank[i] == pytest.approx(np.exp(entropy), rel=1e-5)
        for j, y in enumerate(features):
            assert found.cka[i, j] == pytest.approx(unbiased_cka(x, y), abs=1e-6)
            assert found.mutual_knn[i, j] == pytest.approx(mutual_knn(x, y, 5), abs=1e-9)
            assert found.rsa[i, j] == pytest.approx(spearman(x, y), abs=1e-6)
            other = flat(y) - flat(y).mean(0)
            width = max(centred.shape[1], other.shape[1])
            padded = [np.pad(z, ((0, 0), (0, width - z.shape[1]))) / np.linalg.norm(z) for z in (centred, other)]
            assert found.procrustes[i, j] == pytest.approx(orthogonal_procrustes(*padded)[1], abs=1e-6)


@pytest.mark.parametrize("width", [8, 2000, 20_000])
def test_a_rotated_and_scaled_copy_has_similarity_one_and_noise_none_however_wide_it_is(width: int) -> None:
    generator = np.random.default_rng(1)
    x, noise = (generator.normal(size=(200, columns)).astype(np.float32) for columns in (8, width))
    rotation = np.linalg.qr(generator.normal(size=(8, 8)))[0]
    found = feature_similarity([x, (3 * x @ rotation + 1).astype(np.float32), noise])
    assert found.cka[0, 1] == pytest.approx(1, abs=1e-5)
    assert found.procrustes[0, 1] == pytest.approx(1, abs=1e-5)
    assert abs(found.cka[0, 2]) < 0.05
    assert abs(found.rsa[0, 2]) < 0.05
    assert found.mutual_knn[0, 2] < 0.15
    assert linear_cka(x, x) == pytest.approx(1, abs=1e-9)
    assert rsa(x, x) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_dissimilarities_are_those_of_scipy(metric: str) -> None:
    x = np.random.default_rng(0).normal(100, 1, (30, 7)).astype(np.float32)  # far from zero
    matrix = dissimilarities(x, metric)
    assert (matrix.dtype, matrix.shape) == (np.float64, (30, 30))
    np.testing.assert_allclose(matrix, squareform(pdist(x.astype(np.float64), metric)), atol=1e-12)
    assert (np.diag(matrix) == 0).all()
    np.testing.assert_array_equal(matrix, matrix.T)
    with pytest.raises(UnknownNameError, match="metric 'cosin' not found"):
        dissimilarities(x, "cosin")


def test_rows_of_equal_values_have_no_correlation() -> None:
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    x[2] = 0.1
    matrix, kept = dissimilarities(x), np.delete(np.arange(6), 2)
    assert np.isnan(matrix[2]).all()
    assert np.isnan(matrix[:, 2]).all()
    np.testing.assert_allclose(matrix[np.ix_(kept, kept)], 1 - np.corrcoef(x[kept].astype(np.float64)), atol=1e-12)


@pytest.mark.parametrize("similarity", [rsa, linear_cka])
def test_a_matrix_of_dissimilarities_is_not_taken_for_features(similarity: Callable[..., float]) -> None:
    x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    with pytest.raises(InputError, match=r"expected features \(N, D\), got the dissimilarity matrix .*compare_rdms"):
        similarity(x, squareform(pdist(x)))
    with pytest.raises(InputError, match="features have 9, 6 rows"):
        similarity(x, x[:6])
    with pytest.raises(InputError, match="at least 4"):
        similarity(x[:3], x[:3])


def test_slow_measures_take_a_sample(monkeypatch: pytest.MonkeyPatch, features: list[np.ndarray]) -> None:
    monkeypatch.setattr(module, "_KNN_ROWS", 30)
    monkeypatch.setattr(module, "_RSA_ROWS", 20)
    found = feature_similarity(features, k=3, seed=4)
    order = np.random.default_rng(4).permutation(N)
    of_knn, of_rsa = np.sort(order[:30]), np.sort(order[:20])
    assert (found.knn_rows, found.rsa_rows) == (30, 20)
    x, y = features[0], features[1]
    assert found.mutual_knn[0, 1] == pytest.approx(mutual_knn(x[of_knn], y[of_knn], 3), abs=1e-9)
    assert found.rsa[0, 1] == pytest.approx(spearman(x[of_rsa], y[of_rsa]), abs=1e-6)
    assert found.cka[0, 1] == pytest.approx(unbiased_cka(x, y), abs=1e-6)


def test_a_constant_feature_is_not_comparable(features: list[np.ndarray]) -> None:
    found = feature_similarity([features[0], np.ones((N, 3), np.float32)], k=3)
    assert np.isnan([found.cka[0, 1], found.procrustes[0, 1], found.procrustes[1, 1], found.rsa[0, 1]]).all()
    assert found.effective_rank[1] == 0


@pytest.mark.parametrize(("shapes", "k", "why"), [
    ([], 3, "no features"),
    ([(5, 2), (6, 2)], 3, "5, 6 rows"),
    ([(3, 2)], 1, "at least 4"),
    ([(9, 2)], 9, "expected 1 to 8"),
    ([(1_200, 20_000)], 1, "20,000 values"),
])  # fmt: skip
def test_features_that_cannot_be_compared_are_refused(shapes: list[tuple[int, int]], k: int, why: str) -> None:
    with pytest.raises(InputError, match=why):
        feature_similarity([np.ones(shape, np.float32) for shape in shapes], k=k)


def test_the_old_name_warns_and_gives_the_same() -> None:
    features = [np.random.default_rng(0).normal(size=(20, 3)), np.random.default_rng(1).normal(size=(20, 4))]
    with pytest.warns(DeprecationWarning, match="alikeness is now called feature_similarity"):
        old = module.alikeness(features, k=3)
    np.testing.assert_array_equal(old.cka, feature_similarity(features, k=3).cka)


# Principal axes against scikit-learn, and t-SNE


@pytest.mark.parametrize(("rows", "width"), [(1500, 30), (60, 5000), (40, 90)])
def test_axes_projection_are_those_of_scikit_learn(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_matrix, "_BLOCK_BYTES", 10_000)  # several blocks of rows
    generator = np.random.default_rng(1)
    values = 5 + generator.normal(size=(rows, 3)) @ (generator.normal(size=(3, width)) * [[9], [5], [2]])
    values = (values + generator.normal(size=(rows, width)) / 10).astype(np.float32)
    fitted, used = axes_of_sample(FeatureRows.of(values), 3)
    assert used == rows
    reference = PCA(3, svd_solver="full").fit(values.astype(np.float64))
    np.testing.assert_allclose(fitted.shares, reference.explained_variance_ratio_, rtol=1e-4)
    np.testing.assert_allclose(np.abs((fitted.axes.numpy() * reference.components_).sum(1)), 1, atol=1e-5)
    coordinates = project(FeatureRows.of(values), fitted)
    np.testing.assert_allclose(np.abs(coordinates), np.abs(reference.transform(values)), atol=1e-2)
    assert (fitted.axes.numpy().max(1) >= -fitted.axes.numpy().min(1)).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(1, 5), (2, 5), (7, 5), (3, 5000)])
def test_one_row_and_equal_rows_have_a_place(shape: tuple[int, int]) -> None:
    values = FeatureRows.of(np.ones(shape, np.float32))
    fitted, _ = axes_of_sample(values, 2)
    assert np.isfinite(project(values, fitted)).all()
    assert (fitted.shares == 0).all()
    assert tsne(values).tolist() == [[0, 0]] * shape[0]


def test_t_sne_keeps_groups_apart() -> None:
    generator = np.random.default_rng(2)
    centres = generator.normal(size=(2, 60))
    values = (centres[np.arange(80) % 2] * 5 + generator.normal(size=(80, 60))).astype(np.float32)
    points = tsne(FeatureRows.of(values))
    middles = points[::2].mean(0), points[1::2].mean(0)
    spread = max(points[::2].std(0).max(), points[1::2].std(0).max())
    assert np.linalg.norm(middles[0] - middles[1]) > 2 * spread
    assert tsne(FeatureRows.of(values[:3])).shape == (3, 2)


def test_cka_of_features_that_the_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = np.random.default_rng(0).normal(size=(5, module.MOST_COLUMNS + 1)).astype(np.float32)
    assert linear_cka(wide, wide) == pytest.approx(1)
    monkeypatch.setattr(module, "free_bytes", lambda: 1 << 20)
    with pytest.raises(InputError, match="a feature has 16,385 values for an image; expected at most 16,384"):
        linear_cka(wide, wide[:, :3])
