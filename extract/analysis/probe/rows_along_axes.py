"""Rows along their principal axes: the form in which logistic regression reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from extract.analysis.probe.feature_matrix import FeatureRows, moments
from extract.compute.principal_axes import RowBlocks, principal_axes

__all__ = ["RowsAlongAxes", "rows_along_axes"]

_FLATTEST = 1e-7  # of the largest variance; axes below it are rounding errors and are not stretched further
_WIDEST = 6000  # columns for which principal axes are computed; wider features are scaled column by column


@dataclass(frozen=True)
class RowsAlongAxes:
    """The rows, and the axes along which the variables lie.

    Attributes:
        rows: (N, D) rows to read in every pass; None if they are held.
        held: (N, R) centred rows along the axes; None if they do not fit into memory or have no principal axes.
        mean: (D,) of the rows.
        axes: (R, D) orthonormal principal axes; None: the columns.
        variances: (R,) of the rows along the axes, at least 1e-7 of the largest.
        count: N.
    """

    rows: FeatureRows | None
    held: Tensor | None
    mean: Tensor
    axes: Tensor | None
    variances: Tensor
    count: int

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, block) over all rows; a block is (n, R) if the rows are held, else (n, D)."""
        if self.held is not None:
            for start in range(0, self.count, size):
                yield start, self.held[start : start + size]
        elif self.rows is not None:
            for first, array in self.rows.blocks():  # read large blocks, compute on small ones
                block = torch.from_numpy(array).to(self.mean.device)
                for start in range(0, len(block), size):
                    yield first + start, block[start : start + size]

    def along(self, weights: Tensor) -> Tensor:
        """Convert weights along the axes (..., R) to weights of the columns (..., D)."""
        return weights if self.axes is None else weights @ self.axes


def rows_along_axes(rows: FeatureRows, device: torch.device, memory_bytes: int) -> RowsAlongAxes:
    """Compute the principal axes of rows, and hold the rows along them if they fit.

    Args:
        rows: (N, D).
        device: device to compute on.
        memory_bytes: limit for the held rows.

    Raises:
        LayertapError: the features are too large for float32.
    """
    count, width = len(rows), rows.width
    are_held = 4 * count * min(count, width) <= memory_bytes
    source: Tensor | RowBlocks = rows
    if count < width and are_held and 4 * rows.nbytes <= memory_bytes:
        source = torch.from_numpy(rows.array())
    elif width > _WIDEST:
        mean, variances = (torch.from_numpy(values).float().to(device) for values in moments(rows))
        return RowsAlongAxes(rows, None, mean, None, _with_floor(variances), count)
    fitted = principal_axes(source, device=device)
    varying = fitted.squares > 0
    varying[0] = True  # all rows are equal
    mean, axes, variances = fitted.mean.float(), fitted.axes[varying], _with_floor(fitted.squares[varying] / count)
    if not are_held:
        return RowsAlongAxes(rows, None, mean, axes, variances, count)
    held = torch.empty(count, len(axes), device=device)
    for start, array in rows.blocks():
        held[start : start + len(array)] = (torch.from_numpy(array).to(device) - mean) @ axes.T
    return RowsAlongAxes(None, held, mean, axes, variances, count)


def _with_floor(variances: Tensor) -> Tensor:
    return torch.maximum(variances, _FLATTEST * variances.max()).float()
