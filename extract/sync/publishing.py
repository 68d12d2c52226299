"""Publish the state of the manifest as the version that readers see."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.images.image_list import class_and_split, classes_of_folders
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.version import HASH_BYTES, Version, pass_folder, table_path, write_table
from extract.store.reader import FeatureReader
from extract.sync.manifest import Manifest, batches
from extract.system.atomic_files import discard

__all__ = ["publish", "remove_unneeded"]

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
    number = published.version.number if published and published.version else 0
    is_published = published is not None and number == manifest.version and _is_intact(published, root)
    if is_published or not manifest.version:
        return published
    if number >= manifest.version:
        with manifest.transaction():
            manifest.version = number + 1
    count = manifest.n_files()
    if published is None and not count:  # all rows were lost
        return None
    template = published or DataSet.open(pass_folder(out, manifest.passes()[0]))
    classes, split_level, paths_xxh3 = _read_paths(manifest)
    rows = map(_columns_with_labels(out, classes, split_level), batches(manifest.rows()))
    rows_xxh3 = write_table(out, manifest.version, classes, count, manifest.longest_path(), rows)
    version = Version(manifest.version, rows_xxh3, tuple(manifest.passes_in_use()))
    images = {"root": root, "count": count, "paths_xxh3": paths_xxh3}
    dataset = DataSet(out, template.depends_on, template.features, images, shard_rows_for(template.features), version)
    try:  # before readers see it, and before the files of the published version are deleted
        DataSet.from_content(json.loads(json.dumps(dataset.content())), out, "dataset.json").version_rows()
    except (InputError, FileNotFoundError) as error:
        raise sqlite3.DatabaseError(f"a version made of it cannot be read: {error}") from error
    try:
        dataset.write()
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    return dataset


def _is_intact(published: DataSet, root: str) -> bool:
    """Return whether a version is one of this folder that can be read."""
    assert published.version is not None
    try:
        published.version_rows()
    except (InputError, FileNotFoundError):
        return False
    return bool(published.images["root"] == root)


def _read_paths(manifest: Manifest) -> tuple[list[str], bool, str]:
    """Return the classes, whether the first folders are splits, and the xxh3-128 of the sorted paths; read once."""
    digest = xxhash.xxh3_128()

    def folders() -> Iterator[str]:
        for number, paths in enumerate(batches(manifest.paths())):
            digest.update((b"\0" if number else b"") + b"\0".join(paths))
            # The paths of a folder are neighbours, but for those of folders in it.
            yield from (os.fsdecode(folder) for folder, _ in itertools.groupby(map(_folder_of, paths)))

    classes, split_level = classes_of_folders(folders())
    return classes, split_level, digest.hexdigest()


def _folder_of(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


def _columns_with_labels(
    out: Path, classes: list[str], split_level: bool
) -> Callable[[list[tuple[bytes, int, int, bytes]]], dict[str, Any]]:
    """Return a function that gives the columns of checked rows of the manifest; for labels, `labels_from_folders`."""
    check = _hash_check(out)
    index = {name: number for number, name in enumerate(classes)}

    @functools.lru_cache(_CACHED_FOLDERS)
    def label_and_split(folder: bytes) -> tuple[int, str]:
        name, split = class_and_split(os.fsdecode(folder), split_level)
        return -1 if name is None else index[name], split

    def columns(batch: list[tuple[bytes, int, int, bytes]]) -> dict[str, Any]:
        paths, passes, rows, hashes = zip(*batch, strict=True)
        labels, splits = zip(*map(label_and_split, map(_folder_of, paths)), strict=True)
        source_hash = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)
        check(np.array(passes), np.array(rows), source_hash)
        return {"path": paths, "pass": passes, "row": rows, "label": labels, "split": splits,
                "source_hash": source_hash}  # fmt: skip

    return columns


def _hash_check(out: Path) -> Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]], None]:
    """Return a function that compares rows, sorted by pass and row, with the passes that have their features.

    It is the last of three checks of the manifest, and independent of SQLite. It raises sqlite3.DatabaseError if the
    features of a row were computed from another image.
    """

    @functools.lru_cache(1)
    def reader_of(number: int) -> FeatureReader | None:
        try:
            return FeatureReader(pass_folder(out, number))
        except LayertapError:
            return None

    def check(passes: NDArray[np.int64], rows: NDArray[np.int64], hashes: NDArray[np.uint8]) -> None:
        for number in np.unique(passes).tolist():
            reader, of_pass = reader_of(number), passes == number
            if reader is None:  # it cannot be read: then no reader takes a row of it for another
                continue
            here = rows[of_pass]
            first, last = int(here.min()), int(here.max())
            try:
                stored = reader.column("source_hash", slice(first, last + 1))
            except LayertapError:  # nor can this shard
                continue
            if len(stored) <= last - first or (stored[here - first] != hashes[of_pass]).any():
                raise sqlite3.DatabaseError(f"rows of pass {number} do not belong to the images of their files")

    return check


def remove_unneeded(out: Path, manifest: Manifest, published: DataSet | None) -> None:
    """Delete tables of other versions than the published one, and passes that are not planned and have no row.

    Processes that have these files open can still read them.
    """
    version = published.version if published else None
    needed = table_path(out, version.number) if version else None
    for table in (out / "versions").glob("*"):
        if table != needed:
            discard(table)
    recorded, (planned, _) = set(manifest.passes()), manifest.planned()
    for folder in (out / "passes").glob("*"):
        if not folder.name.isdecimal() or int(folder.name) not in recorded | {planned}:
            shutil.rmtree(folder, ignore_errors=True)
