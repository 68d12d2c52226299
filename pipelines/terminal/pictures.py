"""Pictures of rows of a data set, read from its images, for galleries, reports and masks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps

from extract import defaults
from extract.errors import InputError, LayertapError, first_line
from extract.images import listed_again
from extract.images.decoding import DecodeOptions, header_size
from extract.images.part_names import file_of, part_of
from extract.images.part_source import source_of
from extract.images.sources import Files, ImageSource
from extract.store.reader import FeatureReader
from pipelines.terminal.text_output import printable

__all__ = ["Pictures"]

_MOST_PIXELS = 100_000_000  # of a picture that is only shown
_INSET = 0.38  # side of the picture that a part is of, in the side of the part


class Pictures:
    """Pictures of some rows, turned as those that the features were computed of.

    Args:
        reader: reader of the data set.
        root: location of the images as recorded in the data set.
        rows: rows that may be requested.
        images: location that the user named; None: `root`, unless pictures would be fetched from a URL.

    Attributes:
        why_not: why no pictures are available; empty: pictures may be available.
    """

    def __init__(self, reader: FeatureReader, root: str, rows: Sequence[int], images: str | None = None):
        configuration = reader.provenance.get("configuration")
        recorded = configuration if isinstance(configuration, dict) else {}
        most = recorded.get("max_pixels")
        self._options = DecodeOptions(
            most if type(most) is int and most > 0 else defaults.MAX_PIXELS,
            orientation="ignore" if recorded.get("orientation") == "ignore" else defaults.ORIENTATION,
            icc="srgb" if recorded.get("icc") == "srgb" else defaults.ICC,
        )
        self._small = self._options._replace(max_pixels=_MOST_PIXELS)
        self._hashes = reader.column("source_hash")
        self._reading = threading.Lock()
        self._place = {row: place for place, row in enumerate(rows)}
        self._names = [reader.paths[row] for row in rows]
        self._root, self._images = root, images
        self._files: ImageSource | None = None  # the files of parts
        self.why_not = ""
        try:
            self._source = listed_again(root, self._names, images).source
        except LayertapError as error:
            self.why_not = first_line(error)

    def picture(self, row: int, min_decode_px: int = 0) -> tuple[Image.Image | None, str]:
        """Return the RGB picture of a row, or None and why it is missing.

        Args:
            row: row of the data set.
            min_decode_px: minimum of the shorter side, down to which a JPEG may be decoded at reduced size.
        """
        data, why = self._read(row)
        if data is None:
            return None, why
        try:
            options = self._small._replace(min_decode_px=min_decode_px)
            return self._source.picture(self._place[row], data, options), ""
        except (ValueError, OSError, MemoryError) as error:
            return None, first_line(error)

    def tile(self, row: int, side_px: int) -> tuple[Image.Image | None, str]:
        """Return the picture of a row for a tile, or None and why it is missing.

        A box of a picture has the whole picture in its lower right corner, in which it is outlined.

        Args:
            row: row of the data set.
            side_px: side of the tile. A box is made as large; another picture may be larger.
        """
        picture, why = self.picture(row, side_px)
        part = part_of(self._names[self._place[row]])
        if picture is None or part is None or part.window is None:
            return picture, why
        size, whole = self._whole(row, round(_INSET * side_px))
        picture = ImageOps.contain(picture, (side_px, side_px))
        if whole is None:
            return picture, ""
        scale = whole.width / size[0]
        left, upper, right, lower = (round(edge * scale) for edge in part.window.inside(size))
        outline = ImageDraw.Draw(whole)
        outline.rectangle((left - 1, upper - 1, max(right, left + 2), max(lower, upper + 2)), outline="black")
        outline.rectangle((left, upper, max(right - 1, left + 1), max(lower - 1, upper + 1)), outline="white")
        framed = ImageOps.expand(whole, 1, "white")
        picture.paste(framed, (picture.width - framed.width, picture.height - framed.height))
        return picture, ""

    def _whole(self, row: int, side_px: int) -> tuple[tuple[int, int], Image.Image | None]:
        """Return the size of the picture that a row is a box of, and a small copy; None if it is not decoded whole."""
        with contextlib.suppress(OSError, ValueError, MemoryError, LayertapError):
            place, (data, _) = self._place[row], self._read(row)  # of which the hash was checked
            if self._files is None:
                self._files = listed_again(self._root, [file_of(name) for name in self._names], self._images).source
            whole = self._files.picture(place, data or b"", self._small)
            return whole.size, ImageOps.contain(whole, (side_px, side_px))
        return (0, 0), None

    def size(self, row: int) -> tuple[int, int] | None:
        """Return (width, height) of the picture of a row, if possible from its header; None if it is not available."""
        data, _ = self._read(row)
        if data is None:
            return None
        is_part = part_of(self._names[self._place[row]]) is not None
        if not is_part and (size := header_size(data, self._options.orientation)):
            return size
        picture, _ = self.picture(row)  # rows of arrays are not files
        return None if picture is None else picture.size

    def of_file(self, path: Path) -> Image.Image:
        """Return the picture of a file, or part of one, that is not in the data set, decoded as those of its rows.

        Raises:
            InputError: the file cannot be decoded.
        """
        try:
            source = source_of([path.name], partial(Files, str(path.parent)))
            return source.picture(0, source.read(0)[0], self._options)
        except (ValueError, OSError) as error:
            raise InputError(f"{printable(str(path))} cannot be read: {first_line(error)}") from error

    def _read(self, row: int) -> tuple[bytes | None, str]:
        """Return the bytes from which a row was computed, or None and why they are missing."""
        if self.why_not:
            return None, "not available"
        try:
            with self._reading:  # archives close files that other threads may read
                data, _ = self._source.read(self._place[row])
        except FileNotFoundError:
            return None, "no such file"
        except (OSError, ValueError, LayertapError) as error:
            return None, first_line(error)
        # A data set of a stranger may name any file of this machine, and users send pages with pictures to others.
        same = self._source.content_hash(self._place[row], data) == self._hashes[row].tobytes()
        return (data, "") if same else (None, "its file has changed")
