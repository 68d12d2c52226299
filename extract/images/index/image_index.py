"""A plan: a list of images in files, so that no process holds all their names.

A plan is a folder that lists any number of images:

    plan.json            description; it is written last, and without it the plan is not finished
    parts/000000.npz     `part_rows` rows each, in order (extract/images/index/index_parts.py)
    listing/             only while the plan is being written (extract/images/index/index_writing.py)

`plan.json` has the keys

    format           "layertap plan"          version       1
    kind             "folder": paths are relative to `root`; "list": relative to its folder, absolute, or URLs
    root             the folder, URL or list that was listed
    count            number of images         part_rows     images in each part but the last
    classes          class names              splits        the splits that occur
    ids              whether rows have ids    left_out      suffix -> number of files that are not images
    notes            messages for the user about the listing
    paths_xxh3, labels_xxh3                   see `extract.images.image_list.ImageList`
    parts_xxh3       xxh3-128 of the file of each part
    names            "decoded": only for a folder of a web server; earlier versions stored percent-encoded names

The content does not depend on when and where the plan is written: the same images give the same bytes.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from extract.credentials import without_credentials
from extract.errors import InputError
from extract.images.csv_lists import stored_path
from extract.images.image_list import Images, hashes_of
from extract.images.index.index_parts import MOST_PART_ROWS, SPLIT_CODES, Part, part_path, read_part
from extract.images.kept_columns import Column
from extract.images.sources import BrokenListError, Chosen, Files
from extract.system.json_files import read_json
from extract.system.urls import is_http, is_url, without_query

__all__ = [
    "DECODED",
    "FORMAT",
    "LISTING",
    "VERSION",
    "PlannedImages",
    "base_of",
    "has_decoded_names",
    "is_plan",
    "open_plan",
    "read_in_pieces",
]

FORMAT, VERSION = "layertap plan", 1
LISTING = "listing"
DECODED = "decoded"

_KEPT = 2  # parts in memory: a batch may span two


def is_plan(where: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a plan.

    Raises:
        InputError: the plan is not finished.
    """
    folder = Path(where)
    try:
        is_finished = (folder / "plan.json").is_file() and (folder / "parts").is_dir()
        is_begun = (folder / LISTING / "begun.json").is_file()
    except PermissionError:  # listing the folder reports this
        return False
    if is_finished:
        return read_json(folder / "plan.json").get("format") == FORMAT
    if is_begun:
        begun = read_json(folder / LISTING / "begun.json")
        if begun.get("format") == FORMAT:
            raise InputError(f"{folder} is an unfinished plan", hint="run `layertap plan` again to complete it")
    return False


