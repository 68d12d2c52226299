"""Principal axes: the streamed fit against scikit-learn's PCA, the projection, and files of axes."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA

from extract.compute import axes_fit
from extract.compute.axes_files import AxesSource, axes_source
from extract.compute.axes_fit import AxesFit
from extract.compute.axes_projection import AxesProjection
from extract.errors import InputError, LayertapError

SOURCE = AxesSource("timm/x", "aa", "layer1 output", "none", (4, 5), 50, 0, "bb")


def rows_of(count: int, inputs: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows with a decaying spectrum and a large mean, as activations have."""
    source = np.random.default_rng(seed)
    scales = 10 / (1 + np.arange(min(count, inputs)))
    directions = source.standard_normal((len(scales), inputs))
    rows: NDArray[np.float64] = source.standard_normal((count, len(scales))) * scales @ directions + 30
    return rows.astype(np.float32)


def fitted(folder: Path, rows: NDArray[np.float32], axes: int, images: int | None = None, batch: int = 7) -> Path:
    with AxesFit(folder, rows.shape[1], images or len(rows), axes, "layer1") as fit:
        for start in range(0, len(rows), batch):
            fit.add(rows[start : start + batch])
        return fit.write(SOURCE)


@pytest.mark.parametrize(("count", "inputs", "axes"), [(60, 20, 20), (60, 500, 12), (60, 500, 59), (40, 40, 5)])
def test_axes_are_those_of_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, inputs: int, axes: int
) -> None:
    monkeypatch.setattr(axes_fit, "_TILE", 64)
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


def test_axes_do_not_depend_on_the_batches_nor_on_failed_images(tmp_path: Path) -> None:
    rows = rows_of(30, 90)
    one, other = fitted(tmp_path, rows, 8, batch=30), fitted(tmp_path, rows, 8, images=35, batch=4)
    assert one == other  # named by the hash of its content
    assert axes_source(one) == dataclasses.replace(SOURCE, images=30, shape=[4, 5])
    assert [path.name for path in tmp_path.iterdir()] == [one.name]


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


def test_axes_that_cannot_be_fitted_are_refused(tmp_path: Path) -> None:
    rows = rows_of(10, 50)
    with pytest.raises(InputError, match="layer1: 10 axes need at least 11 images to fit, and there are 10; use fewer"):
        fitted(tmp_path, rows, 10)
    with pytest.raises(InputError, match="layer1: the 40 images vary along 9 axes only, not 12; use pca9 or less"):
        fitted(tmp_path, np.tile(rows, (4, 1)), 12)
    with pytest.raises(InputError, match="the 5 images vary along 0 axes only"):
        fitted(tmp_path, np.ones((5, 3), np.float32), 2)
    with pytest.raises(InputError, match="pca51 of 50 values: .* use K up to 50"):
        AxesProjection(50, 51, False)
    with pytest.raises(InputError, match="layer1: .* need a matrix of 30,000 x 30,000; use --fit-on 20000 or less"):
        AxesFit(tmp_path, 40_000, 30_000, 64, "layer1")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert AxesFit(tmp_path, 802_816, 2000, 256, "layer1").disk_bytes == 4 * 802_816 * 2256
    for name in ("pwrite", "posix_fallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(LayertapError, match="cannot write .*: No space left on device"):
                fitted(tmp_path, rows_of(10, 50), 4)
        assert not list(tmp_path.iterdir())


def test_files_that_are_no_axes_or_other_axes_are_refused(tmp_path: Path) -> None:
    path = fitted(tmp_path, rows_of(10, 50), 4)
    with pytest.raises(InputError, match="has 4 axes of 50 values; pca5 needs 5 of 50"):
        AxesProjection(50, 5, False).load(path)
    with pytest.raises(InputError, match="has 4 axes of 50 values; pca4 needs 4 of 60"):
        AxesProjection(60, 4, False).load(path)
    other = tmp_path / "weights.safetensors"
    save_file({"weight": np.zeros(3, np.float32)}, other)
    for damaged in (other, tmp_path / "cut.safetensors"):
        if not damaged.exists():
            damaged.write_bytes(path.read_bytes()[:100])
        for read in (axes_source, AxesProjection(50, 4, False).load):
            with pytest.raises(InputError, match=f"{damaged.name} is not a file of principal axes"):
                read(damaged)  # type: ignore[operator]
    with pytest.raises(LayertapError, match="is not a file of principal axes|cannot read"):
        axes_source(tmp_path / "absent.safetensors")
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    for read in (axes_source, AxesProjection(50, 4, False).load):
        with pytest.raises(InputError, match="pipe.safetensors is not a file; expected principal axes"):
            read(pipe)  # type: ignore[operator]
    content = load_file(path)
    for name, values in (("mean", content["mean"] * np.nan), ("explained_variance", content["explained_variance"][:2])):
        save_file({**content, name: values}, other)
        with pytest.raises(InputError, match="is damaged: its mean or its variances"):
            AxesProjection(50, 4, False).load(other)
    with pytest.raises(InputError, match="pca4 has no axes; fit them with `layertap embed`"):
        AxesProjection(50, 4, False)(torch.zeros(2, 50))
