"""Projections of features onto a plane: principal components, computed in blocks; t-SNE and UMAP, if installed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.compute.principal_axes import PrincipalAxes, principal_axes
from extract.system.optional_libraries import library

__all__ = ["axes_of_sample", "project", "tsne", "umap"]

_WIDEST = 4096  # largest D for a (D, D) matrix; for wider rows, products of a sample of rows are used
_HELD_BYTES = 256 << 20
_HELD_ROWS = 2000
_COMPONENTS = 50  # principal components passed to t-SNE and UMAP (van der Maaten and Hinton 2008, section 4.2, use 30)


def axes_of_sample(rows: FeatureRows, count: int, seed: int = 0) -> tuple[PrincipalAxes, int]:
    """Compute the first principal axes, and return them with the number of rows that they were computed from.

    With up to 4,096 values a row, all rows are used, with a (D, D) matrix in memory. With wider rows, at most 2,000
    random rows are used and held in memory (256 MB).

    Args:
        rows: (N, D), N at least 1.
        count: number of axes; fewer are returned if there are fewer rows or values.
        seed: seed of the random choice of rows.

    Raises:
        InputError: a value is not finite.
        LayertapError: the squares of the values exceed the range of float32.
    """
    if rows.width <= _WIDEST:
        return principal_axes(rows, count), len(rows)
    n_held = max(2, min(_HELD_ROWS, _HELD_BYTES // (4 * rows.width)))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:n_held])
    return principal_axes(torch.from_numpy(rows.subset(chosen).array()), count), len(chosen)


def project(rows: FeatureRows, fitted: PrincipalAxes) -> NDArray[np.float32]:
    """Return the coordinates (N, K) of rows along axes."""
    mean, axes = fitted.mean.float().numpy(), fitted.axes.numpy()
    coordinates = np.empty((len(rows), len(axes)), np.float32)
    for start, block in rows.blocks():
        coordinates[start : start + len(block)] = (block - mean) @ axes.T
    return coordinates


def tsne(rows: FeatureRows, seed: int = 0) -> NDArray[np.float32]:
    """Compute t-SNE coordinates (N, 2) by cosine, from the first 50 principal components, held in memory.

    They are zero if there is one row, or if all rows are equal.

    Raises:
        LayertapError: scikit-learn or threadpoolctl is not installed.
    """
    manifold = library("sklearn.manifold", "report", "a t-SNE map")
    vectors = _directions(rows, seed)
    if not np.ptp(vectors, 0).any():
        return np.zeros((len(vectors), 2), np.float32)
    perplexity = min(30.0, max(1.0, (len(vectors) - 1) / 3))
    start = "pca" if len(vectors) > 3 and vectors.shape[1] > 1 else "random"  # rows may be single numbers
    estimator = manifold.TSNE(perplexity=perplexity, init=start, random_state=seed)
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
    vectors = _directions(rows, seed)
    if not np.ptp(vectors, 0).any():
        return np.zeros((len(vectors), 2), np.float32)
    neighbours = min(15, max(2, len(vectors) - 1))
    estimator = umap_learn.UMAP(n_neighbors=neighbours, metric="cosine", random_state=seed, n_jobs=1)
    return np.asarray(estimator.fit_transform(vectors), np.float32)


def _directions(rows: FeatureRows, seed: int) -> NDArray[np.float32]:
    """Return the first principal components (N, K) of rows, scaled to length 1."""
    vectors = project(rows, axes_of_sample(rows, _COMPONENTS, seed)[0])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit
