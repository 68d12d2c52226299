"""Tiles of pictures: a grid of squares at one level, and which of them show more than background."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from extract.errors import InputError, LayertapError, first_line, is_of_the_machine
from extract.images.decoding import DecodeOptions, check_whole, header_size, opened
from extract.images.part_names import Window
from extract.images.part_source import Parts
from extract.images.pyramids import is_read_in_regions
from extract.images.sources import OnDisk, UnreachableError
from extract.system.urls import is_url

__all__ = ["saturated", "share_of", "tiles", "tiles_of"]

_OVERVIEW_PX = 2048  # longer side of the overview whose saturation tells background from content
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
    stems = Counter(map(_stem, set(names))) if asked.masks is not None else Counter[str]()
    if several := [stem for stem, count in stems.items() if count > 1]:
        text = f"{asked.masks}: the mask of {several[0]} belongs to several pictures, with other suffixes"
        raise InputError(text, hint="rename them, and give each a mask")
    for row, name in enumerate(names):
        sizes = _unless_damaged(name, partial(_sizes, source, row, asked)) or []
        if asked.level >= len(sizes):
            yield row, Window(0, 0, 0, 0, level=asked.level)
            continue
        found, content = tiles(sizes, asked.tiles, asked.overlap, asked.level), None
        if asked.masks is not None:
            content = share_of(_mask(source, row, name, asked, sizes[0]), sizes[0])
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


def _mask(source: Parts, row: int, name: str, asked: Any, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which pixels (H, W) of the mask of a picture are not 0.

    Args:
        source: source of the pictures.
        row: the picture.
        name: its path, relative to the folder of the pictures.
        asked: settings, see `tiles_of`.
        size: (width, height) of the picture.

    Raises:
        InputError: there is no mask, or one that cannot be used.
    """
    folder, stem = asked.masks, os.path.join(asked.masks, _stem(name))  # noqa: PTH118  as pictures are named
    if is_url(name) or os.path.isabs(name) or ".." in name.split("/"):  # noqa: PTH117
        raise InputError(f"{name}: masks belong to pictures of one folder", hint="give the folder of the pictures")
    if not os.path.isdir(folder):  # noqa: PTH112
        raise InputError(f"masks: {folder or 'an empty text'} is not a folder of this machine")
    paths = [stem + suffix for suffix in _MASK_SUFFIXES if os.path.isfile(stem + suffix)]  # noqa: PTH113
    if not paths:
        hint = "give a list of the pictures that have one"
        raise InputError(f"{folder}: {name} has no mask; expected {stem}{_MASK_SUFFIXES[0]}", hint=hint)
    if paths[1:]:
        raise InputError(f"{paths[0]} and {paths[1]} are masks of {name}", hint="remove one of them")
    if (own := source.local_path(row)) and os.path.samefile(own, paths[0]):  # noqa: PTH121
        raise InputError(f"{paths[0]} is the picture, not its mask", hint="name the folder of the masks")
    try:
        mask = _not_zero(paths[0], asked)
    except Exception as error:  # see `decode`
        reasons = {
            UnidentifiedImageError: "not a PNG or TIFF",
            Image.DecompressionBombError: f"more than {asked.max_pixels:,} pixels; --max-pixels sets the limit",
        }
        reason = reasons.get(type(error)) or first_line(error)
        raise InputError(f"{paths[0]} cannot be read: {reason}") from error
    if abs(math.log(mask.shape[1] * size[1] / (mask.shape[0] * size[0]))) > _OTHER_SHAPE:
        shapes = f"{mask.shape[1]} x {mask.shape[0]} pixels, and {name} {size[0]} x {size[1]}"
        raise InputError(f"{paths[0]} has {shapes}; expected the same ratio of width and height")
    return mask


def _not_zero(path: str, asked: Any) -> NDArray[np.bool_]:
    """Return which pixels (H, W) of a picture are not 0 in a channel other than alpha."""
    with open(path, "rb") as file:  # noqa: PTH123
        data = file.read()
    with opened(data, asked.max_pixels) as image:
        if image.format not in ("PNG", "TIFF") or "jpeg" in image.info.get("compression", ""):
            raise ValueError("JPEG and such formats do not keep 0 as it is; expected PNG or lossless TIFF")
        if getattr(image, "tag_v2", {}).get(ExifTags.Base.PhotometricInterpretation) == 0:
            raise ValueError("its 0 is white (WhiteIsZero), which programs read as 0 or as 255; expected PNG")
        check_whole(data, image)
        if asked.orientation == "exif":
            ImageOps.exif_transpose(image, in_place=True)
        values = np.asarray(image)
        bands = len(image.getbands()) - (image.mode in _WITH_ALPHA)
    return np.asarray((values.reshape(*values.shape[:2], -1)[:, :, :bands] != 0).any(2), np.bool_)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]  # noqa: PTH122  as pictures are named


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


def saturated(overview: Image.Image) -> NDArray[np.bool_]:
    """Return which pixels (H, W) of a picture are not background.

    Background has a saturation (HSV) of at most Otsu's threshold: paper and glass are grey, stained tissue is not.
    """
    saturation = np.asarray(overview.convert("HSV"))[:, :, 1]
    return np.asarray(saturation > _threshold(saturation), np.bool_)


def share_of(content: NDArray[np.bool_], size: tuple[int, int]) -> Callable[[Window], float]:
    """Return a function: window -> share of it that is not background.

    Args:
        content: (H, W), which pixels of the picture are not background, at another size.
        size: (width, height) of the picture in level 0.
    """
    (height, width), (full_width, full_height) = content.shape, size

    def share(window: Window) -> float:
        # By whole numbers: a float would be rounded up to a pixel that is not there.
        x, y, right, lower = (int(edge) for edge in (window.x, window.y, window.x + window.w, window.y + window.h))
        rows = slice(y * height // full_height, -(-lower * height // full_height))
        inside = content[rows, x * width // full_width : -(-right * width // full_width)]
        return int(np.count_nonzero(inside)) / inside.size

    return share


def _threshold(values: NDArray[np.uint8]) -> int:
    """Return the value that splits values into two classes with the largest variance between them (Otsu, 1979)."""
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below, sums = counts.cumsum(), (counts * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (sums[-1] * below / below[-1] - sums) ** 2 / (below * (below[-1] - below))
    return int(np.nan_to_num(between, posinf=0).argmax())
