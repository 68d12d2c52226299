"""What a projection changes: distances, cosines and similarities between images, before it and after it.

Pairs of images are those of one batch: whole activations of many layers and all images would not fit into memory. Of
each batch, only the products of its images are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.backbones import LoadedBackbone
from extract.compute.feature_choice import Choice, Feature
from extract.compute.sparse_projection import is_channels_last
from extract.system.foreign_code import exits_refused
from extract.system.torch_state import evaluating, full_float32
from extract.taps.taps import Taps

__all__ = ["Distortion", "distortion_of_grams", "measured_distortion"]

_COLUMNS = 1 << 14  # multiplied at once in float64; 4 MB of 32 images stay near the cores (65,536: half as fast)


@dataclass(frozen=True)
class Distortion:
    """Differences between a projected feature and what was projected.

    Attributes:
        pairs: number of pairs of images.
        distance_median: median of |d' / d - 1| over pairs, of the Euclidean distances d before and d' after.
        distance_p95: its 95th percentile.
        cosine_median: median of |c' - c|, of the cosines.
        cosine_p95: its 95th percentile.
        cka: linear CKA (Kornblith et al. 2019) of the two, over batches as in Nguyen et al. (2021); 1: the same up to
            rotation and scale.
    """

    pairs: int
    distance_median: float
    distance_p95: float
    cosine_median: float
    cosine_p95: float
    cka: float

    def __str__(self) -> str:
        return (
            f"distances change by {self.distance_median:.1%} (median) to {self.distance_p95:.1%} (95th percentile), "
            f"cosines by {self.cosine_median:.3f} to {self.cosine_p95:.3f}, CKA {self.cka:.3f}; "
            f"{self.pairs:,} pairs of images"
        )


def measured_distortion(backbone: LoadedBackbone, choice: Choice, batches: Iterable[Tensor]) -> dict[str, Distortion]:
    """Measure every projected feature in eager float32: name -> its distortion. Others are left out.

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


def distortion_of_grams(grams: Iterable[NDArray[np.float64]]) -> Distortion | None:
    """Return the distortion by the products of rows; None if no two images differ.

    Args:
        grams: (2, B, B) for each batch, before and after.
    """
    distances, cosines, alike = [], [], np.zeros(3)
    for before, after in grams:
        first, second = np.triu_indices(len(before), 1)
        (d, c), (d_after, c_after) = (_pairs(gram, first, second) for gram in (before, after))
        apart = d > 1e-6 * math.sqrt(max(float(np.diag(before).max()), 1e-300))  # not copies of one image
        distances.append(np.abs(d_after[apart] / d[apart] - 1))
        cosines.append(np.abs(c_after - c)[apart])
        k, m = (_centred(gram) for gram in (before, after))
        alike += [(k * m).sum(), (k * k).sum(), (m * m).sum()]
    if not distances or not sum(map(len, distances)):
        return None
    of_distances, of_cosines = np.concatenate(distances), np.concatenate(cosines)
    cka = float(alike[0] / math.sqrt(alike[1] * alike[2])) if alike[1] > 0 and alike[2] > 0 else math.nan
    distance_median, distance_p95 = np.percentile(of_distances, (50, 95)).tolist()
    cosine_median, cosine_p95 = np.percentile(of_cosines, (50, 95)).tolist()
    return Distortion(len(of_distances), distance_median, distance_p95, cosine_median, cosine_p95, cka)


def _pairs(
    gram: NDArray[np.float64], first: NDArray[np.int64], second: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return distances and cosines of pairs of rows; the cosine with a row of zeros is 0."""
    squares = np.diag(gram)
    squared = squares[first] + squares[second] - 2 * gram[first, second]
    lengths = np.sqrt(squares[first] * squares[second])
    cosines = np.divide(gram[first, second], lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return np.sqrt(np.maximum(squared, 0)), cosines


def _centred(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    means = gram.mean(0)
    centred: NDArray[np.float64] = gram - means[:, None] - means[None, :] + means.mean()
    return centred


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
