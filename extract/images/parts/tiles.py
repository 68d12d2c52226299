"""Tiles of pictures: a grid of squares at one level, and which of them show more than background."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract import defaults
from extract.errors import InputError, LayertapError, first_line, is_of_the_machine
from extract.images.decoding import DecodeOptions, header_size, opened
from extract.images.part_names import Window
from extract.images.part_source import Parts
from extract.images.pyramids import is_read_in_regions
from extract.images.sources import OnDisk, UnreachableError
from extract.system.urls import is_url

__all__ = ["saturated", "share_of", "tiles", "tiles_of"]

_OVERVIEW_PX = 2048  # longer side of the overview that tells background from content
_MASK_SUFFIXES = (".png", ".tif", ".tiff")  # of formats that keep 0 as it is
_WITH_ALPHA = ("LA", "PA", "RGBA")
_OTHER_SHAPE = 0.02  # by which the ratio of the sides of a mask may differ from that of its picture: masks are small

Result = TypeVar("Result")


def tiles_of(source: Parts, names: Sequence[str], asked: Any) -> Iterator[tuple[int, Window]]:
    """Yield the row of each file, and its tiles.

    A file that cannot be read, or lacks the level, has one window without area. Its row fails with the reason, and
    would fail too if the file could be read later: a whole file is not a tile.

    Args:
        source: source of the files.
        names: their names.
        asked: settings; see `extract.extraction.settings.PartSettings`, and `DecodingSettings`.

    Raises:
        InputError: a picture has no mask, or one that cannot be used.
        LayertapError: a server fails, or a library is missing.
    """
    for row, name in enumerate(names):
        sizes = _unless_damaged(name, partial(_sizes, source, row, asked)) or []
        if asked.level >= len(sizes):
            yield row, Window(0, 0, 0, 0, level=asked.level)
            continue
        found, content = tiles(sizes, asked.tiles, asked.overlap, asked.level), None
        if asked.masks:
            content = share_of(_mask(asked.masks, name, sizes[0]), sizes[0])
        elif asked.content and (overview := _unless_damaged(name, partial(_overview, source, row, asked))):
            content = share_of(saturated(overview), sizes[0])
        yield from ((row, window) for window in found if content is None or content(window) >= asked.content)


def _unless_damaged(name: str, read: Callable[[], Result]) -> Result | None:
    """Return what is read of a file; None if it is damaged: its rows fail."""
    try:
        return read()
    except LayertapError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, UnreachableError) or is_of_the_machine(error):
            raise LayertapError(f"{name} cannot be read: {first_line(error)}", hint="run again later") from error
        return None


def _sizes(source: Parts, row: int, asked: Any) -> list[tuple[int, int]]:
    """Return (width, height) of the levels of a file, from its header if it is on the local disk."""
    path = source.local_path(row)
    if path is not None and not asked.level and not is_read_in_regions(path):
        with open(OnDisk(path).path, "rb") as file:  # noqa: PTH123  no pipe, which would block
            if size := header_size(file, asked.orientation):
                return [size]
    data, _ = source.read(row)
    if isinstance(data, OnDisk) or asked.level:
        return source.pyramid(data).sizes
    return [source.picture(row, data, DecodeOptions(asked.max_pixels, 0, asked.orientation)).size]


def _overview(source: Parts, row: int, asked: Any) -> Image.Image:
    data, _ = source.read(row)
    if isinstance(data, OnDisk):
        return source.pyramid(data).overview(_OVERVIEW_PX)
    picture = source.picture(row, data, DecodeOptions(asked.max_pixels, _OVERVIEW_PX, asked.orientation))
    return picture.reduce(-(-max(picture.size) // _OVERVIEW_PX))


def _mask(folder: str | os.PathLike[str], name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the mask of a picture, reduced, from 0 to 255.

    Args:
        folder: folder of the masks.
        name: path of the picture, relative to the folder of the pictures.
        size: its (width, height).

    Raises:
        InputError: there is no mask, or one that cannot be used.
    """
    stem = os.path.join(folder, os.path.splitext(name)[0])  # noqa: PTH118, PTH122  as pictures are named
    if is_url(name) or os.path.isabs(name):  # noqa: PTH117
        raise InputError(f"{name}: masks belong to pictures of one folder", hint="give the folder of the pictures")
    path = next((stem + suffix for suffix in _MASK_SUFFIXES if os.path.isfile(stem + suffix)), None)  # noqa: PTH113
    if path is None:
        hint = "give a list of the pictures that have one"
        raise InputError(f"{folder}: {name} has no mask; expected {stem}{_MASK_SUFFIXES[0]}", hint=hint)
    try:
        with open(path, "rb") as file, opened(file, defaults.MAX_PIXELS) as image:  # noqa: PTH123
            values, n_bands = np.asarray(image), len(image.getbands()) - (image.mode in _WITH_ALPHA)
            values = values.reshape(*values.shape[:2], -1)[:, :, :n_bands]
    except Exception as error:  # see `decode`
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if abs(math.log(values.shape[1] * size[1] / (values.shape[0] * size[0]))) > _OTHER_SHAPE:
        shapes = f"{values.shape[1]} x {values.shape[0]} pixels, and {name} {size[0]} x {size[1]}"
        raise InputError(f"{path} has {shapes}; expected the same ratio of width and height")
    mask = Image.fromarray((values != 0).any(2).astype(np.uint8) * 255)
    return np.asarray(mask.reduce(-(-max(mask.size) // _OVERVIEW_PX)))


def tiles(sizes: Sequence[tuple[int, int]], side: int, overlap: float, level: int) -> Iterator[Window]:
    """Yield the tiles of a level, in pixels of level 0, row by row.

    The last column and row are moved inside: each pixel is in a tile, and no tile has padding. A picture that is
    smaller than a tile has one tile of its own width or height.

    Args:
        sizes: (width, height) of the levels.
        side: pixels of the level.
        overlap: part of a tile that the next one covers too.
        level: the level.
    """
    step = max(1, round(side * (1 - overlap)))
    columns, rows = (_edges(*each, side, step) for each in zip(sizes[level], sizes[0], strict=True))
    for (upper, lower), (left, right) in itertools.product(rows, columns):
        yield Window(left, upper, right - left, lower - upper, level=level)


def _edges(length: int, full: int, side: int, step: int) -> list[tuple[int, int]]:
    """Return the edges of tiles along an axis, in level 0, of which `length` pixels of the level have `full`."""
    last = max(0, length - side)
    starts = [*range(0, last, step), last]
    return [(round(start * full / length), round(min(start + side, length) * full / length)) for start in starts]


def saturated(overview: Image.Image) -> NDArray[np.uint8]:
    """Return 255 for the pixels (H, W) of a picture that are not background, and 0 for the others.

    Background has a saturation (HSV) of at most Otsu's threshold: paper and glass are grey, stained tissue is not.
    """
    saturation = np.asarray(overview.convert("HSV"))[:, :, 1]
    return (saturation > _threshold(saturation)).astype(np.uint8) * 255


def share_of(content: NDArray[np.uint8], size: tuple[int, int]) -> Callable[[Window], float]:
    """Return a function: window -> share of it that is not background.

    Args:
        content: (H, W), from 0 for background to 255, of the picture, reduced.
        size: (width, height) of the picture in level 0.
    """
    sums = np.zeros([side + 1 for side in content.shape], np.int64)  # left of and above each pixel
    sums[1:, 1:] = content.astype(np.int64).cumsum(0).cumsum(1)
    scale_x, scale_y = (side / full for side, full in zip(content.shape[::-1], size, strict=True))

    def share(window: Window) -> float:
        left, right = int(window.x * scale_x), math.ceil((window.x + window.w) * scale_x)
        upper, lower = int(window.y * scale_y), math.ceil((window.y + window.h) * scale_y)
        inside = sums[lower, right] - sums[upper, right] - sums[lower, left] + sums[upper, left]
        return float(inside / (255 * (lower - upper) * (right - left)))

    return share


def _threshold(values: NDArray[np.uint8]) -> int:
    """Return the value that splits values into two classes with the largest variance between them (Otsu, 1979)."""
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below, sums = counts.cumsum(), (counts * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (sums[-1] * below / below[-1] - sums) ** 2 / (below * (below[-1] - below))
    return int(np.nan_to_num(between, posinf=0).argmax())
