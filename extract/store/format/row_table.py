"""Read the rows of a version from its table."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, first_line
from extract.store.format.untrusted import Refuse, dataset_in
from extract.store.format.version import HASH_BYTES, Version, hash_of, table_path
from extract.system.atomic_files import open_regular

__all__ = ["RowTable", "read_rows"]

_COLUMNS = {"path": "S", "split": "S", "classes": "S", "label": "i", "pass": "i", "row": "i"}  # name -> dtype.kind
_HASHES = "source_hash"  # (N, 16) uint8; earlier versions of layertap wrote none
_TEXTS_AT_ONCE = 1 << 16
_REPAIR = "run `layertap sync` to repair it"


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
        hashes: (N, 16) uint8, the hashes of the images; None if the table has none.
    """

    paths: Sequence[str]
    labels: NDArray[np.int64]
    splits: Sequence[str]
    classes: Sequence[str]
    passes: NDArray[np.int64]
    rows: NDArray[np.int64]
    hashes: NDArray[np.uint8] | None = None


class _Texts(Sequence[str]):
    """Texts that are decoded when they are used; a slice is such a sequence, too.

    As a list of `str`, with the numbers beside them, a million rows took 340 MB.

    Args:
        array: (N,) bytes, a mapped file.
    """

    def __init__(self, array: NDArray[np.bytes_]):
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return _Texts(self._array[index]) if isinstance(index, slice) else os.fsdecode(self._array[index])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _TEXTS_AT_ONCE):
            yield from map(os.fsdecode, self._array[start : start + _TEXTS_AT_ONCE].tolist())


def read_rows(out: Path, version: Version, n_rows: int) -> RowTable:
    """Read the rows of a version.

    The file is mapped: texts are read when they are used, also after later versions have replaced the file.

    Args:
        out: folder of the data set.
        version: the version in `dataset.json`.
        n_rows: rows of the version according to `dataset.json`.

    Raises:
        FileNotFoundError: a table does not exist, for example because a later version has been published.
        InputError: a table is damaged, or is not of this format.
        LayertapError: a table cannot be read.
    """
    columns, refuse = _read_table(out, version)
    passes = columns["pass"]
    if len(passes) != n_rows:
        # Earlier versions of layertap wrote tables of changes, which the next pass replaces.
        raise refuse(f"it has {len(passes):,} rows, expected {n_rows:,}")
    if not np.isin(np.unique(passes), version.passes).all():
        raise refuse("it refers to passes that dataset.json does not list")
    classes = [os.fsdecode(name) for name in columns["classes"].tolist()]
    return RowTable(
        _Texts(columns["path"]), columns["label"], _Texts(columns["split"]), classes, passes, columns["row"],
        columns.get(_HASHES),
    )  # fmt: skip


def _read_table(out: Path, version: Version) -> tuple[dict[str, NDArray[Any]], Refuse]:
    """Return the columns of a table, and what makes the error for a fault in it; errors as in `read_rows`."""
    path = table_path(out, version.number)

    def refuse(problem: str) -> InputError:
        return InputError(f"{path} is not a valid version table: {problem}", hint=_REPAIR)

    columns: dict[str, NDArray[Any]] = {}
    try:
        if hash_of(path) != version.rows_xxh3:
            raise InputError(f"{path} is damaged: its hash does not match dataset.json", hint=_REPAIR)
        with os.fdopen(open_regular(path), "rb") as raw, h5py.File(raw, "r") as file:
            mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
            for name, kind in {**_COLUMNS, **({_HASHES: "u"} if _HASHES in file else {})}.items():
                data = dataset_in(file.id, name, refuse)
                inner = (HASH_BYTES,) if name == _HASHES else ()
                if data.dtype.kind != kind or data.shape[1:] != inner or not data.shape or data.chunks is not None:
                    raise refuse(f"column {name!r} is {data.dtype} {data.shape}, or compressed")
                if data.size * data.dtype.itemsize > len(mapped):
                    raise refuse(f"column {name!r} has more bytes than the file")
                column = (
                    np.empty(data.shape, data.dtype)
                    if not data.size
                    else (np.frombuffer(mapped, data.dtype, data.size, data.id.get_offset()).reshape(data.shape))
                )
                columns[name] = column.astype(np.int64, copy=False) if kind == "i" else column
    except (FileNotFoundError, LayertapError):
        raise
    except OSError as error:
        if error.errno:
            raise LayertapError(f"cannot read {path}: {error.strerror}") from error
        raise InputError(f"{path} is damaged: {first_line(error)}") from error
    except Exception as error:  # h5py raises errors of many types on malformed files
        raise InputError(f"{path} is damaged: {first_line(error)}") from error
    _check(columns, refuse)
    return columns, refuse


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
