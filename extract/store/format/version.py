"""Versions of a data set of `layertap sync`: the tables of its rows, which passes write and publish, and readers read.

    OUT/
      dataset.json             as in any data set, with `version`: its number, its passes, the hash of its table
      versions/000012.h5       the table: path, label and split of each row, and the location of its features
      passes/000001/           features computed by one pass: an ordinary data set, whose rows never change
      passes/000012/

Renaming the new `dataset.json` publishes a version. Readers that opened an earlier version continue to read it; files
that no version needs any more are removed, but stay readable for processes that have them open.

A table is plain HDF5: `path`, `label`, `split`, `classes`, `pass` and `row`, the pass with the features and the row in
that pass, and `source_hash`, the hash of the image when its file was examined, which the pass has, too. Rows are sorted
by pass, row and path, so that features are read in file order. Images with identical bytes share the features of one
row. Readers use no other columns; `extract/sync/records.py` writes and reads those by which a pass knows its files.

Each pass that changes anything writes the whole table.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, system_errors_as
from extract.store.format.checked_file import hdf5_on_disk
from extract.store.format.untrusted import Refuse, dataset_in, open_untrusted
from extract.system.atomic_files import atomic_write, open_regular, own_folder

__all__ = ["HASH_BYTES", "RowTable", "Version", "hash_of", "pass_folder", "read_rows", "table_path", "write_table"]

_FORMAT = "layertap version"
HASH_BYTES = 16  # xxh3-128
_ROWS_AT_ONCE = 1 << 16  # h5py copies what it writes
_COLUMNS = {"path": "S", "split": "S", "classes": "S", "label": "i", "pass": "i", "row": "i"}  # name -> dtype.kind
_HASHES = "source_hash"  # (N, 16) uint8; earlier versions of layertap wrote none
_REPAIR = "run `layertap sync` to repair it"


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


def pass_folder(out: Path, number: int) -> Path:
    """Return the folder of the data set that one pass computed."""
    return out / "passes" / f"{number:06d}"


def table_path(out: Path, number: int) -> Path:
    """Return the path of a version's table."""
    return out / "versions" / f"{number:06d}.h5"


def write_table(out: Path, number: int, columns: Mapping[str, NDArray[Any]]) -> str:
    """Write the table of a version, without publishing the version; return its xxh3-128.

    Args:
        out: folder of the data set.
        number: number of the version.
        columns: name -> values; texts are bytes.

    Raises:
        LayertapError: the disk is full or refuses.
    """
    path = table_path(out, number)
    with system_errors_as(f"cannot write {path}"):
        own_folder(path.parent)
        with atomic_write(path) as whole:
            temporary = Path(whole.name)
            with hdf5_on_disk(temporary, "w") as file:
                file.attrs.update(format=_FORMAT, version=number)
                for name, values in columns.items():
                    is_text = values.dtype.kind == "S"
                    dtype = h5py.string_dtype("utf-8", values.dtype.itemsize) if is_text else values.dtype
                    data = file.create_dataset(name, values.shape, dtype)
                    for start in range(0, len(values), _ROWS_AT_ONCE):
                        data[start : start + _ROWS_AT_ONCE] = values[start : start + _ROWS_AT_ONCE].astype(dtype)
            return hash_of(temporary)


