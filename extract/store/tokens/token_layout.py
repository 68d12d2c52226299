"""Where the tokens of a stored feature are: in its rows, and in the picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError

__all__ = ["TokenLayout", "token_boxes", "token_labels", "token_layout"]


@dataclass(frozen=True)
class TokenLayout:
    """Tokens in a row of a feature.

    Attributes:
        grid: (rows, columns) of the tokens; they are counted row by row.
        prefix: names of the tokens before them: "class" or "other" (registers, for instance).
        channels: values of a token.
        channels_first: whether the axes of the feature are (C, H, W).
    """

    grid: tuple[int, int]
    prefix: tuple[str, ...]
    channels: int
    channels_first: bool

    @property
    def count(self) -> int:
        """Tokens of an image, without the prefix."""
        return self.grid[0] * self.grid[1]

    def split(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the tokens of images, with those of the prefix: (B, *shape) -> (B, T, C), a view."""
        if self.channels_first:
            return values.reshape(len(values), self.channels, self.count).swapaxes(1, 2)
        return values.reshape(len(values), len(self.prefix) + self.count, self.channels)


def token_layout(name: str, shape: Sequence[int], attributes: Mapping[str, str]) -> TokenLayout:
    """Return where the tokens of a feature are.

    Args:
        name: name of the feature, for messages.
        shape: shape of a row.
        attributes: attributes of the feature: axes, grid, prefix.

    Raises:
        InputError: it has no tokens, or the data set does not record their grid.
    """
    axes = attributes.get("axes", "")
    if axes not in ("TC", "CHW", "HWC") or len(shape) != len(axes):
        size = "(" + ", ".join(map(str, shape)) + ")"
        raise InputError(
            f"{name} has no tokens: a row has shape {size} and axes {axes or 'that are not known'}",
            hint="extract a map or patch tokens, such as -l LAYER:tokens",
        )
    if axes != "TC":
        rows, columns = (shape[axes.index(axis)] for axis in "HW")
        return TokenLayout((rows, columns), (), shape[axes.index("C")], axes == "CHW")
    prefix = tuple(filter(None, attributes.get("prefix", "").split(",")))
    grid = re.fullmatch(r"(\d{1,6}),(\d{1,6})", attributes.get("grid", ""), re.ASCII)
    if grid is None or int(grid[1]) * int(grid[2]) + len(prefix) != shape[0]:
        raise InputError(
            f"the grid of the {shape[0]:,} tokens of {name} is not recorded: they are not in the order of the picture, "
            "or an earlier version of layertap stored them",
            hint="extract them again, or read whole rows, reader[...]",
        )
    return TokenLayout((int(grid[1]), int(grid[2])), prefix, shape[1], channels_first=False)


def token_boxes(
    grid: tuple[int, int], preprocessing: Mapping[str, Any], picture_px: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the part of a picture that each token of a grid covers.

    This is the cell of the grid. What a token depends on may be larger, up to the whole input.

    Args:
        grid: (rows, columns).
        preprocessing: `resize_px` and `crop_px`, as recorded in the data set.
        picture_px: (width, height) of the picture, upright.

    Returns:
        (rows * columns, 4), left, top, right and bottom in pixels of the picture, row by row.

    Raises:
        InputError: the backbone's library resizes and crops in its own way.
    """
    x, y = _edges(grid, preprocessing, picture_px)
    boxes = np.empty((*grid, 4))
    boxes[..., 0], boxes[..., 2] = x[:-1], x[1:]
    boxes[..., 1], boxes[..., 3] = y[:-1, None], y[1:, None]
    return boxes.reshape(-1, 4)


def token_labels(
    grid: tuple[int, int],
    preprocessing: Mapping[str, Any],
    mask: NDArray[Any],
    ignore: int | None,
    min_share: float,
) -> NDArray[np.int64]:
    """Return the label of each token by a mask; see `TokenArray.labels`.

    Raises:
        InputError: the mask is not an image of integers from 0, or see `token_boxes`.
    """
    if mask.ndim != 2 or mask.dtype.kind not in "iub" or not mask.size:
        shape = "(" + ", ".join(map(str, mask.shape)) + ")"
        raise InputError(
            f"the mask is an array of {mask.dtype} with shape {shape}; expected integers (H, W)",
            hint="open PNG masks by np.asarray(Image.open(...)), without conversion to RGB",
        )
    labels = mask.astype(np.int64)
    if int(labels.min()) < 0:
        raise InputError(f"the mask has the label {labels.min()}; expected labels from 0")
    if not 0 <= min_share <= 1:
        raise InputError(f"min_share is {min_share}; expected 0 to 1")
    height, width = mask.shape
    x, y = _edges(grid, preprocessing, (width, height))
    # The cell of each row and column of pixels, by their centres; -1 or the number of cells outside the crop.
    columns = np.searchsorted(x, np.arange(width) + 0.5, side="right") - 1
    rows = np.searchsorted(y, np.arange(height) + 0.5, side="right") - 1
    inside = np.ix_((rows >= 0) & (rows < grid[0]), (columns >= 0) & (columns < grid[1]))
    cells = (rows[:, None] * grid[1] + columns)[inside].reshape(-1)
    values, numbers = np.unique(labels[inside].reshape(-1), return_inverse=True)
    count = grid[0] * grid[1]
    counts = np.bincount(cells * len(values) + numbers, minlength=count * len(values)).reshape(count, len(values))
    pixels = counts.sum(1)
    if ignore is not None:
        counts[:, values == ignore] = 0
    most = counts.max(1, initial=0)
    chosen = np.full(count, -1, np.int64)
    known = (most > 0) & (most >= min_share * pixels)
    if known.any():
        chosen[known] = values[counts[known].argmax(1)]
    return chosen


def _edges(
    grid: tuple[int, int], preprocessing: Mapping[str, Any], picture_px: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return where the columns and the rows of a grid begin and end in a picture, in pixels."""
    if "resize_px" not in preprocessing:
        raise InputError(
            "the places of tokens are not known: the backbone's library resizes and crops pictures by its own transform"
        )
    width, height = picture_px
    if width < 1 or height < 1:
        raise InputError(f"the picture has {width} x {height} pixels; expected at least 1 x 1")
    resize, (crop_height, crop_width) = preprocessing["resize_px"], preprocessing["crop_px"]
    if not isinstance(resize, int):
        new_height, new_width = resize
    elif width <= height:  # torchvision rounds down
        new_width, new_height = resize, int(resize * height / width)
    else:
        new_width, new_height = int(resize * width / height), resize
    left, top = round((new_width - crop_width) / 2), round((new_height - crop_height) / 2)
    rows, columns = grid
    y = (top + np.arange(rows + 1) * (crop_height / rows)) * (height / new_height)
    x = (left + np.arange(columns + 1) * (crop_width / columns)) * (width / new_width)
    return x, y
