"""Publish the state of the manifest as the version that readers see."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.images.image_list import class_and_split, classes_of_folders
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.row_table import check_rows
from extract.store.format.version import (
    HASH_BYTES,
    NewRows,
    Table,
    Version,
    hash_of,
    pass_folder,
    table_path,
    write_table,
)
from extract.sync.manifest import Manifest, batches
from extract.system.atomic_files import discard

__all__ = ["publish", "remove_unneeded"]

Row = tuple[bytes, int, int, bytes]  # path, pass, row, hash of the image
RemovedRow = tuple[bytes, int, int]

R = TypeVar("R", Row, RemovedRow)

_SMALL_ROWS = 1 << 14  # a smaller table is written whole: it takes about a megabyte
_ROWS_PER_CHANGE = 4  # a table of changes has at most this share of the rows of its base
_CACHED_FOLDERS = 1 << 14  # the rows of a pass are sorted by path, so a few folders would do


def publish(out: Path, root: str, manifest: Manifest, published: DataSet | None) -> DataSet | None:
    """Publish the state of the manifest, if it is not published yet.

    Returns:
        The published data set; None if there is none.

    Raises:
        sqlite3.DatabaseError: the manifest is damaged: a row has the features of another image, or no reader could open
            the version. The published version does not change.
        LayertapError: the disk is full or cannot be written to.
    """
    number, intact = 0, False
    if published is not None and published.version is not None:
        number = published.version.number
        intact = _fault_of(published) is None and published.images["root"] == root
    if (number == manifest.version and intact) or not manifest.version:
        return published
    if number >= manifest.version:
        with manifest.transaction():
            manifest.version = number + 1
    paths = _PathSummary.of(manifest)
    if published is None and not paths.count:  # all rows were lost
        return None
    template = published or DataSet.open(pass_folder(out, manifest.passes()[0]))
    version = _write_rows(out, manifest, paths)
    images = {"root": root, "count": paths.count, "paths_xxh3": paths.digest}
    dataset = DataSet(out, template.depends_on, template.features, images, shard_rows_for(template.features), version)
    if fault := _fault_of(dataset):  # before readers see it, and before the files of the published version are deleted
        raise sqlite3.DatabaseError(f"a version made of it cannot be read: {fault}")
    try:
        dataset.write()
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    return dataset


def _fault_of(dataset: DataSet) -> str | None:
    """Return why the rows of a version cannot be read; None if they can."""
    assert dataset.version is not None
    try:
        DataSet.from_content(json.loads(json.dumps(dataset.content())), dataset.out, "dataset.json")
        check_rows(dataset.out, dataset.version, dataset.n_rows)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except InputError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _PathSummary:
    """What a version depends on of all paths.

    Attributes:
        count: number of paths.
        digest: xxh3-128 of the sorted paths.
        path_bytes: length of the longest path.
        classes: names of the classes.
        split_level: whether the first folders are splits.
    """

    count: int
    digest: str
    path_bytes: int
    classes: list[str]
    split_level: bool

    @classmethod
    def of(cls, manifest: Manifest) -> _PathSummary:
        """Return the summary of the paths in a manifest, which are read once."""
        digest, count, path_bytes = xxhash.xxh3_128(), 0, 0

        def folders() -> Iterator[str]:
            nonlocal count, path_bytes
            last = b""
            for paths in manifest.paths():
                digest.update((b"\0" if count else b"") + b"\0".join(paths))
                count += len(paths)
                path_bytes = max(path_bytes, *map(len, paths))
                for path in paths:
                    folder = path.rpartition(b"/")[0]
                    if folder != last:  # the paths of a folder are neighbours, but for those of folders in it
                        last = folder
                        yield os.fsdecode(folder)

        classes, split_level = classes_of_folders(folders())
        return cls(count, digest.hexdigest(), path_bytes, classes, split_level)


def _write_rows(out: Path, manifest: Manifest, paths: _PathSummary) -> Version:
    """Write the table of the version: the changes to the last table with all rows, or all rows."""
    number, base = manifest.version, _base_for_changes(out, manifest, paths)
    passes = tuple(manifest.passes_in_use())
    if base is not None:
        folders = {os.fsdecode(path.rpartition(b"/")[0]) for path, *_ in manifest.added_rows()}
        names = {class_and_split(folder, paths.split_level)[0] for folder in folders}
        classes = sorted(name for name in names if name is not None)
        rows = _new_rows(manifest.added_rows, _columns_with_labels(out, classes, paths.split_level))
        table = write_table(out, number, classes, rows, _new_rows(manifest.removed_rows, _columns))
        return Version(number, table.rows_xxh3, passes, base)
    columns = _columns_with_labels(out, paths.classes, paths.split_level)
    rows = NewRows(paths.count, paths.path_bytes, map(columns, batches(manifest.rows())))
    table = write_table(out, number, paths.classes, rows)
    # Before the version is published: a pass that is killed after that needs no table with all rows, either.
    with manifest.transaction():
        manifest.set_base({**vars(table), "rows": paths.count, "split_level": paths.split_level})
    return Version(number, table.rows_xxh3, passes)


def _base_for_changes(out: Path, manifest: Manifest, paths: _PathSummary) -> Table | None:
    """Return the table to which changes are to be written; None to write all rows."""
    base = manifest.base
    if not base or base["number"] >= manifest.version or base["split_level"] != paths.split_level:
        return None
    if _is_due(base["rows"], manifest.n_changes(), manifest.version - base["number"]):
        return None
    table = Table(base["number"], base["rows_xxh3"])
    try:
        return table if hash_of(table_path(out, table.number)) == table.rows_xxh3 else None
    except (OSError, InputError):  # it is missing, or something else has taken its place
        return None


def _is_due(rows: int, changes: int, versions: int) -> bool:
    """Return whether all rows are to be written, instead of changes.

    Each version has all changes since its base. If passes change C rows each, table V after the base has V * C rows,
    and together these tables have V * V * C / 2. A new base is due when they have as many rows as the base: then about
    half of what is written are bases.

    Args:
        rows: rows of the base.
        changes: paths that have changed since.
        versions: versions since.
    """
    return rows < _SMALL_ROWS or changes > rows / _ROWS_PER_CHANGE or versions * changes / 2 > rows


def _new_rows(rows: Callable[[], Iterator[R]], columns: Callable[[list[R]], dict[str, Any]]) -> NewRows:
    """Return rows to write, which are read twice: once for their number and the longest path."""
    count = path_bytes = 0
    for path, *_ in rows():
        count, path_bytes = count + 1, max(path_bytes, len(path))
    return NewRows(count, path_bytes, map(columns, batches(rows())))


def _columns(batch: list[RemovedRow]) -> dict[str, Any]:
    paths, passes, rows = zip(*batch, strict=True)
    return {"path": paths, "pass": passes, "row": rows}


def _columns_with_labels(out: Path, classes: list[str], split_level: bool) -> Callable[[list[Row]], dict[str, Any]]:
    """Return a function that gives the columns of rows, after `_HashCheck`; for labels, see `labels_from_folders`."""
    check = _HashCheck(out)
    index = {name: number for number, name in enumerate(classes)}

    @functools.lru_cache(_CACHED_FOLDERS)
    def label_and_split(folder: bytes) -> tuple[int, str]:
        name, split = class_and_split(os.fsdecode(folder), split_level)
        return -1 if name is None else index[name], split

    def columns(batch: list[Row]) -> dict[str, Any]:
        paths, passes, rows, hashes = zip(*batch, strict=True)
        labels, splits = zip(*(label_and_split(path.rpartition(b"/")[0]) for path in paths), strict=True)
        source_hash = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)
        check(np.array(passes), np.array(rows), source_hash)
        return {"path": paths, "pass": passes, "row": rows, "label": labels, "split": splits,
                "source_hash": source_hash}  # fmt: skip

    return columns


class _HashCheck:
    """Compares rows with the passes that have their features, before they are published.

    Raises:
        sqlite3.DatabaseError: the features of a row were computed from another image.
    """

    def __init__(self, out: Path):
        self._out = out
        # Rows are sorted by pass and row.
        self._dataset = functools.lru_cache(1)(self._open)
        self._stored = functools.lru_cache(1)(self._read)

    def __call__(self, passes: NDArray[np.int64], rows: NDArray[np.int64], hashes: NDArray[np.uint8]) -> None:
        for number in np.unique(passes).tolist():
            if (dataset := self._dataset(number)) is None:
                continue
            of_pass = np.flatnonzero(passes == number)
            shards = rows[of_pass] // dataset.shard_rows
            for shard in np.unique(shards).tolist():
                here = of_pass[shards == shard]
                stored = self._stored(number, shard)
                local = rows[here] - shard * dataset.shard_rows
                if stored is not None and (local.max() >= len(stored) or (stored[local] != hashes[here]).any()):
                    raise sqlite3.DatabaseError(f"rows of pass {number} do not belong to the images of their files")

    def _open(self, number: int) -> DataSet | None:
        try:
            return DataSet.open(pass_folder(self._out, number))
        except InputError:
            return None

    def _read(self, number: int, shard: int) -> NDArray[np.uint8] | None:
        """Return (N, 16) uint8, empty if there is no such shard.

        None if the shard cannot be read: then no reader takes a row of it for another.
        """
        dataset = self._dataset(number)
        assert dataset is not None
        if not 0 <= shard < dataset.n_shards:
            return np.empty((0, HASH_BYTES), np.uint8)
        if (path := dataset.published()[shard]) is None:
            return None
        try:
            with dataset.open_shard(shard, path) as opened:
                return opened.column("source_hash")
        except LayertapError:
            return None


def remove_unneeded(out: Path, manifest: Manifest, published: DataSet | None) -> None:
    """Delete tables that the published version does not need, and passes that are not planned and have no row.

    Processes that have these files open can still read them.
    """
    version = published.version if published else None
    needed = {table_path(out, table.number) for table in version.tables} if version else set()
    for table in (out / "versions").glob("*"):
        if table not in needed:
            discard(table)
    recorded, (planned, _) = set(manifest.passes()), manifest.planned()
    for folder in (out / "passes").glob("*"):
        if not folder.name.isdecimal() or int(folder.name) not in recorded | {planned}:
            shutil.rmtree(folder, ignore_errors=True)
