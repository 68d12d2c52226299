"""Remaining work of a run: unfinished shards, their rows in batches, and the files to write."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.extraction.plan import Plan
from extract.images.sources import ImageSource
from extract.row_status import Status
from extract.store.format.copying import copy_shard
from extract.store.format.dataset import DataSet, ShardFiles
from extract.store.format.layout import RowNames, create_shard, row_bytes
from extract.store.format.receipt import read_receipt
from extract.store.format.writer import ShardWriter

__all__ = ["ShardWork", "batches_of", "check_disk_space", "check_same_images", "open_part", "work_at", "work_of"]

_TRIED_S = 2.0  # to try images of a shard that had an I/O error; if a server is down, each takes seconds
_SAMPLED = 16  # stored rows whose images are read again if their folder has another name than before
RowNumbers = range | NDArray[np.int64]  # ascending


@dataclass(frozen=True)
class ShardWork:
    """A shard that is not finished.

    Attributes:
        shard: number of the shard.
        revision: revision of the file to write.
        rows: rows of the data set to compute, none of which has good features.
        published: finished file that the new one replaces; None if there is none.
        compress: compression of the published file; None if it has none.
    """

    shard: int
    revision: int
    rows: RowNumbers
    published: Path | None = None
    compress: str | None = None


def work_of(dataset: DataSet, source: ImageSource, retry_failed: bool) -> list[ShardWork]:
    """Return the work of unfinished shards, and of finished shards with I/O errors if one of the images can be read.

    Args:
        dataset: data set of the shards.
        source: source of its images.
        retry_failed: also return every row of finished shards whose status is not OK.
    """
    remaining = []
    for shard, where in enumerate(dataset.shard_files()):
        work = work_at(dataset, shard, where, retry_failed)
        if work is None and not retry_failed:
            work = _of_io_errors(dataset, source, shard, where)
        if work is not None:
            remaining.append(work)
    return remaining


def _of_io_errors(dataset: DataSet, source: ImageSource, shard: int, where: ShardFiles) -> ShardWork | None:
    """Return the rows of a finished shard with an I/O error, if an image of them can be read now."""
    assert where.published is not None
    published = dataset.path(shard, where.published)
    receipt = read_receipt(published, len(dataset.shard_range(shard)))
    if receipt is None or not receipt["status"].get(Status.IO_ERROR.text):
        return None
    with dataset.open_shard(shard, published) as opened:
        compress = next(iter(opened.compression.values()), None)
        rows = dataset.shard_range(shard)[0] + np.flatnonzero(opened.column("status") == Status.IO_ERROR)
    end = time.monotonic() + _TRIED_S
    for row in np.random.default_rng().permutation(rows).tolist():  # another order in each run
        if _can_be_read(source, row):
            return ShardWork(shard, where.published + 1, rows, published, compress)
        if time.monotonic() > end:
            break
    return None  # the shard is not rewritten without need


def _can_be_read(source: ImageSource, row: int) -> bool:
    try:
        source.read(row)
    except (OSError, ValueError):
        return False
    return True


def work_at(dataset: DataSet, shard: int, where: ShardFiles, retry_failed: bool = False) -> ShardWork | None:
    """Return the remaining work of one shard, or None. Damaged rows of an unfinished file become pending."""
    rows: RowNumbers = dataset.shard_range(shard)
    first_row, published, compress = rows[0], None, None
    if where.published is not None:
        if where.part is None and not retry_failed:
            return None
        published = dataset.path(shard, where.published)
        with dataset.open_shard(shard, published) as opened:
            compress = next(iter(opened.compression.values()), None)
            rows = first_row + np.flatnonzero(opened.column("status") != Status.OK)
    if where.part is not None:
        with ShardWriter(dataset, shard, where.part) as writer:
            writer.check()
            rows = first_row + np.flatnonzero(writer.status != Status.OK)
        return ShardWork(shard, where.part, rows, published, compress)
    revision = 0 if where.published is None else where.published + 1
    return ShardWork(shard, revision, rows, published, compress) if len(rows) else None


@contextlib.contextmanager
def open_part(plan: Plan, work: ShardWork) -> Iterator[ShardWriter]:
    """Context manager: yield the writer of a shard; create its file if it does not exist.

    After an error, a new file without stored rows is removed.
    """
    part = plan.dataset.path(work.shard, work.revision, part=True)
    is_new = not part.exists()
    if is_new:
        _create_part(plan, work, part)
    writer = ShardWriter(plan.dataset, work.shard, work.revision, sync_s=plan.settings.sync_s)
    try:
        with writer:
            yield writer
    except BaseException:
        if is_new and work.published is None and (writer.status == Status.PENDING).all():
            part.unlink(missing_ok=True)
        raise


def _create_part(plan: Plan, work: ShardWork, part: Path) -> None:
    """Create the file to write: a new one, or a copy of the finished file in which the rows of `work` are pending."""
    dataset, images = plan.dataset, plan.images
    rows = dataset.shard_range(work.shard)
    if work.published is not None:
        with dataset.open_shard(work.shard, work.published) as published:
            copy_shard(published, part, pending=np.asarray(work.rows) - rows.start)
        return
    here = images.slice(rows.start, rows.stop)
    names = RowNames(here.paths, here.labels, here.splits, here.classes, here.ids, here.columns)
    create_shard(part, dataset.features, dataset.identity(work.shard), names, plan.provenance)


def batches_of(rows: RowNumbers, plan: Plan) -> Iterator[list[int]]:
    """Split the rows of one shard into batches at the same boundaries as if all rows were to be computed.

    The remaining batches of a resumed run, and so their features, are therefore those of an uninterrupted run.
    """
    if not len(rows):
        return iter(())
    start = int(rows[0]) // plan.dataset.shard_rows * plan.dataset.shard_rows
    batch = (np.asarray(rows) - start) // plan.settings.batch_size
    return map(np.ndarray.tolist, np.split(np.asarray(rows), np.flatnonzero(np.diff(batch)) + 1))


def check_same_images(plan: Plan, existing: DataSet) -> None:
    """Check that a few images with stored rows are identical, byte for byte, in the new folder.

    A folder may move. But two folders may hold different pictures under the same names, and a second run would then
    report the wrong pictures as complete.

    Raises:
        InputError: an image differs or cannot be read; the names may belong to other images.
    """
    for shard, where in enumerate(existing.shard_files()):
        file = existing.current(shard, where)
        if file is None:
            continue
        with existing.open_shard(shard, file) as stored:
            good = np.flatnonzero(stored.column("status") == Status.OK)
            chosen = good[:: max(1, len(good) // _SAMPLED)]
            hashes = stored.column("source_hash")[chosen]
            first_row = stored.identity.first_row
            for row, expected in zip((first_row + chosen).tolist(), hashes, strict=True):
                path = plan.images.slice(row, row + 1).paths[0]
                try:
                    same = xxhash.xxh3_128_digest(plan.images.source.read(row)[0]) == expected.tobytes()
                except (OSError, ValueError):
                    same = False
                if not same:
                    raise InputError(
                        f"{existing.out} holds features of the images in {existing.images['root']}; those in "
                        f"{plan.images.root} are others: {path} differs",
                        hint="choose another output folder",
                    )
        if len(chosen):
            return


def check_disk_space(dataset: DataSet) -> None:
    """Check that the shards to create fit on the disk.

    Raises:
        LayertapError: the shards do not fit.
    """
    new = [shard for shard, where in enumerate(dataset.shard_files()) if where.published is None and where.part is None]
    needed = sum(len(dataset.shard_range(shard)) for shard in new) * row_bytes(dataset.features)
    place = next(folder for folder in (dataset.out.absolute(), *dataset.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise LayertapError(
            f"{dataset.out}: features need {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free on the disk",
            hint="pool the layers, store float16 (--dtype float16), or choose another output folder",
        )
