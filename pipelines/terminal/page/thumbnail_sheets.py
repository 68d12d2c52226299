"""Thumbnails of a report: WebP images that hold up to 256 small pictures each.

A WebP header and a data URL for each picture would take more than the pixels of a small picture, and a browser decodes
20 sheets faster than 5,000 images.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from PIL import Image

from pipelines.terminal.pictures import Pictures

__all__ = ["LARGEST_PX", "ThumbnailSheets", "sheets_of_rows", "thumbnail_sheets"]

LARGEST_PX = 192  # side of a tile; pictures are shown at 28 to 200 pixels
_SIDES_PX = (192, 128, 96, 64, 48, 32)
_COLUMNS = 16
_TILES = _COLUMNS * _COLUMNS
_QUALITY = 70  # of WebP


@dataclass
class ThumbnailSheets:
    """Square tiles, `columns` in each line of a sheet; tile number n is in sheet n // columns ** 2.

    Attributes:
        side: pixels of the side of a tile.
        columns: tiles in a line, and lines in a sheet.
        sheets: WebP files in base64.
        tiles: row -> (tile number, width, height) of the picture, which stands in the upper left corner of its tile.
    """

    side: int = LARGEST_PX
    columns: int = _COLUMNS
    sheets: list[str] = field(default_factory=list)
    tiles: dict[int, tuple[int, int, int]] = field(default_factory=dict)


def sheets_of_rows(source: Pictures, rows: Sequence[int], room: int) -> tuple[ThumbnailSheets, Counter[str]]:
    """Put the pictures of rows, the most important first, into sheets; also return why others are missing -> number."""
    missing = Counter[str]()

    def pictures() -> Iterator[tuple[int, Image.Image]]:
        for row in rows:
            picture, why = source.tile(row, LARGEST_PX)
            if picture is None:
                missing[why] += 1
            else:
                yield row, picture

    return thumbnail_sheets(pictures(), len(rows), room), missing


def thumbnail_sheets(pictures: Iterable[tuple[int, Image.Image]], count: int, room: int) -> ThumbnailSheets:
    """Put pictures into sheets, as large as there is room for.

    The side of the tiles is the largest at which `count` pictures fit into the room, estimated by the first sheet. When
    the room is used up, further pictures are left out.

    Args:
        pictures: (row, RGB picture), most important first.
        count: number of pictures that are expected.
        room: bytes for all sheets in base64.
    """
    remaining = ((row, _shrunk(picture, LARGEST_PX)) for row, picture in pictures)  # few large pictures in memory
    first = list(itertools.islice(remaining, _TILES))
    # Smaller tiles hold small pictures as they are.
    largest = max((max(picture.size) for _, picture in first), default=1)
    sides = [largest, *(side for side in _SIDES_PX if side < largest)]
    per_picture = room / max(1, count)
    side = next((side for side in sides if len(_sheet(first, side)) <= per_picture * len(first)), sides[-1])
    result = ThumbnailSheets(side)
    chained = itertools.chain(first, remaining)
    while block := list(itertools.islice(chained, _TILES)):
        sheet = _sheet(block, side)
        while block and len(sheet) > room:  # pictures of more detail than those of the first sheet
            block = block[: int(len(block) * 0.9 * room / len(sheet))]
            sheet = _sheet(block, side)
        if not block:
            break
        for number, (row, picture) in enumerate(block, _TILES * len(result.sheets)):
            result.tiles[row] = (number, *_shrunk(picture, side).size)
        room -= len(sheet)
        result.sheets.append(sheet)
        if len(block) < _TILES:
            break
    return result


def _sheet(pictures: list[tuple[int, Image.Image]], side: int) -> str:
    lines = -(-len(pictures) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * side, max(1, lines) * side))
    for number, (_, picture) in enumerate(pictures):
        sheet.paste(_shrunk(picture, side), (number % _COLUMNS * side, number // _COLUMNS * side))
    data = io.BytesIO()
    sheet.save(data, "WEBP", quality=_QUALITY)
    return base64.b64encode(data.getvalue()).decode()


def _shrunk(picture: Image.Image, side: int) -> Image.Image:
    small = picture.copy()
    small.thumbnail((side, side))
    return small
