"""Pictures of rows of a data set, read from its images, for galleries, reports and masks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from extract import defaults
from extract.errors import InputError, LayertapError, first_line
from extract.images import listed_again
from extract.images.decoding import decode, header_size
from extract.images.part_names import part_of
from extract.store.reader import FeatureReader
from pipelines.terminal.text_output import printable

__all__ = ["Pictures"]

_MOST_PIXELS = 100_000_000  # of a picture that is only shown


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
        self._orientation = "ignore" if recorded.get("orientation") == "ignore" else defaults.ORIENTATION
        most = recorded.get("max_pixels")
        self._max_pixels = most if type(most) is int and most > 0 else defaults.MAX_PIXELS
        self._hashes = reader.column("source_hash")
        self._reading = threading.Lock()
        self._place = {row: place for place, row in enumerate(rows)}
        self._names = [reader.paths[row] for row in rows]
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
            return self._source.picture(self._place[row], data, _MOST_PIXELS, min_decode_px, self._orientation), ""
        except (ValueError, OSError, MemoryError) as error:
            return None, first_line(error)

    def size(self, row: int) -> tuple[int, int] | None:
        """Return (width, height) of the picture of a row, if possible from its header; None if it is not available."""
        data, _ = self._read(row)
        if data is None:
            return None
        is_part = part_of(self._names[self._place[row]]) is not None
        size = None if is_part else header_size(data, self._orientation)
        if size is None:  # rows of arrays are not files
            picture, _ = self.picture(row)
            return None if picture is None else picture.size
        return size

    def of_file(self, path: Path) -> Image.Image:
        """Return the picture of a file that is not in the data set, decoded as those of its rows.

        Raises:
            InputError: the file cannot be decoded.
        """
        try:
            return decode(path.read_bytes(), self._max_pixels, orientation=self._orientation)
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
