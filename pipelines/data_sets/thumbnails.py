"""Pictures of rows of a data set, from where its images are: for galleries and reports."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from PIL import Image

from extract.errors import LayertapError, first_line
from extract.images import listed_again
from extract.images.decoding import decode_partly
from extract.store.reader import FeatureReader

__all__ = ["Pictures"]

_MOST_PIXELS = 100_000_000  # of a picture that is only looked at


class Pictures:
    """Pictures of some rows.

    Args:
        reader: of the data set.
        root: where the images are; see `extract.images.list_images`.
        rows: that may be asked for.

    Attributes:
        why_not: why there are no pictures at all; empty: there may be.
    """

    def __init__(self, reader: FeatureReader, root: str, rows: Sequence[int]):
        self._hashes = reader.column("source_hash")
        self._place = {row: place for place, row in enumerate(rows)}
        self.why_not = ""
        try:
            self._source = listed_again(root, [reader.paths[row] for row in rows]).source
        except LayertapError as error:
            self.why_not = first_line(error)

    def picture(self, row: int, at_least_px: int = 0) -> tuple[Image.Image | None, str]:
        """The upright RGB picture of a row, or None and why there is none.

        Args:
            row: of the data set.
            at_least_px: of its shorter side; a JPEG may be decoded smaller than it is, but not smaller than that.
        """
        data, why = self._read(row)
        if data is None:
            return None, why
        try:
            return self._source.decode(data, _MOST_PIXELS, at_least_px), ""
        except (ValueError, OSError, MemoryError) as error:
            return None, first_line(error)

    def part_of(self, row: int) -> Image.Image | None:
        """What can be shown of the picture of a row that failed; None: nothing."""
        data, _ = self._read(row)
        return None if data is None else decode_partly(data, _MOST_PIXELS)

    def _read(self, row: int) -> tuple[bytes | None, str]:
        """The bytes of an image, if they are those that the row was computed from; or why there are none."""
        if self.why_not:
            return None, self.why_not
        try:
            data, _ = self._source.read(self._place[row])
        except FileNotFoundError:
            return None, "no such file"
        except (OSError, ValueError, LayertapError) as error:
            return None, first_line(error)
        same = xxhash.xxh3_128_digest(data) == self._hashes[row].tobytes()
        return (data, "") if same else (None, "its file has changed since")
