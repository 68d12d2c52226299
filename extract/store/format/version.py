"""Versions of a data set of `layertap sync`: the table of its rows, which each pass writes and publishes.

    OUT/
      dataset.json             as in any data set, with `version`: its number, its passes, the hash of its table
      versions/000012.h5       the table: path, label and split of each row, and the location of its features
      passes/000001/           features computed by one pass: an ordinary data set, whose rows never change
      passes/000012/

Renaming the new `dataset.json` publishes a version. Readers that opened an earlier version continue to read it; files
that no version needs any more are removed, but stay readable for processes that have them open.

The table is plain HDF5: `path`, `label`, `split`, `classes`, and `pass` and `row`, the pass with the features and the
row in that pass. Rows are sorted by these two, so that features are read in file order. Images with identical bytes
share the features of one row.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, first_line
from extract.store.format.untrusted import dataset_in
from extract.system.atomic_files import open_regular, own_folder, write_whole

__all__ = ["RowTable", "Version", "is_intact", "pass_folder", "read_rows", "table_path", "write_rows"]

_FORMAT = "layertap version"
_COLUMNS = {"path": "S", "split": "S", "classes": "S", "label": "i", "pass": "i", "row": "i"}  # name -> dtype.kind


@dataclass(frozen=True)
class Version:
    """Entry of the published version in `dataset.json`.

    Attributes:
        number: number of the version, from 1, increasing.
        rows_xxh3: xxh3-128 of the file of its table.
        passes: numbers of the passes that hold its rows, ascending.
    """

    number: int
    rows_xxh3: str
    passes: tuple[int, ...]

    @classmethod
    def of(cls, content: Any) -> Version:
        """Return the version for the entry `version` of a `dataset.json`, whose shape was checked.

        Raises:
            ValueError: a number is out of range.
        """
        version = cls(content["number"], content["rows_xxh3"], tuple(content["passes"]))
        if not all(0 < number < 1_000_000_000 for number in (version.number, *version.passes)):
            raise ValueError("a number of its version is out of range")
        return version


@dataclass(frozen=True)
class RowTable:
    """The rows of a version.

    Attributes:
        paths: relative to the image folder; undecodable bytes as in `os.fsdecode`.
        labels: (N,) int64, index into `classes`; -1 unknown.
        splits: train, val, test or empty, for each row.
        classes: names of the classes.
        passes: (N,) int64, ascending: the pass with the features of each row.
        rows: (N,) int64: the row in that pass; ascending within a pass, with repeats.
    """

    paths: Sequence[str]
    labels: NDArray[np.int64]
    splits: Sequence[str]
    classes: Sequence[str]
    passes: NDArray[np.int64]
    rows: NDArray[np.int64]


def pass_folder(out: Path, number: int) -> Path:
    """Return the folder of the data set that one pass computed."""
    return out / "passes" / f"{number:06d}"


def table_path(out: Path, number: int) -> Path:
    """Return the path of a version's table."""
    return out / "versions" / f"{number:06d}.h5"


def write_rows(out: Path, number: int, table: RowTable) -> Version:
    """Write the table of a version, without publishing the version.

    Raises:
        LayertapError: the disk is full or refuses.
    """
    path, content = table_path(out, number), _as_hdf5(number, table)
    try:
        own_folder(path.parent)
        write_whole(path, content)
    except OSError as error:
        raise LayertapError(f"cannot write {path}: {error.strerror}") from error
    return Version(number, xxhash.xxh3_128_hexdigest(content), tuple(np.unique(table.passes).tolist()))


def _as_hdf5(number: int, table: RowTable) -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file.attrs.update(format=_FORMAT, version=number)
        for name, texts in (("path", table.paths), ("split", table.splits), ("classes", table.classes)):
            encoded = [os.fsencode(text) for text in texts]
            dtype = h5py.string_dtype("utf-8", max(map(len, encoded), default=1) or 1)
            file.create_dataset(name, data=np.array(encoded, f"S{dtype.itemsize}").astype(dtype))
        for name, numbers in (("label", table.labels), ("pass", table.passes), ("row", table.rows)):
            file.create_dataset(name, data=np.asarray(numbers, "<i8"))
    return memory.getvalue()


def is_intact(out: Path, version: Version) -> bool:
    """Return whether the table of a version exists and is undamaged."""
    try:
        return xxhash.xxh3_128_hexdigest(_content(table_path(out, version.number))) == version.rows_xxh3
    except (OSError, InputError):
        return False


def _content(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_rows(out: Path, version: Version, n_rows: int) -> RowTable:
    """Read the table of a version.

    Args:
        out: folder of the data set.
        version: the version in `dataset.json`.
        n_rows: rows of the version according to `dataset.json`.

    Raises:
        FileNotFoundError: the table does not exist, for example because a later version has been published.
        InputError: the table is damaged, or is not of this format.
        LayertapError: the table cannot be read.
    """
    path = table_path(out, version.number)

    def refuse(problem: str) -> InputError:
        return InputError(f"{path} is not a valid version table: {problem}")

    try:
        content = _content(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror}") from error
    if xxhash.xxh3_128_hexdigest(content) != version.rows_xxh3:
        raise InputError(
            f"{path} is damaged: its hash does not match dataset.json", hint="run `layertap sync` to repair it"
        )
    columns: dict[str, NDArray[Any]] = {}
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            for name, kinds in _COLUMNS.items():
                data = dataset_in(file.id, name, refuse)
                if data.dtype.kind not in kinds or len(data.shape) != 1 or data.properties.get_nfilters():
                    raise refuse(f"column {name!r} is {data.dtype} {data.shape}, or compressed")
                if data.size * data.dtype.itemsize > len(content):
                    raise refuse(f"column {name!r} has more bytes than the file")
                columns[name] = h5py.Dataset(data.id)[:]
    except LayertapError:
        raise
    except Exception as error:  # h5py raises errors of many types on malformed files
        raise InputError(f"{path} is damaged: {first_line(error)}") from error
    passes, rows, labels = (columns[name].astype(np.int64) for name in ("pass", "row", "label"))
    lengths = {name: len(column) for name, column in columns.items() if name != "classes"}
    order = np.lexsort((rows, passes))
    in_range = (labels >= -1).all() and (labels < len(columns["classes"])).all() and (rows >= 0).all()
    if set(lengths.values()) != {n_rows} or not in_range or (order != np.arange(len(order))).any():
        raise refuse(f"its columns are inconsistent (lengths: {lengths}; expected {n_rows} rows)")
    if not np.isin(passes, version.passes).all():
        raise refuse("it refers to passes that dataset.json does not list")
    texts = {name: [os.fsdecode(value) for value in columns[name].tolist()] for name in ("path", "split", "classes")}
    return RowTable(texts["path"], labels, texts["split"], texts["classes"], passes, rows)
