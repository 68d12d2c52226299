"""Principal axes against scikit-learn's PCA and NumPy, the projection, and files of axes."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.compute import principal_axes as principal_axes_module
from extract.compute.principal_axes import AxesProjection, AxesSource, axes_source, principal_axes, write_axes
from extract.errors import InputError, LayertapError
from extract.system import atomic_files

SOURCE = AxesSource("timm/x", "aa", "layer1 output", "none", (4, 5), 50, 60, "bb")


def rows_of(count: int, inputs: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows with a decaying spectrum and a large mean, as activations have."""
    source = np.random.default_rng(seed)
    scales = 10 / (1 + np.arange(min(count, inputs)))
    directions = source.standard_normal((len(scales), inputs))
    rows: NDArray[np.float64] = source.standard_normal((count, len(scales))) * scales @ directions + 30
    return rows.astype(np.float32)


def fitted(folder: Path, rows: NDArray[np.float32], axes: int) -> Path:
    source = dataclasses.replace(SOURCE, images=len(rows))
    return write_axes(folder, principal_axes(torch.from_numpy(rows), axes), source)


@pytest.mark.parametrize(("count", "inputs", "axes"), [(60, 20, 20), (60, 500, 12), (60, 500, 59), (40, 40, 5)])
def test_axes_are_those_of_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, inputs: int, axes: int
) -> None:
    monkeypatch.setattr(principal_axes_module, "_TILE", 64)
    rows = rows_of(count, inputs)
    pca = PCA(axes, svd_solver="full").fit(rows.astype(np.float64))
    path = fitted(tmp_path, rows, axes)
    content = load_file(path)
    np.testing.assert_allclose(content["explained_variance"], pca.explained_variance_, rtol=1e-4)
    np.testing.assert_allclose(content["explained_variance_ratio"], pca.explained_variance_ratio_, rtol=1e-4)
    np.testing.assert_allclose(content["mean"], pca.mean_, rtol=1e-6)
    assert np.rad2deg(subspace_angles(content["components"].T, pca.components_.T)).max() < 0.01
    np.testing.assert_allclose(content["components"], pca.components_, atol=1e-4)  # with the same signs
    for whiten in (False, True):
        projection = AxesProjection(inputs, axes, whiten)
        projection.load(path)
        assert projection.explained == pytest.approx(pca.explained_variance_ratio_.sum(), rel=1e-6)
        pca.whiten = whiten
        expected = pca.transform(rows.astype(np.float64))
        found = projection(torch.from_numpy(rows).reshape(count, -1, 4)).numpy()
        assert np.abs(found - expected).max() <= 2e-4 * np.abs(expected).max()


