"""Masks of the images of a data set: the class of each pixel, by its label in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError
from extract.images.csv_lists import read_table
from extract.store.tokens.token_array import TokenArray
from pipelines.probe.coco import CocoFile
from pipelines.probe.pixel_files import CropLoss, check_size, read_pixels
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

__all__ = ["MaskFiles", "class_names"]

_MOST_LABELS = 1000  # more are numbers of objects, or no labels at all
_COUNTED = 1 << 16  # labels below are counted, which is faster than sorting
_LARGEST = 0xFFFF - 1  # label; 65,535 is written outside the crop
_VOID = 255  # label without a class, as in Pascal VOC, Cityscapes and MMSegmentation


def class_names(path: Path) -> dict[int, str]:
    """Read a table with the columns `id` and `name`: label in masks -> name of the class.

    Raises:
        InputError: the table lacks a column, or a label is not a whole number from 0 or occurs twice.
    """
    table, _ = read_table(str(path), "name")
    if "id" not in table:
        raise InputError(f"{path} has no column 'id'")
    names: dict[int, str] = {}
    for text, name in zip(table["id"], table["name"], strict=True):
        if not str(text).isascii() or not str(text).isdigit():
            raise InputError(f"{path}: the id {text!r} is not a whole number from 0")
        if int(text) > _LARGEST:
            raise InputError(f"{path}: the id {text}; expected labels up to {_LARGEST:,}")
        if int(text) in names:
            raise InputError(f"{path}: the id {text} occurs twice")
        names[int(text)] = str(name)
    if len(set(names.values())) < len(names):
        raise InputError(f"{path}: two classes have the same name", hint="give each its own name")
    return names


class MaskFiles:
    """Masks of images with the numbers of classes from 0 to K - 1, and -1 for pixels without a class.

    Args:
        names: row -> its file, or its name in the COCO file.
        coco: COCO file with the masks; None: they are in files of their own.
        ignored: labels without a class, besides 255; in a COCO file, 255 has no special meaning.
        named: label -> name of its class; None: all labels in the masks are classes, or those of the COCO file.
    """

    def __init__(
        self, names: Mapping[int, str], coco: CocoFile | None, ignored: Sequence[int], named: Mapping[int, str] | None
    ):
        self._names, self._coco = names, coco
        self._ignored = np.array([*ignored, *([] if coco else [_VOID])], np.int64)
        if named is not None and _VOID in named and not coco:
            raise InputError(f"--class-names has the label {_VOID}, which means no label", hint="use another label")
        if named is None and coco is not None:
            named = coco.classes
        self._named = None if named is None else {label: name for label, name in named.items()
                                                  if label not in self._ignored}  # fmt: skip
        self.ids = np.array(sorted(self._named or ()), np.int64)

    @property
    def classes(self) -> list[str]:
        """Names of the K classes; `ids` has their labels in masks."""
        return [str(label) if self._named is None else self._named[label] for label in self.ids.tolist()]

    def examine(self, tokens: TokenArray, pictures: Pictures) -> list[str]:
        """Read all masks once: learn the classes, compare the sizes with those of the pictures, and return notes.

        Raises:
            InputError: a mask cannot be read, has another size than its picture, or a label that is not a class.
        """
        # All masks are read before the first fit: one of another image, or not turned as its picture, would give low
        # metrics and no error. What the crop leaves out is told: it can be 42 % of the labelled pixels (320 x 240,
        # 224).
        labels: set[int] = set()
        loss = CropLoss(tokens, pictures)
        for row, name in self._names.items():
            size = pictures.size(row)
            if self._coco is not None:  # before memory is allocated for a size that the file only states
                check_size(name, self._coco.size(name), size)
            mask = self._labels(row)
            check_size(name, mask.shape, size)
            labels |= _labels_in(mask)
            if len(labels) > _MOST_LABELS:
                raise InputError(
                    f"the masks have more than {_MOST_LABELS:,} different labels; expected classes",
                    hint="numbers of objects and depths are not classes",
                )
            loss.count(mask >= 0)
        if not loss.total:
            raise InputError("no pixel of the masks has a class", hint="does --ignore-label name the right labels?")
        if self._named is None:
            self.ids = np.array(sorted(labels), np.int64)
        elif unknown := sorted(labels - set(self._named)):
            row = next(row for row in self._names if (self._labels(row) == unknown[0]).any())
            raise InputError(
                f"{printable(self._names[row])} has the label {unknown[0]}, which is not a class",
                hint="add it to the file of --class-names, or name it with --ignore-label",
            )
        return loss.notes("labelled pixels")

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        labels = self._labels(row)
        numbers = np.minimum(np.searchsorted(self.ids, labels), len(self.ids) - 1)
        return np.asarray(np.where(labels < 0, -1, numbers), np.int64)

    def _labels(self, row: int) -> NDArray[np.int64]:
        """Return (H, W) labels as they are in the file, but -1 for ignored ones."""
        name = self._names[row]
        if self._coco is not None:
            mask = self._coco.read(name)
        else:
            pixels = read_pixels(Path(name), "iub", "integers as labels")
            if pixels.max() > _LARGEST:
                raise InputError(f"{printable(name)} has the label {pixels.max()}; expected labels up to {_LARGEST:,}")
            mask = pixels.astype(np.int64)
        without = np.isin(mask, self._ignored) | (mask == -1 if self._coco else False)
        if (wrong := mask[(mask < 0) & ~without]).size:
            raise InputError(f"{printable(name)} has the label {wrong.min()}", hint="name it with --ignore-label")
        mask[without] = -1
        return mask


def _labels_in(mask: NDArray[np.int64]) -> set[int]:
    """Return the labels of a mask without -1."""
    labels = mask[mask >= 0]
    if labels.size and labels.max() < _COUNTED:
        return set(np.flatnonzero(np.bincount(labels)).tolist())
    return set(np.unique(labels).tolist())
