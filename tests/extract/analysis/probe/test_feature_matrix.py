"""FeatureRows read in blocks are the rows of the arrays, whatever they lie in."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler, normalize

from extract.analysis.probe.feature_matrix import FeatureRows, Scaling, moments
from extract.errors import InputError


def test_blocks_are_the_rows_of_every_kind_of_source(tmp_path):
    x = np.random.default_rng(0).normal(size=(50, 3, 2)).astype(np.float16)
    np.save(tmp_path / "x.npy", x)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        stored = file.create_dataset("x", data=x)
        for source in (x, torch.from_numpy(x), np.load(tmp_path / "x.npy", mmap_mode="r"), stored):
            for index in (None, np.array([0, 3, 4, 49]), np.arange(10, 20)):
                rows = FeatureRows.of(source, index)
                blocks = np.concatenate([block for _, block in rows.blocks(block_bytes=72)])
                expected = x if index is None else x[index]
                np.testing.assert_array_equal(blocks, expected.reshape(len(expected), 6).astype(np.float32))


def test_sparse_rows_are_picked_and_dense_ones_cut_out():
    class Counting:
        shape = (10_000, 2)

        def __init__(self):
            self.slices = 0

        def __getitem__(self, rows):
            self.slices += isinstance(rows, slice)
            return np.arange(20_000, dtype=np.float32).reshape(10_000, 2)[rows]

    source = Counting()
    assert FeatureRows.of(source, np.array([0, 9_999])).between(0, 2)[:, 0].tolist() == [0, 19_998]
    assert source.slices == 0
    assert FeatureRows.of(source, np.array([5, 9])).between(0, 2)[:, 0].tolist() == [10, 18]
    assert source.slices == 1


def test_rows_of_several_parts_subsets_and_columns_side_by_side():
    a = np.arange(12, dtype=np.float32).reshape(6, 2)
    b = 100 + np.arange(6, dtype=np.float32).reshape(6, 1)
    rows = FeatureRows.of([a, b], np.array([1, 2, 5])) + FeatureRows.of([a, b], np.array([0, 3]))
    expected = np.concatenate([a, b], 1)[[1, 2, 5, 0, 3]]
    np.testing.assert_array_equal(rows.between(0, 5), expected)
    np.testing.assert_array_equal(rows.between(2, 4), expected[2:4])
    np.testing.assert_array_equal(rows.subset(np.array([0, 2, 4])).between(0, 3), expected[[0, 2, 4]])
    np.testing.assert_array_equal(rows.held().between(1, 5), expected[1:5])
    assert rows.width == 3


def test_what_is_read_is_a_copy():
    x = np.ones((4, 2), np.float32)
    FeatureRows.of(x).scaled(Scaling("l2")).between(0, 4)
    assert (x == 1).all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_scalings_are_those_of_scikit_learn(offset):
    x = (np.random.default_rng(0).normal(size=(300, 5)) * [1, 2, 3, 4, 0] + offset).astype(np.float32)
    rows = FeatureRows.of(x)
    expected = StandardScaler().fit_transform(x.astype(np.float64))
    expected[:, 4] = 0
    scaled = rows.scaled(Scaling.of("standardise", rows)).between(0, 300)
    np.testing.assert_allclose(scaled, expected, atol=2e-3 if offset else 1e-5)
    np.testing.assert_allclose(rows.scaled(Scaling("l2")).between(0, 300), normalize(x), atol=1e-6)


def test_statistics_of_values_far_apart_are_those_of_numpy():
    x = np.array([[3e38, 1e8], [-3e38, 1], [1e38, 2], [0, 3]], np.float32)
    mean, variance = moments(FeatureRows.of(x))
    np.testing.assert_allclose(mean, x.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(variance, x.var(0, dtype=np.float64), rtol=1e-12)


def test_statistics_are_those_of_the_rows_they_are_taken_of():
    x = np.concatenate([np.zeros((5, 1)), np.full((5, 1), 10.0)]).astype(np.float32)
    x[0] = 2
    scaling = Scaling.of("standardise", FeatureRows.of(x, np.arange(5)))
    assert scaling.mean is not None
    assert scaling.mean[0] == pytest.approx(0.4)


def test_errors_name_the_row_and_the_shape():
    x = np.ones((5, 2), np.float32)
    x[3, 1] = np.inf
    with pytest.raises(InputError, match="row 3 of the features contains NaN or infinity"):
        FeatureRows.of(x).held()
    with pytest.raises(InputError, match=r"expected an array of shape \(N, D\)"):
        FeatureRows.of(np.ones(5))
    with pytest.raises(InputError, match="have 5 and 6 rows"):
        FeatureRows.of([np.ones((5, 2)), np.ones((6, 2))])
