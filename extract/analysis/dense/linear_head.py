"""The linear heads of DINOv3 for segmentation and depth, trained through upsampled predictions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from extract.analysis.dense.depth_bins import DepthBins, mean_depth
from extract.analysis.dense.head_training import linear_layers, train_head, trained_layers
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.model import LinearProbe
from extract.system.torch_state import with_gradients

__all__ = ["depth_bins", "train_depth_head", "train_segmentation_head"]

_SEGMENTATION_ITERATIONS, _DEPTH_ITERATIONS = 40_000, 38_400
_BINS = 256
_LEAST_SHARE = 1e-4  # of the largest depth: 0.001 of 10, as published
_LOSS_WITHOUT_VARIANCE = 100  # first steps


def train_segmentation_head(
    rows: FeatureRows,
    grid: tuple[int, int],
    labels: Callable[[int], NDArray[np.int32]],
    n_classes: int,
    *,
    iterations: int | None,
    seed: int,
    device: torch.device,
) -> LinearProbe:
    """Train the head, with the settings of `config-ade20k-linear-training.yaml` of DINOv3 (Simeoni et al. 2025).

    Tokens are frozen, so there is no augmentation: neither scaled and flipped pictures nor random crops.

    Args:
        rows: (N * h * w, C), tokens of the training images.
        grid: (h, w).
        labels: function of the number of an image, from 0 to N - 1, that returns (H, W) labels of its input to the
            backbone; -1 is ignored. All have the same size.
        n_classes: K.
        iterations: batches of 16 images; None: 40,000. The learning rate rises in the first 3.75 % of them, and falls
            to 0 in the others.
        seed: seed of the weights, the order and the dropout.
        device: device to compute on.

    Returns:
        the head with its batch norm, as a probe of single tokens.

    Raises:
        InputError: a token has NaN or infinity, or the training does not stay finite.
    """
    iterations = _SEGMENTATION_ITERATIONS if iterations is None else iterations
    with with_gradients(), _seeded(seed, device):
        norm, linear = linear_layers(rows.width, n_classes)
        head = nn.Sequential(nn.Dropout2d(0.1), norm, linear).to(device)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=1e-3)
        train_head(
            head, rows, grid, labels, _mean_cross_entropy, optimizer,
            lambda step: _set(optimizer, lr=1e-3 * _segmentation_rate(step, iterations)),
            iterations=iterations, seed=seed, device=device,
        )  # fmt: skip
    return trained_layers(norm, linear)


def _mean_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over labelled pixels, but 0 for a batch without any."""
    total = cross_entropy(logits, target.long(), ignore_index=-1, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1)


def _segmentation_rate(step: int, iterations: int) -> float:
    """Return the learning rate of a step as a share of the highest."""
    warm_up = iterations * 1500 / _SEGMENTATION_ITERATIONS
    if step < warm_up:
        risen = 1 - (1 - step / warm_up) * (1 - 1e-6)
        return risen * (1 - step / iterations)
    return _falling((step + 1) / iterations)


def _falling(share: float) -> float:
    """Return the value of a half period of the cosine, from 1 at 0 to 0 at 1."""
    return (1 + math.cos(math.pi * min(1.0, share))) / 2


def _set(optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    for group in optimizer.param_groups:
        group.update(settings)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def depth_bins(largest: float) -> DepthBins:
    """Return 256 bins, spread evenly from 1/10,000 of the largest depth to this depth."""
    return DepthBins(torch.linspace(largest * _LEAST_SHARE, largest, _BINS).numpy(), "relu", largest)


class _MeanDepth(nn.Module):
    """Depths (B, 1, ...) from the scores (B, bins, ...) of bins."""

    def __init__(self, bins: DepthBins):
        super().__init__()
        self._weighting = bins.weighting
        self.register_buffer("depths", torch.from_numpy(bins.depths))

    def forward(self, scores: Tensor) -> Tensor:
        return mean_depth(scores, self.get_buffer("depths"), self._weighting)[:, None]


def train_depth_head(
    rows: FeatureRows,
    grid: tuple[int, int],
    depths: Callable[[int], NDArray[np.float32]],
    bins: DepthBins,
    *,
    iterations: int | None,
    seed: int,
    device: torch.device,
) -> LinearProbe:
    """Train the head, with the settings of `config-nyu.yaml` of DINOv3 (Simeoni et al. 2025), without augmentation.

    The loss is the scale-invariant one of Eigen et al. (2014) as in AdaBins. The rate rises in the first third of the
    steps, with a first moment of 0, and falls in the others.

    Args:
        rows: (N * h * w, C), tokens of the training images.
        grid: (h, w).
        depths: function of the number of an image, from 0 to N - 1, that returns (H, W) depths of its input to the
            backbone; NaN is ignored. All have the same size.
        bins: result of `depth_bins`.
        iterations: batches of 16 images; None: 38,400.
        seed: seed of the weights and the order.
        device: device to compute on.

    Returns:
        the head with its batch norm, as a probe of single tokens, which gives the scores of the bins.

    Raises:
        InputError: a token has NaN or infinity, or the training does not stay finite.
    """
    iterations = _DEPTH_ITERATIONS if iterations is None else iterations
    seen = 0

    def loss(predicted: Tensor, target: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        known = ~target.isnan()
        if not known.any():
            return predicted.sum() * 0
        least = bins.largest * _LEAST_SHARE
        ratio = (predicted[:, 0][known] + least).log() - (target[known] + least).log()
        value = 0.15 * ratio.mean() ** 2
        if seen > _LOSS_WITHOUT_VARIANCE and len(ratio) > 1:
            value = value + ratio.var()
        return value.sqrt() if value > 0 else value.abs()

    def schedule(step: int) -> None:
        warm_up = iterations / 3
        if step < warm_up:
            lr, moment = 1e-3 + _falling(step / iterations) * step / warm_up, 0.0
        else:
            lr = 4e-5 + (1 - 4e-5) * _falling((step + 1) / iterations)
            moment = 0.95 - 0.1 * _falling((step - warm_up) / (iterations - warm_up))
        _set(optimizer, lr=3e-4 * lr, betas=(moment, 0.99))

    with with_gradients(), _seeded(seed, device):
        norm, linear = linear_layers(rows.width, len(bins.depths))
        head = nn.Sequential(norm, linear, _MeanDepth(bins)).to(device)
        optimizer = torch.optim.AdamW(head.parameters(), lr=3e-4, betas=(0.95, 0.99), weight_decay=1e-4)
        train_head(
            head, rows, grid, depths, loss, optimizer, schedule,
            iterations=iterations, seed=seed, device=device, largest_gradient=35.0,
        )  # fmt: skip
    return trained_layers(norm, linear)
