"""k-nearest-neighbour classification, as in DINO (Caron et al. 2021; Wu et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.system.torch_state import full_float32

__all__ = ["TEMPERATURE", "neighbour_shares"]

TEMPERATURE = 0.07  # from DINO's eval_knn.py and DINOv2's eval/knn.py
_COSINES = 1 << 24  # held at once
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
    largest_k = max(ks)
    results = [np.zeros((len(queries), n_classes), np.float32) for _ in ks]
    with torch.inference_mode(), full_float32():
        for start, array in queries.blocks(min(4 * queries.width * _QUERIES, memory_bytes // 8)):
            cosines, rows = _nearest_rows(bank, _unit(array, device), largest_k, memory_bytes // 8)
            # Subtract the largest cosine, which prevents overflow and does not change the shares.
            votes = ((cosines - cosines[:, :1]) / TEMPERATURE).double().exp().cpu().numpy()
            total, query_numbers = np.zeros((len(array), n_classes)), np.arange(len(array))
            for rank, neighbours in enumerate(rows.T.cpu().numpy()):
                if targets.ndim == 1:
                    total[query_numbers, targets[neighbours]] += votes[:, rank]
                else:
                    total += votes[:, rank, None] * targets[neighbours]
                for k, shares in zip(ks, results, strict=True):
                    if k == rank + 1:
                        shares[start : start + len(array)] = total / votes[:, :k].sum(1, keepdims=True)
    return results


def _unit(array: NDArray[np.float32], device: str | torch.device) -> Tensor:
    """Return the rows (n, D) scaled to length 1; zero rows stay zero."""
    rows = torch.from_numpy(array).to(device)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows.div_(lengths.clamp(min=torch.finfo(torch.float32).tiny))


def _nearest_rows(bank: FeatureRows, block: Tensor, count: int, block_bytes: int) -> tuple[Tensor, Tensor]:
    """Return cosines and row numbers (q, most), nearest first; read at most `block_bytes` of the bank at once."""
    cosines = torch.empty(len(block), 0, device=block.device)
    rows = torch.empty(len(block), 0, dtype=torch.int64, device=block.device)
    for first, others in bank.blocks(min(4 * bank.width * max(1, _COSINES // len(block)), block_bytes)):
        block_cosines = block @ _unit(others, block.device).T
        numbers = torch.arange(first, first + len(others), device=block.device).expand(len(block), -1)
        cosines, rows = torch.cat([cosines, block_cosines], 1), torch.cat([rows, numbers], 1)
        if cosines.shape[1] > count:
            order = _largest(cosines, count).sort(1)[0]  # in row order, so that earlier rows win ties with later blocks
            cosines, rows = cosines.gather(1, order), rows.gather(1, order)
    order = cosines.sort(dim=1, descending=True, stable=True)[1]
    return cosines.gather(1, order), rows.gather(1, order)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the columns (q, most) of the largest values of each row; the first columns win ties."""
    top, columns = values.topk(count, 1)
    # `topk` does not define which of several values equal to the last it takes.
    tied = (values >= top[:, -1:]).sum(1) > count
    if bool(tied.any()):
        columns[tied] = values[tied].sort(dim=1, descending=True, stable=True)[1][:, :count]
    return columns
