"""Images before any of them is read: names in a fixed order, labels, splits, and their source."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.images.kept_columns import Column, select
from extract.images.sources import Chosen, ImageSource

__all__ = [
    "SPLITS",
    "ImageList",
    "Images",
    "class_and_split",
    "classes_of_folders",
    "classes_of_values",
    "hashes_of",
    "is_litter",
    "label_text",
    "labels_from_folders",
    "labels_from_values",
    "order_of",
]

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

# Files that operating systems and file servers leave in folders and archives, besides hidden files.
_LITTER = frozenset({
    "thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "$recycle.bin", "system volume information", "lost+found",
    "@eadir", "icon\r",
})  # fmt: skip

_LARGEST_LABEL = 100_000  # integers up to it are labels; with a larger one, integers are class names


class ImageList(Protocol):
    """The images of a run, in the byte order of their paths.

    `Images` holds all of them in memory, `extract.images.index.image_index.PlannedImages` a few parts at a time.

    Attributes:
        root, classes, source, left_out, notes, columns: see `Images`.
        split_names: the splits that occur, sorted.
        paths_xxh3: xxh3-128 of all paths, separated by zero bytes.
        labels_xxh3: xxh3-128 of labels, splits, classes, ids and kept columns, which may change where paths do not.
    """

    @property
    def root(self) -> str: ...  # noqa: D102
    @property
    def classes(self) -> list[str]: ...  # noqa: D102
    @property
    def source(self) -> ImageSource: ...  # noqa: D102
    @property
    def left_out(self) -> Counter[str]: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def columns(self) -> Mapping[str, Column]: ...  # noqa: D102
    @property
    def split_names(self) -> list[str]: ...  # noqa: D102
    @property
    def paths_xxh3(self) -> str: ...  # noqa: D102
    @property
    def labels_xxh3(self) -> str: ...  # noqa: D102

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> Images:
        """Return the rows of a range."""

    def select(self, rows: Sequence[int]) -> Images:
        """Return the given rows, which ascend."""

    def head(self, count: int) -> Self:
        """Return the first `count` images; `classes` does not change."""


@dataclass(frozen=True)
class Images:
    """Images in memory, sorted by the bytes of their paths.

    Attributes:
        root: the folder, archive, list or URL; absolute, so valid from any working directory of this machine.
        paths: relative to the folder or URL, or as in the list or archive, with `/`; bytes that are not UTF-8 are
            decoded as by `os.fsdecode`.
        labels: (N,) int64, index into `classes`; -1 for an image without a class.
        classes: names of the classes.
        splits: `train`, `val`, `test` or empty, for each image.
        source: reads the bytes of a row.
        ids: id of each image, from the list; None if there are no ids.
        left_out: suffix or other reason -> number of files that are not images.
        notes: messages for the user about the listing.
        columns: name -> values of each image, of further columns to store.
    """

    root: str
    paths: list[str]
    labels: NDArray[np.int64]
    classes: list[str]
    splits: list[str]
    source: ImageSource
    ids: list[str] | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.paths)

    def head(self, count: int) -> Images:
        """Return the first `count` images; `classes` does not change."""
        return replace(
            self,
            paths=self.paths[:count],
            labels=self.labels[:count],
            splits=self.splits[:count],
            ids=None if self.ids is None else self.ids[:count],
            columns={name: values[:count] for name, values in self.columns.items()},
        )

    def slice(self, start: int, stop: int) -> Images:
        """See `ImageList`."""
        return self.select(range(start, min(stop, len(self))))

    def select(self, rows: Sequence[int]) -> Images:
        """See `ImageList`."""
        return replace(
            self,
            paths=[self.paths[row] for row in rows],
            labels=self.labels[np.asarray(rows, np.int64)],
            splits=[self.splits[row] for row in rows],
            source=Chosen(self.source, rows),
            ids=None if self.ids is None else [self.ids[row] for row in rows],
            columns=select(self.columns, rows),
        )

    @property
    def split_names(self) -> list[str]:
        """See `ImageList`."""
        return sorted(set(self.splits) - {""})

    @property
    def paths_xxh3(self) -> str:
        """See `ImageList`."""
        return self._hashes[0]

    @property
    def labels_xxh3(self) -> str:
        """See `ImageList`."""
        return self._hashes[1]

    @functools.cached_property
    def _hashes(self) -> tuple[str, str]:
        return hashes_of(lambda: iter([self]))


def hashes_of(pieces: Callable[[], Iterator[Images]]) -> tuple[str, str]:
    """Return `paths_xxh3` and `labels_xxh3` of images that come in pieces.

    The pieces are read once, plus once if there are splits, once if there are ids, and once for each kept column.

    Args:
        pieces: returns an iterator over all pieces, in order; all pieces have the same `classes`.
    """
    paths, labels = xxhash.xxh3_128(), xxhash.xxh3_128()
    splits, ids, classes, columns, count = set[str](), False, list[str](), list[str](), 0
    for piece in pieces():
        paths.update(b"\0" * bool(count) + b"\0".join(map(os.fsencode, piece.paths)))
        labels.update(piece.labels.astype("<i8").tobytes())
        splits.update(piece.splits)
        ids, classes, columns, count = piece.ids is not None, piece.classes, list(piece.columns), count + len(piece)
    if splits <= {""}:
        labels.update(b"\0" * max(0, count - 1) + b"\0\0")
    else:
        _hash_texts(labels, (piece.splits for piece in pieces()))
    _hash_texts(labels, [classes])
    _hash_texts(labels, (piece.ids or [] for piece in pieces()) if ids else [])
    for name in sorted(columns):
        _hash_texts(labels, [[name]])
        _hash_texts(labels, ([str(value) for value in piece.columns[name]] for piece in pieces()))
    return paths.hexdigest(), labels.hexdigest()


def _hash_texts(digest: xxhash.xxh3_128, pieces: Iterable[Sequence[str]]) -> None:
    between = b""
    for texts in pieces:
        digest.update(between + b"\0".join(map(os.fsencode, texts)))
        between = b"\0"
    digest.update(b"\0\0")


def order_of(paths: Sequence[str]) -> list[int]:
    """Return the positions that sort paths by their bytes."""
    encoded = [os.fsencode(path) for path in paths]
    return sorted(range(len(encoded)), key=encoded.__getitem__)


def is_litter(name: str) -> bool:
    """Return whether a file or folder of this name is hidden or was left by an operating system or file server."""
    return name.startswith(".") or name.lower() in _LITTER


def labels_from_folders(paths: Sequence[str]) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Return labels, classes and splits, derived from folder names.

    The first folder is the class. If every first folder is named train, val (valid, validation) or test, it is the
    split, and the folder below it is the class.
    """
    folders = [path.rpartition("/")[0] for path in paths]
    classes, split_level = classes_of_folders(folders)
    of_folder = {folder: class_and_split(folder, split_level) for folder in set(folders)}
    labels, _ = _indexed([of_folder[folder][0] for folder in folders], classes)
    return labels, classes, [of_folder[folder][1] for folder in folders]


