"""Statistics of stored features, computed in one pass."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from extract.analysis.network.activation_statistics import Statistics, summarise
from extract.analysis.probe.feature_matrix import FeatureRows

__all__ = ["statistics_of"]


def statistics_of(rows: FeatureRows) -> tuple[Statistics, NDArray[np.float64]]:
    """Compute statistics of stored features block by block. Each value of a row is a channel.

    Returns:
        the statistics, and (N,) the Euclidean length of each row.
    """
    statistics, lengths = Statistics(), np.empty(len(rows))
    for start, block in rows.blocks():
        statistics.add(summarise(torch.from_numpy(block), []))
        lengths[start : start + len(block)] = np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64))
    return statistics, lengths
