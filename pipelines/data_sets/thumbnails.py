"""Thumbnails of the images of a data set, for exports."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from extract import defaults
from extract.errors import InputError
from extract.store.reader import FeatureReader
from pipelines.terminal.pictures import Pictures

__all__ = ["thumbnails"]

_FIRST = 16  # images that are looked for before the export
_QUALITY = 85  # of JPEG


@contextmanager
def thumbnails(
    reader: FeatureReader, root: str, side_px: int, images: str | None
) -> Iterator[Callable[[int, int], Sequence[bytes | None]]]:
    """Context manager: yield a function that returns JPEG thumbnails of the rows from START to STOP.

    The thumbnail of an image that is missing or was changed is None.

    Args:
        reader: reader of the data set.
        root: location of the images as recorded in the data set.
        side_px: longest side.
        images: location that the user named; see `Pictures`.

    Raises:
        InputError: the images are not available.
    """
    source = Pictures(reader, root, range(len(reader)), images)
    if source.why_not:
        raise InputError(f"no thumbnails: {source.why_not}")

    sample = [source.picture(row, side_px) for row in range(min(_FIRST, len(reader)))]
    if not any(picture is not None for picture, _ in sample):
        raise InputError(
            f"no thumbnails: none of the first {len(sample)} images can be read: {sample[0][1]}",
            hint="name their place: --images",
        )

    def encoded(row: int) -> bytes | None:
        picture, _ = source.picture(row, side_px)
        if picture is None:
            return None
        picture.thumbnail((side_px, side_px))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY)
        return file.getvalue()

    with ThreadPoolExecutor(defaults.CORES) as pool:
        yield lambda start, stop: list(pool.map(encoded, range(start, stop)))
