"""Depths predicted from tokens, against scikit-learn, PyTorch and the definitions of the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import interpolate

from extract.analysis.dense import DepthBins, cell_means, depth_probe
from extract.errors import LayertapError
from tests.extract.analysis.dense.test_segmentation import CHANNELS, CROP, GRID, IMAGES, TEST, TRAIN, token_array

LARGEST = 8.0
UNKNOWN_IN_TEST = [np.full(CROP, 0.0 if image in TEST else 1.0 + image % 7) for image in range(IMAGES)]


@pytest.fixture(scope="module")
def samples() -> tuple[Any, list[np.ndarray]]:
    """Tokens that tell the depth of their cell, with noise, and depth maps in the size of the crop."""
    generator = np.random.default_rng(0)
    cells = generator.uniform(1, LARGEST, (IMAGES, *GRID))
    values = generator.normal(0, 0.3, (IMAGES, *GRID, CHANNELS))
    values[..., 0] += cells
    values[..., 1] += np.log(cells)
    depths = [cell.repeat(8, 0).repeat(8, 1) for cell in cells]
    for depth in depths:
        depth[:3] = 0
        depth[3, :5] = np.nan
    return token_array(values.reshape(IMAGES, -1, CHANNELS).astype(np.float32)), depths


def known(depth: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (depth > 0) & (depth < np.inf)


@pytest.mark.usefixtures("few_strengths")
def test_metrics_are_means_over_images_by_their_definitions(samples: Any) -> None:
    tokens, depths = samples
    predicted: dict[int, np.ndarray] = {}
    result = depth_probe(tokens, depths, TRAIN, TEST, on_prediction=predicted.__setitem__)
    assert list(predicted) == list(TEST)
    each = []
    for image in TEST:
        counts = known(depths[image]) & ~np.isnan(predicted[image])
        true, guess = depths[image][counts].astype(np.float64), predicted[image][counts].astype(np.float64)
        ratio = np.maximum(true / guess, guess / true)
        each.append(
            (np.sqrt(np.mean((true - guess) ** 2)), np.mean(np.abs(true - guess) / true), np.mean(ratio < 1.25))
        )
    for column, name in enumerate(("rmse", "abs_rel", "delta1")):
        np.testing.assert_allclose(result.per_image[name], [row[column] for row in each], rtol=1e-4)
        assert result.metrics[name].value == pytest.approx(np.mean([row[column] for row in each]), rel=1e-4)
        assert result.metrics[name].low < result.metrics[name].value < result.metrics[name].high
    assert "only 6 images" in result.metrics["rmse"].method
    assert result.primary == "delta1"
    assert result.metrics["delta1"].value > 0.6
    assert (result.n_train, result.n_test) == (24, 6)


@pytest.mark.usefixtures("few_strengths")
def test_the_fast_protocol_is_logistic_regression_of_the_means_of_cells(samples: Any) -> None:
    tokens, depths = samples
    predicted: dict[int, np.ndarray] = {}
    val = range(20, 24)
    result = depth_probe(tokens, depths, range(20), TEST, val=val, on_prediction=predicted.__setitem__)
    assert result.chosen_on == "validation images"
    values = np.array(tokens[:]).reshape(IMAGES, -1, CHANNELS)
    means = np.full((IMAGES, *GRID), np.nan)
    for image, row, column in np.ndindex(means.shape):
        cell = depths[image][8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        if known(cell).mean() >= 0.5:
            means[image, row, column] = cell[known(cell)].mean()
    targets = means.reshape(IMAGES, -1)
    has = ~np.isnan(targets)
    train = np.arange(IMAGES) < 24  # the final fit takes the validation images too
    x, y = values[train][has[train]].astype(np.float64), targets[train][has[train]]
    edges = np.linspace(y.min(), y.max(), 17)
    bins = np.digitize(y, edges[1:-1], right=True)
    fitted_on = (np.arange(IMAGES) < 20)[train].repeat(
        has[train].sum(1)
    )  # depths of bins: of the training images alone
    centres = np.array([y[fitted_on & (bins == number)].mean() for number in range(16)])
    mean, scale = x.mean(0), x.std(0)
    model = LogisticRegression(C=1 / result.chosen, solver="newton-cholesky", max_iter=5000, tol=1e-8).fit(
        (x - mean) / scale, bins
    )
    for image in TEST:
        of_cells = (model.predict_proba((values[image] - mean) / scale) @ centres).reshape(1, 1, *GRID)
        expected = interpolate(torch.from_numpy(of_cells), size=CROP, mode="bilinear")[0, 0]
        np.testing.assert_allclose(predicted[image], expected, atol=0.05)


def test_means_of_cells_are_those_of_their_known_pixels(samples: Any) -> None:
    tokens = token_array(np.zeros((1, 24, CHANNELS), np.float32), resize=(64, 64))
    generator = np.random.default_rng(1)
    depth = generator.uniform(1, 2, (64, 64)).astype(np.float32)
    depth[generator.random((64, 64)) < 0.4] = np.nan
    depth[16:24, 8:16] = np.nan
    found = cell_means(tokens, depth).reshape(GRID)
    assert np.isnan(found[0, 0])
    inside = depth[16:48, 8:56]  # the crop
    for row, column in np.ndindex(GRID):
        cell = inside[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        if (~np.isnan(cell)).mean() >= 0.5:
            assert found[row, column] == pytest.approx(np.nanmean(cell), rel=1e-6)
        else:
            assert np.isnan(found[row, column])


def test_depths_of_bins_are_means_weighted_by_scores() -> None:
    tokens = token_array(np.zeros((1, 24, CHANNELS), np.float32))
    scores, depths = torch.randn(16, *GRID), torch.linspace(0.5, 10, 16)
    weights = scores.softmax(0)
    of_cells = ((weights * depths[:, None, None]).sum(0) / weights.sum(0)).clamp(max=8)
    expected = interpolate(of_cells[None, None], size=CROP, mode="bilinear", align_corners=False)[0, 0]
    found = DepthBins(depths.numpy(), 8.0).predicted(tokens, scores, (48, 32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.usefixtures("few_strengths")
def test_larger_depths_neither_count_nor_are_predicted(samples: Any) -> None:
    tokens, depths = samples
    predicted: dict[int, np.ndarray] = {}
    result = depth_probe(tokens, depths, TRAIN, TEST, max_depth=4.0, on_prediction=predicted.__setitem__)
    assert max(np.nanmax(values) for values in predicted.values()) <= 4
    counted = [int((known(depths[image]) & (depths[image] <= 4)).sum()) for image in TEST]
    assert result.per_image["n"].tolist() == counted
    again = depth_probe(tokens, depths, TRAIN, TEST, max_depth=4.0, seed=0)
    assert again.metrics["rmse"] == result.metrics["rmse"]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"max_depth": 0.0}, "max_depth=0.0; expected a positive number"),
    ({"depths": {}}, "no depth map of image 0"),
    ({"depths": [np.zeros((4, 4, 3))] * IMAGES}, r"shape \(4, 4, 3\); expected numbers"),
    ({"depths": [np.zeros(CROP)] * IMAGES}, "no pixel of the training images has a known depth"),
    ({"protocol": "depth-dinov2"}, "protocol 'depth-dinov2' not found"),
    ({"depths": UNKNOWN_IN_TEST}, "test images have no known depth inside the crop"),
])  # fmt: skip
@pytest.mark.usefixtures("few_strengths")
def test_wrong_arguments_are_refused(samples: Any, arguments: dict[str, Any], message: str) -> None:
    how: dict[str, Any] = {"depths": samples[1], "train": TRAIN, "test": TEST} | arguments
    with pytest.raises(LayertapError, match=message):
        depth_probe(samples[0], **how)
