"""Where the tokens of a stored feature are: in its rows, and in the picture.

Token t is in row t // T: an image is computed, resumed and verified as a whole. All its tokens are stored: fewer images
save as many bytes as a random choice of tokens, at the same loss (sparse autoencoder of 896 features on 98,000 tokens
of CIFAR-10, three choices each: 53.2 to 53.6 with all tokens of 500 images, 53.1 to 54.3 with 49 of each of 2,000).
Places in the picture follow from its size, which whoever needs them has, and from the recorded resizing and crop.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError

__all__ = ["TokenLayout", "recorded_crop", "token_boxes", "token_labels", "token_layout"]


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
        known = f"axes {axes}" if axes.isalpha() and axes.isascii() else "no known axes"
        raise InputError(
            f"{name} has no tokens: a row has shape {size} and {known}",
            hint="extract a map or patch tokens, such as -l LAYER:tokens",
        )
    if axes != "TC":
        rows, columns = (shape[axes.index(axis)] for axis in "HW")
        return TokenLayout((rows, columns), (), shape[axes.index("C")], axes == "CHW")
    prefix = tuple(filter(None, attributes.get("prefix", "").split(",")))
    grid = re.fullmatch(r"([1-9]\d{0,5}),([1-9]\d{0,5})", attributes.get("grid", ""), re.ASCII)
    if grid is None or int(grid[1]) * int(grid[2]) + len(prefix) != shape[0]:
        raise InputError(
            f"the grid of the {shape[0]:,} tokens of {name} is not recorded: an earlier version stored them, or they "
            "are not in the order of the picture",
            hint="read whole rows, reader[...], or extract into a new folder if the version is the reason",
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
        picture_px: (width, height) of the picture as it was decoded, which is upright unless orientation was "ignore".

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
    grid: tuple[int, int], preprocessing: Mapping[str, Any], mask: Any, ignore: int | None, min_share: float
) -> NDArray[np.int64]:
    """Return the label of each token by a mask; see `TokenArray.labels`.

    Raises:
        InputError: the mask is not an image of integers from 0, or see `token_boxes`.
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or mask.dtype.kind not in "iub" or not mask.size:
        shape = "(" + ", ".join(map(str, mask.shape)) + ")"
        raise InputError(
            f"the mask is an array of {mask.dtype} with shape {shape}; expected integers (H, W)",
            hint="open masks by np.asarray(Image.open(...)), without conversion to RGB",
        )
    if ignore is not None and not isinstance(ignore, int | np.integer):
        raise InputError(f"ignore is {ignore!r}; expected one label", hint="give several labels the same number first")
    if not 0 <= min_share <= 1:
        raise InputError(f"min_share is {min_share}; expected 0 to 1")
    wrong = mask[(mask < 0) & (mask != ignore)] if mask.dtype.kind == "i" else mask[mask > np.iinfo(np.int64).max]
    if wrong.size:
        raise InputError(
            f"the mask has the label {wrong[0]}; expected labels from 0 to 2**63 - 1",
            hint="name the label of unlabelled pixels as ignore" if wrong[0] < 0 else "",
        )
    height, width = mask.shape
    x, y = _edges(grid, preprocessing, (width, height))
    # The cell of each row and column of pixels, by their centres; -1 or the number of cells outside the crop.
    columns = np.searchsorted(x, np.arange(width) + 0.5, side="right") - 1
    rows = np.searchsorted(y, np.arange(height) + 0.5, side="right") - 1
    inside = np.ix_((rows >= 0) & (rows < grid[0]), (columns >= 0) & (columns < grid[1]))
    cells = (rows[:, None] * grid[1] + columns)[inside].reshape(-1)
    seen = mask[inside].reshape(-1)
    n_cells, labels = grid[0] * grid[1], np.unique(seen).astype(np.int64)
    pairs = cells * len(labels) + np.searchsorted(labels, seen.astype(np.int64))
    counts = np.bincount(pairs, minlength=n_cells * len(labels)).reshape(n_cells, len(labels))
    pixels = counts.sum(1)
    counts[:, labels == ignore] = 0
    if not counts.size:
        return np.full(n_cells, -1, np.int64)
    most = counts.max(1)  # the first label of several that are equally frequent
    return np.where((most > 0) & (most >= min_share * pixels), labels[counts.argmax(1)], -1)


def _edges(
    grid: tuple[int, int], preprocessing: Mapping[str, Any], picture_px: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return where the columns and the rows of a grid begin and end in a picture, in pixels."""
    crop_height, crop_width = recorded_crop(preprocessing)
    width, height = _size(picture_px, "the picture")
    resize = preprocessing["resize_px"]
    if isinstance(resize, list | tuple):
        new_height, new_width = _size(resize, "the recorded size")
    else:
        shorter, _ = _size((resize, resize), "the recorded size")
        if width <= height:  # torchvision rounds down
            new_width, new_height = shorter, shorter * height // width
        else:
            new_width, new_height = shorter * width // height, shorter
    left, top = round((new_width - crop_width) / 2), round((new_height - crop_height) / 2)
    rows, columns = grid
    y = np.array([(top + row * crop_height / rows) * height / new_height for row in range(rows + 1)], np.float64)
    x = np.array([(left + cell * crop_width / columns) * width / new_width for cell in range(columns + 1)], np.float64)
    return x, y


def recorded_crop(preprocessing: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width of the crop, which is the backbone's input.

    Raises:
        InputError: see `token_boxes`.
    """
    if "resize_px" not in preprocessing:
        raise InputError(
            "the places of tokens are not known: the backbone's library resizes and crops pictures by its own transform"
        )
    return _size(preprocessing.get("crop_px"), "the recorded crop")


def _size(sides: Any, what: str) -> tuple[int, int]:
    """Return two sides in pixels as integers.

    Raises:
        InputError: they are something else.
    """
    try:
        first, second = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        raise InputError(f"{what} is {sides!r}; expected two sides in pixels") from None
    if not (0 < first < 1 << 31 and 0 < second < 1 << 31):
        raise InputError(f"{what} has {first} x {second} pixels; expected at least 1 x 1")
    return first, second
