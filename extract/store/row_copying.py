"""Copy rows of a reader into another data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, create_shard
from extract.store.format.shard import BLOCK_BYTES, runs
from extract.store.format.writer import SOURCE, ShardWriter
from extract.store.reader import FeatureReader

__all__ = ["copy_rows"]


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
    for shard, files in enumerate(dataset.shard_files()):
        row_range = dataset.shard_range(shard)
        if files.published is not None and files.part is None:
            on_rows(len(row_range), True)
            continue
        if files.part is None:
            path = dataset.path(shard, part=True)
            create_shard(path, dataset.features, dataset.identity(shard), names(row_range), provenance)
        with ShardWriter(dataset, shard, files.part or 0) as writer:
            _fill(writer, reader, source, row_range, on_rows)
            origins = source[row_range.start : row_range.stop].tolist()
            rows = zip(row_range, origins, strict=True)
            writer.give_reasons({row: reasons[origin] for row, origin in rows if origin in reasons})
            writer.publish(compress)


def _fill(
    writer: ShardWriter,
    reader: FeatureReader,
    source: NDArray[np.int64],
    row_range: range,
    on_rows: Callable[[int, bool], None],
) -> None:
    """Write the pending rows of one shard."""
    writer.check()
    todo = np.flatnonzero(writer.status == Status.PENDING)
    on_rows(len(row_range) - len(todo), True)
    for start, stop in runs(todo, max(1, BLOCK_BYTES // max(1, sum(reader[name].row_bytes for name in reader.layers)))):
        rows = np.arange(row_range.start + start, row_range.start + stop)
        features = reader.checked(source[rows])
        columns = {name: reader.column(name)[source[rows]] for name in SOURCE}
        writer.write(rows, features, reader.status[source[rows]], columns)
        on_rows(stop - start, False)
