"""Projections of features onto a plane: principal components, computed in blocks; t-SNE and UMAP, if installed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.compute.principal_axes import principal_axes
from extract.system.optional_libraries import library

__all__ = ["Principal", "principal", "tsne", "umap"]

_WIDEST = 4096  # largest D for a (D, D) matrix; for wider rows, products of a sample of rows are used
_HELD_BYTES = 256 << 20
_HELD_ROWS = 2000
_KEPT = 50  # principal axes passed to t-SNE and UMAP (van der Maaten and Hinton 2008, section 4.2, use 30)


@dataclass(frozen=True)
class Principal:
    """Principal axes: the directions in which rows vary most.

    Attributes:
        mean: (D,) float32.
        axes: (K, D) float32, of length 1; the largest component of each is positive, which fixes the sign.
        shares: (K,) share of the variance along each axis.
        rows: number of rows that the axes were computed from.
    """

    mean: NDArray[np.float32]
    axes: NDArray[np.float32]
    shares: NDArray[np.float64]
    rows: int

    def project(self, rows: FeatureRows) -> NDArray[np.float32]:
        """Return the coordinates (N, K) of rows."""
        coordinates = np.empty((len(rows), len(self.axes)), np.float32)
        for start, block in rows.blocks():
            coordinates[start : start + len(block)] = (block - self.mean) @ self.axes.T
        return coordinates


def principal(rows: FeatureRows, count: int, seed: int = 0) -> Principal:
    """Compute the first principal axes.

    With up to 4,096 values a row, the axes are exact: all rows are used, with a (D, D) matrix in memory. With wider
    rows, at most 2,000 random rows are used and held in memory (256 MB).

    Args:
        rows: (N, D), N at least 1.
        count: number of axes; fewer are returned if there are fewer rows or values.
        seed: seed of the random choice of rows.

    Raises:
        InputError: a value is not finite.
        LayertapError: the squares of the values exceed the range of float32.
    """
    used = len(rows)
    if rows.width > _WIDEST:
        used = min(used, max(2, min(_HELD_ROWS, _HELD_BYTES // (4 * rows.width))))
        chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:used])
        fitted = principal_axes(torch.from_numpy(rows.subset(chosen).array()), count)
    else:
        fitted = principal_axes(rows, count)
    return Principal(fitted.mean.float().numpy(), fitted.axes.numpy(), fitted.shares, used)


def tsne(rows: FeatureRows, seed: int = 0) -> NDArray[np.float32]:
    """Compute t-SNE coordinates (N, 2) by cosine, from the first 50 principal components, held in memory.

    They are zero if there is one row, or if all rows are equal.

    Raises:
        LayertapError: scikit-learn or threadpoolctl is not installed.
    """
    manifold = library("sklearn.manifold", "report", "a t-SNE map")
    vectors = _unit_vectors(principal(rows, _KEPT, seed).project(rows))
    if not np.ptp(vectors, 0).any():
        return np.zeros((len(vectors), 2), np.float32)
    perplexity = min(30.0, max(1.0, (len(vectors) - 1) / 3))
    estimator = manifold.TSNE(perplexity=perplexity, init="random" if len(vectors) < 4 else "pca", random_state=seed)
    # t-SNE's threads wait for each other in each of 1,000 steps; on busy cores this takes longer than the computation.
    with library("threadpoolctl", "report", "a t-SNE map").threadpool_limits(1, "openmp"):
        return np.asarray(estimator.fit_transform(vectors), np.float32)


def umap(rows: FeatureRows, seed: int = 0) -> NDArray[np.float32]:
    """Compute UMAP coordinates (N, 2) by cosine, from the first 50 principal components, held in memory.

    They are zero if there is one row, or if all rows are equal.

    Raises:
        LayertapError: umap-learn is not installed.
    """
    umap_learn = library("umap", "umap", "a UMAP map")
    vectors = _unit_vectors(principal(rows, _KEPT, seed).project(rows))
    if not np.ptp(vectors, 0).any():
        return np.zeros((len(vectors), 2), np.float32)
    neighbours = min(15, max(2, len(vectors) - 1))
    estimator = umap_learn.UMAP(n_neighbors=neighbours, metric="cosine", random_state=seed, n_jobs=1)
    return np.asarray(estimator.fit_transform(vectors), np.float32)


def _unit_vectors(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit
