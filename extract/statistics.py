"""What stored features are like: their values and lengths, in one pass that holds a block at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extract.probe.rows import FeatureRows

__all__ = ["FeatureStatistics", "statistics_of"]


@dataclass(frozen=True)
class FeatureStatistics:
    """Of all values of some rows; NaN where there are none.

    Attributes:
        rows: N.
        width: D, values of a row.
        mean, std: of the values; the standard deviation of all of them, not of a sample.
        least, largest: of the values.
        zeros: the share of values that are exactly zero.
        dead: how many of the D are zero in every row.
        constant: how many of the D have one value in every row, zero or not.
        lengths: (N,) float64, Euclidean, of the rows.
    """

    rows: int
    width: int
    mean: float
    std: float
    least: float
    largest: float
    zeros: float
    dead: int
    constant: int
    lengths: NDArray[np.float64]


def statistics_of(rows: FeatureRows) -> FeatureStatistics:
    """One pass over the rows.

    Sums are of float64, and the spread of blocks is joined by Chan, Golub and LeVeque (1983), so that a large mean
    does not hide it.

    Raises:
        InputError: a value is not finite.
    """
    count, mean, squares, zeros = 0, 0.0, 0.0, 0
    low, high = np.full(rows.width, np.inf, np.float32), np.full(rows.width, -np.inf, np.float32)
    lengths = np.empty(len(rows))
    for start, block in rows.blocks():
        here = float(block.mean(dtype=np.float64))
        centred = block - np.float32(here)
        rest = here - float(np.float32(here))  # what rounding the mean has left
        within = float(np.einsum("nd,nd->", centred, centred, dtype=np.float64)) - block.size * rest**2
        total, off = count + block.size, here - mean
        squares += max(0.0, within) + off**2 * (count * block.size / total)
        mean += off * (block.size / total)
        count = total
        zeros += block.size - int(np.count_nonzero(block))
        np.minimum(low, block.min(0), out=low)
        np.maximum(high, block.max(0), out=high)
        lengths[start : start + len(block)] = np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64))
    nothing = math.nan
    return FeatureStatistics(
        rows=len(rows),
        width=rows.width,
        mean=mean if count else nothing,
        std=math.sqrt(squares / count) if count else nothing,
        least=float(low.min()) if count else nothing,
        largest=float(high.max()) if count else nothing,
        zeros=zeros / count if count else nothing,
        dead=int(((low == 0) & (high == 0)).sum()) if count else 0,
        constant=int((low == high).sum()) if count else 0,
        lengths=lengths,
    )
