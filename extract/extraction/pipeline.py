"""One shard is filled: batch by batch through the backbone, into its file, which is published when it is full.

batch k + 2 is decoded | batch k + 1 is computed (on a GPU, by itself) | batch k is written
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from extract.compute.forward import Forward, Rows, rows_begun
from extract.errors import MachineError
from extract.extraction.duplicates import Duplicates
from extract.extraction.plan import Plan
from extract.extraction.summary import Summary
from extract.extraction.todo import ShardWork, create_part
from extract.images import Batch
from extract.row_status import Status
from extract.store.format.writer import ShardWriter

__all__ = ["fill_shard"]

_SUSPECT = 32  # images in a row that fail for the same reason, which is hardly theirs; of dead links there may be some


def fill_shard(
    plan: Plan,
    work: ShardWork,
    batches: Iterator[Batch],
    forward: Forward,
    summary: Summary,
    on_rows: Callable[[int, bool], None] = lambda rows, found: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fill one shard with these batches of its rows and publish it; each is written while the next is computed."""
    part = plan.dataset.path(work.shard, work.revision, part=True)
    is_new = not part.exists()
    if is_new:
        create_part(plan, work, part)
    before, start = copy.deepcopy(summary), time.perf_counter()
    with ShardWriter(plan.dataset, work.shard, work.revision, sync_s=plan.sync_s) as writer:
        try:
            with _Filling(plan, writer, forward, summary, on_rows) as filling:
                filling.run(batches, stop)
        except BaseException:
            if is_new and work.published is None and (writer.status == Status.PENDING).all():
                part.unlink(missing_ok=True)  # nothing was stored in it
            raise
        if not summary.stopped:
            made = summary.made_since(before, time.perf_counter() - start, plan.provenance)
            with summary.timed("write"):
                writer.publish(plan.compress or work.compress, made)


class _Filling:
    """Batches of one shard on their way; a context manager, at whose end all that was computed is stored."""

    def __init__(
        self,
        plan: Plan,
        writer: ShardWriter,
        forward: Forward,
        summary: Summary,
        on_rows: Callable[[int, bool], None],
    ):
        self._plan, self._writer, self._forward = plan, writer, forward
        self._summary, self._on_rows = summary, on_rows
        self._duplicates = Duplicates(writer, self._store_all, self._wait_until_written)
        self._copying_s = forward.copying_s  # until now
        self._computing: list[tuple[Batch, Callable[[], Rows]]] = []  # the oldest first; two at most
        self._writing: list[tuple[Future[None], NDArray[np.uint8]]] = []  # one at most, and its status

    def run(self, batches: Iterator[Batch], stop: Callable[[], bool]) -> None:
        """Compute all batches and begin to store them, until asked to stop."""
        summary = self._summary
        while not summary.stopped:
            with summary.timed("images"):
                batch = next(batches, None)
            if batch is None:
                return
            if (batch.status == Status.MISSING).any() or not (batch.status == Status.OK).any():
                self._plan.images.source.check_there()  # files that are missing with their disk are no failed rows
            self._check_machine(batch)
            with self._timed_forward():
                rows = self._duplicates.begin(batch, self._begin)
            self._computing.append((batch, rows))
            self._store_computed(but=1 if self._forward.ahead else 0)
            summary.stopped = stop()

    def _begin(self, batch: Batch) -> Callable[[], Rows]:
        return rows_begun(batch, self._forward, self._plan.choice.features, self._plan.dataset.features[0].dtype)

    def _store_computed(self, but: int = 0) -> None:
        """Wait for batches that are computed, but so many, and begin to store each when the one before it is stored."""
        while len(self._computing) > but:
            batch, rows = self._computing[0]
            with self._timed_forward():
                features, status, reasons = rows()
            source = {name: getattr(batch, name) for name in ("source_size", "source_mtime_ns", "source_hash")}
            self._wait_until_written()
            written = self._background.submit(self._writer.write, batch.rows, features, status, source, reasons)
            self._writing.append((written, status))
            del self._computing[0]  # not before: whoever is interrupted waits for it again
            self._summary.duplicates += self._duplicates.count
            self._duplicates.count = 0

    def _wait_until_written(self) -> None:
        """Wait until the batch that is written is stored, and count it."""
        while self._writing:
            written, status = self._writing[0]
            with self._summary.timed("write"):
                written.result()
            del self._writing[0]
            self._summary.computed += len(status)
            self._summary.status.update(Status(code).text for code in status.tolist())
            self._on_rows(len(status), False)

    def _store_all(self) -> None:
        self._store_computed()
        self._wait_until_written()

    @contextlib.contextmanager
    def _timed_forward(self) -> Iterator[None]:
        """Add the time of the block to the forward, but for what copying took of it."""
        with self._summary.timed("forward"):
            yield
        copying, self._copying_s = self._forward.copying_s - self._copying_s, self._forward.copying_s
        if copying > 0:
            stages = self._summary.stages
            stages["forward"] -= copying
            stages["copy"] = stages.get("copy", 0.0) + copying

    def _check_machine(self, batch: Batch) -> None:
        """End the run where images fail for a reason that is hardly theirs: at many in a row, or in the first batch.

        So that they are no failed rows when a disk, a server or the memory fails.

        Raises:
            MachineError: they do.
        """
        summary = self._summary
        kind, count = summary.suspect
        reason = ""
        for row, status in zip(batch.rows.tolist(), batch.status.tolist(), strict=True):
            if status == Status.OK:
                kind, count = "", 0
            elif row in batch.suspect:
                count = count + 1 if batch.suspect[row] == kind else 1
                kind, reason = batch.suspect[row], batch.reasons[row]
        summary.suspect = kind, count
        nothing_yet = not (summary.computed or self._computing or self._writing)
        if count >= _SUSPECT or (nothing_yet and 1 < count == len(batch.rows)):
            raise MachineError(
                f"{count} images in a row cannot be read: {reason}. That many are an error of the disk, the server or "
                "the machine, not of the images. What was stored before is safe; run again when it is fixed"
            )

    def __enter__(self) -> Self:
        self._background = ThreadPoolExecutor(1, "writer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._background:
            try:
                try:
                    self._store_computed()
                finally:
                    self._wait_until_written()
            except Exception as later:
                if error is None:
                    raise
                if later is not error:  # the first one is what is to be told
                    error.add_note(f"what was computed before could not all be stored: {later}")
