"""Principal axes against scikit-learn, and t-SNE."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from extract.analysis.probe import feature_matrix
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.projection import axes_of_sample, project, tsne


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
