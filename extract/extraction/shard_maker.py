"""Build shards of a data set in several processes, independently and in any order.

A process that builds shards knows nothing of the others. It builds a shard in its own folder, as `extract` does, and
publishes it at the place of the data set. If another process has published the shard first, that shard stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from extract.errors import LayertapError, LockedError
from extract.extraction.pipeline import checked_batches, extract_shard
from extract.extraction.plan import Plan
from extract.extraction.shard_decoding import ShardBatches
from extract.extraction.summary import Summary
from extract.extraction.todo import ShardWork, work_at
from extract.extraction.validation import Computation, ValidatedForward
from extract.images.worker_deaths import DeadWorkerError
from extract.store.format.dataset import DataSet, ShardFiles
from extract.store.format.receipt import checked_receipt
from extract.store.places.destination import Destination
from extract.system.atomic_files import discard
from extract.system.folder_lock import locked
from extract.system.foreign_code import exits_refused

__all__ = ["ShardMaker", "scratch_folder"]

_AT_ONCE = 1000  # processes per machine that build shards of one data set


class ShardMaker:
    """Context manager that builds shards, one at a time.

    Args:
        plan: plan of the run; shards are built in `scratch`, not in the folder of its data set.
        place: where finished shards are published.
        scratch: folder for this process alone; see `scratch_folder`.
        on_computation, on_note: see `extract`.

    Attributes:
        about: the device that computes.
        left_over: shards that an earlier run has left in the folder, unfinished or not published.
    """

    def __init__(
        self,
        plan: Plan,
        place: Destination,
        scratch: Path,
        on_computation: Callable[[Computation], None] = lambda computation: None,
        on_note: Callable[[str], None] | None = None,
    ):
        self._plan = replace(plan, dataset=replace(plan.dataset, out=scratch))
        self._place, self._on_note = place, on_note
        self.about: str = plan.provenance["device"]
        self._batches = ShardBatches(self._plan)
        self._was_ahead = False  # images of later shards may have been decoded when the last shard failed
        dataset = self._plan.dataset
        place.open_or_create(plan.dataset)
        place.keep_axes(plan.choice.axes_files)
        dataset.open_or_create()
        published = place.published()
        self._forward = ValidatedForward(self._plan, bool(len(published)), on_computation)
        _remove_published(scratch, published)
        self.left_over: list[int] = sorted({shard for shard, *_ in dataset.files()})

    def make(
        self,
        shard: int,
        on_rows: Callable[[int, bool], None] = lambda rows, stored_earlier: None,
        stop: Callable[[], bool] = lambda: False,
        following: Callable[[Container[int]], int | None] = lambda known: None,
    ) -> bool:
        """Build one shard, or resume one that was started in this folder. Call `publish` afterwards.

        Args:
            shard: number of the shard.
            on_rows: see `extract`.
            stop: called after each batch; True leaves the shard to be resumed.
            following: returns the shard that is likely to be built next, other than the shards passed to it, or None
                if unknown. Its images are decoded as soon as all images of this shard are.

        Returns:
            True if the shard is finished, False if it was stopped.

        Raises:
            LayertapError: see `extract`.
        """
        if self._plan.dataset.path(shard).exists():  # an earlier run was killed before publishing it
            return True
        try:
            return self._fill(shard, on_rows, stop, following)
        except DeadWorkerError:
            if not self._was_ahead:
                raise
        # An image of a later shard may have killed the worker: retry without decoding ahead.
        return self._fill(
            shard, lambda rows, earlier: None if earlier else on_rows(rows, earlier), stop, lambda known: None
        )

    def publish(self, shard: int) -> dict[str, Any] | None:
        """Publish a finished shard; another thread may build the next one meanwhile.

        Returns:
            receipt of the shard; None if another process published it first.

        Raises:
            LayertapError: the place cannot take the shard; the call may be repeated.
        """
        dataset = self._plan.dataset
        final = dataset.path(shard)
        receipt = checked_receipt(final, len(dataset.shard_range(shard)))
        won = self._place.publish(final, receipt)
        dataset.withdraw(final)
        return receipt if won else None

    def _fill(
        self,
        shard: int,
        on_rows: Callable[[int, bool], None],
        stop: Callable[[], bool],
        following: Callable[[Container[int]], int | None],
    ) -> bool:
        """See `make`."""
        dataset = self._plan.dataset
        work, batches = self._batches.take(shard, self._work, lambda known: self._fresh(following(known)))
        on_rows(len(dataset.shard_range(shard)) - len(work.rows), True)
        try:
            summary = Summary(n_rows=dataset.n_rows)
            checked = checked_batches(batches, self._plan.images, self._report_note)
            with exits_refused():
                extract_shard(self._plan, work, checked, self._forward, summary, on_rows, stop)
        except BaseException:
            self._was_ahead = self._batches.is_ahead
            self._batches.close()
            raise
        if summary.stopped:
            self._batches.close()
        return not summary.stopped

    def _report_note(self, note: str) -> None:
        if self._on_note is not None:
            self._on_note(note)
        self._on_note = None  # once for all shards

    def _work(self, shard: int) -> ShardWork:
        part = self._plan.dataset.path(shard, part=True)
        work = work_at(self._plan.dataset, shard, ShardFiles(part=0 if part.exists() else None))
        assert work is not None
        return work

    def _fresh(self, shard: int | None) -> ShardWork | None:
        """Return the work of a shard without files; None for others, which are opened when they are built."""
        if shard is None or any(self._plan.dataset.path(shard, part=part).exists() for part in (False, True)):
            return None
        return work_at(self._plan.dataset, shard, ShardFiles())

    def give_up(self, shard: int) -> None:
        """Remove the files of a shard that is no longer needed."""
        discard(self._plan.dataset.path(shard, part=True))
        self._plan.dataset.withdraw(self._plan.dataset.path(shard))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()
        self._forward.close()


@contextlib.contextmanager
def scratch_folder(out: str, place: Destination, dataset: DataSet, base: Path | None = None) -> Iterator[Path]:
    """Context manager: yield a folder on this machine in which one process builds shards of a data set.

    The next run gets the same folder and resumes the shards in it. At the end, published shards and empty folders are
    removed, including those of killed processes.

    Args:
        out: folder or URL of the data set.
        place: the same as a `Destination`.
        dataset: the data set.
        base: parent folder; None: the folder for temporary files.

    Raises:
        LayertapError: the folder cannot be written to, or none is free.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    what = "\0".join([out, dataset.fingerprint, dataset.images["paths_xxh3"]])
    name = f"layertap-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    with contextlib.ExitStack() as at_the_end:
        folder = _first_free(base, name, at_the_end)
        try:
            yield folder
        finally:
            with contextlib.suppress(LayertapError):  # files stay if the place does not answer
                published = place.published()
                _tidy(folder, published)
                for other in base.glob(f"{name}-*"):
                    with contextlib.suppress(LayertapError), locked(other):  # locked: in use
                        _tidy(other, published)


def _tidy(folder: Path, published: NDArray[np.int64]) -> None:
    """Remove published shards, and the folder if no shard is left."""
    _remove_published(folder, published)
    if not any((folder / "shards").glob("*.h5*")):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_published(folder: Path, published: NDArray[np.int64]) -> None:
    gone = set(published.tolist())
    for path in (folder / "shards").glob("[0-9]" * 6 + "*"):
        if int(path.name[:6]) in gone:
            discard(path)


def _first_free(base: Path, name: str, at_the_end: contextlib.ExitStack) -> Path:
    for number in range(_AT_ONCE):
        folder = base / f"{name}-{number}"
        try:
            base.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)  # a user who can write to it could change features
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            at_the_end.enter_context(locked(folder))
        except LockedError:  # another process of this machine holds it
            continue
        except OSError as error:
            raise LayertapError(f"cannot write to {folder}: {error.strerror}") from error
        return folder
    raise LayertapError(f"{base}: all {_AT_ONCE:,} scratch folders are in use")
