"""The linear heads of DINOv3 for segmentation and depth, trained through upsampled predictions.

Tokens are frozen, so there is no augmentation: neither scaled and flipped pictures nor random crops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from extract.analysis.dense.dense_probe import DenseProbe
from extract.analysis.dense.token_images import held, remembered, token_numbers
from extract.analysis.dense.upsampling import DepthBins, mean_depth
from extract.analysis.probe.feature_matrix import Scaling
from extract.analysis.probe.model import LinearProbe
from extract.analysis.probe.protocols import Fitted
from extract.errors import InputError
from extract.system.torch_state import with_gradients

__all__ = ["depth_bins", "train_depth_head", "train_segmentation_head"]

_BATCH = 16  # images: 2 on each of 8 GPUs
_SEGMENTATION_ITERATIONS = 40_000
_DEPTH_ITERATIONS = 38_400
_BINS = 256
_LEAST_SHARE = 1e-4  # of the largest depth: 0.001 of 10, as published
_LOSS_WITHOUT_VARIANCE = 100  # first steps


def _trained(
    probe: DenseProbe,
    target_of: Callable[[int], NDArray[np.generic]],
    n_outputs: int,
    iterations: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    schedule: Callable[[int], dict[str, Any]],
    *,
    before: tuple[nn.Module, ...] = (),
    after: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    weight_decay: float,
    largest_gradient: float = math.inf,
) -> Fitted:
    """Train a batch norm and a linear layer on the `learned` images.

    Args:
        probe: the tokens of the images.
        target_of: function of the number of an image that returns (H, W) targets of the pixels of its input. All have
            the same size.
        n_outputs: K, outputs of the linear layer.
        iterations: batches of 16 images.
        loss_of: loss of the upsampled predictions (B, K, H, W) for targets (B, H, W).
        schedule: function of the number of a step, from 0, that returns the settings of AdamW.
        before: modules before the batch norm, in training.
        after: applied to the outputs of the linear layer in training, before they are upsampled.
        weight_decay: of AdamW.
        largest_gradient: norm to which longer gradients are cut.

    Returns:
        the layers as a probe of single tokens, whose scores are the outputs of the linear layer.

    Raises:
        InputError: a token has NaN or infinity, or the training does not stay finite.
    """
    tokens, images, settings = probe.features[0], probe.learned, probe.settings
    device, per_image = settings.device, tokens.per_image
    rows = held(probe.features, token_numbers(images, per_image), settings)
    target = remembered(lambda number: target_of(int(images[number])), settings)
    with with_gradients(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        norm, linear = nn.BatchNorm2d(rows.width), nn.Conv2d(rows.width, n_outputs, 1)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)  # type: ignore[arg-type]
        head = nn.Sequential(*before, norm, linear).to(device).train()
        optimizer = torch.optim.AdamW(head.parameters(), weight_decay=weight_decay)
        for step, numbers in enumerate(_batches(len(images), iterations, settings.seed)):
            for group in optimizer.param_groups:
                group.update(schedule(step))
            values = np.stack([rows.between(i * per_image, (i + 1) * per_image) for i in numbers])
            maps = torch.from_numpy(values).to(device).transpose(1, 2).reshape(len(numbers), -1, *tokens.grid)
            targets = torch.from_numpy(np.stack([target(i) for i in numbers])).to(device)
            loss = loss_of(interpolate(after(head(maps)), size=targets.shape[1:], mode="bilinear"), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if largest_gradient < math.inf:
                nn.utils.clip_grad_norm_(head.parameters(), largest_gradient)
            optimizer.step()
    model = _as_probe(norm, linear)
    return Fitted(lambda tokens: (model.scores(tokens), None), len(images), model=model)


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


def _falling(share: float) -> float:
    """Return the value of a half period of the cosine, from 1 at 0 to 0 at 1."""
    return (1 + math.cos(math.pi * min(1.0, share))) / 2


def train_segmentation_head(probe: DenseProbe, labels_of: Callable[[int], NDArray[np.int32]], n_classes: int) -> Fitted:
    """Train the head, with the settings of `config-ade20k-linear-training.yaml` of DINOv3 (Simeoni et al. 2025).

    The learning rate rises in the first 3.75 % of the steps, and falls to 0 in the others.

    Args:
        probe: the tokens of the images; without a number of iterations, they are 40,000.
        labels_of: see `_trained`; -1 is ignored.
        n_classes: K.

    Raises:
        InputError: a token has NaN or infinity, or the training does not stay finite.
    """
    iterations = _SEGMENTATION_ITERATIONS if probe.iterations is None else probe.iterations

    def mean_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean over labelled pixels, but 0 for a batch without any."""
        total = cross_entropy(logits, target.long(), ignore_index=-1, reduction="sum")
        return total / (target >= 0).sum().clamp(min=1)

    def schedule(step: int) -> dict[str, Any]:
        warm_up = iterations * 1500 / _SEGMENTATION_ITERATIONS
        if step < warm_up:
            risen = 1 - (1 - step / warm_up) * (1 - 1e-6)
            return {"lr": 1e-3 * (risen * (1 - step / iterations))}
        return {"lr": 1e-3 * _falling((step + 1) / iterations)}

    return _trained(
        probe, labels_of, n_classes, iterations, mean_cross_entropy, schedule, before=(nn.Dropout2d(0.1),),
        weight_decay=1e-3,
    )  # fmt: skip


def depth_bins(largest: float) -> DepthBins:
    """Return 256 bins, spread evenly from 1/10,000 of the largest depth to this depth."""
    return DepthBins(torch.linspace(largest * _LEAST_SHARE, largest, _BINS).numpy(), "relu", largest)


def train_depth_head(probe: DenseProbe, depths_of: Callable[[int], NDArray[np.float32]], bins: DepthBins) -> Fitted:
    """Train the head, with the settings of `config-nyu.yaml` of DINOv3 (Simeoni et al. 2025).

    The loss is the scale-invariant one of Eigen et al. (2014) as in AdaBins. The rate rises in the first third of the
    steps, with a first moment of 0, and falls in the others.

    Args:
        probe: the tokens of the images; without a number of iterations, they are 38,400.
        depths_of: see `_trained`; NaN is ignored.
        bins: result of `depth_bins`.

    Returns:
        a probe of single tokens, which gives the scores of the bins.

    Raises:
        InputError: a token has NaN or infinity, or the training does not stay finite.
    """
    iterations = _DEPTH_ITERATIONS if probe.iterations is None else probe.iterations
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

    def schedule(step: int) -> dict[str, Any]:
        warm_up = iterations / 3
        if step < warm_up:
            lr, moment = 1e-3 + _falling(step / iterations) * step / warm_up, 0.0
        else:
            lr = 4e-5 + (1 - 4e-5) * _falling((step + 1) / iterations)
            moment = 0.95 - 0.1 * _falling((step - warm_up) / (iterations - warm_up))
        return {"lr": 3e-4 * lr, "betas": (moment, 0.99)}

    depths = torch.from_numpy(bins.depths).to(probe.settings.device)
    return _trained(
        probe, depths_of, len(depths), iterations, loss, schedule, weight_decay=1e-4, largest_gradient=35.0,
        after=lambda scores: mean_depth(scores, depths, bins.weighting)[:, None],
    )  # fmt: skip
