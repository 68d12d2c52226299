"""Read the rows of a version: its table, or its table of changes and the table to which these refer."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, first_line
from extract.store.format.untrusted import Refuse, dataset_in
from extract.store.format.version import HASH_BYTES, Table, Version, hash_of, table_path
from extract.system.atomic_files import open_regular

__all__ = ["RowTable", "check_rows", "read_rows"]

_COLUMNS = {"path": "S", "split": "S", "classes": "S", "label": "i", "pass": "i", "row": "i"}  # name -> dtype.kind
_REMOVED = {"removed_path": "S", "removed_pass": "i", "removed_row": "i"}
_HASHES = "source_hash"  # (N, 16) uint8; earlier versions of layertap wrote none
_TEXTS_AT_ONCE = 1 << 16
_ROWS_AT_ONCE = 1 << 20


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
        hashes: returns (R, 16) uint8, the hashes of the images of a range of rows; None if a table has none.
    """

    paths: Sequence[str]
    labels: NDArray[np.int64]
    splits: Sequence[str]
    classes: Sequence[str]
    passes: NDArray[np.int64]
    rows: NDArray[np.int64]
    hashes: Callable[[int, int], NDArray[np.uint8]] | None = None


class _Texts(Sequence[str]):
    """Texts that are decoded when they are used; a slice is such a sequence, too.

    Args:
        arrays: (N,) bytes each, mapped files.
        chosen: positions in the concatenation of the arrays.
    """

    def __init__(self, arrays: Sequence[NDArray[np.bytes_]], chosen: range | NDArray[Any]):
        self._arrays, self._chosen = arrays, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Texts(self._arrays, self._chosen[index])
        return next(iter(_Texts(self._arrays, np.array([self._chosen[index]]))))

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _TEXTS_AT_ONCE):
            chosen = np.asarray(self._chosen[start : start + _TEXTS_AT_ONCE])
            dtype = max((array.dtype for array in self._arrays), key=lambda dtype: dtype.itemsize)
            yield from map(os.fsdecode, _chosen(self._arrays, chosen, np.empty(len(chosen), dtype)).tolist())


