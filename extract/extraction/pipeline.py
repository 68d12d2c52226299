"""The path of images to rows on disk: `extract_shard`. Start reading here.

    batches           worker processes, `extract.images.loading`: bytes -> upright RGB picture -> (H, W, 3) uint8
    Duplicates.split  images with the same bytes are computed once
    forward           `extract.compute.forward`: device -> backbone under `Taps`, whose forward hooks pool each tapped
                      activation on the device (`extract.compute.pooling`) and copy it to the CPU
    rows_of           features and a status for each row
    writer.write      `extract.store.format.writer`: into the `.part` file

Three batches are in progress at once: batch k + 2 is decoded, batch k + 1 is computed, batch k is written.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.forward import Values, rows_of
from extract.extraction.plan import Plan
from extract.extraction.summary import Summary
from extract.extraction.todo import ShardWork, open_part
from extract.extraction.validation import ValidatedForward
from extract.images import Batch, Images
from extract.row_status import Status
from extract.store.format.value_types import read_as
from extract.store.format.writer import ShardWriter

__all__ = ["extract_shard", "reporting_a_note"]

T = TypeVar("T")
_END = object()


def extract_shard(
    plan: Plan,
    work: ShardWork,
    batches: Iterator[Batch],
    forward: ValidatedForward,
    summary: Summary,
    on_rows: Callable[[int, bool], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Compute the rows of one shard, store each batch while the next is computed, and publish the shard.

    Args:
        plan: plan of the run.
        work: the shard, and which of its rows to compute.
        batches: decoded batches of these rows.
        forward: forward that compares its first batch with the reference before any row is stored.
        summary: updated with the rows and times; `stopped` if the run was asked to stop. Then the shard can be resumed.
        on_rows: called with the number of rows stored since the last call, and False.
        stop: called after each batch is decoded; True stops the run after the batches in progress are stored.

    Raises:
        LayertapError: a batch cannot be decoded, computed or stored. Batches before it are stored.
    """
    before, start, copying_s = copy.deepcopy(summary), time.perf_counter(), forward.copying_s
    stages, reported, dtype = summary.stages, 0, read_as(plan.settings.dtype)
    with open_part(plan, work) as writer:
        decoded = _timed_each(stages, "images", _until_stopped(batches, summary, stop))
        computed = _timed_each(stages, "forward", _computed(map(Duplicates(writer).split, decoded), forward))
        for batch, features in computed:
            rows = rows_of(batch.unique, features, plan.choice.features, dtype)
            written_s = stages["write"]
            with _timed(stages, "write"):
                writer.write(batch.unique.rows, rows.features, rows.status, batch.unique.source, rows.reasons)
                if batch.copies:
                    writer.copy(batch.copies.rows, batch.origins, batch.copies.source)
            summary.write_wait_s += stages["write"] - written_s
            summary.duplicates += len(batch.origins)
            reported = _report_stored(writer, reported, on_rows)
        with _timed(stages, "write"):
            writer.flush()
        _report_stored(writer, reported, on_rows)
        summary.count(writer.stored)
        summary.move("forward", "copy", forward.copying_s - copying_s)
        summary.images_at_once = forward.images_at_once
        if not summary.stopped:
            made = summary.made_since(before, time.perf_counter() - start, plan.provenance)
            with _timed(stages, "write"):
                writer.publish(plan.settings.compress or work.compress, made)


class Split(NamedTuple):
    """A batch, split into rows to compute and rows with the image of an earlier row.

    Attributes:
        images: (B, ...) images to compute.
        unique: rows to compute, and rows whose images failed.
        copies: the other rows; None if there are none.
        origins: (len(copies.rows),) earlier row of the shard with the same image.
    """

    images: Tensor
    unique: Batch
    copies: Batch | None
    origins: NDArray[np.int64]


class Duplicates:
    """The contents of the images of one shard, so that images with the same bytes are computed once.

    They are found within a shard only: shards are computed independently, in any order and perhaps on several machines.

    Args:
        writer: writer of the shard; an image of its rows that are OK is not computed again.
    """

    def __init__(self, writer: ShardWriter):
        good = np.flatnonzero(writer.status == Status.OK)
        # In reverse order, so that the first of several rows with the same image is the origin.
        hashes, rows = writer.column("source_hash")[good[::-1]], good[::-1] + writer.first_row
        self._row_with = {content.tobytes(): row for content, row in zip(hashes, rows.tolist(), strict=True)}

    def split(self, batch: Batch) -> Split:
        """Split a batch into rows to compute and rows to copy from earlier ones."""
        unique, copies, origins = [], [], []
        for position, (row, status) in enumerate(zip(batch.rows.tolist(), batch.status.tolist(), strict=True)):
            content = batch.source_hash[position].tobytes()
            if status != Status.OK or self._row_with.setdefault(content, row) == row:
                unique.append(position)
            else:
                copies.append(position)
                origins.append(self._row_with[content])
        if not copies:
            return Split(batch.images, batch, None, np.empty(0, np.int64))
        to_compute = batch.select(unique)
        return Split(to_compute.images, to_compute, batch.select(copies), np.array(origins, np.int64))


def _computed(batches: Iterator[Split], forward: ValidatedForward) -> Iterator[tuple[Split, Values]]:
    """Yield batches with their features; the first batches of a run are compared with the reference."""
    yield from forward.first_batches(batches)
    if forward.chosen is not None:
        yield from forward.chosen.map(batches)


def _report_stored(writer: ShardWriter, reported: int, on_rows: Callable[[int, bool], None] | None) -> int:
    """Report the rows stored since the last report, at which `reported` were stored; return how many are stored now."""
    stored = writer.stored.total()
    if stored > reported and on_rows is not None:
        on_rows(stored - reported, False)
    return stored


def _until_stopped(batches: Iterator[Batch], summary: Summary, stop: Callable[[], bool] | None) -> Iterator[Batch]:
    """Yield batches until `stop`, called after each one, returns True."""
    while not summary.stopped and (batch := next(batches, None)) is not None:
        yield batch
        summary.stopped = stop is not None and stop()


def _timed_each(stages: dict[str, float], stage: str, values: Iterable[T]) -> Iterator[T]:
    """Yield the values; add the seconds to get each to a stage, excluding those of stages inside."""
    iterator = iter(values)
    while True:
        with _timed(stages, stage):
            value = next(iterator, _END)
        if value is _END:
            return
        yield value  # type: ignore[misc]


@contextlib.contextmanager
def _timed(stages: dict[str, float], stage: str) -> Iterator[None]:
    """Context manager: add the seconds of the block to a stage, excluding those of stages inside."""
    start, others = time.perf_counter(), sum(stages.values())
    try:
        yield
    finally:
        inside = sum(stages.values()) - others
        stages[stage] += time.perf_counter() - start - inside


def reporting_a_note(
    batches: Iterable[Batch], images: Images, on_note: Callable[[str], None] | None
) -> Iterator[Batch]:
    """Pass batches on; report the first note on an image, with its path, as thousands may have the same."""
    for batch in batches:
        if batch.notes and on_note is not None:
            row = min(batch.notes)
            on_note(f"{images.slice(row, row + 1).paths[0]}: {batch.notes[row]}")
            on_note = None
        yield batch
