"""Pictures of rows of a data set, read from its images, for galleries, reports and masks."""

from __future__ import annotations

import io
from collections.abc import Sequence

import xxhash
from PIL import ExifTags, Image

from extract import defaults
from extract.errors import LayertapError, first_line
from extract.images import listed_again
from extract.images.decoding import decode_partly
from extract.store.reader import FeatureReader

__all__ = ["Pictures"]

_MOST_PIXELS = 100_000_000  # of a picture that is only shown
_ON_THEIR_SIDE = range(5, 9)  # EXIF orientations


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
        recorded = configuration.get("orientation") if isinstance(configuration, dict) else None
        self._orientation = "ignore" if recorded == "ignore" else defaults.ORIENTATION
        self._hashes = reader.column("source_hash")
        self._place = {row: place for place, row in enumerate(rows)}
        self.why_not = ""
        try:
            self._source = listed_again(root, [reader.paths[row] for row in rows], images).source
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
            return self._source.decode(data, _MOST_PIXELS, min_decode_px, self._orientation), ""
        except (ValueError, OSError, MemoryError) as error:
            return None, first_line(error)

    def size(self, row: int) -> tuple[int, int] | None:
        """Return (width, height) of the picture of a row, if possible from its header; None if it is not available."""
        data, _ = self._read(row)
        if data is None:
            return None
        try:
            with Image.open(io.BytesIO(data)) as image:
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _ON_THEIR_SIDE
                return image.size[::-1] if turned and self._orientation == "exif" else image.size
        except Exception:  # Pillow raises many types on damaged files, and rows of arrays are not files
            picture, _ = self.picture(row)
            return None if picture is None else picture.size

    def partial_picture(self, row: int) -> Image.Image | None:
        """Return the part of a failed row's picture that can be decoded; None if nothing can."""
        data, _ = self._read(row)
        return None if data is None else decode_partly(data, _MOST_PIXELS)

    def _read(self, row: int) -> tuple[bytes | None, str]:
        """Return the bytes from which a row was computed, or None and why they are missing."""
        if self.why_not:
            return None, "not available"
        try:
            data, _ = self._source.read(self._place[row])
        except FileNotFoundError:
            return None, "no such file"
        except (OSError, ValueError, LayertapError) as error:
            return None, first_line(error)
        same = xxhash.xxh3_128_digest(data) == self._hashes[row].tobytes()
        return (data, "") if same else (None, "its file has changed")
