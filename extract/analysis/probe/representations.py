"""How alike two layers see the same images, whatever their width: linear CKA and representational similarity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows, Source
from extract.errors import InputError

__all__ = ["linear_cka", "rsa", "similarities"]

_WORK_BYTES = 64 << 20  # of rows in double precision


def linear_cka(x: Source | FeatureRows, y: Source | FeatureRows) -> float:
    """Linear centred kernel alignment of two features of the same images: 1 where one is the other, rotated and scaled.

    Kornblith et al. 2019, with the unbiased estimator of HSIC of Song et al. 2012 (as Nguyen, Raghu and Kornblith
    2021), so that features that have nothing in common give 0 also where they have more columns than rows; it may be a
    little below.

    Args:
        x: (N, D), or (N, *shape).
        y: (N, E): the same images in the same order.

    Raises:
        InputError: other numbers of rows, or fewer than 4.
    """
    return _cka(*_grams(x, y))


def rsa(x: Source | FeatureRows, y: Source | FeatureRows) -> float:
    """Representational similarity: the rank correlation of how far images lie apart in one feature and in the other.

    Kriegeskorte, Mur and Bandettini 2008: Spearman's correlation of 1 - Pearson's r between all pairs of images.

    Args:
        x: (N, D), or (N, *shape).
        y: (N, E): the same images in the same order.

    Raises:
        InputError: other numbers of rows, or fewer than 4.
    """
    first, second = _as_rows(x), _as_rows(y)
    _check(len(first), len(second))
    return _correlation(_ranked_distances(first), _ranked_distances(second))


def similarities(features: Iterable[FeatureRows]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(M, M) linear CKA and (M, M) RSA between all features, each of the same images in the same order.

    (N, N) float64 and half as many ranks are held of each; features are taken one at a time.
    """
    grams, distances = [], []
    for rows in features:
        distances.append(_ranked_distances(rows))
        grams.append(_gram(rows))
    cka, likeness = np.eye(len(grams)), np.eye(len(grams))
    for i in range(len(grams)):
        for j in range(i + 1):
            cka[i, j] = cka[j, i] = _cka(grams[i], grams[j])
            likeness[i, j] = likeness[j, i] = _correlation(distances[i], distances[j])
    return cka, likeness


def _as_rows(x: Source | FeatureRows) -> FeatureRows:
    return x if isinstance(x, FeatureRows) else FeatureRows.of(x)


def _check(first: int, second: int) -> None:
    if first != second or first < 4:
        raise InputError(f"features of {first} and {second} rows; expected the same images, 4 at least")


def _grams(x: Source | FeatureRows, y: Source | FeatureRows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = _as_rows(x), _as_rows(y)
    _check(len(first), len(second))
    return _gram(first), _gram(second)


def _gram(rows: FeatureRows) -> NDArray[np.float64]:
    """(N, N) products of the rows, less their mean, with a diagonal of zeros, centred as the estimator wants it."""
    count = len(rows)
    mean = sum((block.sum(0, dtype=np.float64) for _, block in rows.blocks()), np.zeros(rows.width)) / count
    gram = np.empty((count, count))
    size = max(1, _WORK_BYTES // (8 * rows.width))
    for first in range(0, count, size):
        left = rows.between(first, min(first + size, count)) - mean
        for second in range(0, first + 1, size):
            right = rows.between(second, min(second + size, count)) - mean
            here = left @ right.T
            gram[first : first + len(left), second : second + len(right)] = here
            gram[second : second + len(right), first : first + len(left)] = here.T
    np.fill_diagonal(gram, 0)
    # U-centred (Szekely and Rizzo 2014): the mean of products of two of these is the unbiased estimator.
    sums = gram.sum(0) / (count - 2)
    gram -= sums[:, None] + sums[None, :] - gram.sum() / ((count - 1) * (count - 2))
    np.fill_diagonal(gram, 0)
    return gram


def _cka(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    scale = float(np.sqrt(np.vdot(first, first) * np.vdot(second, second)))
    return float(np.vdot(first, second)) / scale if scale else float("nan")


def _ranked_distances(rows: FeatureRows) -> NDArray[np.float64]:
    """(N (N - 1) / 2,) ranks of the distances between all pairs, equal ones sharing theirs, less their mean."""
    count = len(rows)
    _check(count, count)
    unit = np.empty((count, rows.width))
    for start, block in rows.blocks():
        centred = block - block.mean(1, keepdims=True, dtype=np.float64)
        lengths = np.linalg.norm(centred, axis=1, keepdims=True)
        unit[start : start + len(block)] = centred / np.where(lengths > 0, lengths, 1)
    distances = (1 - unit @ unit.T)[np.triu_indices(count, 1)]
    _, place, times = np.unique(distances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times + 1) / 2)[place]
    return np.asarray(ranks - ranks.mean())


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    scale = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / scale if scale else float("nan")
