"""List the parts of listed files."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from extract.errors import InputError, first_line
from extract.images.image_list import PART_KINDS, Column, Images, labels_from_values, order_of, values_at
from extract.images.part_names import VIEWS, Window, has_parts, time_name, window_name
from extract.images.part_source import Parts
from extract.images.parts.boxes import Box, read_boxes
from extract.images.parts.tiles import tiles_of
from extract.images.sources import Chosen, OnDisk, PackedNames
from extract.images.videos import times_of

__all__ = ["Listed", "of_files", "parts_of"]

_MOST_TILES = 20_000_000  # which take some GB of memory
_SEVERAL = -2  # in place of a row: a path without suffix is that of several files


class Listed(NamedTuple):
    """Parts of files, in any order.

    Attributes:
        names: their names.
        rows: the file of each, by its row among the listed files; -1 for a file that is not listed.
        columns: name -> value of each, to be stored.
        labels, ids, splits: of each part; None: those of its file.
        notes: messages for the user.
    """

    names: Sequence[str]
    rows: Sequence[int]
    columns: Mapping[str, Column]
    labels: Sequence[str | None] | None = None
    ids: Sequence[str] | None = None
    splits: Sequence[str] | None = None
    notes: tuple[str, ...] = ()


def parts_of(images: Images, asked: Any, keep: Sequence[str] = (), *, may_be_none: bool = False) -> Images:
    """Return the parts of images that the settings ask for, sorted by their names.

    Args:
        images: listed files.
        asked: settings; see `extract.extraction.settings.PartSettings`.
        keep: further columns of the boxes, for `Images.columns`.
        may_be_none: whether the files may have no parts.

    Raises:
        InputError: there are no parts, or they cannot be read.
    """
    if has_parts(images.paths):
        kind = next(name for name in PART_KINDS if getattr(asked, name))
        raise InputError(f"{images.root}: its rows are parts of images already", hint=f"leave out --{kind}")
    if asked.boxes:
        listed = _of_boxes(images, asked, keep)
    elif asked.tiles:
        listed = _of_tiles(images, asked)
    else:
        listed = _of_views(images, asked.views) if asked.views else _of_frames(images, asked)
    if not len(listed.names) and not may_be_none:
        what = f"no tile of its images has a content of {asked.content:g} or more" if asked.tiles else ""
        raise InputError(f"{images.root}: {what or 'no parts of its images'}")
    return of_files(images, listed)


def of_files(images: Images, listed: Listed) -> Images:
    """Return images whose rows are parts of listed files."""
    order = order_of(listed.names)
    names, rows = [listed.names[i] for i in order], np.array(listed.rows, np.int64)[order]
    columns = {name: values_at(values, order) for name, values in listed.columns.items()}
    classes, labels = images.classes, np.where(rows < 0, -1, images.labels[rows])
    if listed.labels is not None:
        labels, classes = labels_from_values([listed.labels[i] for i in order])

    def texts(of_parts: Sequence[str] | None, of_files: Sequence[str]) -> list[str]:
        if of_parts is not None:
            return [of_parts[i] for i in order]
        return ["" if row < 0 else of_files[row] for row in rows.tolist()]

    splits = texts(listed.splits, images.splits)
    ids = None if listed.ids is None and images.ids is None else texts(listed.ids, images.ids or [])
    if taken := columns.keys() & images.columns.keys():
        raise InputError(f"keep {min(taken)!r}: parts have a column of this name", hint="rename a column to keep it")
    columns |= {name: values_at(values, rows.clip(0)) for name, values in images.columns.items()}  # type: ignore[arg-type]
    packed = PackedNames(names)
    source = Parts(_FilesOfParts(images.source, rows.tolist()), packed)
    return replace(
        images, paths=names, labels=labels, classes=classes, splits=splits, source=source, ids=ids, columns=columns,
        notes=(*images.notes, *listed.notes), stored_hashes=None,
    )  # fmt: skip


class _FilesOfParts(Chosen):
    """Selected rows of a source, of which some are of files that are not there."""

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        if self._rows[row] < 0:
            raise FileNotFoundError
        return super().read(row)

    def local_path(self, row: int) -> str | None:
        """See `ImageSource`."""
        return None if self._rows[row] < 0 else super().local_path(row)


def _of_boxes(images: Images, asked: Any, keep: Sequence[str]) -> Listed:
    rows, names = _rows_of_files(images), Counter[str]()
    boxes: list[Box] = []
    of_boxes: list[int] = []
    titles: list[str] = []
    for box in read_boxes(asked.boxes, keep):
        row = rows.get(box.file, -1)
        if row == _SEVERAL:
            raise InputError(
                f"{asked.boxes}: {box.file} is the name of several images of {images.root}, with other suffixes",
                hint="rename them, or make a table of the boxes, with complete paths",
            )
        file = images.paths[row] if row >= 0 else box.file
        window = replace(box.window, context=asked.context, square=asked.box_shape == "square")
        name = window_name(file, window)
        names[name] += 1
        titles.append(name if names[name] == 1 else f"{name}&n={names[name]}")
        of_boxes.append(row)
        boxes.append(box)
    notes = _notes(images, asked.boxes, [box.file for box in boxes], of_boxes)
    if cut := [title for title, box in zip(titles, boxes, strict=True) if box.window.cut]:
        notes += (f"boxes that begin left of or above their picture, of which the part inside is used: {len(cut):,}, "
                  f"the first is {cut[0]}",)  # fmt: skip
    has_labels, has_ids = any(box.label is not None for box in boxes), any(box.id is not None for box in boxes)
    kept = map(_column, zip(*(box.kept for box in boxes), strict=True))
    return Listed(
        titles,
        of_boxes,
        dict(zip(keep, kept, strict=bool(boxes))) | _columns([box.window for box in boxes]),
        [box.label for box in boxes] if has_labels else None,
        [box.id or "" for box in boxes] if has_ids else None,
        [box.split for box in boxes] if any(box.split for box in boxes) else None,
        notes,
    )


def _of_tiles(images: Images, asked: Any) -> Listed:
    found = list(itertools.islice(tiles_of(Parts(images.source, images.paths), images.paths, asked), _MOST_TILES + 1))
    if len(found) > _MOST_TILES:
        raise InputError(f"{images.root}: more than {_MOST_TILES:,} tiles", hint="use larger tiles, or a higher level")
    rows, windows = [row for row, _ in found], [window for _, window in found]
    level = {"level": np.full(len(windows), asked.level, np.int64)} if asked.level else {}
    empty = len(images) - len(set(rows))
    notes = (f"images without a tile of a content of {asked.content:g} or more: {empty:,}",) if empty else ()
    names = [window_name(images.paths[row], window) for row, window in found]
    return Listed(names, rows, _columns(windows) | level, notes=notes)


def _of_views(images: Images, kind: str) -> Listed:
    numbered = [(row, number) for row in range(len(images)) for number in range(VIEWS[kind])]
    names = [f"{images.paths[row]}#view={kind},{number}" for row, number in numbered]
    return Listed(names, [row for row, _ in numbered], {})


def _of_frames(images: Images, asked: Any) -> Listed:
    """Return the frames; a video that cannot be read is a part of its own, whose row fails."""
    names, rows, times = [], [], []
    unread: list[str] = []
    for row, file in enumerate(images.paths):
        chosen, reason = _frames_of(images, row, asked)
        unread += [f"{file}: {reason}"] if reason else []
        names += [time_name(file, time) for time in chosen] or [file]
        times += [time / 1e6 for time in chosen] or [math.nan]
        rows += [row] * max(1, len(chosen))
    columns = {"time": np.array(times, np.float64)}
    note = f"videos that cannot be read, whose rows fail: {len(unread):,}, the first is {next(iter(unread), '')}"
    return Listed(names, rows, columns, notes=(note,) if unread else ())


def _frames_of(images: Images, row: int, asked: Any) -> tuple[list[int], str]:
    """Return the times of the frames of a video, or why it cannot be read."""
    path = images.source.local_path(row)
    if path is None:
        raise InputError(
            f"{images.paths[row]}: frames are taken of files of this machine only", hint="copy the videos here"
        )
    try:
        chosen = times_of(OnDisk(path).path).chosen(asked.fps, asked.every, asked.keyframes)
    except (ValueError, OSError) as error:
        return [], getattr(error, "strerror", None) or first_line(error)
    return chosen, "" if chosen else "it has no key frame"


def _notes(images: Images, where: Any, files: Sequence[str], rows: Sequence[int]) -> tuple[str, ...]:
    """Return notes on pictures without boxes, and boxes without pictures.

    Args:
        images: the pictures.
        where: the boxes.
        files: picture that each box names.
        rows: its row; -1 if it is not there.

    Raises:
        InputError: none of the pictures is there.
    """
    missing, notes = {file for file, row in zip(files, rows, strict=True) if row < 0}, []
    if files and len(missing) == len(set(files)):
        raise InputError(
            f"{where}: none of its {len(missing):,} pictures is in {images.root}; the first is {files[0]!r}, expected "
            f"a path such as {images.paths[0]!r}"
        )
    if missing:
        first = min(missing, key=os.fsencode)
        notes.append(f"pictures of {where} that are not there, whose rows fail: {len(missing):,}, the first is {first}")
    if without := len(images) - len(set(rows) - {-1}):
        notes.append(f"images without a box: {without:,}")
    return tuple(notes)


def _rows_of_files(images: Images) -> dict[str, int]:
    """Return path -> row, also of paths without suffix, as labels of YOLO and Pascal VOC name them; or `_SEVERAL`."""
    rows: dict[str, int] = {}
    for row, path in enumerate(images.paths):
        stem = os.path.splitext(path)[0]  # noqa: PTH122  also of URLs
        rows[stem] = _SEVERAL if stem in rows else row
    return rows | {path: row for row, path in enumerate(images.paths)}


def _column(values: Sequence[Any]) -> Column:
    if all(isinstance(value, int) for value in values):
        return np.array(values, np.int64)
    if all(isinstance(value, int | float) for value in values):
        return np.array(values, np.float64)
    return ["" if value is None else str(value) for value in values]


def _columns(windows: Sequence[Window]) -> dict[str, Column]:
    """Return the columns x, y, w and h: whole pixels, or fractions of the picture."""
    numbers = np.array([(window.x, window.y, window.w, window.h) for window in windows]).reshape(-1, 4)
    is_percent = any(window.percent for window in windows)
    values = numbers / 100 if is_percent else numbers.astype(np.int64)
    return {name: values[:, i].copy() for i, name in enumerate("xywh")}
