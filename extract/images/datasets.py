"""Datasets of Hugging Face (on disk, on the hub, or open), of PyTorch or torchvision; pictures or paths in a list."""

from __future__ import annotations

import bisect
import copy
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from extract.credentials import without_credentials
from extract.errors import InputError, first_line
from extract.images.arrays import PixelRows
from extract.images.csv_lists import plain_path
from extract.images.image_list import SPLITS, Column, Images, arrow_column, chosen_columns, joined, labels_from_values
from extract.images.sources import UNKNOWN, Files, ImageSource
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean
from extract.system.urls import is_url

__all__ = ["PROTOCOL", "MapDataset", "is_in_memory", "is_on_disk", "list_dataset", "list_hugging_face"]

_IN_MEMORY = "memory:"  # start of the root of images that exist only in a program
PROTOCOL = "hfds://"
_LABEL_COLUMNS = ("label", "labels")
_NOT_APPLIED = "the transform of the dataset is not applied: pictures and labels are those of its columns"
_TARGETS = ("targets", "labels", "_labels")  # where torchvision's datasets have the labels of all images
_PAIRS = "_samples"  # where others of torchvision's datasets have a file and a label for each image


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


def is_hugging_face(dataset: object) -> bool:
    """Return whether an object is a dataset of the library `datasets`."""
    opened = sys.modules.get("datasets")  # if the library is not imported, no object is one of its own
    names = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    kinds = tuple(kind for name in names if isinstance(kind := getattr(opened, name, None), type))
    return bool(kinds) and hasattr(opened, "load_from_disk") and isinstance(dataset, kinds)


def is_on_disk(where: str) -> bool:
    """Return whether a place is `hfds://` with a folder of `save_to_disk`; other folders may name servers."""
    return where.startswith(PROTOCOL) and _is_saved(Path(_parts(where.removeprefix(PROTOCOL))[0]))


def _is_saved(folder: Path) -> bool:
    return any((folder / marker).is_file() for marker in ("dataset_dict.json", "state.json"))


def list_hugging_face(where: str, keep: Sequence[str] = ()) -> Images:
    """List the images of `hfds://FOLDER_OR_NAME[:SPLIT][:COLUMN]`.

    A folder is one of `save_to_disk`, or one that `load_dataset` reads, such as a folder with Parquet files. Any other
    name is a dataset of the hub, which is downloaded. Code of datasets is not run.

    Args:
        where: the dataset.
        keep: names of further columns, for `Images.columns`.

    Raises:
        InputError: there is no such dataset, split or column.
        LayertapError: the library is not installed.
    """
    datasets = library("datasets", "datasets", PROTOCOL)
    name, split, column = _parts(where.removeprefix(PROTOCOL))
    folder = Path(name)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):  # no name of the hub
        raise InputError(f"{where}: no such folder", hint=did_you_mean(name))
    try:
        opened = datasets.load_from_disk(name) if _is_saved(folder) else datasets.load_dataset(name)
    except Exception as error:  # each reader raises its own errors
        raise InputError(f"{where} cannot be opened: {first_line(error)}") from error
    if split and isinstance(opened, dict):
        if split not in opened:
            raise InputError(f"{where}: no split {split!r}; there are {', '.join(opened)}")
        opened = opened[split]
    elif split and not column:  # a dataset without splits
        split, column = "", split
    place = str(folder.resolve()) if folder.is_dir() else name
    root = PROTOCOL + ":".join([place, split, column]).rstrip(":")
    return list_opened(opened, root, column, keep)


def _parts(name: str) -> tuple[str, str, str]:
    """Split FOLDER_OR_NAME[:SPLIT][:COLUMN]."""
    if Path(name).is_dir():
        return name, "", ""
    head, *others = name.split(":")
    if len(others) > 2:
        raise InputError(f"{PROTOCOL}{name}: expected {PROTOCOL}FOLDER_OR_NAME[:SPLIT][:COLUMN]")
    return head, *(*others, "", "")[:2]  # type: ignore[return-value]


