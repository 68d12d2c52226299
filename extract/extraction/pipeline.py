"""The path of images to rows on disk: `extract_shard`. Start reading here.

    batches           worker processes, `extract.images.loading`: bytes -> upright RGB picture -> (H, W, 3) uint8
    Duplicates.split  images with the same bytes are computed once
    forward           `extract.compute.forward`: device -> backbone under `Taps`, whose forward hooks pool each tapped
                      activation on the device (`extract.compute.pooling`) and copy it to the CPU
    rows_of           features and a status for each row of the data set; boxes are pooled here
    writer.write      `extract.store.format.writer`: into the `.part` file

Three batches are in progress at once: batch k + 2 is decoded, batch k + 1 is computed, batch k is written. A finished
shard is published while the next one is computed. The concurrency belongs to what owns a process, a device or a thread:
`load_batches`, `Forward`, `ShardWriter`, and the run for the publication.

One image passes ten files, with 22 changes from one to another (`python -m tests.trace_path`): what one image
passes lies together, and what can be resolved before the loop is not done in it.

If a file fails, its row does; if a disk, server or network fails, the run stops, because one dead link says nothing
about a server: after 32 failures of one kind in a row, or if a first batch of several images fails completely.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.forward import Values, check_count
from extract.extraction.plan import Plan
from extract.extraction.validation import Computation, ValidatedForward
from extract.images import Batch, Images
from extract.images.loading import stop_on_machine_errors
from extract.row_status import Status
from extract.store.format.layout import RowNames
from extract.store.format.writer import (
    RowNumbers,
    ShardWork,
    ShardWriter,
    StoredRows,
    open_part,
    stored_rows,
)

__all__ = ["Summary", "batches_of", "checked_batches", "extract_shard", "names_of", "pictures_of", "rows_of"]


def extract_shard(
    plan: Plan,
    work: ShardWork,
    batches: Iterator[Batch],
    forward: ValidatedForward,
    summary: Summary,
    on_rows: Callable[[int, bool], None] | None = None,
    stop: Callable[[], bool] | None = None,
    beside: Callable[..., Any] | None = None,
) -> Callable[[], object] | None:
    """Compute the rows of one shard, and store each batch while the next is computed.

    Args:
        plan: plan of the run.
        work: the shard, and which of its rows to compute.
        batches: decoded batches of these rows.
        forward: forward that compares its first batch with the reference before any row is stored.
        summary: updated with the rows and times; `stopped` if the run was asked to stop. Then the shard can be resumed.
        on_rows: called with the number of rows stored since the last call, and False.
        stop: called after each batch is decoded; True stops the run after the batches in progress are stored.
        beside: gives the stored features of rows to which layers are added; None: all layers are computed.

    Returns:
        A function that publishes the shard and closes its file, in any thread: hashing a file of 1 GB takes as long as
        writing it. None if the run was stopped.

    Raises:
        LayertapError: a batch cannot be decoded, computed or stored. Batches before it are stored, but perhaps for the
            last one, which was computed while another was stored.
    """
    before, began = copy.deepcopy(summary), time.perf_counter()
    stages, reported, blank = summary.stages, 0, {feature.name: feature.blank for feature in plan.computed}
    # The first batch is read before the file of the shard is made: where no image can be read, no file is left.
    first = list(itertools.islice(batches, 1))  # empty if the rows of an unfinished shard are all stored
    stages["images"] += time.perf_counter() - began
    batches = itertools.chain((first.pop() for _ in range(len(first))), batches)  # and not held any longer
    with contextlib.ExitStack() as opened:
        names, sync_s = functools.partial(names_of, plan.images), plan.settings.sync_s
        writer = opened.enter_context(open_part(plan.dataset, work, names, plan.provenance, sync_s, beside))
        for batch, features in _computed(batches, Duplicates(writer), plan, forward, summary, stop):
            arrived = time.perf_counter()
            rows = rows_of(batch.unique, plan, features, blank)
            asked = time.perf_counter()
            stages["forward"] += asked - arrived
            writer.write(batch.unique.rows, rows.features, rows.status, batch.unique.source, rows.reasons)
            if batch.copies:
                # By the writing thread, which has stored the origins by then: the next forward need not wait for them.
                writer.copy(batch.copies.rows, batch.origins, batch.copies.source)
            waited_s = time.perf_counter() - asked
            stages["write"] += waited_s
            summary.write_wait_s += waited_s
            summary.duplicates += len(batch.origins)
            reported = _report_stored(writer, reported, on_rows)
        asked = time.perf_counter()
        writer.flush()
        stages["write"] += time.perf_counter() - asked
        _report_stored(writer, reported, on_rows)
        summary.count(writer.stored)
        summary.images_at_once = forward.images_at_once
        if summary.stopped:
            return None
        made = summary.made_since(before, time.perf_counter() - began, plan.provenance)
        compress, until_published = plan.settings.compress or work.compress, opened.pop_all()

    def publish() -> None:
        with until_published:
            writer.publish(compress, made)

    return publish


def names_of(images: Images, rows: range) -> RowNames:
    """Return what a shard keeps of its images."""
    here = images.slice(rows.start, rows.stop)
    return RowNames(here.paths, here.labels, here.splits, here.classes, here.ids, here.columns)


def batches_of(rows: RowNumbers, plan: Plan) -> Iterator[list[int]]:
    """Split the rows of one shard into batches at the same boundaries as if all rows were to be computed.

    The remaining batches of a resumed run, and so their features, are therefore those of an uninterrupted run.
    """
    if not len(rows):
        return iter(())
    start = int(rows[0]) // plan.dataset.shard_rows * plan.dataset.shard_rows
    batch = (np.asarray(rows) - start) // plan.batch_size
    return map(np.ndarray.tolist, np.split(np.asarray(rows), np.flatnonzero(np.diff(batch)) + 1))


@dataclass
class Summary:
    """Result of a run.

    Attributes:
        n_rows: rows of the data set.
        found: rows that were done before the run.
        computed: rows of this run, including failed rows.
        duplicates: rows of this run that were copied, because an earlier row has an image with the same bytes.
        status: status -> number of rows of this run.
        seconds: time from the first image to the last receipt.
        stages: seconds spent waiting for images, in the forward (with pooling, and copies to the device and back), and
            writing.
        write_wait_s: the part of "write" in which the next batch waited until the previous one was stored, without the
            time to complete and publish files.
        computation: how the features were computed; None if none were.
        images_at_once: images per forward at the end, if memory was insufficient for a batch; otherwise None.
        stopped: whether the run was asked to stop before the end.
    """

    n_rows: int
    found: int = 0
    computed: int = 0
    duplicates: int = 0
    status: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "forward": 0.0, "write": 0.0})
    write_wait_s: float = 0.0
    computation: Computation | None = None
    images_at_once: int | None = None
    stopped: bool = False

    @property
    def images_per_s(self) -> float:
        """Rows per second of this run."""
        return self.computed / self.seconds if self.seconds else 0.0

    def made_since(self, before: Summary, seconds: float, provenance: dict[str, Any]) -> dict[str, Any]:
        """Return where, when and how fast rows were computed, for the receipt of a shard.

        Args:
            before: copy of this summary from the start of the shard.
            seconds: seconds since then.
            provenance: provenance of the run.
        """
        return {
            "host": provenance["machine"]["host"],
            "device": provenance["device"],
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "computed": self.computed - before.computed,
            "seconds": round(seconds, 3),
            "stages": {stage: round(spent - before.stages[stage], 3) for stage, spent in self.stages.items()},
        }

    def count(self, stored: Counter[int]) -> None:
        """Add stored rows: status code -> number."""
        self.computed += stored.total()
        for code, rows in stored.items():
            self.status[Status(code).text] += rows


def _computed(
    batches: Iterator[Batch],
    duplicates: Duplicates,
    plan: Plan,
    forward: ValidatedForward,
    summary: Summary,
    stop: Callable[[], bool] | None,
) -> Iterator[tuple[Split, Values]]:
    """Decode batches and yield them with their features, each while the device computes the next one."""
    stages, computing = summary.stages, deque[tuple[Split, Callable[[], Values]]]()
    while not summary.stopped:
        asked = time.perf_counter()
        decoded = next(batches, None)
        arrived = time.perf_counter()
        stages["images"] += arrived - asked
        if decoded is None:
            break
        batch = duplicates.split(decoded)
        computing.append((batch, _started(batch.unique, plan, forward)))
        stages["forward"] += time.perf_counter() - arrived
        if forward.chosen is None or len(computing) > forward.chosen.ahead:
            yield _oldest(computing, stages)
        summary.stopped = stop is not None and stop()
    while computing:
        yield _oldest(computing, stages)


def _started(batch: Batch, plan: Plan, forward: ValidatedForward) -> Callable[[], Values]:
    """Start computing images, and return what waits for their features, which are empty if there are no images."""
    if not len(batch.images):  # no placeholder is computed for an image that failed
        return dict
    images = pictures_of(batch)
    if forward.chosen is not None and forward.is_validated:
        return forward.chosen.start(images)
    values = forward.validated(images, functools.partial(_over_boxes, batch, plan))
    return lambda: values


def _oldest(computing: deque[tuple[Split, Callable[[], Values]]], stages: dict[str, float]) -> tuple[Split, Values]:
    """Wait for the features of the batch that was started first, and return both."""
    asked = time.perf_counter()
    batch, features = computing.popleft()
    values = features()
    stages["forward"] += time.perf_counter() - asked
    return batch, values


class Split(NamedTuple):
    """A batch, split into rows to compute and rows with the image of an earlier row.

    Attributes:
        unique: rows to compute, and rows whose images failed.
        copies: the other rows; None if there are none.
        origins: (len(copies.rows),) earlier row of the shard with the same image.
    """

    unique: Batch
    copies: Batch | None
    origins: NDArray[np.int64]


class Duplicates:
    """The contents of the images of one shard, so that images with the same bytes are computed once.

    They are found within a shard only: shards are computed independently, in any order and perhaps on several machines.
    The content is known only after a worker has read the file, so a copy is decoded too, and only its forward is saved.

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
            return Split(batch, None, np.empty(0, np.int64))
        return Split(batch.select(unique), batch.select(copies), np.array(origins, np.int64))


