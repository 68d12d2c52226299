"""Depths from scores of bins of depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.analysis.dense.upsampling import upsampled
from extract.store.tokens.token_array import TokenArray

__all__ = ["DepthBins", "mean_depth"]

# Scores (B, bins, ...) -> weights that are divided by their sum. "relu" is that of DINOv3.
_LARGEST = float(np.finfo(np.float32).max)
_WEIGHTS = {"softmax": lambda scores: scores.softmax(1), "relu": lambda scores: scores.relu() + 0.1}


def mean_depth(scores: Tensor, depths: Tensor, weighting: str) -> Tensor:
    """Return the mean depth of bins, weighted by their scores: (B, bins, ...) -> (B, ...).

    Args:
        scores: (B, bins, ...).
        depths: (bins,) depth of each bin.
        weighting: "softmax", or "relu": relu(score) + 0.1.
    """
    weights = _WEIGHTS[weighting](scores)
    return torch.einsum("bk...,k->b...", weights / weights.sum(1, keepdim=True), depths)


@dataclass(frozen=True)
class DepthBins:
    """How scores of tokens give the depths of pixels.

    Attributes:
        depths: (bins,) float32, depth of each bin.
        weighting: see `mean_depth`.
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
        of_cells = mean_depth(scores[None], torch.from_numpy(self.depths), self.weighting)[0]
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
