"""Versions of a data set of `layertap sync`: the tables of its rows, which passes write and publish.

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
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import xxhash
from numpy.typing import NDArray

from extract.errors import LayertapError
from extract.store.format.checked_file import hdf5_on_disk
from extract.system.atomic_files import atomic_write, open_regular, own_folder

__all__ = ["HASH_BYTES", "Version", "hash_of", "pass_folder", "table_path", "write_table"]

_FORMAT = "layertap version"
HASH_BYTES = 16  # xxh3-128
_ROWS_AT_ONCE = 1 << 16  # h5py copies what it writes


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

    def content(self) -> dict[str, Any]:
        """Return the entry for `dataset.json`."""
        return {"number": self.number, "rows_xxh3": self.rows_xxh3, "passes": list(self.passes)}


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
    try:
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
    except OSError as error:
        raise LayertapError(f"cannot write {path}: {error.strerror}") from error


def hash_of(path: Path) -> str:
    """Return the xxh3-128 of a file.

    Raises:
        InputError: the path is not a regular file.
        OSError: it does not exist or cannot be read.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
