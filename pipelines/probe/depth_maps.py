"""Depth maps of the images of a data set, from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError
from extract.store.tokens.token_array import TokenArray
from pipelines.probe.pixel_files import CropLoss, check_size, read_pixels
from pipelines.terminal.pictures import Pictures

__all__ = ["DepthFiles"]


class DepthFiles:
    """Depth maps (H, W) in float32 by row, in the unit of the files; 0, negative numbers and NaN mean unknown.

    Args:
        names: row -> its file.
    """

    def __init__(self, names: Mapping[int, str]):
        self._names = names

    def examine(self, tokens: TokenArray, pictures: Pictures) -> list[str]:
        """Read all depth maps once, compare their sizes with those of the pictures, and return notes.

        Raises:
            InputError: a file cannot be read, or has another size than its picture.
        """
        loss = CropLoss(tokens, pictures)
        for row, name in self._names.items():
            depth = self[row]
            check_size(name, depth.shape, pictures.size(row))
            loss.count((depth > 0) & (depth < np.inf))
        if not loss.total:
            raise InputError("no pixel of the depth maps has a positive depth")
        return loss.notes("pixels of known depth")

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        return read_pixels(Path(self._names[row]), "iuf", "numbers as depths").astype(np.float32)