def hash_of(path: Path) -> str:
    """Return the xxh3-128 of a file.

    Raises:
        InputError: the path is not a regular file.
        OSError: it does not exist or cannot be read.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True)
class RowTable:
    """The rows of a version. Paths and splits are bytes in a mapped file: as `str`, a million rows took 340 MB.

    Attributes:
        paths: (N,) bytes, relative to the image folder.
        labels: (N,) int64, index into `classes`; -1 unknown.
        splits: (N,) bytes: train, val, test or empty.
        classes: names of the classes.
        passes: (N,) int64, ascending: the pass with the features of each row.
        rows: (N,) int64: the row in that pass; ascending within a pass, with repeats.
        hashes: (N, 16) uint8, the hashes of the images; None if the table has none.
    """

    paths: NDArray[np.bytes_]
    labels: NDArray[np.int64]
    splits: NDArray[np.bytes_]
    classes: Sequence[str]
    passes: NDArray[np.int64]
    rows: NDArray[np.int64]
    hashes: NDArray[np.uint8] | None = None

    def part(self, part: slice | NDArray[np.int64]) -> RowTable:
        """Return some of the rows, without the hashes; their numbers ascend."""
        paths, labels, splits = self.paths[part], self.labels[part], self.splits[part]
        return RowTable(paths, labels, splits, self.classes, self.passes[part], self.rows[part])


def read_rows(out: Path, version: Version, n_rows: int) -> RowTable:
    """Read the rows of a version.

    The file is mapped: paths and splits are read when they are used, also after later versions have replaced the file.

    Args:
        out: folder of the data set.
        version: the version in `dataset.json`.
        n_rows: rows of the version according to `dataset.json`.

    Raises:
        FileNotFoundError: a table does not exist, for example because a later version has been published.
        InputError: a table is damaged, or is not of this format.
        LayertapError: a table cannot be read.
    """
    path = table_path(out, version.number)

    def refuse(problem: str) -> InputError:
        return InputError(f"{path} is not a valid version table: {problem}", hint=_REPAIR)

    columns: dict[str, NDArray[Any]] = {}
    try:
        if hash_of(path) != version.rows_xxh3:
            raise InputError(f"{path} is damaged: its hash does not match dataset.json", hint=_REPAIR)
        with path.open("rb") as raw:  # not in `open_untrusted`: what the system cannot map is not damaged
            mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        with open_untrusted(path, str(path)) as file:
            for name, kind in {**_COLUMNS, **({_HASHES: "u"} if _HASHES in file else {})}.items():
                data = dataset_in(file.id, name, refuse)
                inner = (HASH_BYTES,) if name == _HASHES else ()
                if data.dtype.kind != kind or data.shape[1:] != inner or not data.shape or data.chunks is not None:
                    raise refuse(f"column {name!r} is {data.dtype} {data.shape}, or compressed")
                if data.size * data.dtype.itemsize > len(mapped):
                    raise refuse(f"column {name!r} has more bytes than the file")
                column = np.empty(data.shape, data.dtype)
                if data.size:
                    column = np.frombuffer(mapped, data.dtype, data.size, data.id.get_offset()).reshape(data.shape)
                columns[name] = column.astype(np.int64, copy=False) if kind == "i" else column
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror}") from error
    _check(columns, refuse)
    passes = columns["pass"]
    if len(passes) != n_rows:
        # Earlier versions of layertap wrote tables of changes, which the next pass replaces.
        raise refuse(f"it has {len(passes):,} rows, expected {n_rows:,}")
    if not np.isin(np.unique(passes), version.passes).all():
        raise refuse("it refers to passes that dataset.json does not list")
    classes = [os.fsdecode(name) for name in columns["classes"].tolist()]
    return RowTable(
        columns["path"], columns["label"], columns["split"], classes, passes, columns["row"], columns.get(_HASHES)
    )


def _check(columns: dict[str, NDArray[Any]], refuse: Refuse) -> None:
    """Check lengths, ranges and order of the columns of a table."""
    lengths = {name: len(column) for name, column in columns.items() if name != "classes"}
    if len(set(lengths.values())) > 1:
        raise refuse(f"its columns have different lengths: {lengths}")
    labels, rows, steps = columns["label"], columns["row"], np.diff(columns["pass"])
    if (steps < 0).any() or ((steps == 0) & (np.diff(rows) < 0)).any() or (rows < 0).any():
        raise refuse("its rows are not in order")
    if len(labels) and not (labels.min() >= -1 and labels.max() < len(columns["classes"])):
        raise refuse("a label is not the index of a class")