def classes_of_folders(folders: Iterable[str]) -> tuple[list[str], bool]:
    """Return the classes of images in folders, and whether the first folders are splits; see `labels_from_folders`.

    Args:
        folders: relative paths, "" for the top; iterated over once.
    """
    top, below, split_level = set[str](), set[str](), True
    for folder in folders:
        if not folder:
            continue
        first, *others = folder.split("/", 2)
        top.add(first)
        # `train` beside `airplane` and `bus` is a class: all first folders must have names of splits.
        if split_level and first.lower() not in SPLITS:
            split_level, below = False, set()
        if split_level and others:
            below.add(others[0])
    return sorted(below if split_level else top, key=os.fsencode), bool(top) and split_level


def class_and_split(folder: str, split_level: bool) -> tuple[str | None, str]:
    """Return the class and split of images in a folder; `split_level`: whether the first folders are splits."""
    parts = folder.split("/") if folder else []
    split = SPLITS[parts[0].lower()] if split_level and parts else ""
    return parts[split_level] if len(parts) > split_level else None, split


def labels_from_values(values: Sequence[str | int | None]) -> tuple[NDArray[np.int64], list[str]]:
    """Return labels and classes from the value given for each image; None, "" and -1 mean no class.

    If all values are integers from 0 to `_LARGEST_LABEL`, they are the labels, and their digits the class names.
    """
    texts = [label_text(value) for value in values]
    return _indexed(texts, classes_of_values({text for text in texts if text is not None}))


def label_text(value: str | int | None) -> str | None:
    """Return the label given for an image as text; None for no class."""
    return None if value in (None, "", "-1", -1) else str(value)


def classes_of_values(known: set[str]) -> list[str]:
    """Return the classes for the set of all labels, as text; see `labels_from_values`."""
    numbers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text, re.ASCII) for text in known)
    if numbers and known and 0 <= min(map(int, known)) <= max(map(int, known)) <= _LARGEST_LABEL:
        return [str(number) for number in range(max(map(int, known)) + 1)]
    return sorted(known, key=int if numbers else os.fsencode)


def _indexed(names: Sequence[str | None], classes: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    index = {name: i for i, name in enumerate(classes)}
    return np.array([-1 if name is None else index[name] for name in names], np.int64), classes
