"""Versions of a data set of `layertap sync`: the tables of its rows, which passes write and publish.

    OUT/
      dataset.json             as in any data set, with `version`: its number, its passes, the hash of its table
      versions/000012.h5       the table: path, label and split of each row, and the location of its features
      versions/000015.h5       a table of changes to that table
      passes/000001/           features computed by one pass: an ordinary data set, whose rows never change
      passes/000012/

Renaming the new `dataset.json` publishes a version. Readers that opened an earlier version continue to read it; files
that no version needs any more are removed, but stay readable for processes that have them open.

A table is plain HDF5: `path`, `label`, `split`, `classes`, `pass` and `row`, the pass with the features and the row in
that pass, and `source_hash`, the hash of the image when its file was examined, which the pass has, too. Rows are sorted
by pass, row and path, so that features are read in file order. Images with identical bytes share the features of one
row.

A table of changes has, in these columns, the rows that another table with all rows, its base, does not have. Its
columns `removed_path`, `removed_pass` and `removed_row` are the rows that only the base has, in the same order. Its
`classes` are those of its own rows. `base` in `version` names the base.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from extract.errors import LayertapError
from extract.store.format.checked_file import hdf5_on_disk
from extract.system.atomic_files import atomic_write, open_regular, own_folder

__all__ = ["HASH_BYTES", "NewRows", "Table", "Version", "hash_of", "pass_folder", "table_path", "write_table"]

_FORMAT = "layertap version"
_BLOCK_BYTES = 1 << 20
HASH_BYTES = 16  # xxh3-128


@dataclass(frozen=True)
class Table:
    """A file in `versions/`.

    Attributes:
        number: number of the version that wrote it.
        rows_xxh3: xxh3-128 of the file.
    """

    number: int
    rows_xxh3: str


@dataclass(frozen=True)
class Version:
    """Entry of the published version in `dataset.json`.

    Attributes:
        number: number of the version, from 1, increasing.
        rows_xxh3: xxh3-128 of the file of its table.
        passes: numbers of the passes that hold its rows, ascending.
        base: the table with all rows to which the table of this version lists changes; None if that has all rows.
    """

    number: int
    rows_xxh3: str
    passes: tuple[int, ...]
    base: Table | None = None

    @classmethod
    def of(cls, content: Any) -> Version:
        """Return the version for the entry `version` of a `dataset.json`, whose shape was checked.

        Raises:
            ValueError: a number is out of range.
        """
        base = Table(**{name: content["base"][name] for name in ("number", "rows_xxh3")}) if "base" in content else None
        version = cls(content["number"], content["rows_xxh3"], tuple(content["passes"]), base)
        if not all(0 < number < 1_000_000_000 for number in (version.number, *version.passes)):
            raise ValueError("a number of its version is out of range")
        if base is not None and not 0 < base.number < version.number:
            raise ValueError("the base of its version is not an earlier version")
        return version

    def content(self) -> dict[str, Any]:
        """Return the entry for `dataset.json`."""
        content = {"number": self.number, "rows_xxh3": self.rows_xxh3, "passes": list(self.passes)}
        return {**content, "base": vars(self.base)} if self.base else content

    @property
    def tables(self) -> list[Table]:
        """The files of the version: its table, and the base of that, if it has one."""
        return [Table(self.number, self.rows_xxh3), *([self.base] if self.base else [])]


@dataclass(frozen=True)
class NewRows:
    """Rows to write to a table.

    Attributes:
        count: number of rows.
        path_bytes: length of the longest path.
        batches: column -> values, for some of the rows each.
    """

    count: int
    path_bytes: int
    batches: Iterable[Mapping[str, Any]]


def pass_folder(out: Path, number: int) -> Path:
    """Return the folder of the data set that one pass computed."""
    return out / "passes" / f"{number:06d}"


def table_path(out: Path, number: int) -> Path:
    """Return the path of a version's table."""
    return out / "versions" / f"{number:06d}.h5"


def write_table(out: Path, number: int, classes: Sequence[str], rows: NewRows, removed: NewRows | None = None) -> Table:
    """Write the table of a version, without publishing the version.

    Args:
        out: folder of the data set.
        number: number of the version.
        classes: names of the classes, to which labels refer.
        rows: the rows, in batches of `path`, `label`, `split`, `pass`, `row` and `source_hash`.
        removed: for a table of changes, the rows of the base to remove, in batches of `path`, `pass` and `row`.

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
                names = [os.fsencode(name) for name in classes]
                width = max(map(len, names), default=1) or 1
                file.create_dataset("classes", data=np.array(names, h5py.string_dtype("utf-8", width)))
                _write(file, "", rows, ("path", "label", "split", "pass", "row", "source_hash"))
                if removed is not None:
                    _write(file, "removed_", removed, ("path", "pass", "row"))
            digest = hash_of(temporary)
    except OSError as error:
        raise LayertapError(f"cannot write {path}: {error.strerror}") from error
    return Table(number, digest)


def _write(file: h5py.File, prefix: str, rows: NewRows, columns: Sequence[str]) -> None:
    widths = {"path": rows.path_bytes or 1, "split": len("train")}
    for name in columns:
        if name == "source_hash":
            file.create_dataset(prefix + name, (rows.count, HASH_BYTES), "u1")
        else:
            dtype = h5py.string_dtype("utf-8", widths[name]) if name in widths else "<i8"
            file.create_dataset(prefix + name, (rows.count,), dtype)
    start = 0
    for batch in rows.batches:
        for name in columns:
            data = file[prefix + name]
            data[start : start + len(batch[name])] = np.array(batch[name], data.dtype)
        start += len(batch["path"])
    if start != rows.count:
        raise LayertapError(f"got {start:,} rows for the table of a version, expected {rows.count:,}")


def hash_of(path: Path) -> str:
    """Return the xxh3-128 of a file; it is read in blocks.

    Raises:
        InputError: the path is not a regular file.
        OSError: it does not exist or cannot be read.
    """
    digest = xxhash.xxh3_128()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
