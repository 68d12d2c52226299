"""Tiles of pictures: a grid of squares at one level, and which of them show more than background."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.errors import LayertapError, first_line, is_of_the_machine
from extract.images.decoding import DecodeOptions, header_size
from extract.images.part_names import Window
from extract.images.part_source import Parts
from extract.images.pyramids import is_read_in_regions
from extract.images.sources import OnDisk, UnreachableError

__all__ = ["content_of", "tiles", "tiles_of"]

_OVERVIEW_PX = 2048  # longer side of the overview whose saturation tells background from content

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
        LayertapError: a server fails, or a library is missing.
    """
    for row, name in enumerate(names):
        sizes = _unless_damaged(name, partial(_sizes, source, row, asked)) or []
        if asked.level >= len(sizes):
            yield row, Window(0, 0, 0, 0, level=asked.level)
            continue
        found, overview = tiles(sizes, asked.tiles, asked.overlap, asked.level), None
        if asked.content:
            overview = _unless_damaged(name, partial(_overview, source, row, asked))
        content = content_of(overview, sizes[0]) if overview is not None else None
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


def content_of(overview: Image.Image, size: tuple[int, int]) -> Callable[[Window], float]:
    """Return a function: window -> share of its pixels that are not background.

    Background has a saturation (HSV) of at most Otsu's threshold: paper and glass are grey, stained tissue is not.

    Args:
        overview: the picture, reduced.
        size: its (width, height) in level 0.
    """
    saturation = np.asarray(overview.convert("HSV"))[:, :, 1]
    counts = np.zeros([side + 1 for side in saturation.shape], np.int64)  # of content left of and above each pixel
    counts[1:, 1:] = (saturation > _threshold(saturation)).cumsum(0).cumsum(1)
    scale_x, scale_y = (side / full for side, full in zip(overview.size, size, strict=True))

    def share(window: Window) -> float:
        left, right = int(window.x * scale_x), math.ceil((window.x + window.w) * scale_x)
        upper, lower = int(window.y * scale_y), math.ceil((window.y + window.h) * scale_y)
        inside = counts[lower, right] - counts[upper, right] - counts[lower, left] + counts[upper, left]
        return float(inside) / ((lower - upper) * (right - left))

    return share


def _threshold(values: NDArray[np.uint8]) -> int:
    """Return the value that splits values into two classes with the largest variance between them (Otsu, 1979)."""
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below, sums = counts.cumsum(), (counts * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (sums[-1] * below / below[-1] - sums) ** 2 / (below * (below[-1] - below))
    return int(np.nan_to_num(between, posinf=0).argmax())
