"""Publish the state of the manifest as the version that readers see."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import xxhash

from extract.errors import LayertapError
from extract.images.image_list import labels_from_folders
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.version import RowTable, is_intact, pass_folder, table_path, write_rows
from extract.sync.manifest import Manifest
from extract.system.atomic_files import discard

__all__ = ["publish", "remove_unneeded"]


def publish(out: Path, root: str, manifest: Manifest, published: DataSet | None) -> DataSet | None:
    """Publish the state of the manifest, if it is not published yet.

    Returns:
        The published data set; None if there is none.

    Raises:
        LayertapError: the disk is full or cannot be written to.
    """
    number, intact = 0, False
    if published is not None and published.version is not None:
        number = published.version.number
        intact = is_intact(published.out, published.version) and published.images["root"] == root
    if (number == manifest.version and intact) or not manifest.version:
        return published
    if number >= manifest.version:
        with manifest.transaction():
            manifest.version = number + 1
    rows = list(manifest.rows())
    paths = [path.decode("utf-8", "surrogateescape") for path, _, _ in rows]
    labels, classes, splits = labels_from_folders(paths)
    positions = np.array([position for _, *position in rows], np.int64).reshape(-1, 2)
    if published is None and not rows:  # all rows were lost
        return None
    template = published or DataSet.open(pass_folder(out, manifest.passes()[0]))
    table = RowTable(paths, labels, splits, classes, positions[:, 0], positions[:, 1])
    version = write_rows(out, manifest.version, table)
    paths_digest = xxhash.xxh3_128_hexdigest(b"\0".join(sorted(path for path, _, _ in rows)))
    images = {"root": root, "count": len(rows), "paths_xxh3": paths_digest}
    dataset = DataSet(out, template.depends_on, template.features, images, shard_rows_for(template.features), version)
    try:
        dataset.write()
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    return dataset


def remove_unneeded(out: Path, manifest: Manifest) -> None:
    """Delete the tables of earlier versions, and passes that are not planned and have no row in the manifest.

    Processes that have these files open can still read them.
    """
    for table in (out / "versions").glob("*"):
        if table != table_path(out, manifest.version):
            discard(table)
    recorded, (planned, _) = set(manifest.passes()), manifest.planned()
    for folder in (out / "passes").glob("*"):
        if not folder.name.isdecimal() or int(folder.name) not in recorded | {planned}:
            shutil.rmtree(folder, ignore_errors=True)
