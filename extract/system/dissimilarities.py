"""Dissimilarities of all pairs of rows: the representational dissimilarity matrix (RDM) of neuroscience."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from extract.errors import unknown_name

__all__ = ["METRICS", "dissimilarities"]

METRICS = ("correlation", "cosine", "euclidean")


def dissimilarities(rows: NDArray[np.floating], metric: str = "correlation") -> NDArray[np.float64]:
    """Return the dissimilarity matrix (N, N), with a zero diagonal, computed in float64.

    Args:
        rows: (N, D).
        metric: "correlation": 1 - Pearson's r of two rows; "cosine": 1 - their cosine; "euclidean": their distance. The
            first is NaN for a row whose values are all equal, the second for a row of zeros.

    Raises:
        UnknownNameError: there is no such metric.
    """
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    vectors = rows.astype(np.float64)
    if metric == "euclidean":
        matrix = np.zeros((len(rows), len(rows)))
        for row, vector in enumerate(vectors):
            apart = vectors[row:] - vector
            matrix[row, row:] = matrix[row:, row] = np.sqrt(np.einsum("nd,nd->n", apart, apart))
    else:
        # Rounding of the mean leaves a constant row a length, which is not a direction.
        rounding = 1e-13 * np.sqrt(rows.shape[1]) * np.abs(vectors).max(1, keepdims=True)
        if metric == "correlation":
            vectors -= vectors.mean(1, keepdims=True)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        lengths[lengths <= rounding] = np.nan
        vectors /= lengths
        matrix = vectors @ vectors.T  # changed in place below: 3 GB for 20,000 rows
        np.subtract(1, matrix.clip(-1, 1, out=matrix), out=matrix)
    np.fill_diagonal(matrix, np.where(np.isnan(np.diag(matrix)), np.nan, 0))
    return matrix