def list_opened(opened: Any, root: str, column: str = "", keep: Sequence[str] = ()) -> Images:
    """List the images of a `Dataset`, or of all splits of a `DatasetDict`.

    Paths are row numbers, after the name of the split if there are several; train, validation and test are the splits
    of the rows. Labels are those of the column `label` or `labels`, or of the only column of type `ClassLabel`. Ids are
    those of the column `id`.

    Pictures and labels are those of the columns. A format is not applied, nor is a transform (`set_transform`), which
    a note says. Classes are the names of a `ClassLabel`, in its order; they are sorted if splits have other orders.

    Args:
        opened: the dataset.
        root: its name, stored in data sets.
        column: column of the images; "": the only one.
        keep: names of further columns, for `Images.columns`; numbers of classes become their names.

    Raises:
        InputError: it is a stream, whose rows have no numbers to resume by; it is empty; or its images are not in one
            column.
    """
    parts = dict(sorted(opened.items())) if isinstance(opened, dict) else {"": opened}
    if not all(hasattr(part, "select_columns") and hasattr(part, "__len__") for part in parts.values()):
        raise InputError(
            f"{root} is a stream, whose rows have no numbers",
            hint="open it without streaming=True, or write it to files with Dataset.from_generator",
        )
    paths, splits, sources, notes = [], [], [], set()
    values: list[Any] = []
    kept: list[dict[str, Column]] = []
    class_names: list[tuple[str, ...]] = []
    for split, part in parts.items():
        name = _image_column(part, column, root)
        of_part, names, note = _labels_of(part)
        class_names.append(names)
        notes |= {note, _NOT_APPLIED if part.format["type"] == "custom" else ""} - {""}
        digits = len(str(max(0, len(part) - 1)))
        paths += [f"{split}/{row:0{digits}d}".removeprefix("/") for row in range(len(part))]
        splits += [SPLITS.get(split.lower(), "")] * len(part)
        values += of_part
        sources.append((part, name))
        kept.append(_kept_columns(part, root, keep))
    if not paths:
        raise InputError(f"{root} is empty")
    labels, classes = labels_from_values(values)
    stated = {names for names in class_names if names}  # a split may have no labels
    if len(stated) == 1:  # also the classes without images, in their order
        (names,) = stated
        number = {None: -1} | {name: i for i, name in enumerate(names)}
        if number.keys() >= set(values):
            labels, classes = np.array([number[value] for value in values], np.int64), [*names]
    source, ids = HuggingFaceRows(sources), [each for part in parts.values() for each in _ids_of(part)]
    return Images(
        root, paths, labels, classes, splits, source, ids if len(ids) == len(paths) else None,
        notes=tuple(sorted(notes)), columns=joined(root, kept),
    )  # fmt: skip


def _ids_of(part: Any) -> list[str]:
    """Return the ids of the column `id`, which is of text or whole numbers; empty if there is none."""
    if not re.fullmatch(r"(large_)?string|u?int\d+", getattr(part.features.get("id"), "dtype", None) or ""):
        return []
    ids = part.select_columns(["id"]).with_format("arrow")[:]["id"].to_pylist()
    return ["" if value is None else without_credentials(str(value)) for value in ids]


def _kept_columns(part: Any, root: str, keep: Sequence[str]) -> dict[str, Column]:
    chosen = chosen_columns(root, keep, {name.lower(): name for name in part.features})
    if not chosen:
        return {}
    table = part.select_columns(list(set(chosen.values()))).with_format("arrow")[:]
    names = {column: getattr(part.features[column], "names", None) for column in chosen.values()}
    return {name: arrow_column(root, name, table[column], names[column]) for name, column in chosen.items()}


def _image_column(part: Any, column: str, root: str) -> str:
    kinds = {name: type(feature).__name__ for name, feature in part.features.items()}
    types = {name: getattr(feature, "dtype", "") for name, feature in part.features.items()}
    binary = [name for name, dtype in types.items() if dtype in ("binary", "large_binary")]
    images = [name for name, kind in kinds.items() if kind == "Image"]
    if column:
        if column not in images + binary:
            raise InputError(f"{root}: the column {column!r} has no images; those with images: {images + binary}")
        return column
    found = images or binary
    if len(found) != 1:
        raise InputError(
            f"{root}: {'several columns have' if found else 'no column has'} images: {', '.join(found or kinds)}",
            hint="name the column: hfds://NAME:SPLIT:COLUMN" if found else "",
        )
    return str(found[0])


def _labels_of(part: Any) -> tuple[list[Any], tuple[str, ...], str]:
    """Return the label of each row, None for none; the names of a `ClassLabel`; and why there are no labels."""
    labels = [name for name, feature in part.features.items() if type(feature).__name__ == "ClassLabel"]
    chosen = next((name for name in _LABEL_COLUMNS if name in part.features), labels[0] if len(labels) == 1 else None)
    if chosen is None:
        several = f"no labels: the columns {', '.join(labels)} have classes, and none of them is called label"
        return [None] * len(part), (), several if labels else ""
    feature = part.features[chosen]
    values = part.select_columns([chosen]).with_format("arrow")[:][chosen].to_pylist()  # without the pictures
    if type(feature).__name__ == "ClassLabel":
        names = dict(enumerate(feature.names))
        return [names.get(value) for value in values], tuple(feature.names), ""
    if all(isinstance(value, str | int | None) for value in values):
        return values, (), ""
    return [None] * len(part), (), f"no labels: the column {chosen} has neither numbers nor text"


class HuggingFaceRows(ImageSource):
    """ImageSource of the encoded images of datasets, one after the other.

    Args:
        parts: (dataset, column of its images) of each.
    """

    def __init__(self, parts: list[tuple[Any, str]]):
        self._columns = [part.select_columns([column]).with_format("arrow") for part, column in parts]
        self._names = [column for _, column in parts]
        self._starts = np.cumsum([0, *(len(part) for part, _ in parts)])

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        place = int(row - self._starts[number])
        value = self._columns[number][place : place + 1][self._names[number]][0].as_py()
        if isinstance(value, dict):  # {"bytes": ..., "path": ...}, as the type Image stores it
            path, value = value.get("path"), value.get("bytes")
            if value is None and path and not is_url(path):
                value = Files("/", [path]).read(0)[0]
        if value is None:
            raise FileNotFoundError
        return value, UNKNOWN
