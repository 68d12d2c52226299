"""Images of datasets of the library `datasets` of Hugging Face: on disk, on the hub, or open in a program."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract.credentials import without_credentials
from extract.errors import InputError, first_line
from extract.images.image_list import SPLITS, Images, labels_from_values
from extract.images.kept_columns import Column, arrow_column, chosen_columns, joined
from extract.images.sources import UNKNOWN, Files, ImageSource
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean
from extract.system.urls import is_url

__all__ = ["PROTOCOL", "is_hugging_face", "is_on_disk", "list_hugging_face", "list_opened"]

PROTOCOL = "hfds://"
_LABELS = ("label", "labels")
_NOT_APPLIED = "the transform of the dataset is not applied: pictures and labels are those of its columns"


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
    chosen = next((name for name in _LABELS if name in part.features), labels[0] if len(labels) == 1 else None)
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