def pictures_of(batch: Batch) -> Tensor:
    """Return the images of a batch to compute: of boxes that are pooled, each picture once."""
    if not batch.boxes:
        return batch.images
    return batch.images[np.unique(_boxes(batch)[:, 0], return_index=True)[1]]


def _boxes(batch: Batch) -> NDArray[np.float64]:
    """Return (B, 5): the boxes of the images of a batch, see `Batch.boxes`."""
    good = batch.rows[batch.status == Status.OK].tolist()
    return np.array([batch.boxes[row] for row in good], np.float64).reshape(-1, 5)


def _over_boxes(batch: Batch, plan: Plan, values: Values) -> Values:
    """Pool what was computed of each picture over the boxes of it."""
    if not batch.boxes or not values:
        return values
    boxes = _boxes(batch)
    pictures, boxes[:, 0] = np.unique(boxes[:, 0], return_inverse=True)
    check_count(values, len(pictures))
    where: dict[str, Any] = {"boxes": torch.from_numpy(boxes), "input_px": batch.images.shape[1:3]}
    pool = {feature.name: feature.poolings.steps[-1].function for feature in plan.choice.features}
    return {name: pool[name](torch.from_numpy(maps), **where).numpy() for name, maps in values.items()}


def rows_of(batch: Batch, plan: Plan, values: Values, blank: Mapping[str, NDArray[Any]]) -> StoredRows:
    """Return the rows of a batch as stored: features, and a status for each row.

    Args:
        batch: the rows, and which of them have an image.
        plan: how they are computed.
        values: feature -> (B, *shape) for the `pictures_of` the batch; empty if there are none.
        blank: feature -> its `StoredFeature.blank`, whose dtype the rows get.

    Raises:
        InputError: a feature does not have one row for each image.
    """
    values = _over_boxes(batch, plan, values)
    check_count(values, len(batch.images))
    values = {name: _rounded(values[name], row.dtype) for name, row in blank.items()} if values else {}
    return stored_rows(batch.rows, values, blank, batch.status, batch.reasons)


def _rounded(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Cast to another dtype. Values beyond its range become infinite, and the row gets the status NOT_FINITE."""
    return values if values.dtype == dtype else torch.from_numpy(values).to(getattr(torch, dtype.name)).numpy()


def _report_stored(writer: ShardWriter, reported: int, on_rows: Callable[[int, bool], None] | None) -> int:
    """Report the rows stored since the last report, at which `reported` were stored; return how many are stored now."""
    stored = writer.stored.total()
    if stored > reported and on_rows is not None:
        on_rows(stored - reported, False)
    return stored


def checked_batches(batches: Iterable[Batch], images: Images, on_note: Callable[[str], None] | None) -> Iterator[Batch]:
    """Pass the batches of a run on; report the first note on an image, with its path, as thousands may have the same.

    Raises:
        MachineError: see `stop_on_machine_errors`.
    """
    for batch in stop_on_machine_errors(batches, images.source):
        if batch.notes and on_note is not None:
            row = min(batch.notes)
            on_note(f"{images.slice(row, row + 1).paths[0]}: {batch.notes[row]}")
            on_note = None
        yield batch
