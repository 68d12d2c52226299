"""Labels of the items of a dataset of PyTorch or torchvision, and the names of their classes."""

from __future__ import annotations

import bisect
import copy
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.images.image_list import labels_from_values

__all__ = ["labels_of_items"]

_TARGETS = ("targets", "labels", "_labels")  # where torchvision's datasets have the labels of all images
_PAIRS = "_samples"  # where others of torchvision's datasets have a file and a label for each image


def labels_of_items(dataset: Any, count: int) -> tuple[NDArray[np.int64], list[str], tuple[str, ...]]:
    """Return labels, classes and notes: the label of row i is `dataset[i][1]`, and -1 if it cannot be read.

    Items are read, since only they have the label that training sees: `target_transform`, an own `__getitem__` and
    edited `samples` change it, and comparing the first item with `targets` notices one such change in six. Labels are
    needed before the first row is computed, so they cannot be taken while the run decodes. Parts below `Subset` and
    `ConcatDataset` that torchvision's own code reads are read without their pictures. Other items are decoded, once
    each, unless the first has no label; a dataset whose items are only pictures may have `targets` or `labels`.

    Classes have the names that the dataset has in `classes` if all labels are their positions, the dataset does not
    have other labels in `targets`, and all parts have the same names. Otherwise classes are the labels themselves.

    Args:
        dataset: a map-style dataset, which is not changed.
        count: number of its items.
    """
    parts: dict[int, _Part] = {}
    values = []
    for row in range(count):
        value = None
        with suppress(Exception):  # code of the user; the row fails when its picture is read
            origin, index = _origin(dataset, row)
            if id(origin) not in parts:
                parts[id(origin)] = _Part(origin)
            value = parts[id(origin)].label(index)
        values.append(value)
    if other := [type(value).__name__ for value in values if not isinstance(value, int | str | None)]:
        note = f"labels of type {other[0]} are not stored; classes are integers or text"
        return np.full(count, -1, np.int64), [], (note,)
    labelled = [part for part in parts.values() if part.labels]
    names = [part.names() for part in labelled]
    if names and names[0] and all(each == names[0] for each in names):
        return np.array([-1 if value is None else value for value in values], np.int64), names[0], ()
    note = (
        "class names are not stored, and classes are the labels themselves: items have other labels than `targets`, "
        "labels without a name, or parts of the dataset have different names"
    )
    are_lost = any(part.has_names and isinstance(part.labels[0][1], int) for part in labelled)
    return *labels_from_values(values), (note,) if are_lost else ()


def _origin(dataset: Any, index: Any) -> tuple[Any, Any]:
    """Return the dataset below `Subset` and `ConcatDataset` that has an item, and the item's index there."""
    from torch.utils.data import ConcatDataset, Subset

    while True:
        read = type(dataset).__getitem__  # of a subclass with its own one, the item may be another
        if read is Subset.__getitem__:
            dataset, index = dataset.dataset, dataset.indices[index]
        elif read is ConcatDataset.__getitem__:
            index = index + len(dataset) if index < 0 else index
            number = bisect.bisect_right(dataset.cumulative_sizes, index)
            start = dataset.cumulative_sizes[number - 1] if number else 0
            dataset, index = dataset.datasets[number], index - start  # `-=` would change a tensor of indices
        else:
            return dataset, index


class _Part:
    """Labels of a dataset that is no `Subset` or `ConcatDataset`.

    Attributes:
        labels: (index, label) of the items that were read and have a label.
        has_names: whether the dataset has names of classes.
    """

    def __init__(self, dataset: Any):
        names = _attribute(dataset, "classes")
        self.has_names = isinstance(names, Sequence) and not isinstance(names, str)
        self.labels: list[tuple[Any, Any]] = []
        self._dataset, self._items = dataset, _without_pictures(dataset)
        self._in_items: bool | None = None  # whether items have labels, as the first that can be read

    def label(self, index: Any) -> Any:
        """Return the label of an item, or None; raises what the code of the dataset raises."""
        value = None
        if self._in_items is not False:
            try:
                item = self._items[index]
            except Exception:
                if self._items is self._dataset:
                    raise
                item = self._dataset[index]  # with its picture
            has_label = isinstance(item, tuple | list) and len(item) > 1
            self._in_items = has_label if self._in_items is None else self._in_items
            value = _plain(item[1]) if has_label else None
        if not self._in_items and self._targets is not None and len(self._targets) == len(self._dataset):
            value = _plain(self._targets[index])
        if value is not None:
            self.labels.append((index, value))
        return value

    def names(self) -> list[str] | None:
        """Return the names of the classes, or None if the labels are not known to be their positions."""
        if not self.has_names:
            return None
        names = _unique(self._dataset.classes)
        if not all(isinstance(value, int) and -1 <= value < len(names) for _, value in self.labels):
            return None
        with suppress(Exception):  # targets of any kind
            if self._targets is None:
                return names if _attribute(self._dataset, "target_transform") is None else None
            if len(self._targets) == len(self._dataset):
                return names if all(_plain(self._targets[index]) == value for index, value in self.labels) else None
        return None

    @cached_property
    def _targets(self) -> Any:
        """Return what the dataset states as the labels of all its items, or None."""
        stated = (each for name in _TARGETS if (each := _attribute(self._dataset, name)) is not None)
        pairs = _attribute(self._dataset, _PAIRS)
        return next(stated, None if pairs is None else [label for _, label in pairs])


def _without_pictures(dataset: Any) -> Any:
    """Return a dataset with the same labels, which opens no pictures if it can be avoided.

    If torchvision's own `__getitem__` reads the items, this code is run on a shallow copy whose loader and picture
    transform do nothing; a table of attributes would be wrong when torchvision changes. 50,000 items of CIFAR take
    0.6 s. The code of a user may use the picture for the label, so it has the picture.
    """
    code = getattr(type(dataset).__getitem__, "__globals__", {}).get("__name__", "")  # `wraps` does not change it
    if not code.startswith("torchvision.datasets."):
        return dataset
    separate = sys.modules["torchvision.datasets.vision"].StandardTransform
    with suppress(Exception):  # attributes that cannot be set
        light = copy.copy(dataset)
        if light.transforms is not None:
            if type(light.transforms) is not separate:  # of picture and label together
                return dataset
            light.transforms = separate(None, light.transforms.target_transform)
        light.transform = None
        if hasattr(light, "loader"):
            light.loader = _no_picture
        return light
    return dataset


def _attribute(dataset: Any, name: str) -> Any:
    """Return an attribute, or None if there is none or its code raises."""
    with suppress(Exception):
        return getattr(dataset, name)
    return None


def _no_picture(_: Any) -> None:
    return None


def _unique(names: Sequence[Any]) -> list[str]:
    """Return names of classes as text; one that occurs twice gets its number."""
    texts = [", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name) for name in names]
    counts = Counter(texts)
    return [text if counts[text] == 1 else f"{text} ({number})" for number, text in enumerate(texts)]


def _plain(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as a Python one; other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
