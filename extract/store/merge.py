"""Merge several data sets with the same fingerprint, and copy rows of a reader into another data set."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LockedError
from extract.row_status import Status
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.kept_axes import copy_axes
from extract.store.format.layout import RowNames, row_bytes
from extract.store.format.shard import BLOCK_BYTES, runs
from extract.store.format.untrusted import need_libraries
from extract.store.format.writer import SOURCE, ShardWork, open_part
from extract.store.reader import FeatureReader
from extract.store.text_column import TextColumn

__all__ = ["copy_rows", "merge"]


def merge(
    sources: Sequence[Path],
    out: Path,
    *,
    shard_rows: int | None = None,
    compress: str | None = None,
    on_rows: Callable[[int, bool], None] = lambda rows, stored: None,
) -> DataSet:
    """Copy the rows of complete data sets into a new data set, sorted by path; a repeated call resumes the copy.

    Paths become relative to the common parent of all image folders.

    Args:
        sources: folders of data sets.
        out: folder of the new data set.
        shard_rows: rows in a shard; None keeps the value of an existing data set, or limits shards to 1 GB.
        compress: see `ShardWriter.publish`.
        on_rows: called with a number of rows, and whether they were already stored (True) or copied now (False).

    Raises:
        InputError: `shard_rows` is less than 1, the fingerprints differ, an image is in two sources, a row does not
            match its hashes, or `out` holds something else.
        LockedError: another process writes to `out`.
        LayertapError: a source is incomplete, or the disk is full or cannot be written to.
    """
    if shard_rows is not None and shard_rows < 1:
        raise InputError(f"shard_rows is {shard_rows}; it must be at least 1")
    need_libraries(compress)
    datasets = [DataSet.open(source) for source in sources]
    for source in sources:
        if source.resolve() in (out.resolve(), *out.resolve().parents):
            raise InputError(
                f"{out} is one of the data sets to merge, or inside one", hint="choose another output folder"
            )
    with FeatureReader(list(sources)) as reader:
        if reader.fingerprint != datasets[0].fingerprint:
            raise LockedError(f"layers were added to {sources[0]} meanwhile", hint="run again")
        existing_rows = DataSet.open(out).shard_rows if (out / "dataset.json").exists() else None
        root, paths, rows = _sorted_by_path(reader, datasets, sources)
        merged = DataSet(
            out,
            datasets[0].depends_on,
            datasets[0].features,
            {
                "root": root,
                "count": len(paths),
                "paths_xxh3": xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, paths))),
                "merged_from": sorted(
                    ({name: dataset.images[name] for name in ("root", "count", "paths_xxh3")} for dataset in datasets),
                    key=lambda source: str(source["root"]),
                ),
            },
            min(shard_rows or existing_rows or shard_rows_for(datasets[0].features), len(paths)),
        )
        if merged.check() is not None:
            _check_same_rows(merged, reader, rows)
        provenance = {
            **reader.provenance,
            "merged_from": [
                {"out": str(source.resolve()), "images": dataset.images}
                for source, dataset in zip(sources, datasets, strict=True)
            ],
        }

        def names(row_range: range) -> RowNames:
            part = slice(row_range.start, row_range.stop)
            chosen, splits, ids = rows[part], cast(TextColumn, reader.splits), cast(TextColumn | None, reader.ids)
            columns = cast(Mapping[str, TextColumn | NDArray[Any]], reader.columns)
            return RowNames(
                paths[part],
                reader.labels[chosen],
                splits[chosen],
                reader.classes,
                None if ids is None else ids[chosen],
                {name: values[chosen] for name, values in columns.items()},
            )

        with merged.locked():
            merged.open_or_create()
            copy_axes(datasets[0], out)
            copy_rows(reader, rows, merged, names, provenance, compress, on_rows)
    return merged


def _sorted_by_path(
    reader: FeatureReader, datasets: Sequence[DataSet], sources: Sequence[Path]
) -> tuple[str, list[str], NDArray[np.int64]]:
    """Return the rows of the merged data set.

    Returns:
        The common parent of all image folders, paths relative to it, sorted by their bytes, and the row of the reader
        for each.
    """
    # `os.path` would collapse the "//" of a URL.
    roots = [dataset.images["root"].replace("://", "/:/") for dataset in datasets]
    try:
        root = os.path.commonpath(roots)
    except ValueError as error:
        raise InputError(f"the image folders of the data sets have no common parent: {error}") from error
    prefixes = [os.path.relpath(dataset_root, root) for dataset_root in roots]
    root = root.replace("/:/", "://")
    paths = [
        path if prefixes[number] == "." else f"{prefixes[number]}/{path}"
        for number, path in zip(reader.sets.tolist(), reader.paths, strict=True)
    ]
    encoded = [os.fsencode(path) for path in paths]
    order = sorted(range(len(paths)), key=encoded.__getitem__)
    for first, second in itertools.pairwise(order):
        if encoded[first] == encoded[second]:
            raise InputError(
                f"{paths[first]} (below {root}) is in {sources[reader.sets[first]]} and in "
                f"{sources[reader.sets[second]]}; an image may be in only one of them"
            )
    return root, [paths[row] for row in order], np.array(order, np.int64)


def _check_same_rows(merged: DataSet, reader: FeatureReader, rows: NDArray[np.int64]) -> None:
    """Check that the rows already stored match those of the sources.

    Raises:
        InputError: a row differs, because a source has changed.
    """
    with FeatureReader(merged.out, partial=True) as stored:
        source = rows[stored.rows]
        matches = stored.column("row_hash") == reader.column("row_hash")[source]
        matches &= (stored.column("source_hash") == reader.column("source_hash")[source]).all(1)
        matches &= stored.status == reader.status[source]
        if not matches.all():
            path = stored.paths[int(np.flatnonzero(~matches)[0])]
            raise InputError(
                f"{merged.out}: the stored row of {path} differs from the data sets to merge",
                hint="merge into a new folder",
            )


def copy_rows(
    reader: FeatureReader,
    source: NDArray[np.int64],
    dataset: DataSet,
    names: Callable[[range], RowNames],
    provenance: dict[str, Any],
    compress: str | None = None,
    on_rows: Callable[[int, bool], None] = lambda rows, stored: None,
) -> None:
    """Fill a data set, whose folder exists and is locked, with rows of a reader; a repeated call resumes the copy.

    Args:
        reader: source of the rows.
        source: (N,) int64, the row of the reader for each row of the data set.
        dataset: the data set to fill.
        names: returns paths, labels, splits, classes, ids and kept columns of a range of its rows.
        provenance: provenance of its shards.
        compress: see `ShardWriter.publish`.
        on_rows: called with a number of rows, and whether they were already stored (True) or copied now (False).

    Raises:
        InputError: a row does not match its hashes.
        LayertapError: the disk is full or cannot be written to.
    """
    reasons = {row: why for row, _, _, why in reader.failures}
    at_once = max(1, BLOCK_BYTES // max(1, row_bytes(dataset.features)))
    for shard, files in enumerate(dataset.shard_files()):
        row_range = dataset.shard_range(shard)
        if files.published is not None and files.part is None:
            on_rows(len(row_range), True)
            continue
        with open_part(dataset, ShardWork(shard, files.part or 0, row_range), names, provenance) as writer:
            writer.check()
            todo = np.flatnonzero(writer.status == Status.PENDING)
            on_rows(len(row_range) - len(todo), True)
            for start, stop in runs(todo, at_once):
                rows = np.arange(row_range.start + start, row_range.start + stop)
                features = reader.checked(source[rows])
                columns = {name: reader.column(name)[source[rows]] for name in SOURCE}
                writer.write(rows, features, reader.status[source[rows]], columns)
                on_rows(stop - start, False)
            origins = source[row_range.start : row_range.stop].tolist()
            pairs = zip(row_range, origins, strict=True)
            writer.give_reasons({row: reasons[origin] for row, origin in pairs if origin in reasons})
            writer.publish(compress)