def axes_by_numpy(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All axes (K, n) and the sums of squares along them, by a singular value decomposition."""
    _, singular, axes = np.linalg.svd(rows.astype(np.float64) - rows.mean(0, dtype=np.float64), full_matrices=False)
    axes *= np.where(axes[np.arange(len(axes)), np.abs(axes).argmax(1)] < 0, -1, 1)[:, None]
    return axes, singular**2


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(("count", "inputs"), [(200, 12), (12, 12), (12, 200), (9, 30)])
def test_axes_in_memory_and_read_in_blocks_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, count: int, inputs: int, in_memory: bool
) -> None:
    monkeypatch.setattr(principal_axes_module, "_TILE", 7)
    rows = rows_of(count, inputs)
    source = FeatureRows.of(rows)
    read_in_blocks = source.blocks
    monkeypatch.setattr(FeatureRows, "blocks", lambda _: read_in_blocks(4 * inputs * 5))  # 5 rows at a time
    found = principal_axes(torch.from_numpy(rows) if in_memory else source)
    axes, squares = axes_by_numpy(rows)
    rank = min(inputs, count - 1)
    np.testing.assert_allclose(found.squares[:rank], squares[:rank], rtol=1e-9 if in_memory else 1e-3)
    np.testing.assert_allclose(found.axes[:rank], axes[:rank], atol=1e-6 if in_memory else 1e-3)
    np.testing.assert_allclose(found.mean, rows.mean(0, dtype=np.float64), rtol=1e-12)
    assert found.axes.shape == (min(count, inputs), inputs)
    assert found.total == pytest.approx(squares.sum(), rel=1e-6)
    assert found.n_varying == rank or not in_memory  # in float32, rounding is not negligible
    fewer = principal_axes(torch.from_numpy(rows) if in_memory else source, 3)
    torch.testing.assert_close(fewer.axes, found.axes[:3], rtol=0, atol=0)


def test_axes_of_degenerate_rows_are_finite_and_of_the_right_plane() -> None:
    random = np.random.default_rng(0)
    constant = rows_of(50, 8)
    constant[:, 3] = 7
    for rows in (constant, np.ascontiguousarray(constant[:6].repeat(3, 1))):
        found = principal_axes(torch.from_numpy(rows))
        axes, squares = axes_by_numpy(rows)
        np.testing.assert_allclose(found.squares, squares[: len(found.squares)], rtol=1e-9, atol=1e-9 * squares[0])
        np.testing.assert_allclose(found.axes[:5], axes[:5], atol=1e-6)
    for shape in ((1, 5), (7, 5), (3, 500)):  # a single row, and equal rows
        found = principal_axes(torch.ones(shape), 2)
        assert found.axes.isfinite().all()
        assert found.squares.tolist() == [0] * min(2, shape[0])
        assert found.shares.tolist() == [0] * min(2, shape[0])
        assert found.n_varying == 0
    plane = np.linalg.qr(random.normal(size=(40, 2)))[0].T
    for count in (4, 60):  # of two axes with one variance, the plane is defined
        circle = np.stack([np.cos(2 * np.pi * np.arange(count) / count), np.sin(2 * np.pi * np.arange(count) / count)])
        found = principal_axes(torch.from_numpy(circle.T @ plane), 2)
        np.testing.assert_allclose(found.squares, [count / 2] * 2, rtol=1e-12)
        assert np.rad2deg(subspace_angles(found.axes.numpy().T, plane.T)).max() < 1e-4
        assert (found.axes.max(1)[0] >= -found.axes.min(1)[0]).all()


def test_rows_that_cannot_be_squared_or_are_not_finite_are_refused() -> None:
    huge = np.full((30, 4), 3e30, np.float32) * np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    with pytest.raises(LayertapError, match="too large to be summed in float32"):
        principal_axes(FeatureRows.of(huge))
    assert principal_axes(torch.from_numpy(huge)).squares.isfinite().all()  # in float64
    for value in (np.nan, np.inf):
        huge[3, 2] = value
        with pytest.raises(InputError, match="row 3 of the features contains NaN or infinity"):
            principal_axes(FeatureRows.of(huge))
        with pytest.raises(LayertapError):
            principal_axes(torch.from_numpy(huge))


def test_a_file_of_axes_is_named_by_its_content_and_says_what_it_was_fitted_on(tmp_path: Path) -> None:
    rows = rows_of(30, 90)
    path = fitted(tmp_path, rows, 8)
    assert path == fitted(tmp_path, rows, 8)
    assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert axes_source(path) == dataclasses.replace(SOURCE, images=30)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_a_projection_takes_the_first_axes_of_a_larger_fit_and_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    rows = torch.from_numpy(rows_of(40, 300))
    path = fitted(tmp_path, rows.numpy(), 20)
    large, small = AxesProjection(300, 20, False), AxesProjection(300, 6, False)
    large.load(path)
    small.load(path)
    assert (small.name, AxesProjection(300, 6, True).name) == ("pca6", "pcaw6")
    torch.testing.assert_close(small(rows), large(rows)[:, :6], rtol=1e-4, atol=1e-3)
    alone = torch.cat([large(row[None]) for row in rows])
    torch.testing.assert_close(alone, large(rows), rtol=1e-4, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(large(rows), large(rows.clone()))
        torch.testing.assert_close(large(rows), large(rows.double()), rtol=1e-4, atol=1e-3)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(atomic_files, "flush_to_disk", Mock(side_effect=full))
    with pytest.raises(LayertapError, match="cannot write axes to .*: No space left on device"):
        fitted(tmp_path, rows_of(10, 50), 4)
    assert not list(tmp_path.iterdir())


def test_more_axes_than_values_files_that_are_no_axes_and_other_axes_are_refused(tmp_path: Path) -> None:
    path = fitted(tmp_path, rows_of(10, 50), 4)
    with pytest.raises(InputError, match="pca51 of 50 values: .* use K up to 50"):
        AxesProjection(50, 51, False)
    for inputs, axes in ((50, 5), (60, 4)):
        with pytest.raises(InputError, match=f"has 4 axes of 50 values; pca{axes} needs {axes} of {inputs}"):
            AxesProjection(inputs, axes, False).load(path)
    other = tmp_path / "weights.safetensors"
    save_file({"weight": np.zeros(3, np.float32)}, other)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:100])
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(LayertapError, match="is not a file of principal axes|cannot read"):
        axes_source(tmp_path / "absent.safetensors")
    for message in (
        "weights.safetensors is not a file of principal axes", "cut.safetensors is not a file of principal axes",
        "pipe.safetensors is not a file; expected principal axes",
    ):  # fmt: skip
        for read in (axes_source, AxesProjection(50, 4, False).load):
            with pytest.raises(InputError, match=message):
                read(tmp_path / message.partition(" ")[0])
    content = load_file(path)
    for name, values in (("mean", content["mean"] * np.nan), ("explained_variance", content["explained_variance"][:2])):
        save_file({**content, name: values}, other)
        with pytest.raises(InputError, match="is damaged: its mean or its variances"):
            AxesProjection(50, 4, False).load(other)
    with pytest.raises(InputError, match="pca4 has no axes; fit them with `layertap embed`"):
        AxesProjection(50, 4, False)(torch.zeros(2, 50))
