"""Pictures that are read in regions: slides by OpenSlide, large TIFF and the levels of TIFF by tifffile.

Only the segments (tiles or strips) of a file that a region touches are read and decoded. Regions are in pixels of level
0, from the upper left corner of the picture as it is stored.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract import defaults
from extract.errors import LayertapError, MachineError, first_line, is_of_the_machine
from extract.images.decoding import SLIDE_SUFFIXES, SLIDES, DecodeOptions, header_size, to_picture
from extract.images.part_names import Window
from extract.images.sources import OnDisk, suffix_of
from extract.system.optional_libraries import library

__all__ = ["Pyramid", "is_read_in_regions", "open_pyramid"]

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ORIENTATION, _ICC = 274, 34675  # TIFF 6.0 tags
# Values of the tags PhotometricInterpretation and ExtraSamples -> Pillow's mode. A decoder of JPEG converts YCbCr.
_WHITE_IS_ZERO, _YCBCR = 0, 6
_MODES = {
    (_WHITE_IS_ZERO, ()): "L", (1, ()): "L", (2, ()): "RGB", (_YCBCR, ()): "RGB",
    (2, (0,)): "RGBX", (2, (1,)): "RGBa", (2, (2,)): "RGBA",
}  # fmt: skip
_SEPARATE, _JPEG = 2, (6, 7)  # values of the tags PlanarConfiguration and Compression
_BLOCK_PX = 2048  # side of the blocks that an overview is made of


def is_read_in_regions(path: str) -> bool:
    """Whether a local file is never read whole: a slide, or a TIFF of more pixels or bytes than are decoded.

    This depends on the file alone, not on settings, so that a name always means the same pixels.

    Raises:
        OSError, ValueError: there is no such file.
    """
    suffix = suffix_of(path, ())
    if suffix not in (".tif", ".tiff"):
        return suffix in SLIDE_SUFFIXES
    if OnDisk(path).size > defaults.MAX_FILE_BYTES:
        return True
    with open(path, "rb") as file:  # noqa: PTH123
        return math.prod(header_size(file) or (0,)) > defaults.MAX_PIXELS


def open_pyramid(data: bytes) -> Pyramid:
    """Open a slide or TIFF, of which `data` are the bytes, or stand for its file.

    Raises:
        MachineError: the library that reads it is not installed.
        ValueError: it is damaged, or of a kind that is not read.
    """
    try:
        is_slide = isinstance(data, OnDisk) and suffix_of(data.path, ()) in SLIDES
        return _Slide(data.path) if is_slide else _Tiff(data)  # type: ignore[attr-defined]
    except LayertapError as error:  # no row is marked as failed
        raise MachineError(error.message, hint=error.hint) from error
    except Exception as error:
        raise _of_file(error) from error


def _of_file(error: Exception) -> Exception:
    """Return an error of a decoder, of which each has its types, as one of the file if it is not of the machine."""
    if isinstance(error, MemoryError) or is_of_the_machine(error):
        return error
    return ValueError(first_line(error))


class Pyramid:
    """A picture that is read in regions.

    Attributes:
        sizes: (width, height) of each level, the largest first.
        identity: what tells its pixels from those of others, if they are in other files than its own.
        orientation: TIFF 6.0 orientation that its pixels are stored with.
    """

    sizes: list[tuple[int, int]]
    identity = ""
    orientation = 1

    def region(self, window: Window, options: DecodeOptions) -> Image.Image:
        """Return the RGB picture of a window, in pixels of its level.

        Raises:
            ValueError: there is no such region, it has more than `max_pixels`, or it cannot be decoded.
        """
        if window.level >= len(self.sizes):
            raise ValueError(f"it has no level {window.level}; its last level is {len(self.sizes) - 1}")
        if options.orientation == "exif" and self.orientation != 1:
            raise ValueError(f"its regions are turned (orientation {self.orientation}); add --orientation ignore")
        box = window.inside(self.sizes[0])
        sides = zip(box[:2], box[2:], self.sizes[window.level], self.sizes[0], strict=True)
        (left, right), (upper, lower) = (_in_level(*each) for each in sides)
        if (n_pixels := (right - left) * (lower - upper)) > options.max_pixels:
            raise ValueError(f"the region {window} has {n_pixels:,} pixels; --max-pixels sets the limit")
        return self._picture(window.level, box[:2], (left, upper, right, lower), options.icc)

    def overview(self, side: int) -> Image.Image:
        """Return the whole picture with a longer side of at most `side` pixels, from the smallest sufficient level."""
        level = max([number for number, size in enumerate(self.sizes) if max(size) >= side], default=0)
        (width, height), full = self.sizes[level], self.sizes[0]
        factor = -(-max(width, height) // side)
        overview = Image.new("RGB", (-(-width // factor), -(-height // factor)))
        block = max(1, _BLOCK_PX // factor) * factor
        for x, y in itertools.product(range(0, width, block), range(0, height, block)):
            start = round(x * full[0] / width), round(y * full[1] / height)
            piece = self._picture(level, start, (x, y, min(x + block, width), min(y + block, height)), defaults.ICC)
            overview.paste(piece.reduce(factor), (x // factor, y // factor))
        return overview

    def _picture(self, level: int, start: tuple[int, int], box: tuple[int, int, int, int], icc: str) -> Image.Image:
        """Return the RGB picture of a region.

        Args:
            level: the level to read.
            start: left and upper edge in level 0.
            box: (left, upper, right, lower) in the level.
            icc: see `extract.images.decoding.decode`.
        """
        try:
            return to_picture(self._read(level, start, box), "ignore", icc)
        except Exception as error:
            raise _of_file(error) from error

    def _read(self, level: int, start: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
        raise NotImplementedError


def _in_level(first: int, last: int, side: int, full: int) -> tuple[int, int]:
    """Return the edges, in a level of `side` pixels, of a stretch of level 0; at least a pixel."""
    start = min(round(first * side / full), side - 1)
    return start, max(round(last * side / full), start + 1)


class _Slide(Pyramid):
    """A slide. OpenSlide interpolates the pixels of a level whose downsample is no whole number."""

    def __init__(self, path: str):
        openslide = library("openslide", "slides", f"{path}: a slide")
        if openslide.OpenSlide.detect_format(path) is None:
            raise ValueError("not a slide in a format that OpenSlide reads")
        self._slide = openslide.OpenSlide(path)
        self.sizes = list(self._slide.level_dimensions)
        self.identity = self._slide.properties.get(openslide.PROPERTY_NAME_QUICKHASH1, "")

    def _read(self, level: int, start: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
        picture: Image.Image = self._slide.read_region(start, level, (box[2] - box[0], box[3] - box[1]))
        # Without transparent pixels, which are rare, the picture over white is its colours.
        return picture.convert("RGB") if picture.getchannel("A").getextrema() == (255, 255) else picture


class _Tiff(Pyramid):
    """The first picture of a TIFF, and its levels. The file is open only while a segment is read."""

    def __init__(self, data: bytes):
        if not isinstance(data, OnDisk) and not data.startswith(_TIFF_STARTS):
            raise ValueError("it has no levels: not a TIFF or slide")
        tifffile = library("tifffile", "tiff", "a TIFF of many pixels or with levels")
        library("imagecodecs", "tiff", "a compressed TIFF")
        logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # faults of a file are those of its rows
        self._data = data
        with tifffile.TiffFile(data.path if isinstance(data, OnDisk) else io.BytesIO(data)) as file:
            series = file.series[0]
            if series.axes not in ("YX", "YXS", "SYX"):
                raise ValueError(f"its first series is {series.axes} {series.shape}; expected one picture (YX or YXS)")
            self._pages = [level.keyframe for level in series.levels]
            # tifffile reads the values of tags when they are first used: here, while the file is open.
            self._segments = [(page.dataoffsets, page.databytecounts) for page in self._pages]
            self._decoders = [
                partial(page.decode, jpegtables=page.jpegtables, jpegheader=page.jpegheader) for page in self._pages
            ]
            tags = file.pages[0].tags
            self.orientation, self._icc = int(tags.valueof(_ORIENTATION) or 1), tags.valueof(_ICC)
            self._modes = [_mode(page) for page in self._pages]
        self.sizes = [(page.imagewidth, page.imagelength) for page in self._pages]

    def _read(self, level: int, start: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
        page, (left, upper, right, lower) = self._pages[level], box
        width, height = _segment_size(page)
        across, down = -(-page.imagewidth // width), -(-page.imagelength // height)
        is_separate = page.planarconfig == _SEPARATE and page.samplesperpixel > 1
        pixels = np.empty((lower - upper, right - left, page.samplesperpixel), page.dtype)
        planes = range(page.samplesperpixel if is_separate else 1)
        rows, columns = range(upper // height, -(-lower // height)), range(left // width, -(-right // width))
        for plane, row, column in itertools.product(planes, rows, columns):
            y, x = row * height, column * width
            segment = self._segment(level, (plane * down + row) * across + column)
            piece = segment[max(upper - y, 0) : lower - y, max(left - x, 0) : right - x]
            samples = slice(plane, plane + 1) if is_separate else slice(None)
            place = pixels[max(y - upper, 0) : y + height - upper, max(x - left, 0) : x + width - left, samples]
            if place.shape != piece.shape:  # NumPy would repeat a single value
                raise ValueError(f"damaged: a segment has {piece.shape} values, expected {place.shape}")
            place[:] = piece
        return self._image(pixels, level)

    def _segment(self, level: int, index: int) -> NDArray[Any]:
        """Return the pixels of a segment, (height, width, samples)."""
        offset, count = (values[index] for values in self._segments[level])
        data = self._bytes(offset, count)
        if not count or len(data) < count:
            raise ValueError(f"truncated: its segment {index} is {'cut off' if count else 'not stored'}")
        return np.asarray(self._decoders[level](data, index)[0][0])

    def _bytes(self, offset: int, count: int) -> bytes:
        data = self._data
        if not isinstance(data, OnDisk):
            return data[offset : offset + count]
        with open(data.path, "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (data.size, data.mtime_ns):
                raise ValueError("it has changed since it was opened")
            return os.pread(file.fileno(), count, offset)

    def _image(self, pixels: NDArray[Any], level: int) -> Image.Image:
        if self._pages[level].photometric == _WHITE_IS_ZERO:
            pixels = np.iinfo(pixels.dtype).max - pixels
        mode = "I;16" if pixels.dtype == np.uint16 else self._modes[level]
        little_endian = pixels.astype(pixels.dtype.newbyteorder("<"), copy=False)
        image = Image.frombuffer(mode, pixels.shape[1::-1], little_endian, "raw", mode, 0, 1)
        if self._icc:
            image.info["icc_profile"] = self._icc
        return image


def _segment_size(page: Any) -> tuple[int, int]:
    """Return (width, height) of the tiles of a page, or of its strips."""
    strip = page.imagewidth, min(page.rowsperstrip, page.imagelength)
    return (page.tilewidth, page.tilelength) if page.is_tiled else strip


def _mode(page: Any) -> str:
    """Return Pillow's mode of the pixels of a page; refuse pixels that `decode` refuses, and some others."""
    mode, pixels = _MODES.get((page.photometric, tuple(page.extrasamples))), (page.bitspersample, page.dtype)
    is_converted = page.photometric != _YCBCR or page.compression in _JPEG
    if mode is None or not is_converted or not (pixels == (8, "uint8") or (pixels == (16, "uint16") and mode == "L")):
        samples = f"{page.samplesperpixel} samples of {page.bitspersample} bits ({page.dtype})"
        raise ValueError(f"{samples}; expected 8-bit grey, RGB or RGBA, or 16-bit grey")
    if (piece := math.prod(_segment_size(page))) > defaults.MAX_PIXELS:
        raise ValueError(f"it is stored in pieces of {piece:,} pixels; expected tiles, or strips of few rows")
    return mode
