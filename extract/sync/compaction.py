"""Rewrite passes: drop rows that no file needs any more, and join small passes."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.store.format.copying import COMPRESSIONS
from extract.store.format.dataset import DataSet, remove_strays, shard_rows_for
from extract.store.format.kept_axes import copy_axes
from extract.store.format.layout import RowNames
from extract.store.format.version import pass_folder
from extract.store.reader import FeatureReader
from extract.store.row_copying import copy_rows
from extract.sync.manifest import Manifest
from extract.sync.publishing import publish, remove_unneeded
from extract.system.atomic_files import locked

__all__ = ["Compacted", "compact", "compact_passes", "passes_to_compact", "rewrite"]

# Small passes are joined like the files of a log-structured merge tree: this many passes of one tier become one pass of
# a higher tier, and each tier holds passes this many times larger than the tier below. A row is copied once per tier,
# and there are few tiers. After years of short passes, a few dozen files remain.
_FANOUT = 8


@dataclass(frozen=True)
class Compacted:
    """Result of a compaction.

    Attributes:
        passes: number of passes that were replaced.
        rows: rows of these passes that were kept.
        removed: rows of these passes that were dropped.
    """

    passes: int = 0
    rows: int = 0
    removed: int = 0


def passes_to_compact(sizes: Mapping[int, tuple[int, int]], max_dead: float, shard_rows: int) -> list[int]:
    """Return the passes to rewrite: passes with too many dead rows, and small passes if there are many.

    Args:
        sizes: pass -> (rows to keep, all rows); rows that are not kept are dead.
        max_dead: a pass is rewritten if the share of its dead rows is larger than this.
        shard_rows: rows of a full shard; a pass that keeps fewer rows is small.
    """
    chosen = {number for number, (kept, stored) in sizes.items() if stored - kept > max_dead * stored}
    by_tier = defaultdict[int, list[int]](list)
    for number, (kept, _) in sizes.items():
        if kept < shard_rows:
            by_tier[int(math.log(max(1, kept), _FANOUT))].append(number)
    return sorted(chosen.union(*(passes for passes in by_tier.values() if len(passes) >= _FANOUT)))


def compact(out: Path, max_dead: float) -> Compacted:
    """Rewrite passes with too many rows that no file needs any more, and join many small passes.

    Each large pass is rewritten on its own; small passes are rewritten together. The old files are deleted after a
    version without them is published. Readers that have opened an earlier version can still read it. If the process is
    killed, each rewrite has either taken effect or left the data set unchanged.

    Args:
        out: folder of the data set.
        max_dead: a pass is rewritten if the share of rows that no file needs is larger than this.

    Raises:
        InputError: `out` holds no data set of `layertap sync`, its manifest is lost, or a row does not match its
            hashes.
        LockedError: another process writes to the data set.
        LayertapError: the disk is full or cannot be written to, or the manifest is damaged.
    """
    published = DataSet.open(out)
    if published.version is None:
        raise InputError(f"{out} was not written by `layertap sync`; only such data sets have unneeded rows")
    with locked(out):
        remove_strays(out)
        published = DataSet.open(out)
        with Manifest(out) as manifest:
            number = published.version.number if published.version else 0
            try:
                if manifest.rebuilt_because or manifest.version < number:
                    raise InputError(
                        f"{out}/manifest.sqlite is missing or damaged", hint="run `layertap sync` to rebuild it"
                    )
                return compact_passes(out, manifest, published, max_dead, time.time_ns())[0]
            except sqlite3.Error as error:
                raise LayertapError(
                    f"{out}/manifest.sqlite: {error}", hint="delete it and run `layertap sync` to rebuild it"
                ) from error


def compact_passes(
    out: Path, manifest: Manifest, published: DataSet, max_dead: float, unused_before_ns: int
) -> tuple[Compacted, DataSet]:
    """Implement `compact` for a caller that holds the lock; return the result and the published data set."""
    total = Compacted()
    sizes = manifest.sizes_of_passes(unused_before_ns)
    full_rows = shard_rows_for(published.features)
    chosen = passes_to_compact(sizes, max_dead, full_rows)
    small = [number for number in chosen if sizes[number][0] < full_rows]
    for passes in filter(None, [small, *([number] for number in chosen if number not in small)]):
        compacted = rewrite(out, manifest, passes, unused_before_ns)
        total = Compacted(
            total.passes + compacted.passes, total.rows + compacted.rows, total.removed + compacted.removed
        )
        published = _publish(out, manifest, published)
    if not total.passes:  # an earlier compaction may have failed before it published its version or deleted files
        published = _publish(out, manifest, published)
    return total, published


def _publish(out: Path, manifest: Manifest, published: DataSet) -> DataSet:
    """Publish the state of the manifest, delete files that it does not need, and return the published data set."""
    published = publish(out, published.images["root"], manifest, published) or published
    remove_unneeded(out, manifest, published)
    return published


def rewrite(out: Path, manifest: Manifest, passes: Sequence[int], unused_before_ns: int) -> Compacted:
    """Copy the rows to keep from some passes into a new pass, and record their new positions in the manifest.

    The old passes are not deleted; they are needed until a version without them is published. A process that is killed
    before it updates the manifest leaves only a folder, which the next pass deletes. If a pass is incomplete because a
    repair removed rows from it, its other rows are kept.

    Raises:
        InputError: a row does not match its hashes.
        LayertapError: the disk is full or cannot be written to.
    """
    sizes = manifest.sizes_of_passes(unused_before_ns)
    recorded = sum(size for old_pass, (_, size) in sizes.items() if old_pass in set(passes))
    number = manifest.next_pass()
    try:
        ids = _copy_kept_rows(out, manifest, passes, number, unused_before_ns)
    except BaseException:
        shutil.rmtree(pass_folder(out, number), ignore_errors=True)
        raise
    with manifest.transaction():
        manifest.replace_passes(passes, ids, number)
        manifest.version += 1
    return Compacted(len(passes), len(ids), recorded - len(ids))


def _copy_kept_rows(
    out: Path, manifest: Manifest, passes: Sequence[int], number: int, unused_before_ns: int
) -> list[int]:
    """Write the rows to keep as a new pass; return their ids in the manifest, in order."""
    ids: list[int] = []
    folders = [pass_folder(out, old_pass) for old_pass in passes]
    with FeatureReader(folders, partial=True) as reader:
        bases = np.cumsum([0, *(DataSet.open(folder).n_rows for folder in folders)])
        positions: list[int] = []
        paths: list[str] = []
        for old_pass, base in zip(passes, bases.tolist(), strict=False):
            kept = manifest.kept_rows(old_pass, unused_before_ns)
            wanted = base + np.array([row for _, row, _ in kept], np.int64)
            _, present, places = np.intersect1d(wanted, reader.rows, assume_unique=True, return_indices=True)
            for i, position in zip(present.tolist(), places.tolist(), strict=True):
                feature, _, path = kept[i]
                ids.append(feature)
                positions.append(position)
                paths.append(reader.paths[position] if path is None else os.fsdecode(path))
        if ids:
            compressions = sorted({compression for compression, _ in reader.compression.values()})
            compress = compressions[0] if compressions and compressions[0] in COMPRESSIONS else None
            _write(pass_folder(out, number), reader, np.array(positions, np.int64), paths, passes, compress)
    return ids


def _write(
    folder: Path,
    reader: FeatureReader,
    source: NDArray[np.int64],
    paths: list[str],
    passes: Sequence[int],
    compress: str | None,
) -> None:
    """Write rows of a reader as a pass."""
    old_dataset = DataSet.open(folder.with_name(f"{passes[0]:06d}"))
    images = {
        "root": old_dataset.images["root"],
        "count": len(paths),
        "paths_xxh3": xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, paths))),
    }
    shard_rows = min(max(old_dataset.shard_rows, shard_rows_for(old_dataset.features)), len(paths))
    dataset = DataSet(folder, old_dataset.depends_on, old_dataset.features, images, shard_rows)
    provenance = {**reader.provenance, "compacted_from": list(passes)}

    def names(row_range: range) -> RowNames:
        no_labels = np.full(len(row_range), -1, np.int64)
        return RowNames(paths[row_range.start : row_range.stop], no_labels, [""] * len(row_range), [])

    with dataset.locked():
        dataset.open_or_create()
        copy_axes(old_dataset, folder)
        copy_rows(reader, source, dataset, names, provenance, compress)
