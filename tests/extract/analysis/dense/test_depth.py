"""Depths predicted from tokens, against scikit-learn, PyTorch and the definitions of the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import interpolate

from extract.analysis.dense import DEPTH, depth_probe
from extract.analysis.dense.linear_head import depth_bins
from extract.analysis.dense.upsampling import cell_means, mean_depth
from extract.errors import InputError, UnknownNameError
from tests.extract.analysis.dense.test_segmentation import CHANNELS, CROP, GRID, IMAGES, TEST, TRAIN, token_array

LARGEST = 8.0


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


@pytest.mark.parametrize("protocol", DEPTH)
def test_metrics_are_means_over_images_by_their_definitions(samples: Any, protocol: str) -> None:
    tokens, depths = samples
    predicted: dict[int, np.ndarray] = {}
    result = depth_probe(tokens, depths, TRAIN, TEST, protocol=protocol, on_prediction=predicted.__setitem__,
                         iterations=100 if protocol == "depth-dinov3" else None)  # fmt: skip
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
    if protocol == "depth":
        assert result.metrics["delta1"].value > 0.6
    assert (result.n_train, result.n_test) == (24, 6)


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
    model = LogisticRegression(C=1 / result.chosen, max_iter=5000, tol=1e-8).fit((x - mean) / scale, bins)
    for image in TEST:
        of_cells = (model.predict_proba((values[image] - mean) / scale) @ centres).reshape(1, 1, *GRID)
        expected = interpolate(torch.from_numpy(of_cells), size=CROP, mode="bilinear")[0, 0]
        np.testing.assert_allclose(predicted[image], expected, atol=0.05)


def published(tokens: torch.Tensor, depths: torch.Tensor, iterations: int) -> torch.nn.Module:
    """Train the linear head of DINOv3 on (N, C, h, w) tokens and (N, H, W) depths of the input, 0 for unknown.

    `eval/depth` of DINOv3 with `config-nyu.yaml`: AdamW, WarmupOneCycleLR, SigLoss, gradients cut at 35.
    """
    largest = LARGEST
    torch.manual_seed(0)
    norm, linear = torch.nn.BatchNorm2d(tokens.shape[1]), torch.nn.Conv2d(tokens.shape[1], 256, 1)
    torch.nn.init.normal_(linear.weight, mean=0, std=0.01)
    torch.nn.init.constant_(linear.bias, 0)

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = norm, linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logit = torch.relu(self.linear(self.norm(x))) + 0.1
            logit = logit / logit.sum(dim=1, keepdim=True)
            bins = torch.linspace(1e-4 * largest, largest, 256)
            return torch.einsum("ikmn,k->imn", [logit, bins]).unsqueeze(dim=1)

    head = Head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-4, weight_decay=1e-4)
    generator, order = np.random.default_rng(0), []
    warm_up = iterations // 3
    for step in range(iterations):
        if step < warm_up:
            top = 3e-4 * (1 + np.cos(np.pi * step / iterations)) / 2
            rate, moment = 3e-4 / 1000 + top * step / warm_up, 0.0
        else:
            least = 3e-4 / 25 / 1000
            rate = least + (3e-4 - least) / 2 * (np.cos(np.pi * (step + 1) / iterations) + 1)
            moment = 0.95 + (0.85 - 0.95) / 2 * (np.cos(np.pi * (step - warm_up) / (iterations - warm_up)) + 1)
        optimizer.param_groups[0].update(lr=rate, betas=(moment, 0.99))
        while len(order) < 16:
            order += generator.permutation(len(tokens)).tolist()
        chosen, order = order[:16], order[16:]
        target = depths[chosen]
        valid = target > 0
        guess = interpolate(head(tokens[chosen]), size=target.shape[1:], mode="bilinear", align_corners=False)[:, 0]
        eps = 1e-4 * largest
        g = torch.log(guess[valid] + eps) - torch.log(target[valid] + eps)
        loss = 0.15 * torch.pow(torch.mean(g), 2)
        if step >= 100:
            loss = loss + torch.var(g)
        loss = torch.sqrt(loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 35)
        optimizer.step()
    return head.eval()


@pytest.mark.slow
def test_the_published_protocol_is_that_of_plain_pytorch(samples: Any) -> None:
    tokens, depths = samples
    predicted: dict[int, np.ndarray] = {}
    depth_probe(tokens, depths, TRAIN, TEST, protocol="depth-dinov3", iterations=600, max_depth=LARGEST,
                on_prediction=predicted.__setitem__)  # fmt: skip
    maps = torch.from_numpy(np.array(tokens[:]).reshape(IMAGES, *GRID, CHANNELS)).permute(0, 3, 1, 2)
    known_depths = torch.from_numpy(np.stack([np.where(known(depth), depth, 0) for depth in depths])).float()
    head = published(maps[list(TRAIN)], known_depths[list(TRAIN)], 600)
    with torch.no_grad():
        expected = interpolate(head(maps[list(TEST)]), size=CROP, mode="bilinear")[:, 0]
    assert expected.std() > 0.1  # it has learned
    for image, depth in zip(TEST, expected, strict=True):
        np.testing.assert_allclose(predicted[image], depth, atol=1e-3)


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
    scores = torch.randn(2, 256, 3, 4)
    bins_of_head = depth_bins(10.0)
    found = mean_depth(scores, torch.from_numpy(bins_of_head.depths), bins_of_head.weighting)
    weights = scores.clamp(min=0) + 0.1
    bins = torch.linspace(0.001, 10, 256)
    expected = (weights * bins[:, None, None]).sum(1) / weights.sum(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("protocol", DEPTH)
def test_larger_depths_neither_count_nor_are_predicted(samples: Any, protocol: str) -> None:
    tokens, depths = samples
    predicted: dict[int, np.ndarray] = {}
    result = depth_probe(tokens, depths, TRAIN, TEST, max_depth=4.0, protocol=protocol,
                         iterations=50 if protocol == "depth-dinov3" else None,
                         on_prediction=predicted.__setitem__)  # fmt: skip
    assert max(np.nanmax(values) for values in predicted.values()) <= 4
    counted = [int((known(depths[image]) & (depths[image] <= 4)).sum()) for image in TEST]
    assert result.per_image["n"].tolist() == counted
    again = depth_probe(tokens, depths, TRAIN, TEST, max_depth=4.0, protocol=protocol, seed=0,
                        iterations=50 if protocol == "depth-dinov3" else None)  # fmt: skip
    assert again.metrics["rmse"] == result.metrics["rmse"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"iterations": 5}, "iterations=5; expected a positive number for the protocol depth-dinov3"),
        ({"max_depth": 0.0}, "max_depth=0.0; expected a positive number"),
        ({"depths": {}}, "no depth map of image 0"),
        ({"depths": [np.zeros((4, 4, 3))] * IMAGES}, r"shape \(4, 4, 3\); expected numbers"),
        ({"depths": [np.zeros(CROP)] * IMAGES}, "no pixel of the training images has a known depth"),
        ({"train": [0]}, "a single training image"),
        ({"test": [0]}, "in both train and test"),
    ],
)
def test_wrong_arguments_are_refused(samples: Any, arguments: dict[str, Any], message: str) -> None:
    how: dict[str, Any] = {"depths": samples[1], "train": TRAIN, "test": TEST} | arguments
    with pytest.raises(InputError, match=message):
        depth_probe(samples[0], **how)


def test_unknown_protocols_and_test_images_without_depths_are_refused(samples: Any) -> None:
    tokens, depths = samples
    with pytest.raises(UnknownNameError, match="depth-dinov3"):
        depth_probe(tokens, depths, TRAIN, TEST, protocol="depth-dinov2")
    unknown = [np.zeros(CROP) if image in TEST else depth for image, depth in enumerate(depths)]
    with pytest.raises(InputError, match="test images have no known depth inside the crop"):
        depth_probe(tokens, unknown, TRAIN, TEST)
