"""From tokens, and their scores of bins of depth, to the pixels of a picture; and from these to cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.store.tokens.token_array import TokenArray

__all__ = ["DepthBins", "cell_means", "predicted_mask", "upsampled"]

T = TypeVar("T", bound="np.generic[Any]")

_BAND_VALUES = 1 << 24  # of upsampled scores held at once
_LARGEST = float(np.finfo(np.float32).max)
# Scores (bins, h, w) -> weights that are divided by their sum. "relu" is that of DINOv3's head, in probes of earlier
# versions.
_WEIGHTS = {"softmax": lambda scores: scores.softmax(0), "relu": lambda scores: scores.relu() + 0.1}


def _fill(pixels: NDArray[T], tokens: TokenArray, values: Tensor, of_band: Callable[[Tensor], Tensor]) -> NDArray[T]:
    """Fill in the pixels inside the crop from interpolated values, from top to bottom.

    Between the centres of cells, values are interpolated linearly along both axes; outside the outer centres, they are
    those of the nearest cells. For a picture in the size of the crop, this is
    `torch.nn.functional.interpolate(..., mode="bilinear", align_corners=False)`.

    Args:
        pixels: (height, width) of a picture, turned as in `TokenArray.boxes`.
        tokens: tokens of the picture's data set.
        values: (K, h, w) of the grid.
        of_band: function of interpolated values (K, rows, columns) that returns pixels (rows, columns).
    """
    height, width = pixels.shape
    left, top, right, bottom = tokens.window((width, height))
    columns, by_column = _axis(width, left, right, tokens.grid[1])
    rows, by_row = _axis(height, top, bottom, tokens.grid[0])
    along_rows = torch.einsum("khw,cw->khc", values, by_column)
    start = rows.start
    for part in torch.split(by_row, max(1, _BAND_VALUES // max(1, len(values) * len(by_column)))):
        band = of_band(torch.einsum("rh,khc->krc", part, along_rows))
        pixels[start : start + len(part), columns] = band.numpy()
        start += len(part)
    return pixels


def _axis(pixels: int, start: float, end: float, cells: int) -> tuple[slice, Tensor]:
    """Return the pixels with their centres between `start` and `end`, and their weights of the cells."""
    places = (np.arange(pixels) + 0.5 - start) / (end - start) * cells
    inside = np.flatnonzero((places >= 0) & (places < cells))
    positions = np.clip(places[inside] - 0.5, 0, cells - 1)
    lower = np.minimum(positions.astype(np.int64), max(0, cells - 2))
    upper_share = positions - lower
    weights: NDArray[np.float32] = np.zeros((len(inside), cells), np.float32)
    numbers = np.arange(len(inside))
    weights[numbers, lower] = 1 - upper_share
    if cells > 1:
        weights[numbers, lower + 1] = upper_share
    first = int(inside[0]) if len(inside) else 0
    return slice(first, first + len(inside)), torch.from_numpy(weights)


def upsampled(tokens: TokenArray, values: Tensor, picture_px: tuple[int, int]) -> NDArray[np.float32]:
    """Return the interpolated values of a picture, NaN for pixels that the crop left out.

    Args:
        tokens: tokens of the picture's data set.
        values: (h, w), one value for each token of the picture.
        picture_px: (width, height), see `TokenArray.boxes`.

    Returns:
        (height, width).
    """
    return _fill(np.full(picture_px[::-1], np.nan, np.float32), tokens, values[None], lambda band: band[0])


def predicted_mask(tokens: TokenArray, scores: Tensor, picture_px: tuple[int, int]) -> NDArray[np.int64]:
    """Return for each pixel of a picture the class with the highest score.

    Args:
        tokens: tokens of the picture's data set.
        scores: (K, h, w) scores of the classes for the tokens of the picture.
        picture_px: (width, height), see `TokenArray.boxes`.

    Returns:
        (height, width) numbers from 0 to K - 1; -1 for pixels that the crop left out.
    """
    return _fill(np.full(picture_px[::-1], -1, np.int64), tokens, scores, lambda band: band.argmax(0))


def cell_means(tokens: TokenArray, pixels: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the mean of the known pixels of each cell; a pixel counts for the cell that has its centre.

    Args:
        tokens: tokens of the picture's data set.
        pixels: (H, W), NaN for unknown.

    Returns:
        (per_image,); NaN where less than half of the pixels are known.
    """
    height, width = pixels.shape
    left, top, right, bottom = tokens.window((width, height))
    rows = np.floor((np.arange(height) + 0.5 - top) / (bottom - top) * tokens.grid[0]).astype(np.int64)
    columns = np.floor((np.arange(width) + 0.5 - left) / (right - left) * tokens.grid[1]).astype(np.int64)
    inside = ((rows >= 0) & (rows < tokens.grid[0]))[:, None] & ((columns >= 0) & (columns < tokens.grid[1]))
    cells, values = (rows[:, None] * tokens.grid[1] + columns)[inside], pixels[inside].astype(np.float64)
    known = ~np.isnan(values)
    count, n_known = (np.bincount(some, minlength=tokens.per_image) for some in (cells, cells[known]))
    sums = np.bincount(cells[known], values[known], tokens.per_image)
    enough = (n_known > 0) & (2 * n_known >= count)
    return np.asarray(np.divide(sums, n_known, out=np.full(tokens.per_image, np.nan), where=enough))


@dataclass(frozen=True)
class DepthBins:
    """How scores of tokens give the depths of pixels.

    Attributes:
        depths: (bins,) float32, depth of each bin.
        weighting: how scores become weights of the depths: "softmax", or "relu": relu(score) + 0.1.
        largest: depth that is not exceeded.
    """

    depths: NDArray[np.float32]
    weighting: str
    largest: float

    def predicted(self, tokens: TokenArray, scores: Tensor, picture_px: tuple[int, int]) -> NDArray[np.float32]:
        """Return the depths (height, width) of a picture, NaN for pixels that the crop left out.

        Args:
            tokens: tokens of the picture's data set.
            scores: (bins, h, w) scores of its tokens.
            picture_px: (width, height), see `TokenArray.boxes`.
        """
        weights = _WEIGHTS[self.weighting](scores)
        of_cells = torch.einsum("khw,k->hw", weights / weights.sum(0), torch.from_numpy(self.depths))
        return upsampled(tokens, of_cells.clamp(max=self.largest), picture_px)

    def as_json(self) -> dict[str, Any]:
        """Return what a saved probe stores."""
        return {"depths": self.depths.tolist(), "weighting": self.weighting, "largest": self.largest}

    @staticmethod
    def of_json(described: Any, bins: int) -> DepthBins:
        """Return the bins of a saved probe that gives scores of a number of bins.

        Raises:
            ValueError: it is not a description of so many bins.
        """
        expected = f"expected the depths of {bins} bins, a weighting, softmax or relu, and the largest depth, above 0"
        if not isinstance(described, dict) or described.get("weighting") not in (*_WEIGHTS,):
            raise ValueError(f"depth is {described!r}; {expected}")
        depths = described.get("depths")
        numbers = [described.get("largest"), *(depths if isinstance(depths, list) else [])]
        are_depths = all(isinstance(number, float) and 0 < number < _LARGEST for number in numbers)
        if not are_depths or len(numbers) != bins + 1:
            raise ValueError(f"depth is {described!r}; {expected}")
        return DepthBins(np.array(numbers[1:], np.float32), described["weighting"], numbers[0])
