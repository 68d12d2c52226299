"""Names of parts of files: the path of the file, and a media fragment (https://www.w3.org/TR/media-frags/).

    photos/a.jpg#xywh=10,20,300,400                   a box: x, y, width and height in pixels
    photos/a.jpg#xywh=percent:12.5,25,50,50           the same in percent of the picture
    photos/a.jpg#xywh=10,20,300,400&context=0.1       enlarged by 10 % of its width and height on each side
    photos/a.jpg#xywh=10,20,300,400&shape=square      the square around it
    slide.svs#xywh=0,4096,2048,2048&level=2           a tile of a pyramid, read from its level 2
    clip.mp4#t=00:00:12.040000                        the frame shown at this time
    photos/a.jpg#view=five,0                          a view: one of several crops that the preprocessing makes

`context`, `shape`, `level`, `view` and `n` are not of the standard. `n` numbers parts that are otherwise alike. A name
says all that the pixels of a part depend on. So lists, plans, shards, archives and every command name a part as they
name a file, and no other place has to record what a row is a part of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError

__all__ = [
    "VIEWS", "FileNames", "Part", "Window", "file_of", "fragment_of", "has_boxes", "has_parts", "part_hash", "part_of",
    "time_name", "window_name", "windows_of",
]  # fmt: skip

_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_FRAGMENT = re.compile(
    rf"xywh=(?P<percent>percent:)?(?P<x>{_NUMBER}),(?P<y>{_NUMBER}),(?P<w>{_NUMBER}),(?P<h>{_NUMBER})"
    rf"(?:&level=(?P<level>\d{{1,2}}))?(?:&context=(?P<context>{_NUMBER}))?(?P<square>&shape=square)?(?:&n=\d{{1,9}})?"
    r"|t=(?P<hours>\d{2,4}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d\.\d{6})"
    r"|view=(?P<view>five(?=,[0-4])|ten|flips(?=,[01])),(?P<number>\d)",
    re.ASCII,
)
VIEWS = {"five": 5, "ten": 10, "flips": 2}  # kind of views -> their number


@dataclass(frozen=True)
class Window:
    """A rectangle of a picture.

    Attributes:
        x, y: left and upper edge, from the upper left corner of the picture as it is decoded.
        w, h: width and height.
        percent: whether these are percent of the picture's width and height; otherwise pixels, of level 0.
        level: level of a pyramid to read it from.
        context: part of its width and height to add on each side.
        square: whether to take the square around it, moved into the picture where it fits.
        cut: whether it began left of or above the picture, and was cut there; no name says so.
    """

    x: float
    y: float
    w: float
    h: float
    percent: bool = False
    level: int = 0
    context: float = 0.0
    square: bool = False
    cut: bool = field(default=False, compare=False)

    def inside(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return (left, upper, right, lower) in a picture of (width, height): whole pixels, rounded as by Pillow.

        Raises:
            ValueError: no part of it lies in the picture.
        """
        if self.w <= 0 or self.h <= 0:
            raise ValueError(f"the box {self} has no area")
        edges = [self._edges(first, length, full) for first, length, full in self._axes(size)]
        (left, right), (upper, lower) = edges
        box = [max(0, left), max(0, upper), min(size[0], right), min(size[1], lower)]
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"the box {self} lies outside the picture of {size[0]} x {size[1]} pixels")
        return box[0], box[1], box[2], box[3]

    def reaches_over(self, size: tuple[int, int]) -> bool:
        """Whether the rectangle itself, without context, leaves a picture of (width, height) by a pixel or more."""
        scale = [side / 100 if self.percent else 1 for side in size]
        right, lower = (self.x + self.w) * scale[0], (self.y + self.h) * scale[1]
        return right >= size[0] + 1 or lower >= size[1] + 1

    def _axes(self, size: tuple[int, int]) -> list[tuple[float, float, int]]:
        """Return (start, length, length of the picture) along x and y, with context and shape, in pixels."""
        grown = 1 + 2 * self.context
        axes = []
        for start, length, full in ((self.x, self.w, size[0]), (self.y, self.h, size[1])):
            scale = full / 100 if self.percent else 1
            axes.append(((start - self.context * length) * scale, length * grown * scale, full))
        if self.square:
            side = max(length for _, length, _ in axes)
            axes = [(start + (length - side) / 2, side, full) for start, length, full in axes]
        return axes

    def _edges(self, first: float, length: float, full: int) -> tuple[int, int]:
        if self.square:
            first = 0 if length >= full else min(max(first, 0), full - length)
        start = round(first)
        return start, max(round(first + length), start + 1)

    def __str__(self) -> str:
        unit = " percent" if self.percent else ""
        return f"{self.x:g},{self.y:g},{self.w:g},{self.h:g}{unit}"


