"""Images of a program: a `Dataset` of PyTorch or torchvision, a sequence of pictures, or a list of paths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from extract.errors import InputError, first_line
from extract.images.arrays import PixelRows
from extract.images.csv_lists import plain_path
from extract.images.dataset_labels import labels_of_items
from extract.images.hugging_face import is_hugging_face, list_opened
from extract.images.image_list import Images
from extract.images.sources import UNKNOWN, Files
from extract.system.urls import is_url

__all__ = ["MapDataset", "is_in_memory", "list_dataset"]

_IN_MEMORY = "memory:"  # start of the root of images that exist only in a program


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
            pictures, see `as_picture`. Its order is kept, and the path of an image is its row number. The label of row
            i is `dataset[i][1]`; what this costs, and when classes have names, is stated in `labels_of_items`. Or a
            `datasets.Dataset`; see `list_opened`. Or a list of paths, which are sorted.
        keep: names of further columns of a `datasets.Dataset`, for `Images.columns`.

    Raises:
        InputError: the dataset is empty or not a map-style one, no item can be read, or the first is no picture.
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
    number, first = _first_readable(dataset, count)
    if isinstance(first, str | os.PathLike):
        return _list_paths([dataset[row] for row in range(count)])
    from extract.images.pictures import as_picture  # imports torch

    as_picture(_picture_in(first), f"item {number} of the {kind}" if number else f"the first item of the {kind}")
    labels, classes, notes = labels_of_items(dataset, count)
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


def _first_readable(dataset: Any, count: int) -> tuple[int, Any]:
    """Return the first item that can be read, and its number: a row whose item raises fails when it is computed."""
    reason = ""
    for number in range(count):
        try:
            return number, dataset[number]
        except Exception as error:  # code of the user
            reason = reason or f"{type(error).__name__}: {first_line(error)}"
    raise InputError(f"images: no item of the {type(dataset).__name__} can be read; the first raises {reason}")


def _picture_in(item: Any) -> Any:
    return item[0] if isinstance(item, tuple | list) and item else item


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
