"""k-nearest-neighbour classification, as in DINO (Caron et al. 2021; Wu et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.nearest_rows import nearest_in

__all__ = ["TEMPERATURE", "neighbour_shares"]

TEMPERATURE = 0.07  # from DINO's eval_knn.py and DINOv2's eval/knn.py
_QUERIES = 1024  # compared at once


def neighbour_shares(
    bank: FeatureRows,
    targets: NDArray[np.int64] | NDArray[np.float32],
    n_classes: int,
    queries: FeatureRows,
    ks: Sequence[int],
    device: str | torch.device = "cpu",
    memory_bytes: int = 1 << 30,
) -> list[NDArray[np.float32]]:
    """Return each class's share of the votes of the k rows nearest by cosine, for each k.

    The vote of a neighbour has the weight exp(cosine / 0.07). Of equally near rows, the first counts as nearer.

    Args:
        bank: (N, D).
        targets: (N,) classes, or (N, K) labels of 0 and 1.
        n_classes: K.
        queries: (Q, D).
        ks: numbers of neighbours, at most N.
        device: device to compute on.
        memory_bytes: limit for the rows and cosines held at once.

    Returns:
        (Q, K) for each k; if each row of the bank has one class, the shares of a query sum to 1.
    """
    results = [np.zeros((len(queries), n_classes), np.float32) for _ in ks]
    for start, array in queries.blocks(min(4 * queries.width * _QUERIES, memory_bytes // 8)):
        near = nearest_in(bank, array, max(ks), device, memory_bytes // 2, exact=False)
        # Subtract the largest cosine, which prevents overflow and does not change the shares.
        votes = np.exp((near.cosines - near.cosines[:, :1]) / TEMPERATURE)
        total, query_numbers = np.zeros((len(array), n_classes)), np.arange(len(array))
        for rank, neighbours in enumerate(near.rows.T):
            if targets.ndim == 1:
                total[query_numbers, targets[neighbours]] += votes[:, rank]
            else:
                total += votes[:, rank, None] * targets[neighbours]
            for k, shares in zip(ks, results, strict=True):
                if k == rank + 1:
                    shares[start : start + len(array)] = total / votes[:, :k].sum(1, keepdims=True)
    return results
