from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from extract import FeatureReader, InputError
from extract.probe.rows import FeatureRows
from extract.projection import principal, tsne
from extract.statistics import statistics_of
from tests.extract.store.rows import VALUES, complete_data_set


def test_statistics_are_those_of_numpy_in_float64(tmp_path: Path) -> None:
    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        for layer in reader.layers:
            found, values = statistics_of(FeatureRows.of(reader[layer])), VALUES[layer].astype(np.float64)
            assert (found.rows, found.width) == (23, values[0].size)
            expected = values.mean(), values.std(), values.min(), values.max()
            assert (found.mean, found.std, found.least, found.largest) == pytest.approx(expected, rel=1e-6)
            np.testing.assert_allclose(found.lengths, np.linalg.norm(values.reshape(23, -1), axis=1))


def test_blocks_are_joined_and_a_large_mean_does_not_hide_the_spread() -> None:
    generator = np.random.default_rng(0)
    values = (1000 + generator.normal(size=(9000, 700))).astype(np.float32)  # more than one block
    values[:4000] += 3
    values[:, 5] = 7
    values[:, 6] = 0
    values[3, 100:200] = 0
    found, exact = statistics_of(FeatureRows.of(values)), values.astype(np.float64)
    assert (found.mean, found.std) == pytest.approx((exact.mean(), exact.std()), rel=1e-7)
    assert found.zeros == 9100 / values.size
    assert (found.dead, found.constant) == (1, 2)


def test_no_rows_have_no_statistics() -> None:
    found = statistics_of(FeatureRows.of(np.empty((0, 3), np.float32)))
    assert (found.rows, len(found.lengths)) == (0, 0)
    assert np.isnan(found.mean)
    with pytest.raises(InputError, match="NaN"):
        statistics_of(FeatureRows.of(np.full((2, 3), np.nan, np.float32)))


@pytest.mark.parametrize(("rows", "width"), [(15000, 300), (60, 5000), (40, 90)])
def test_principal_axes_are_those_of_scikit_learn(rows: int, width: int) -> None:
    generator = np.random.default_rng(1)
    values = 5 + generator.normal(size=(rows, 3)) @ (generator.normal(size=(3, width)) * [[9], [5], [2]])
    values = (values + generator.normal(size=(rows, width)) / 10).astype(np.float32)
    found = principal(FeatureRows.of(values), 3)
    reference = PCA(3, svd_solver="full").fit(values.astype(np.float64))
    np.testing.assert_allclose(found.shares, reference.explained_variance_ratio_, rtol=1e-4)
    np.testing.assert_allclose(np.abs((found.axes * reference.components_).sum(1)), 1, atol=1e-5)
    coordinates = found.project(FeatureRows.of(values))
    np.testing.assert_allclose(np.abs(coordinates), np.abs(reference.transform(values)), atol=1e-2)
    assert (found.axes.max(1) >= -found.axes.min(1)).all()


def test_one_row_and_equal_rows_have_a_place() -> None:
    for values in (np.ones((1, 5), np.float32), np.ones((7, 5), np.float32), np.ones((3, 5000), np.float32)):
        found = principal(FeatureRows.of(values), 2)
        assert np.isfinite(found.project(FeatureRows.of(values))).all()
        assert (found.shares == 0).all()


def test_t_sne_keeps_groups_apart() -> None:
    generator = np.random.default_rng(2)
    centres = generator.normal(size=(2, 60))
    values = (centres[np.arange(80) % 2] * 5 + generator.normal(size=(80, 60))).astype(np.float32)
    found = tsne(FeatureRows.of(values))
    middles = found[::2].mean(0), found[1::2].mean(0)
    spread = max(found[::2].std(0).max(), found[1::2].std(0).max())
    assert np.linalg.norm(middles[0] - middles[1]) > 2 * spread
    assert tsne(FeatureRows.of(values[:3])).shape == (3, 2)
