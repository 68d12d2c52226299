"""Rewrite passes: drop rows that no file needs any more, and join small passes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError
from extract.images.image_list import texts_hash, values_at
from extract.store.format.dataset import DataSet, remove_strays, shard_rows_for
from extract.store.format.kept_axes import copy_axes
from extract.store.format.layout import RowNames
from extract.store.format.shard import COMPRESSIONS
from extract.store.format.version import pass_folder
from extract.store.merge import copy_rows
from extract.store.reader import FeatureReader
from extract.sync.records import Records, load, locate, publish, row_numbers
from extract.system.atomic_files import locked

__all__ = ["Compacted", "compact", "compact_passes", "passes_to_compact", "rewrite"]

_SMALL_PASSES = 32  # that are joined; together they are about a shard at most, which is quickly copied


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
    """Return the passes to rewrite: passes with too many dead rows, and all small passes if there are many.

    Args:
        sizes: pass -> (rows to keep, all rows); rows that are not kept are dead.
        max_dead: a pass is rewritten if the share of its dead rows is larger than this.
        shard_rows: rows of a full shard; a pass that keeps fewer rows is small.
    """
    chosen = {number for number, (kept, stored) in sizes.items() if stored - kept > max_dead * stored}
    small = [number for number, (kept, _) in sizes.items() if kept < shard_rows]
    return sorted(chosen.union(small if len(small) >= _SMALL_PASSES else ()))


def compact(out: Path, max_dead: float) -> Compacted:
    """Rewrite passes with too many rows that no file needs any more, and join many small passes.

    Each large pass is rewritten on its own; small passes are rewritten together. The old files are deleted after a
    version without them is published. Readers that have opened an earlier version can still read it. If the process is
    killed, each rewrite has either taken effect or left the data set unchanged.

    Args:
        out: folder of the data set.
        max_dead: a pass is rewritten if the share of rows that no file needs is larger than this.

    Raises:
        InputError: `out` holds no data set of `layertap sync`, its table is lost, or a row does not match its hashes.
        LockedError: another process writes to the data set.
        LayertapError: the disk is full or cannot be written to.
    """
    if DataSet.open(out).version is None:
        raise InputError(f"{out} was not written by `layertap sync`; only such data sets have unneeded rows")
    with locked(out):
        remove_strays(out)
        published, now_ns = DataSet.open(out), time.time_ns()
        records = load(out, published, now_ns)
        if records.made_again:
            raise InputError(
                f"{out}: the records of files are lost: {records.made_again}", hint="run `layertap sync` to repair it"
            )
        compacted, published = compact_passes(out, records, published, max_dead, now_ns)
        if not records.changed:
            publish(out, published.images["root"], records, published)  # deletes what an earlier run could not delete
        return compacted


def compact_passes(
    out: Path, records: Records, published: DataSet, max_dead: float, unused_before_ns: int
) -> tuple[Compacted, DataSet]:
    """Implement `compact` for a caller that holds the lock; return the result and the published data set."""
    done: list[Compacted] = []
    sizes = _sizes_of_passes(records, unused_before_ns)
    full_rows = shard_rows_for(published.features)
    chosen = passes_to_compact(sizes, max_dead, full_rows)
    small = [number for number in chosen if sizes[number][0] < full_rows]
    for passes in filter(None, [small, *([number] for number in chosen if number not in small)]):
        done.append(rewrite(out, records, passes, unused_before_ns))
        published = publish(out, published.images["root"], records, published) or published
    return Compacted(*(sum(column) for column in zip(*map(astuple, done), strict=True))), published


def _sizes_of_passes(records: Records, unused_before_ns: int) -> dict[int, tuple[int, int]]:
    """Return pass -> (rows to keep, all recorded rows)."""
    array = records.array
    is_other = np.diff(row_numbers(array), prepend=-1) != 0  # several files may need a row
    n_recorded = np.bincount(array["pass"][is_other])
    n_kept = np.bincount(array["pass"][is_other & _is_kept(records, unused_before_ns)], minlength=len(n_recorded))
    return {number: (int(n_kept[number]), int(n_recorded[number])) for number in np.flatnonzero(n_recorded).tolist()}


def _is_kept(records: Records, unused_before_ns: int) -> NDArray[np.bool_]:
    """(N,) whether each record is that of a file, or of a row that no file has needed since that time or later."""
    return records.of_files | (records.array["tried_ns"] >= unused_before_ns)


def rewrite(out: Path, records: Records, passes: Sequence[int], unused_before_ns: int) -> Compacted:
    """Copy the rows to keep from some passes into a new pass, and record their new positions.

    The old passes are not deleted; they are needed until a version without them is published. A process that is killed
    before that leaves only a folder, which the next pass deletes. If a pass is incomplete because a run was interrupted
    or a repair removed rows from it, its other rows are kept.

    Raises:
        InputError: a row does not match its hashes.
        LayertapError: the disk is full or cannot be written to.
    """
    recorded = sum(size for old_pass, (_, size) in _sizes_of_passes(records, 0).items() if old_pass in set(passes))
    number = records.next_pass(out)
    of_passes = np.isin(records.array["pass"], passes)
    kept = of_passes & _is_kept(records, unused_before_ns)
    names = records.array["path"][kept]
    try:
        moved = _copy_rows(out, records.array[kept], passes, number)
    except BaseException:
        shutil.rmtree(pass_folder(out, number), ignore_errors=True)
        raise
    records.replace(np.concatenate([records.array[~of_passes], moved]))
    if len(moved) < len(names):
        records.unsettle(np.setdiff1d(names, moved["path"]))
    n_rows = len(np.unique(moved["row"]))
    return Compacted(len(passes), n_rows, recorded - n_rows)


def _copy_rows(out: Path, kept: NDArray[Any], passes: Sequence[int], number: int) -> NDArray[Any]:
    """Write the rows of records as a new pass; return the records, without those whose rows are missing."""
    folders = [pass_folder(out, old_pass) for old_pass in passes]
    with FeatureReader(folders, partial=True) as reader:
        bases = np.cumsum([0, *(DataSet.open(folder).n_rows for folder in folders)])
        wanted = bases[np.searchsorted(passes, kept["pass"])] + kept["row"]
        rows, first = np.unique(wanted, return_index=True)  # several files may need a row; the first one names it
        at, there = locate(reader.rows, rows)
        rows, names = rows[there], kept["path"][first[there]].tolist()
        if len(rows):
            positions = at[there]
            paths = [os.fsdecode(name) or reader.paths[i] for name, i in zip(names, positions.tolist(), strict=True)]
            _write(pass_folder(out, number), reader, positions, paths, passes)
    place, has_row = locate(rows, wanted)
    moved = kept[has_row]
    moved["pass"], moved["row"] = number, place[has_row]
    return moved


def _write(
    folder: Path, reader: FeatureReader, source: NDArray[np.int64], paths: list[str], passes: Sequence[int]
) -> None:
    """Write rows of a reader as a pass."""
    compressions = sorted({compression for compression, _ in reader.compression.values()})
    compress = compressions[0] if compressions and compressions[0] in COMPRESSIONS else None
    old_dataset = DataSet.open(folder.with_name(f"{passes[0]:06d}"))
    images = {
        **{name: value for name, value in old_dataset.images.items() if name in ("root", "parts")},
        "count": len(paths),
        "paths_xxh3": texts_hash([paths]),
    }
    shard_rows = min(max(old_dataset.shard_rows, shard_rows_for(old_dataset.features)), len(paths))
    dataset = DataSet(folder, old_dataset.depends_on, old_dataset.features, images, shard_rows)
    provenance = {**reader.provenance, "compacted_from": list(passes)}

    columns = {name: values_at(values, source.tolist()) for name, values in reader.columns.items()}

    def names(row_range: range) -> RowNames:
        part, no_labels = slice(row_range.start, row_range.stop), np.full(len(row_range), -1, np.int64)
        kept = {name: values[part] for name, values in columns.items()}
        return RowNames(paths[part], no_labels, [""] * len(row_range), [], columns=kept)

    with dataset.locked():
        dataset.open_or_create()
        copy_axes(old_dataset, folder)
        copy_rows(reader, source, dataset, names, provenance, compress)
