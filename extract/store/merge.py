"""Several data sets of one fingerprint become one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from extract.errors import InputError
from extract.status import Status
from extract.store.dataset import DataSet, shard_rows_for
from extract.store.layout import RowNames, create_shard, row_bytes
from extract.store.reader import FeatureReader
from extract.store.shard import BLOCK_BYTES, runs
from extract.store.writer import ShardWriter

__all__ = ["merge"]


def merge(
    sources: Sequence[Path],
    out: Path,
    *,
    shard_rows: int | None = None,
    compress: str | None = None,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> DataSet:
    """Copy the rows of complete data sets into a new one, sorted by path; called again, it goes on where it was.

    The paths become relative to the folder that holds all their image folders.

    Args:
        sources: folders of data sets.
        out: folder of the new one.
        shard_rows: rows in a file; None makes files of at most 1 GB.
        compress: as of `ShardWriter.publish`.
        on_rows: called with a number of rows that are done.

    Raises:
        InputError: the fingerprints differ, an image is in two of them, or `out` holds something else.
        LockedError: another process writes to `out`.
        LayertapError: a source is not complete, or the disk is full or refuses.
    """
    datasets = [DataSet.open(source) for source in sources]
    if out.resolve() in [source.resolve() for source in sources]:
        raise InputError(f"{out} is one of the data sets to be merged; choose another output folder")
    common = os.path.commonpath([dataset.images["root"] for dataset in datasets])
    with FeatureReader(list(sources)) as reader:
        prefixes = [os.path.relpath(dataset.images["root"], common) for dataset in datasets]
        paths = [
            path if prefix == "." else f"{prefix}/{path}"
            for prefix, path in zip((prefixes[number] for number in reader.sets), reader.paths, strict=True)
        ]
        encoded = [os.fsencode(path) for path in paths]
        order = np.array(sorted(range(len(paths)), key=encoded.__getitem__), np.int64)
        for first, second in itertools.pairwise(order.tolist()):
            if encoded[first] == encoded[second]:
                raise InputError(
                    f"{paths[first]} (below {common}) is in {sources[reader.sets[first]]} and in "
                    f"{sources[reader.sets[second]]}; an image can be in one of them only"
                )
        merged = DataSet(
            out,
            datasets[0].depends_on,
            datasets[0].features,
            {
                "root": common,
                "count": len(paths),
                "paths_xxh3": xxhash.xxh3_128_hexdigest(b"\0".join(encoded[i] for i in order)),
            },
            min(shard_rows or shard_rows_for(datasets[0].features), len(paths)),
        )
        provenance = {
            **reader.provenance,
            "merged_from": [{"out": str(d.out.resolve()), "images": d.images} for d in datasets],
        }
        reasons = {row: why for row, _, _, why in reader.failures}
        with merged.locked():
            merged.open_or_create()
            for shard, where in enumerate(merged.whereabouts()):
                rows = merged.shard_range(shard)
                if where.published is not None:
                    on_rows(len(rows))
                    continue
                source_rows = order[rows.start : rows.stop]
                part = merged.path(shard, part=True)
                if where.part is None:
                    names = RowNames(
                        [paths[i] for i in source_rows], reader.labels[source_rows],
                        [reader.splits[i] for i in source_rows], reader.classes,
                    )  # fmt: skip
                    create_shard(part, merged.features, merged.identity(shard), names, provenance)
                with ShardWriter(merged, shard) as writer:
                    writer.check()
                    todo = np.flatnonzero(writer.status == Status.PENDING)
                    on_rows(len(rows) - len(todo))
                    for start, stop in runs(todo, max(1, BLOCK_BYTES // max(1, row_bytes(merged.features)))):
                        chosen = source_rows[start:stop]
                        here = np.arange(rows.start + start, rows.start + stop)
                        features = {name: reader[name][chosen] for name in reader.layers}
                        source = {
                            name: reader.column(name)[chosen]
                            for name in ("source_size", "source_mtime_ns", "source_hash")
                        }
                        writer.write(here, features, reader.status[chosen], source)
                        on_rows(len(here))
                    known = {rows.start + i: reasons[int(row)] for i, row in enumerate(source_rows) if row in reasons}
                    writer.give_reasons(known)
                    writer.publish(compress)
    return merged
