"""Passes written anew: without rows that no file needs any more, and many small ones as one."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.store.format.copying import COMPRESSIONS
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.layout import RowNames
from extract.store.format.version import pass_folder
from extract.store.reader import FeatureReader
from extract.store.row_copying import copy_rows
from extract.sync.manifest import Manifest
from extract.sync.publishing import publish, remove_what_is_not_needed
from extract.system.folder_lock import locked

__all__ = ["Compacted", "compact", "compact_passes", "passes_to_compact", "rewrite"]

# Small passes are joined like files of a log-structured merge tree: so many of one size, each at most so many times
# smaller than the next, become one of the next size. A row is copied once for each size, of which there are few.
_FANOUT = 8


@dataclass(frozen=True)
class Compacted:
    """What was written anew.

    Attributes:
        passes: how many were replaced.
        rows: that were kept of them.
        removed: rows that were not.
    """

    passes: int = 0
    rows: int = 0
    removed: int = 0


def passes_to_compact(sizes: Mapping[int, tuple[int, int]], max_dead: float, shard_rows: int) -> list[int]:
    """Passes of which more than a share of the rows is dead, and small ones, where there are many.

    Args:
        sizes: pass -> (rows to be kept, all rows); the others are dead.
        max_dead: the share.
        shard_rows: rows of a file of full size.
    """
    chosen = {number for number, (kept, known) in sizes.items() if known - kept > max_dead * known}
    by_tier: dict[int, list[list[int]]] = {}
    for number, (kept, _) in sizes.items():
        if kept < shard_rows:
            by_tier.setdefault(_tier(kept), []).append([number])
    tier = 0
    while by_tier and tier <= max(by_tier):
        groups = by_tier.pop(tier, [])
        if len(groups) >= _FANOUT:  # joined, they are one of a larger size
            joined = [number for group in groups for number in group]
            chosen.update(joined)
            size = _tier(sum(sizes[number][0] for number in joined))
            by_tier.setdefault(max(tier + 1, size), []).append(joined)
        tier += 1
    return sorted(chosen)


def _tier(rows: int) -> int:
    return int(math.log(max(1, rows), _FANOUT))


def compact(
    out: Path,
    max_dead: float,
    on_rows: Callable[[int, bool], None] = lambda rows, found: None,
) -> Compacted:
    """Remove the rows that no file needs any more from the passes that have more than a share of them.

    Each large pass is written anew by itself, small ones together; their old files are removed when a version without
    them is published. Who reads an earlier version goes on reading it. Killed at any moment, the data set is as before,
    or as after.

    Args:
        out: folder of the data set.
        max_dead: the share.
        on_rows: as of `copy_rows`.

    Raises:
        InputError: no data set of `layertap sync` there, or a row does not agree with its hashes.
        LockedError: another process writes to it.
        LayertapError: the disk is full or refuses.
    """
    published = DataSet.open(out)
    if published.version is None:
        raise InputError(f"{out} is not kept in step with a folder; it has no rows that are not needed")
    with locked(out):
        published = DataSet.open(out)
        with Manifest(out) as manifest:
            if manifest.made_anew or manifest.version < (published.version.number if published.version else 0):
                raise InputError(f"{out}/manifest.sqlite is lost or damaged; `layertap sync` makes it anew")
            try:
                return compact_passes(out, manifest, published, max_dead, time.time_ns(), on_rows)[0]
            except (sqlite3.Error, ValueError, TypeError) as error:  # not one of ours; InputError is a ValueError
                if isinstance(error, LayertapError):
                    raise
                raise LayertapError(
                    f"{out}/manifest.sqlite: {error}; delete it, and `layertap sync` makes it anew"
                ) from error


def compact_passes(
    out: Path,
    manifest: Manifest,
    published: DataSet,
    max_dead: float,
    unused_before_ns: int,
    on_rows: Callable[[int, bool], None] = lambda rows, found: None,
) -> tuple[Compacted, DataSet]:
    """As `compact`, under its lock; returns what was done, and what is published then."""
    total = Compacted()
    sizes = manifest.sizes_of_passes(unused_before_ns)
    full = shard_rows_for(published.features)
    chosen = passes_to_compact(sizes, max_dead, full)
    small = [one for one in chosen if sizes[one][0] < full]
    for passes in filter(None, [small, *([one] for one in chosen if one not in small)]):
        done = rewrite(out, manifest, passes, unused_before_ns, on_rows)
        total = Compacted(total.passes + done.passes, total.rows + done.rows, total.removed + done.removed)
        published = publish(out, published.images["root"], manifest, published) or published
        remove_what_is_not_needed(out, manifest)
    return total, published


def rewrite(
    out: Path,
    manifest: Manifest,
    passes: Sequence[int],
    unused_before_ns: int,
    on_rows: Callable[[int, bool], None] = lambda rows, found: None,
) -> Compacted:
    """Copy the rows of some passes that are to be kept into a new one, and note in the manifest where they are now.

    The old passes are left; they are not needed any more when a version without them is published. Killed at any
    moment, nothing has changed but that a folder is there which the next pass removes. Of a pass that is unfinished,
    since a repair took rows out of it, the others are kept.

    Raises:
        InputError: a row does not agree with its hashes.
        LayertapError: the disk is full or refuses.
    """
    if not passes:
        return Compacted()
    known = sum(size for one, (_, size) in manifest.sizes_of_passes(unused_before_ns).items() if one in set(passes))
    number = manifest.next_pass()
    try:
        ids = _copy_kept_rows(out, manifest, passes, number, unused_before_ns, on_rows)
    except BaseException:
        shutil.rmtree(pass_folder(out, number), ignore_errors=True)
        raise
    with manifest.transaction():
        manifest.move_rows(ids, number)
        for one in passes:
            manifest.forget_pass(one)  # the rows that were not kept
        manifest.version += 1
    return Compacted(len(passes), len(ids), known - len(ids))


def _copy_kept_rows(
    out: Path,
    manifest: Manifest,
    passes: Sequence[int],
    number: int,
    unused_before_ns: int,
    on_rows: Callable[[int, bool], None],
) -> list[int]:
    """Write the rows that are to be kept as a new pass; returns what the manifest calls them, in order."""
    ids: list[int] = []
    folders = [pass_folder(out, one) for one in passes]
    with FeatureReader(folders, partial=True) as reader:
        bases = np.cumsum([0, *(DataSet.open(folder).n_rows for folder in folders)])
        places: list[int] = []
        paths: list[str] = []
        for one, base in zip(passes, bases.tolist(), strict=False):
            kept = manifest.kept_rows(one, unused_before_ns)
            wanted = base + np.array([row for _, row, _ in kept], np.int64)
            at = np.searchsorted(reader.rows, wanted)
            there = (reader.rows[np.minimum(at, len(reader) - 1)] == wanted) if len(reader) else np.zeros(len(at), bool)
            for (feature, _, path), place, found in zip(kept, at.tolist(), there.tolist(), strict=True):
                if not found:
                    continue
                ids.append(feature)
                places.append(place)
                paths.append(reader.paths[place] if path is None else path.decode("utf-8", "surrogateescape"))
        if ids:
            packed = sorted({how for how, _ in reader.compression.values()})
            compress = packed[0] if packed and packed[0] in COMPRESSIONS else None
            _write(pass_folder(out, number), reader, np.array(places, np.int64), paths, passes, compress, on_rows)
    return ids


def _write(
    folder: Path,
    reader: FeatureReader,
    source: NDArray[np.int64],
    paths: list[str],
    passes: Sequence[int],
    compress: str | None,
    on_rows: Callable[[int, bool], None],
) -> None:
    """A pass of these rows of a reader."""
    of = DataSet.open(folder.with_name(f"{passes[0]:06d}"))
    images = {
        "root": of.images["root"],
        "count": len(paths),
        "paths_xxh3": xxhash.xxh3_128_hexdigest(b"\0".join(map(os.fsencode, paths))),
    }
    shard_rows = min(max(of.shard_rows, shard_rows_for(of.features)), len(paths))
    dataset = DataSet(folder, of.depends_on, of.features, images, shard_rows)
    provenance = {**reader.provenance, "compacted_from": list(passes)}

    def names(here: range) -> RowNames:
        none = np.full(len(here), -1, np.int64)
        return RowNames(paths[here.start : here.stop], none, [""] * len(here), [])

    with dataset.locked():
        dataset.open_or_create()
        copy_rows(reader, source, dataset, names, provenance, compress, on_rows)