def _chosen(arrays: Sequence[NDArray[Any]], chosen: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Fill `values` with the values at positions in the concatenation of arrays, which is not made, and return it."""
    first = 0
    for array in arrays:
        here = (chosen >= first) & (chosen < first + len(array))
        values[here] = array[chosen[here] - first]
        first += len(array)
    return values


def read_rows(out: Path, version: Version, n_rows: int) -> RowTable:
    """Read the rows of a version.

    The files are mapped: texts are read when they are used, also after later versions have replaced the files.

    Args:
        out: folder of the data set.
        version: the version in `dataset.json`.
        n_rows: rows of the version according to `dataset.json`.

    Raises:
        FileNotFoundError: a table does not exist, for example because a later version has been published.
        InputError: a table is damaged, or is not of this format.
        LayertapError: a table cannot be read.
    """
    base, changes, refuse = _read_tables(out, version)
    if base is not None:
        table = _with_changes(base, changes, refuse)
    else:
        every_row = range(len(changes["path"]))
        classes = [os.fsdecode(name) for name in changes["classes"].tolist()]
        paths, splits = (_Texts([changes[name]], every_row) for name in ("path", "split"))
        hashes = _hashes_of([changes], every_row)
        table = RowTable(paths, changes["label"], splits, classes, changes["pass"], changes["row"], hashes)
    if len(table.paths) != n_rows:
        raise refuse(f"the version has {len(table.paths):,} rows, expected {n_rows:,}")
    if _count_in(table.passes, version.passes) != n_rows:
        raise refuse("it refers to passes that dataset.json does not list")
    return table


def check_rows(out: Path, version: Version, n_rows: int) -> None:
    """Check that `read_rows` would return `n_rows` rows, without making them; arguments and errors as there."""
    base, changes, refuse = _read_tables(out, version)
    count = _count_in(changes["pass"], version.passes)
    if base is not None:
        _check_changes(base, changes, refuse)
        count += _count_in(base["pass"], version.passes) - _count_in(changes["removed_pass"], version.passes)
    if count != n_rows:
        raise refuse(f"the version has {count:,} rows in its passes, expected {n_rows:,}")


def _count_in(ascending: NDArray[np.int64], passes: Sequence[int]) -> int:
    """Return the number of rows in some passes."""
    return int((np.searchsorted(ascending, passes, "right") - np.searchsorted(ascending, passes)).sum())


def _hashes_of(
    tables: Sequence[dict[str, NDArray[Any]]], chosen: range | NDArray[Any]
) -> Callable[[int, int], NDArray[np.uint8]] | None:
    """Return `RowTable.hashes` for positions in the concatenation of tables."""
    arrays = [table[_HASHES] for table in tables if _HASHES in table]
    if len(arrays) < len(tables):
        return None

    def hashes(start: int, stop: int) -> NDArray[np.uint8]:
        positions = np.asarray(chosen[start:stop], np.int64)
        return _chosen(arrays, positions, np.empty((len(positions), HASH_BYTES), np.uint8))

    return hashes


def _read_tables(out: Path, version: Version) -> tuple[dict[str, NDArray[Any]] | None, dict[str, NDArray[Any]], Refuse]:
    """Return the columns of the base, if there is one, and of the version's own table; the rest as `_read_table`."""
    columns = {**_COLUMNS, **(_REMOVED if version.base else {})}
    changes, refuse = _read_table(out, version.tables[0], columns)
    return (_read_table(out, version.base, _COLUMNS)[0] if version.base else None), changes, refuse


def _read_table(out: Path, table: Table, kinds: dict[str, str]) -> tuple[dict[str, NDArray[Any]], Refuse]:
    """Return the columns of a table, and what makes the error for a fault in it; errors as in `read_rows`."""
    path = table_path(out, table.number)

    def refuse(problem: str) -> InputError:
        return InputError(f"{path} is not a valid version table: {problem}")

    columns: dict[str, NDArray[Any]] = {}
    try:
        if hash_of(path) != table.rows_xxh3:
            raise InputError(
                f"{path} is damaged: its hash does not match dataset.json", hint="run `layertap sync` to repair it"
            )
        with os.fdopen(open_regular(path), "rb") as raw, h5py.File(raw, "r") as file:
            mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
            for name, kind in {**kinds, **({_HASHES: "u"} if _HASHES in file else {})}.items():
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
    for prefix, names in (("", ("path", "split", "label", "pass", "row")), ("removed_", ("path", "pass", "row"))):
        if f"{prefix}path" not in columns:
            continue
        lengths = {prefix + name: len(columns[prefix + name]) for name in names}
        lengths |= {_HASHES: len(columns[_HASHES])} if _HASHES in columns and not prefix else {}
        if len(set(lengths.values())) > 1:
            raise refuse(f"its columns have different lengths: {lengths}")
        passes, rows = columns[f"{prefix}pass"], columns[f"{prefix}row"]
        for block in _blocks(len(rows), overlap=1):
            steps = np.diff(passes[block])
            if (steps < 0).any() or ((steps == 0) & (np.diff(rows[block]) < 0)).any() or (rows[block] < 0).any():
                raise refuse("its rows are not in order")
    labels = columns["label"]
    if len(labels) and not (labels.min() >= -1 and labels.max() < len(columns["classes"])):
        raise refuse("a label is not the index of a class")


def _blocks(count: int, overlap: int = 0) -> Iterator[slice]:
    """Yield slices of some rows each, so that temporary arrays are small; each begins before the last one ends."""
    for start in range(0, count, _ROWS_AT_ONCE):
        yield slice(start, start + _ROWS_AT_ONCE + overlap)


def _gathered(base: NDArray[np.int64], added: NDArray[np.int64], chosen: NDArray[Any]) -> NDArray[np.int64]:
    """Return the values at positions in the concatenation of two arrays, which is not made."""
    values = np.empty(len(chosen), np.int64)
    for block in _blocks(len(chosen)):
        is_added = chosen[block] >= len(base)
        values[block] = base[np.where(is_added, 0, chosen[block])] if len(base) else 0
        values[block][is_added] = added[chosen[block][is_added] - len(base)]
    return values


def _check_changes(
    base: dict[str, NDArray[Any]], changes: dict[str, NDArray[Any]], refuse: Refuse
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which rows of a table are kept after changes to it, and the places of the added rows in its order."""
    removed, found = _places(base, changes["removed_path"], changes["removed_pass"], changes["removed_row"])
    if not found.all() or len(np.unique(removed)) != len(removed):
        raise refuse("it removes rows that its base does not have")
    kept = np.ones(len(base["path"]), np.bool_)
    kept[removed] = False
    places, found = _places(base, changes["path"], changes["pass"], changes["row"])
    if (found & kept[np.minimum(places, max(0, len(kept) - 1))]).any():
        raise refuse("it adds rows that its base has")
    return kept, places


def _with_changes(base: dict[str, NDArray[Any]], changes: dict[str, NDArray[Any]], refuse: Refuse) -> RowTable:
    """Return the rows of a table after changes to it."""
    kept, places = _check_changes(base, changes, refuse)
    chosen = np.flatnonzero(kept).astype(np.min_scalar_type(len(kept) + len(changes["path"])))
    added = len(base["path"]) + np.arange(len(places))
    chosen = np.insert(chosen, np.searchsorted(chosen, places), added)
    names = [os.fsdecode(name) for table in (base, changes) for name in table["classes"].tolist()]
    shift = len(base["classes"])  # of the labels of added rows
    labels = _gathered(base["label"], np.where(changes["label"] < 0, -1, changes["label"] + shift), chosen)
    counts = np.zeros(len(names) + 1, np.int64)  # the first is that of the rows without a class
    for block in _blocks(len(labels)):
        counts += np.bincount(labels[block] + 1, minlength=len(counts))
    used = counts[1:].tolist()
    classes = sorted({name for name, count in zip(names, used, strict=True) if count}, key=os.fsencode)
    index = {name: number for number, name in enumerate(classes)}
    numbers = np.array([*(index.get(name, -1) for name in names), -1], np.int64)  # -1 stays -1
    for block in _blocks(len(labels)):
        labels[block] = numbers[labels[block]]
    return RowTable(
        _Texts([base["path"], changes["path"]], chosen),
        labels,
        _Texts([base["split"], changes["split"]], chosen),
        classes,
        _gathered(base["pass"], changes["pass"], chosen),
        _gathered(base["row"], changes["row"], chosen),
        _hashes_of([base, changes], chosen),
    )


def _places(
    base: dict[str, NDArray[Any]], paths: NDArray[Any], passes: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the places of rows in the order of a table, and whether it has them."""
    places, found = np.zeros(len(paths), np.int64), np.zeros(len(paths), np.bool_)
    for number in np.unique(passes).tolist():
        first, last = np.searchsorted(base["pass"], [number, number + 1]).tolist()
        its_rows = base["row"][first:last]
        here = slice(*np.searchsorted(passes, [number, number + 1]).tolist())
        places[here] = first + np.searchsorted(its_rows, rows[here])
        ends = first + np.searchsorted(its_rows, rows[here], "right")
        for i in (here.start + np.flatnonzero(ends > places[here])).tolist():  # these rows are in the table
            end = int(ends[i - here.start])
            places[i] = bisect_left(base["path"], paths[i], int(places[i]), end)
            found[i] = places[i] < end and base["path"][places[i]] == paths[i]
    return places, found
