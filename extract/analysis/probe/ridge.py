"""Ridge regression for many strengths at once, in closed form (Hoerl and Kennard 1970)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows, mean_of
from extract.errors import InputError

__all__ = ["fit_ridge"]

_WIDEST = 8_000  # largest min(N, D), the side of the matrix whose eigenvectors are computed
_MOST_BYTES = 8 << 30  # largest size of the rows in double precision, if N < D


def fit_ridge(
    rows: FeatureRows, targets: NDArray[np.float64], alphas: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Minimise |X w + b - y|^2 + alpha |w|^2, the objective of scikit-learn's `Ridge(alpha)`, for every alpha.

    One eigendecomposition serves all alphas.

    Args:
        rows: (N, D), read in two passes.
        targets: (N, K).
        alphas: M values above zero.

    Returns:
        (M, K, D) weights and (M, K) biases, in double precision: float32 cannot count the seconds of a year.

    Raises:
        InputError: N and D both exceed 8,000; or N < D and the rows exceed 8 GiB in double precision.
    """
    count, width = len(rows), rows.width
    if min(count, width) > _WIDEST or (count < width and 8 * count * width > _MOST_BYTES):
        raise InputError(
            f"ridge regression of {count:,} rows of {width:,} values needs too much memory",
            hint=f"any number of rows is possible with at most {_WIDEST:,} values a row: store the layer with a "
            "pooling",
        )
    mean = mean_of(rows)
    mean_target = targets.mean(0)
    centred_targets = targets - mean_target
    if count < width:
        # w = X^T (X X^T + alpha)^-1 y, which is equal by the push-through identity.
        centred = rows.between(0, count).astype(np.float64) - mean
        values, vectors = np.linalg.eigh(centred @ centred.T)
        projected, backward = vectors.T @ centred_targets, centred.T @ vectors
    else:
        moments, products = np.zeros((width, width)), np.zeros((width, targets.shape[1]))
        for start, block in rows.blocks():
            centred_block = block - mean
            moments += centred_block.T @ centred_block
            products += centred_block.T @ centred_targets[start : start + len(block)]
        values, backward = np.linalg.eigh(moments)
        projected = backward.T @ products
    weights = np.stack([(backward @ (projected / (np.maximum(values, 0) + alpha)[:, None])).T for alpha in alphas])
    return weights, mean_target - weights @ mean
