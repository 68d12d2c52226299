"""The linear head of DINOv3 for segmentation: batch norm and a linear layer, trained through the upsampled logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from extract.analysis.probe.feature_matrix import FeatureRows, Scaling
from extract.analysis.probe.model import LinearProbe
from extract.errors import InputError

__all__ = ["train_linear_head"]

_BATCH = 16  # images: 2 on each of 8 GPUs
_ITERATIONS = 40_000
_WARM_UP = 1500
_WARM_UP_START = 1e-6  # of the learning rate
_RATE, _DECAY = 1e-3, 1e-3  # of AdamW
_DROPOUT = 0.1


def train_linear_head(
    rows: FeatureRows,
    grid: tuple[int, int],
    labels: Callable[[int], NDArray[np.int64]],
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
    iterations = _ITERATIONS if iterations is None else iterations
    per_image = grid[0] * grid[1]
    count = len(rows) // per_image
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        norm, linear = nn.BatchNorm2d(rows.width), nn.Conv2d(rows.width, n_classes, 1)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)  # type: ignore[arg-type]
        head = nn.Sequential(nn.Dropout2d(_DROPOUT), norm, linear).to(device).train()
        optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, iterations))
        for images in _batches(count, iterations, seed):
            tokens = np.stack([rows.between(i * per_image, (i + 1) * per_image) for i in images])
            maps = torch.from_numpy(tokens).to(device).transpose(1, 2).reshape(len(images), -1, *grid)
            target = torch.from_numpy(np.stack([labels(i) for i in images])).to(device)
            logits = interpolate(head(maps), size=target.shape[1:], mode="bilinear")
            # The mean over labelled pixels, but 0 for a batch without any.
            loss = cross_entropy(logits, target, ignore_index=-1, reduction="sum") / (target >= 0).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    probe = _as_probe(norm, linear)
    if not all(np.isfinite(array).all() for array in (probe.coef_, probe.intercept_)):
        raise InputError("the linear head is not finite", hint="do tokens of the training images have NaN or infinity?")
    return probe


def _rate(step: int, iterations: int) -> float:
    """Return the learning rate of a step as a share of the highest."""
    warm_up = iterations * _WARM_UP / _ITERATIONS
    if step < warm_up:
        risen = 1 - (1 - step / warm_up) * (1 - _WARM_UP_START)
        return risen * (1 - step / iterations)
    return (1 + math.cos(math.pi * min(1.0, (step + 1) / iterations))) / 2


def _batches(count: int, iterations: int, seed: int) -> Iterator[list[int]]:
    """Yield the images of each batch; each image comes once before any comes again."""
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    for _ in range(iterations):
        while len(waiting) < _BATCH:
            waiting += generator.permutation(count).tolist()
        yield waiting[:_BATCH]
        del waiting[:_BATCH]


def _as_probe(norm: nn.BatchNorm2d, linear: nn.Conv2d) -> LinearProbe:
    def array(values: Tensor | None) -> NDArray[np.float32]:
        assert values is not None
        return np.asarray(values.detach().float().cpu().numpy())

    weight = array(linear.weight)[:, :, 0, 0]
    scaling = Scaling("standardise", array(norm.running_mean), np.sqrt(array(norm.running_var) + np.float32(norm.eps)))
    n_classes = len(weight)
    coef, intercept = weight * array(norm.weight), array(linear.bias) + weight @ array(norm.bias)
    if n_classes == 2:  # as all probes of two classes
        coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
    return LinearProbe(coef, intercept, np.arange(n_classes), "classification", scaling)
