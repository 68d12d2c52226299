"""Principal axes of rows: the directions along which they vary most, exact, in memory or read in blocks.

They are the eigenvectors of the smaller of two matrices, the products of all pairs of columns (n, n) or of rows (N, N).
A randomised decomposition would multiply the rows four times or more by K vectors, which is as much work for samples
of some thousand rows, and its axes would depend on a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.errors import LayertapError
from extract.system.torch_state import full_float32

__all__ = ["PrincipalAxes", "RowBlocks", "principal_axes", "too_large"]

_TILE = 8192  # columns or rows in float64 at once
_NEGLIGIBLE = 1e-12  # of the largest variance: the rest is rounding


class RowBlocks(Protocol):
    """Finite rows (N, n) that are read in blocks, such as `FeatureRows`."""

    @property
    def width(self) -> int:
        """Number n of values in a row."""

    def __len__(self) -> int:
        """Number N of rows."""

    def blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, block (b, n)) over all rows."""


@dataclass(frozen=True)
class PrincipalAxes:
    """Principal axes by descending variance.

    Attributes:
        mean: (n,) float64.
        axes: (K, n) float32, orthonormal; the component of largest magnitude of each is positive. An axis of fewer rows
            than values, along which they do not vary, is zero.
        squares: (K,) float64, sum over the rows of the squared distance from the mean along each axis.
        total: sum of the squared distances from the mean.
    """

    mean: Tensor
    axes: Tensor
    squares: Tensor
    total: float

    @property
    def n_varying(self) -> int:
        """Number of axes along which the rows vary by more than rounding."""
        return int((self.squares > _NEGLIGIBLE * self.squares.max()).sum())

    @property
    def shares(self) -> NDArray[np.float64]:
        """(K,) share of the variance along each axis; 0 if all rows are equal."""
        shares: NDArray[np.float64] = (self.squares / self.total if self.total > 0 else self.squares * 0).cpu().numpy()
        return shares


def principal_axes(rows: Tensor | RowBlocks, k: int | None = None, device: str | torch.device = "cpu") -> PrincipalAxes:
    """Compute the K axes along which rows vary most, K = min(k, N, n).

    Products of rows in memory are computed in float64. Those of rows that are read in blocks are computed in float32,
    which takes half the time, and are summed in float64.

    Args:
        rows: (N, n) of any float type, or rows to read once in blocks, with n x n values in memory; N at least 1.
        k: number of axes; None: all.
        device: device to compute on.

    Raises:
        LayertapError: the squares of the values exceed the range of the type.
    """
    # Products square the ratio between the first and the last variance, so they are added up in float64.
    with torch.no_grad(), full_float32():
        if not isinstance(rows, Tensor):
            blocks: Iterable[Tensor] = (torch.from_numpy(block).to(device) for _, block in rows.blocks())
            return _by_columns(blocks, len(rows), rows.width, k, device)
        rows = rows.to(device)
        if rows.shape[1] > len(rows):
            return _by_rows(rows, k)
        starts = range(0, len(rows), _TILE)
        return _by_columns((rows[at : at + _TILE].double() for at in starts), len(rows), rows.shape[1], k, device)


def too_large() -> LayertapError:
    """Return the error for features that float32 cannot sum."""
    return LayertapError(
        "the features are too large to be summed in float32",
        hint="use --scaling standardise (scaling='standardise')",
    )


def _by_columns(
    blocks: Iterable[Tensor], count: int, width: int, k: int | None, device: str | torch.device
) -> PrincipalAxes:
    """Compute axes from the products of columns; moments are merged as in Chan, Golub and LeVeque 1983."""
    seen = 0
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    products = torch.zeros(width, width, dtype=torch.float64, device=device)
    for block in blocks:
        block_mean = block.mean(0, dtype=torch.float64)
        centred = block - block_mean.to(block.dtype)
        shift = block_mean - mean
        total = seen + len(block)
        products += centred.T @ centred
        products += torch.outer(shift, shift) * (seen * len(block) / total)
        mean += shift * (len(block) / total)
        seen = total
    squares, vectors = _largest(products, min(count, width), k)
    return PrincipalAxes(mean, _signed(vectors.T.float()), squares, float(products.trace()))


def _by_rows(rows: Tensor, k: int | None) -> PrincipalAxes:
    """Compute axes from the products of rows, whose eigenvectors combine the centred rows to axes."""
    count, width = rows.shape
    mean = torch.empty(width, dtype=torch.float64, device=rows.device)
    tiles = [slice(start, start + _TILE) for start in range(0, width, _TILE)]
    products = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for tile in tiles:
        columns = rows[:, tile].double()
        mean[tile] = columns.mean(0)
        centred = columns - mean[tile]
        products += centred @ centred.T
    squares, vectors = _largest(products, count, k)
    varying = squares > _NEGLIGIBLE * squares.max()
    squares = squares * varying
    weights = (vectors * torch.where(varying, squares, 1).rsqrt() * varying).T
    axes = torch.empty(len(squares), width, device=rows.device)
    for tile in tiles:
        axes[:, tile] = weights @ (rows[:, tile].double() - mean[tile])
    return PrincipalAxes(mean, _signed(axes), squares, float(products.trace()))


def _largest(products: Tensor, rank: int, k: int | None) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues (K,), at least 0, and their eigenvectors (n, K)."""
    if not bool(products.isfinite().all()):
        raise too_large()
    count = rank if k is None else min(k, rank)
    squares, vectors = torch.linalg.eigh(products)
    return squares.flip(0)[:count].clamp(min=0), vectors.flip(1)[:, :count]


def _signed(axes: Tensor) -> Tensor:
    """Fix the arbitrary sign of axes (K, n) in place: the component of largest magnitude becomes positive."""
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return axes.mul_(torch.where(largest < 0, -1.0, 1.0))
