"""Training of a head on frozen tokens, by its upsampled predictions: what the published evaluations have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate

from extract.analysis.probe.feature_matrix import FeatureRows, Scaling
from extract.analysis.probe.model import LinearProbe
from extract.errors import InputError

__all__ = ["linear_layers", "train_head", "trained_layers"]

_BATCH = 16  # images: 2 on each of 8 GPUs


def linear_layers(width: int, outputs: int) -> tuple[nn.BatchNorm2d, nn.Conv2d]:
    """Return a new batch norm and linear layer, initialised as in DINOv3."""
    norm, linear = nn.BatchNorm2d(width), nn.Conv2d(width, outputs, 1)
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)  # type: ignore[arg-type]
    return norm, linear


def train_head(
    head: nn.Module,
    rows: FeatureRows,
    grid: tuple[int, int],
    target_of: Callable[[int], NDArray[np.generic]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[int], None],
    *,
    iterations: int,
    seed: int,
    device: torch.device,
    largest_gradient: float = float("inf"),
) -> None:
    """Train a head in place.

    Args:
        head: from (B, C, h, w) to (B, K, h, w), on the device.
        rows: (N * h * w, C), tokens of the training images.
        grid: (h, w).
        target_of: function of the number of an image, from 0 to N - 1, that returns (H, W) targets of the pixels of its
            input. All have the same size.
        loss_of: loss of the upsampled predictions (B, K, H, W) for targets (B, H, W).
        optimizer: optimizer of the head.
        schedule: called with the number of a step, from 0, before it is made; sets the settings of the optimizer.
        iterations: batches of 16 images.
        seed: seed of the order.
        device: device to compute on.
        largest_gradient: norm to which longer gradients are cut.
    """
    per_image = grid[0] * grid[1]
    head.train()
    for step, images in enumerate(_batches(len(rows) // per_image, iterations, seed)):
        schedule(step)
        tokens = np.stack([rows.between(i * per_image, (i + 1) * per_image) for i in images])
        maps = torch.from_numpy(tokens).to(device).transpose(1, 2).reshape(len(images), -1, *grid)
        target = torch.from_numpy(np.stack([target_of(i) for i in images])).to(device)
        loss = loss_of(interpolate(head(maps), size=target.shape[1:], mode="bilinear"), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if largest_gradient < float("inf"):
            nn.utils.clip_grad_norm_(head.parameters(), largest_gradient)
        optimizer.step()


def _batches(count: int, iterations: int, seed: int) -> Iterator[list[int]]:
    """Yield the images of each batch; each image comes once before any comes again."""
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    for _ in range(iterations):
        while len(waiting) < _BATCH:
            waiting += generator.permutation(count).tolist()
        yield waiting[:_BATCH]
        del waiting[:_BATCH]


def trained_layers(norm: nn.BatchNorm2d, linear: nn.Conv2d) -> LinearProbe:
    """Return the layers as a probe of single tokens, whose scores are the outputs of the linear layer.

    Raises:
        InputError: a weight is not finite.
    """

    def array(values: Tensor | None) -> NDArray[np.float32]:
        assert values is not None
        return np.asarray(values.detach().float().cpu().numpy())

    weight = array(linear.weight)[:, :, 0, 0]
    scaling = Scaling("standardise", array(norm.running_mean), np.sqrt(array(norm.running_var) + np.float32(norm.eps)))
    outputs = len(weight)
    coef, intercept = weight * array(norm.weight), array(linear.bias) + weight @ array(norm.bias)
    if outputs == 2:  # as all probes of two classes
        coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
    if not (np.isfinite(coef).all() and np.isfinite(intercept).all()):
        raise InputError("the linear head is not finite", hint="do tokens of the training images have NaN or infinity?")
    return LinearProbe(coef, intercept, np.arange(outputs), "classification", scaling)
