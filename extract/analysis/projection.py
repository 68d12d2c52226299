"""Projections of features onto a plane: principal components, computed in blocks; t-SNE and UMAP, if installed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.system.optional_libraries import library
from extract.system.torch_state import full_float32

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
        InputError: a value is not finite; checked with up to 4,096 values a row.
    """
    with torch.inference_mode(), full_float32():
        if rows.width <= _WIDEST:
            mean, products, used = *_products(rows), len(rows)
            variances, vectors = np.linalg.eigh(products)
            count = min(count, len(rows), rows.width)
            axes = vectors[:, ::-1][:, :count].T
            shares = variances[::-1][:count]
            total = float(np.trace(products))
        else:
            used = max(2, min(_HELD_ROWS, _HELD_BYTES // (4 * rows.width)))
            chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:used])
            sample = rows.subset(chosen).between(0, len(chosen))
            used = len(sample)
            mean = sample.mean(0, dtype=np.float64)
            sample -= mean.astype(np.float32)
            variances, vectors = np.linalg.eigh((sample @ sample.T).astype(np.float64))
            count = min(count, used)
            axes = vectors[:, ::-1][:, :count].T @ sample
            shares, total = variances[::-1][:count], float(variances.sum())
    lengths = np.linalg.norm(axes, axis=1, keepdims=True)
    axes = np.divide(axes, lengths, out=np.zeros(axes.shape), where=lengths > 0)
    axes *= np.where(axes[np.arange(count), np.abs(axes).argmax(1)] < 0, -1, 1)[:, None]
    part = np.maximum(shares, 0) / total if total > 0 else np.zeros(count)
    return Principal(mean.astype(np.float32), axes.astype(np.float32), part, used)


def _products(rows: FeatureRows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean (D,), and the sum (D, D) of the products of deviations from the mean."""
    count, mean, products = 0, np.zeros(rows.width), np.zeros((rows.width, rows.width))
    for _, block in rows.blocks():
        block_mean = block.mean(0, dtype=np.float64)
        centred = torch.from_numpy(block - block_mean.astype(np.float32))
        shift = (block_mean - mean)[:, None]
        total = count + len(block)
        products += (centred.T @ centred).numpy()
        products += (shift @ shift.T) * (count * len(block) / total)
        mean += shift[:, 0] * (len(block) / total)
        count = total
    return mean, products


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