class PlannedNames(Sequence[str]):
    """The names of a plan's images, by row. Keeps a few parts in memory, but does not send them to worker processes."""

    def __init__(self, folder: Path, part_rows: int, count: int, n_classes: int, ids: bool, below: bool, hashes: bytes):
        self._folder, self._part_rows, self._count = folder, part_rows, count
        self._n_classes, self.ids, self._below = n_classes, ids, below
        self._hashes = hashes  # 16 bytes for each part
        self._kept: dict[int, Part] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": {}}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        number, place = divmod(int(row), self._part_rows)
        return os.fsdecode(self.part(number).names[place])

    def part(self, number: int) -> Part:
        """Return a part of the plan.

        Raises:
            BrokenListError: the part is damaged or missing.
        """
        part = self._kept.pop(number, None)
        if part is None:
            rows = min(self._part_rows, self._count - number * self._part_rows)
            xxh3 = self._hashes[16 * number : 16 * number + 16]
            part = read_part(part_path(self._folder, number), rows, self._n_classes, self.ids, self._below, xxh3)
        self._kept[number] = part  # reinserted: the most recently used part is last
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return part

    def row_of(self, name: bytes) -> int | None:
        """Return the row of a path, or None if the plan does not have it."""
        numbers = range(-(-self._count // self._part_rows))
        first = bisect.bisect(numbers, name, key=lambda number: self.part(number).names[0])
        if not first:
            return None
        names = self.part(first - 1).names
        place = bisect.bisect_left(names, name)
        return (first - 1) * self._part_rows + place if place < len(names) and names[place] == name else None


@dataclass(frozen=True)
class PlannedImages:
    """The images of a plan, or the first of them: an `ImageList` that is read from files.

    Attributes:
        folder: folder of the plan.
        kind: "folder" or "list".
        count: number of images.
        part_rows: images in each part of the plan but its last.
        names: names by row.
        root, classes, left_out, notes, split_names, paths_xxh3, labels_xxh3, columns: see `ImageList`.
        has_encoded_names: whether an earlier version listed a folder of a web server, with names as in its links.
        source: reads the bytes of a row.
    """

    folder: Path
    kind: str
    root: str
    count: int
    part_rows: int
    names: PlannedNames
    classes: list[str]
    source: Files
    split_names: list[str]
    paths_xxh3: str
    labels_xxh3: str
    left_out: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    has_encoded_names: bool = False
    columns: Mapping[str, Column] = field(default_factory=dict)  # a plan keeps none

    def __len__(self) -> int:
        return self.count

    def slice(self, start: int, stop: int) -> Images:
        """See `ImageList`.

        Raises:
            BrokenListError: a part is damaged or missing, or has a URL with credentials.
        """
        stop = min(stop, self.count)
        pieces = []
        for number in range(start // self.part_rows, -(-stop // self.part_rows)):
            part, first = self.names.part(number), number * self.part_rows
            pieces.append(part.rows(slice(max(start - first, 0), min(stop - first, self.part_rows))))
        return self._images(pieces, range(start, stop))

    def select(self, rows: Sequence[int]) -> Images:
        """See `ImageList`; errors as for `slice`."""
        pieces = []
        for row in rows:
            number, place = divmod(row, self.part_rows)
            pieces.append(self.names.part(number).rows(slice(place, place + 1)))
        return self._images(pieces, rows)

    def _images(self, pieces: list[Part], rows: Sequence[int]) -> Images:
        for name in itertools.chain.from_iterable(piece.names for piece in pieces):
            if self.kind == "list" and stored_path(name) != name:
                raise BrokenListError(
                    f"{self.folder} is a plan of an earlier version, and has URLs with signatures or passwords, which "
                    "a data set must not store",
                    hint=f"delete the plan, and use {self.root} directly",
                )
            if self.has_encoded_names and (b"%" in name or b"?" in name):
                raise BrokenListError(
                    f"{self.folder} is a plan of an earlier version, in which the names of a web server's files are "
                    f"percent-encoded, as {os.fsdecode(name)}. A data set that was started with such names cannot be "
                    "resumed",
                    hint="delete the plan, and run `layertap plan` again",
                )
        none = np.zeros(0, np.int64)
        ids = [text.decode() for piece in pieces for text in piece.ids or ()]
        return Images(
            self.root,
            [os.fsdecode(name) for piece in pieces for name in piece.names],
            np.concatenate([none, *(piece.labels.astype(np.int64) for piece in pieces)]),
            self.classes,
            [SPLIT_CODES[code] for piece in pieces for code in piece.splits.tolist()],
            Chosen(self.source, rows),
            ids if self.names.ids else None,
            self.left_out,
            self.notes,
        )

    def head(self, count: int) -> PlannedImages:
        """See `ImageList`; errors as for `slice`. Reads the images' rows to compute their hashes."""
        if count >= self.count:
            return self
        splits = {split for piece in self.pieces(count) for split in piece.splits}
        paths_xxh3, labels_xxh3 = hashes_of(lambda: self.pieces(count))
        return replace(
            self, count=count, split_names=sorted(splits - {""}), paths_xxh3=paths_xxh3, labels_xxh3=labels_xxh3
        )

    def pieces(self, count: int) -> Iterator[Images]:
        """Yield the first `count` images, part by part; errors as for `slice`."""
        return (self.slice(row, min(row + self.part_rows, count)) for row in range(0, count, self.part_rows))

    def rows_of(self, paths: Sequence[str]) -> list[int | None]:
        """Return the row of each path, None for a path that the plan does not have; errors as for `slice`."""
        rows = {path: self.names.row_of(os.fsencode(path)) for path in sorted(set(paths), key=os.fsencode)}
        return [rows[path] for path in paths]


def open_plan(where: str | os.PathLike[str]) -> PlannedImages:
    """Open a plan. Its parts are checked when they are read.

    Raises:
        InputError: the folder is not a plan, or its plan.json is damaged.
    """
    folder = Path(where).resolve()
    path = folder / "plan.json"
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{folder} is not a plan: it has no plan.json") from error
    try:
        return _images(folder, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} is damaged: {why}", hint="delete the plan, and run `layertap plan` again") from error


def base_of(kind: str, root: str) -> str:
    """Return the folder or URL that the names of a plan are relative to."""
    if kind == "folder":
        return root
    return (without_query(root) if is_url(root) else root).rpartition("/")[0] or "/"


def has_decoded_names(kind: str, root: str) -> bool:
    """Return whether the names of a plan come from links, which are percent-encoded."""
    return kind == "folder" and is_http(root)


def read_in_pieces(folder: Path, content: dict[str, Any]) -> Iterator[Images]:
    """Yield the images of a plan part by part, before its hashes and splits are known."""
    later = {"splits": [], "paths_xxh3": "0" * 32, "labels_xxh3": "0" * 32, "names": DECODED}
    images = _images(folder.resolve(), {**content, **later})
    return images.pieces(images.count)


def _images(folder: Path, content: dict[str, Any]) -> PlannedImages:
    """Check the content of a plan.json and return the images.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the content is damaged.
    """
    if content["format"] != FORMAT or content["version"] != VERSION:
        raise ValueError(f"expected {FORMAT!r} version {VERSION}; a newer layertap may read this version")
    kind, root, notes, count, part_rows, ids, hashes, left_out, classes, splits = (
        content[name]
        for name in (
            "kind", "root", "notes", "count", "part_rows", "ids", "parts_xxh3", "left_out", "classes", "splits",
        )
    )  # fmt: skip
    of_all = content["paths_xxh3"], content["labels_xxh3"]
    lists = (notes, hashes, classes, splits)
    if not all(isinstance(values, list) for values in lists) or not isinstance(left_out, dict):
        raise ValueError("expected lists, and a dictionary for left_out")
    if not all(isinstance(text, str) for text in (kind, root, *of_all, *notes, *hashes, *classes, *splits)):
        raise ValueError("expected text")
    numbers = [count, part_rows, *left_out.values()]
    if not all(type(number) is int and number >= 0 for number in numbers) or type(ids) is not bool:
        raise ValueError("expected numbers from 0, and true or false for ids")
    if not 1 <= part_rows <= MOST_PART_ROWS or count < 1 or len(hashes) != -(-count // part_rows):
        raise ValueError(f"{count:,} images in {len(hashes):,} parts of {part_rows:,}")
    if kind not in ("folder", "list") or "\0" in root or not (is_url(root) or root.startswith("/")):
        raise ValueError(f"kind {kind!r}, root {root!r}")
    if not all(re.fullmatch("[0-9a-f]{32}", digest) for digest in (*of_all, *hashes)):
        raise ValueError("expected hashes of 32 hexadecimal digits")
    if not set(splits) <= set(SPLIT_CODES[1:]):
        raise ValueError(f"splits {splits}")
    below = kind == "folder" and not is_url(root)
    names = PlannedNames(folder, part_rows, count, len(classes), ids, below, bytes.fromhex("".join(hashes)))
    return PlannedImages(
        folder,
        kind,
        without_credentials(root),
        count,
        part_rows,
        names,
        classes,
        Files(base_of(kind, root), names, anywhere=kind == "list"),
        sorted(splits),
        content["paths_xxh3"],
        content["labels_xxh3"],
        Counter(left_out),
        tuple(notes),
        has_decoded_names(kind, root) and content.get("names") != DECODED,
    )
