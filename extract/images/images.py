"""What is known of images before any of them is read: names in a fixed order, labels, splits, and their source."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from extract.images.source import Source

__all__ = ["SPLITS", "Images", "is_litter", "labels_from_folders", "labels_from_values", "order_of"]

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

# What operating systems and file servers leave in folders and archives, besides hidden files.
_LITTER = frozenset({
    "thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "$recycle.bin", "system volume information", "lost+found",
    "@eadir", "icon\r",
})  # fmt: skip

_LARGEST_LABEL = 100_000  # numbers up to it are labels as they are; larger ones are names of classes


@dataclass(frozen=True)
class Images:
    """Images, sorted by the bytes of their path.

    Attributes:
        root: where they are: a folder, an archive, a list, a URL; it finds them again from anywhere on this machine.
        paths: relative to the folder or URL, or as the list or archive has them, with `/`; bytes that are not UTF-8 as
            in `os.fsdecode`.
        labels: (N,) int64, index into `classes`; -1 for an image without a class.
        classes: their names.
        splits: `train`, `val`, `test` or empty, for each image.
        source: reads the bytes of a row.
        ids: of a list that has them, one for each image; else None.
        left_out: suffix, or another reason -> number of files that are no images.
        notes: what the user must be told of how they were found.
    """

    root: str
    paths: list[str]
    labels: NDArray[np.int64]
    classes: list[str]
    splits: list[str]
    source: Source
    ids: list[str] | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def first(self, count: int) -> Images:
        """Only so many; what classes there are does not change."""
        ids = None if self.ids is None else self.ids[:count]
        return replace(self, paths=self.paths[:count], labels=self.labels[:count], splits=self.splits[:count], ids=ids)


def order_of(paths: Sequence[str]) -> list[int]:
    """The positions of paths, sorted by their bytes."""
    encoded = [os.fsencode(path) for path in paths]
    return sorted(range(len(encoded)), key=encoded.__getitem__)


def is_litter(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or was left by an operating system."""
    return name.startswith(".") or name.lower() in _LITTER


def labels_from_folders(paths: Sequence[str]) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Labels, classes and splits, by the names of folders.

    The first folder is the class. Where every first folder is called train, val (valid, validation) or test, it is
    the split, and the class is the folder below that.
    """
    folders = [path.split("/")[:-1] for path in paths]
    top = {parts[0] for parts in folders if parts}
    # `train` beside `airplane` and `bus` is a class; only where all are names of splits are they splits.
    split_level = bool(top) and all(name.lower() in SPLITS for name in top)
    splits = [SPLITS[parts[0].lower()] if split_level and parts else "" for parts in folders]
    names = [parts[split_level] if len(parts) > split_level else None for parts in folders]
    return *_indexed(names, sorted({name for name in names if name is not None}, key=os.fsencode)), splits


def labels_from_values(values: Sequence[str | int | None]) -> tuple[NDArray[np.int64], list[str]]:
    """Labels and classes, by what somebody wrote down for each image; None, empty and -1 mean no class.

    Where all are numbers from 0 on, they are the labels, and their digits the names of the classes.
    """
    texts = [None if value in (None, "", "-1", -1) else str(value) for value in values]
    known = {text for text in texts if text is not None}
    numbers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text, re.ASCII) for text in known)
    if numbers and known and 0 <= min(map(int, known)) <= max(map(int, known)) <= _LARGEST_LABEL:
        return _indexed(texts, [str(number) for number in range(max(map(int, known)) + 1)])
    return _indexed(texts, sorted(known, key=int if numbers else os.fsencode))


def _indexed(names: Sequence[str | None], classes: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    index = {name: i for i, name in enumerate(classes)}
    return np.array([-1 if name is None else index[name] for name in names], np.int64), classes
