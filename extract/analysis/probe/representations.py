"""Similarity of two layers' features of the same images, whatever their width: linear CKA and RSA."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows, Source, mean_of
from extract.errors import InputError
from extract.system.dissimilarities import dissimilarities

__all__ = ["correlation", "linear_cka", "ranked_distances", "rsa", "similarities"]

_WORK_BYTES = 64 << 20  # of rows in double precision held at once


def linear_cka(x: Source | FeatureRows, y: Source | FeatureRows) -> float:
    """Compute the linear centred kernel alignment (CKA) of two features of the same images.

    It is 1 if one feature is a rotated and scaled copy of the other. Kornblith et al. 2019, with the unbiased HSIC
    estimator of Song et al. 2012 (as in Nguyen, Raghu and Kornblith 2021): unrelated features give 0 even with more
    columns than rows. The result may be slightly negative.

    Args:
        x: (N, D), or (N, *shape).
        y: (N, E): the same images in the same order.

    Raises:
        InputError: the numbers of rows differ, or are below 4.
    """
    first, second = _same_images(x, y)
    return _cka(_gram(first), _gram(second))


def rsa(x: Source | FeatureRows, y: Source | FeatureRows) -> float:
    """Representational similarity analysis (RSA): rank correlation of the image distances in two features.

    Kriegeskorte, Mur and Bandettini 2008: Spearman's correlation of 1 - Pearson's r between all pairs of images.

    Args:
        x: (N, D), or (N, *shape).
        y: (N, E): the same images in the same order.

    Raises:
        InputError: the numbers of rows differ, or are below 4.
    """
    first, second = _same_images(x, y)
    return correlation(ranked_distances(first), ranked_distances(second))


def similarities(features: Iterable[FeatureRows]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute linear CKA (M, M) and RSA (M, M) between M features of the same images in the same order.

    For each feature, (N, N) float64 values and half as many ranks are held. Features are read one at a time.
    """
    grams, distances = [], []
    for rows in features:
        distances.append(ranked_distances(rows))
        grams.append(_gram(rows))
    cka, likeness = np.eye(len(grams)), np.eye(len(grams))
    for i in range(len(grams)):
        for j in range(i + 1):
            cka[i, j] = cka[j, i] = _cka(grams[i], grams[j])
            likeness[i, j] = likeness[j, i] = correlation(distances[i], distances[j])
    return cka, likeness


def _same_images(x: Source | FeatureRows, y: Source | FeatureRows) -> tuple[FeatureRows, FeatureRows]:
    first, second = FeatureRows.of(x), FeatureRows.of(y)
    _check(len(first), len(second))
    return first, second


def _check(first: int, second: int) -> None:
    if first != second or first < 4:
        raise InputError(f"features have {first} and {second} rows; expected the same images, at least 4")


def _gram(rows: FeatureRows) -> NDArray[np.float64]:
    """Return the U-centred products (N, N) of the rows minus their mean, with a zero diagonal."""
    count = len(rows)
    mean = mean_of(rows)
    gram = np.empty((count, count))
    size = max(1, _WORK_BYTES // (8 * rows.width))
    for first in range(0, count, size):
        left = rows.between(first, min(first + size, count)) - mean
        for second in range(0, first + 1, size):
            right = rows.between(second, min(second + size, count)) - mean
            products = left @ right.T
            gram[first : first + len(left), second : second + len(right)] = products
            gram[second : second + len(right), first : first + len(left)] = products.T
    np.fill_diagonal(gram, 0)
    # U-centring (Szekely and Rizzo 2014): the mean product of two U-centred matrices is the unbiased estimator.
    sums = gram.sum(0) / (count - 2)
    gram -= sums[:, None] + sums[None, :] - gram.sum() / ((count - 1) * (count - 2))
    np.fill_diagonal(gram, 0)
    return gram


def _cka(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    scale = float(np.sqrt(np.vdot(first, first) * np.vdot(second, second)))
    return float(np.vdot(first, second)) / scale if scale else float("nan")


def ranked_distances(rows: FeatureRows) -> NDArray[np.float64]:
    """Return the ranks (N (N - 1) / 2,) of the distances of all pairs minus their mean; ties share a mean rank."""
    count = len(rows)
    _check(count, count)
    distances = dissimilarities(rows.array())[np.triu_indices(count, 1)]
    distances[np.isnan(distances)] = 1  # a row of equal values is related to none
    _, position, counts = np.unique(distances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[position]
    return np.asarray(ranks - ranks.mean())


def correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the correlation of two vectors whose mean is 0; NaN if one is constant."""
    scale = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / scale if scale else float("nan")
