"""What a projection changes: distances, cosines and similarities between images, before it and after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Distortion", "distortion_of_grams", "too_large"]


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


def too_large(measured: Mapping[str, Distortion], at_most: float) -> str:
    """Return why distances change too much; an empty string if they do not.

    Args:
        measured: feature -> its distortion.
        at_most: largest accepted 95th percentile of the change of distances.
    """
    for name, distortion in measured.items():
        if not distortion.distance_p95 <= at_most:
            return (
                f"{name}: the projection changes 5 % of the distances between images by more than "
                f"{distortion.distance_p95:.1%}; at most {at_most:.1%} is accepted"
            )
    return ""
