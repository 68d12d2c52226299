"""Measure what projections change, on a few images, in eager float32.

Pairs of images are those of one batch: whole activations of many layers and all images would not fit into memory. Of
each batch, only the products of its images are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.backbones import LoadedBackbone
from extract.compute.distortion import Distortion, distortion_of_grams
from extract.compute.feature_choice import Choice, Feature
from extract.compute.sparse_projection import is_channels_last
from extract.system.foreign_code import exits_refused
from extract.system.torch_state import evaluating, full_float32
from extract.taps.taps import Taps

__all__ = ["measured_distortion"]

_COLUMNS = 1 << 14  # multiplied at once in float64; 4 MB of 32 images stay near the cores (65,536: half as fast)


def measured_distortion(backbone: LoadedBackbone, choice: Choice, batches: Iterable[Tensor]) -> dict[str, Distortion]:
    """Measure every projected feature: name -> its distortion. Features without a projection are left out.

    Args:
        backbone: loaded backbone.
        choice: features.
        batches: (B, ...) each, stacked results of `Preprocessing.cpu_transform`.
    """
    projected = [feature for feature in choice.features if feature.is_projected]
    if not projected:
        return {}
    taps = Taps(backbone.model, stop=True)
    for site in dict.fromkeys(feature.site for feature in projected):
        taps.keep(site, reduce=partial(_grams, [feature for feature in projected if feature.site == site]))
    grams: dict[str, list[NDArray[np.float64]]] = {feature.name: [] for feature in projected}
    with exits_refused(), evaluating(backbone.model), full_float32(), torch.inference_mode(), taps:
        for images in batches:
            if len(images) < 2:
                continue
            taps(backbone.preprocessing.to_input(images.to(backbone.device)))
            for feature in projected:
                grams[feature.name].append(taps.record.by_site[feature.site][feature.name].numpy())
    measured = {name: distortion_of_grams(values) for name, values in grams.items()}
    return {name: distortion for name, distortion in measured.items() if distortion is not None}


def _grams(features: list[Feature], activation: Tensor) -> dict[str, Tensor]:
    """Return, for each feature, (2, B, B): products of all pairs of images, before the projection and after it."""
    grams = {}
    for feature in features:
        before, after = feature.poolings.split()
        whole = before(feature.rows.by_image(activation))
        projected = after(whole)
        # Axes are of centred activations, and cosines are those of centred rows.
        if feature.principal_axes and after.steps[0].principal_axes is feature.principal_axes:
            whole = feature.principal_axes.centred(whole)
        grams[feature.name] = torch.stack([_gram(whole), _gram(projected)])
    return grams


def _gram(rows: Tensor) -> Tensor:
    if is_channels_last(rows):
        rows = rows.permute(0, 2, 3, 1)  # products do not depend on the order of the values, and this needs no copy
    rows = rows.reshape(len(rows), -1)
    rows = rows.cpu() if rows.device.type == "mps" else rows  # which has no float64
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, _COLUMNS, dim=1):
        wide = part.double()
        gram += wide @ wide.T
    return gram
