"""Images of a program: a `Dataset` of PyTorch or torchvision, a sequence of pictures, or a list of paths."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, first_line
from extract.images.arrays import PixelRows
from extract.images.csv_lists import plain_path
from extract.images.hugging_face import is_hugging_face, list_opened
from extract.images.image_list import Images, labels_from_values
from extract.images.sources import UNKNOWN, Files
from extract.system.urls import is_url

__all__ = ["MapDataset", "is_in_memory", "list_dataset"]

_IN_MEMORY = "memory:"  # start of the root of images that exist only in a program

_TARGETS = ("targets", "labels", "_labels")  # where torchvision's datasets have the labels of all images


class MapDataset(Protocol):
    """A map-style dataset: `len` and `[]`, by row number from 0."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: Any, /) -> Any: ...


def is_in_memory(root: str) -> bool:
    """Return whether the root of images is that of a dataset of a program; `memory://` is a URL."""
    return root.startswith(_IN_MEMORY) and not is_url(root)


def list_dataset(dataset: MapDataset, keep: Sequence[str] = ()) -> Images:
    """List the images of a program.

    Args:
        dataset: a map-style dataset or sequence whose items are pictures, or tuples of a picture and a label; for
            pictures, see `as_picture`. Its order is kept, and the path of an image is its row number. Labels come from
            `targets` or `labels` of the dataset, as torchvision has them, and otherwise from the items, which are all
            read once. Or a `datasets.Dataset`; see `list_opened`. Or a list of paths, which are sorted.
        keep: names of further columns of a `datasets.Dataset`, for `Images.columns`.

    Raises:
        InputError: the dataset is empty or not a map-style one, or its first item is no picture.
    """
    kind = type(dataset).__name__
    if is_hugging_face(dataset):
        return list_opened(dataset, _IN_MEMORY + kind, keep=keep)
    if keep:
        raise InputError(f"keep: {kind} has no columns", hint="pass a list as a file, or a datasets.Dataset")
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)
    if not is_map_style:
        raise InputError(
            f"images: {kind} has no length and no items by number", hint="pass a map-style dataset or list"
        )
    count = len(dataset)
    if not count:
        raise InputError(f"images: the {kind} is empty")
    shape = tuple(getattr(dataset, "shape", ()))
    if len(shape) == 3 and shape[-1] in (3, 4):
        raise InputError(f"images of shape {shape}: one colour picture or several grey ones?", hint="pass [picture]")
    if hasattr(dataset, "iloc"):  # a Series of pandas, whose [] takes keys
        dataset = list(dataset)  # type: ignore[call-overload]
    first = dataset[0]
    if isinstance(first, str | os.PathLike):
        return _list_paths([dataset[row] for row in range(count)])
    from extract.images.pictures import as_picture  # imports torch

    as_picture(_picture_in(first), f"the first item of the {kind}")
    labels, classes, notes = _labels_of(dataset, first, count)
    paths = [f"{row:0{len(str(count - 1))}d}" for row in range(count)]
    return Images(_IN_MEMORY + kind, paths, labels, classes, [""] * count, DatasetRows(dataset), notes=notes)


def _list_paths(paths: Sequence[Any]) -> Images:
    if other := next((path for path in paths if not isinstance(path, str | os.PathLike)), None):
        raise InputError(
            f"images: paths, and an item of type {type(other).__name__}; expected paths only, or pictures only"
        )
    names = sorted((plain_path(os.fspath(path)) for path in paths), key=os.fsencode)
    if twice := next((name for name, following in itertools.pairwise(names) if name == following), None):
        raise InputError(f"images: {twice} is given twice; expected each path only once")
    none, folder = np.full(len(names), -1, np.int64), str(Path.cwd())
    return Images(folder, names, none, [], [""] * len(names), Files(folder, names, anywhere=True))


def _picture_in(item: Any) -> Any:
    return item[0] if isinstance(item, tuple | list) and item else item


def _labels_of(dataset: Any, first: Any, count: int) -> tuple[NDArray[np.int64], list[str], tuple[str, ...]]:
    """Return labels, classes and notes of a dataset."""
    values, names = _targets_of(dataset)
    in_items = isinstance(first, tuple | list) and len(first) > 1
    if values is not None and in_items:
        with suppress(Exception):  # values of any type
            if _plain(values[0]) != _plain(first[1]):  # such as names of files, or before a `target_transform`
                values = None
    if values is None and in_items:
        values = [_label_of(dataset, row) for row in range(count)]
    plain = [None] * count if values is None else [_plain(value) for value in values]
    if other := [type(value).__name__ for value in plain if not isinstance(value, int | str | None)]:
        note = f"labels of type {other[0]} are not stored; classes are integers or text"
        return np.full(count, -1, np.int64), [], (note,)
    numbers = [value for value in plain if isinstance(value, int)]
    if isinstance(names, Sequence) and len(numbers) == count and -1 <= min(numbers) <= max(numbers) < len(names):
        return np.array(numbers, np.int64), _unique(names), ()
    return *labels_from_values(plain), ()


def _targets_of(dataset: Any) -> tuple[Sequence[Any] | None, Any]:
    """Return the labels of all items, and the names of the classes, as torchvision's datasets have them, or None."""
    if isinstance(getattr(dataset, "indices", None), Sequence) and hasattr(dataset, "dataset"):  # Subset of PyTorch
        values, names = _targets_of(dataset.dataset)
        return (None if values is None else [values[row] for row in dataset.indices]), names
    values = next((found for name in _TARGETS if _is_list(found := getattr(dataset, name, None), len(dataset))), None)
    return values, getattr(dataset, "classes", None)


def _label_of(dataset: Any, row: int) -> Any:
    try:
        return dataset[row][1]
    except Exception:  # code of the user; the row fails when its picture is read
        return None


def _unique(names: Sequence[Any]) -> list[str]:
    """Return names of classes as text; one that occurs twice gets its number."""
    texts = [", ".join(map(str, name)) if isinstance(name, tuple | list) else str(name) for name in names]
    counts = Counter(texts)
    return [text if counts[text] == 1 else f"{text} ({number})" for number, text in enumerate(texts)]


def _is_list(values: Any, count: int) -> bool:
    is_array = hasattr(values, "tolist") and getattr(values, "ndim", 0) > 0
    return (isinstance(values, Sequence) or is_array) and len(values) == count


def _plain(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as a Python one; other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


class DatasetRows(PixelRows):
    """ImageSource of the pictures of a map-style dataset."""

    def __init__(self, dataset: MapDataset):
        self._dataset = dataset

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`; the pixels are RGB."""
        from extract.images.pictures import as_picture

        try:
            picture = as_picture(_picture_in(self._dataset[row]), f"item {row}")
        except (OSError, ValueError, MemoryError):
            raise
        except Exception as error:  # code of the user; any other type would end the run
            raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
        return self.encode(np.asarray(picture)), UNKNOWN
