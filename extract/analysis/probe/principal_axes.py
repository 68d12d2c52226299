"""Rows along their principal axes: the form in which logistic regression reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.errors import LayertapError

__all__ = ["PrincipalAxes", "principal_axes", "too_large"]

_FLATTEST = 1e-7  # of the largest variance; axes below it are rounding errors and are not stretched further
_WIDEST = 6000  # columns for which principal axes are computed; wider features are scaled column by column


@dataclass(frozen=True)
class PrincipalAxes:
    """The rows, and the axes along which the variables lie.

    Attributes:
        rows: (N, D) rows to read in every pass; None if they are held.
        held: (N, R) centred rows along the axes; None if they do not fit into memory or have no principal axes.
        mean: (D,) of the rows.
        axes: (D, R) orthonormal principal axes; None: the columns.
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
        return weights if self.axes is None else weights @ self.axes.T


def principal_axes(rows: FeatureRows, device: torch.device, memory_bytes: int) -> PrincipalAxes:
    """Compute the principal axes of rows, and hold the rows along them if they fit.

    Args:
        rows: (N, D).
        device: device to compute on.
        memory_bytes: limit for the held rows.

    Raises:
        LayertapError: the features are too large for float32.
    """
    count, width = len(rows), rows.width
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    for _, array in rows.blocks():
        mean += torch.from_numpy(array).to(device).sum(0, dtype=torch.float64)
    mean = (mean / count).float()
    in_memory = 4 * count * min(count, width) <= memory_bytes
    if count < width and in_memory and 4 * rows.nbytes <= memory_bytes:
        return _of_few_rows(rows, mean)
    if width > _WIDEST:
        variances = torch.zeros(width, dtype=torch.float64, device=device)
        for _, array in rows.blocks():
            variances += (torch.from_numpy(array).to(device) - mean).square().sum(0, dtype=torch.float64)
        return PrincipalAxes(rows, None, mean, None, _with_floor(variances / count), count)
    moments = torch.zeros(width, width, dtype=torch.float64, device=device)
    for _, array in rows.blocks():
        centred = torch.from_numpy(array).to(device) - mean
        moments += centred.T @ centred
    if not bool(moments.isfinite().all()):
        raise too_large()
    eigenvalues, axes = torch.linalg.eigh(moments / count)
    axes, variances = axes.float(), _with_floor(eigenvalues)
    if not in_memory:
        return PrincipalAxes(rows, None, mean, axes, variances, count)
    held = torch.empty(count, width, device=device)
    for start, array in rows.blocks():
        held[start : start + len(array)] = (torch.from_numpy(array).to(device) - mean) @ axes
    return PrincipalAxes(None, held, mean, axes, variances, count)


def too_large() -> LayertapError:
    """Return the error for features that float32 cannot sum."""
    return LayertapError(
        "the features are too large to be summed in float32",
        hint="use --scaling standardise (scaling='standardise')",
    )


def _of_few_rows(rows: FeatureRows, mean: Tensor) -> PrincipalAxes:
    """Compute the features for fewer rows than columns: the axes lie in the span of the rows."""
    centred = torch.from_numpy(rows.between(0, len(rows))).to(mean.device).double() - mean
    eigenvalues, vectors = torch.linalg.eigh(centred @ centred.T)
    kept = eigenvalues > 1e-12 * eigenvalues[-1].clamp(min=torch.finfo(torch.float64).tiny)
    if not bool(kept.any()):  # all rows are equal
        kept[-1] = True
    lengths = eigenvalues[kept].clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    axes = centred.T @ (vectors[:, kept] / lengths)
    held = (vectors[:, kept] * lengths).float()
    return PrincipalAxes(None, held, mean, axes.float(), _with_floor(eigenvalues[kept] / len(rows)), len(rows))


def _with_floor(variances: Tensor) -> Tensor:
    return torch.maximum(variances, _FLATTEST * variances.max()).float()