@dataclass(frozen=True)
class Part:
    """What a fragment names: a window, the time of a frame, or a view.

    Attributes:
        window: rectangle of the picture; None: all of it.
        seconds: time of a frame in seconds.
        view: kind of views, and which of them.
    """

    window: Window | None = None
    seconds: float | None = None
    view: tuple[str, int] | None = None


def fragment_of(name: str) -> str:
    """Return the fragment of a name, without `#`; "" for a whole file.

    >>> fragment_of("a.jpg#xywh=1,2,3,4"), fragment_of("photos#2/a.jpg")
    ('xywh=1,2,3,4', '')
    """
    _, _, fragment = name.rpartition("#")
    return fragment if len(fragment) + 1 < len(name) and _FRAGMENT.fullmatch(fragment) else ""


def file_of(name: str) -> str:
    """Return the path of the file that a row is of: the name without its fragment."""
    fragment = fragment_of(name)
    return name[: -len(fragment) - 1] if fragment else name


def part_hash(digest: bytes, fragment: bytes) -> bytes:
    """Return the hash of a part of a file, given that of the file's bytes; without a fragment, of the whole file."""
    return xxhash.xxh3_128_digest(digest + fragment) if fragment else digest


def has_parts(names: Sequence[str]) -> bool:
    """Whether a name is that of a part."""
    return any("#" in name and fragment_of(name) for name in names)


def has_boxes(names: Sequence[str]) -> bool:
    """Whether the first part among these names is a box of a picture."""
    part = part_of(next((name for name in names if "#" in name and fragment_of(name)), ""))
    return part is not None and part.window is not None and not part.window.level


def part_of(name: str) -> Part | None:
    """Return what part of its file a row is; None for a whole file."""
    found = _FRAGMENT.fullmatch(fragment_of(name))
    if found is None:
        return None
    if found["view"]:
        return Part(view=(found["view"], int(found["number"])))
    if found["seconds"]:
        return Part(seconds=int(found["hours"]) * 3600 + int(found["minutes"]) * 60 + float(found["seconds"]))
    x, y, w, h = (float(found[name]) for name in "xywh")
    level, context = int(found["level"] or 0), float(found["context"] or 0)
    return Part(Window(x, y, w, h, bool(found["percent"]), level, context, bool(found["square"])))


def window_name(file: str, window: Window) -> str:
    """Return the name of a window of a file; fractions of a pixel are rounded as Pillow's `crop` rounds."""
    numbers = [_digits(number) for number in (window.x, window.y, window.w, window.h)]
    name = f"{file}#xywh={'percent:' if window.percent else ''}{','.join(numbers)}"
    name += f"&level={window.level}" if window.level else ""
    name += f"&context={_digits(window.context)}" if window.context else ""
    return name + ("&shape=square" if window.square else "")


def time_name(file: str, microseconds: int) -> str:
    """Return the name of a frame of a file.

    >>> time_name("a.mp4", 12_040_000)
    'a.mp4#t=00:00:12.040000'
    """
    minutes, within = divmod(microseconds, 60_000_000)
    return f"{file}#t={minutes // 60:02}:{minutes % 60:02}:{within // 1_000_000:02}.{within % 1_000_000:06}"


def windows_of(names: Sequence[str]) -> NDArray[Any]:
    """Return (N, 4) the x, y, width and height of parts: int64 pixels, or float64 fractions of the picture.

    Raises:
        InputError: a row is not a window, or some are in pixels and others in fractions.
    """
    windows = [None if (part := part_of(name)) is None else part.window for name in names]
    if None in windows:
        name = names[windows.index(None)]
        raise InputError(f"{name} is not a window of a picture; expected a name such as {name}#xywh=0,0,64,64")
    found = [window for window in windows if window is not None]
    if len({window.percent for window in found}) > 1:
        raise InputError("some windows are in pixels, and others in fractions of their pictures")
    numbers = np.array([(window.x, window.y, window.w, window.h) for window in found]).reshape(-1, 4)
    return numbers / 100 if found and found[0].percent else numbers.astype(np.int64)


def _digits(number: float) -> str:
    """Return a number of at most six decimals, without exponent."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


class FileNames(Sequence[str]):
    """The files of names, one for each, as a view of the names."""

    def __init__(self, names: Sequence[str]):
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, row: Any) -> Any:
        return file_of(self._names[row])
