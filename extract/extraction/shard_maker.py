"""Shards of a data set that several processes make together, each on its own, in any order.

A process that makes shards knows nothing of the others. It builds a shard in a folder of its own, as `extract` does,
and gives it to the place where the data set is; if another process was faster, that one's shard stays.
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
from extract.extraction.pipeline import extract_shard, stop_on_machine_errors
from extract.extraction.plan import Plan
from extract.extraction.shard_decoding import ShardBatches
from extract.extraction.summary import Callbacks, Summary
from extract.extraction.todo import ShardWork, work_at
from extract.extraction.validation import Computation, ValidatedForward, validated_forward
from extract.images.worker_deaths import DeadWorkerError
from extract.store.format.dataset import DataSet, Whereabouts
from extract.store.places.destination import Place
from extract.system.atomic_files import discard, read_json
from extract.system.folder_lock import locked

__all__ = ["ShardMaker", "scratch_folder"]

_AT_ONCE = 1000  # processes of a machine that make shards of one data set


class ShardMaker:
    """Makes shards, one at a time; a context manager.

    Args:
        plan: what to compute. Its data set is where it is built: in the folder `scratch`.
        place: where finished shards go.
        scratch: a folder that this process has for itself; see `scratch_folder`.
        on_computation: as of `extract`.

    Attributes:
        about: the device that it computes on.
        begun: shards of which a part is in the folder already, from an earlier run.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        scratch: Path,
        on_computation: Callable[[Computation], None] = lambda computation: None,
    ):
        self._plan = replace(plan, dataset=replace(plan.dataset, out=scratch))
        self._place, self._on_computation = place, on_computation
        self._open_now = contextlib.ExitStack()
        self.about: str = plan.provenance["device"]
        self._forward: ValidatedForward | None = None
        self._batches = ShardBatches(self._plan)
        self._was_ahead = False  # images of further shards may have been decoded when the last one failed
        dataset = self._plan.dataset
        place.open_or_create(plan.dataset)
        dataset.open_or_create()
        published = place.published()
        self._has_rows_elsewhere = bool(len(published))
        _remove_published(scratch, published)
        self.begun: list[int] = sorted({shard for shard, *_ in dataset.files()})

    def make(
        self,
        shard: int,
        on_rows: Callable[[int, bool], None] = lambda rows, found: None,
        stop: Callable[[], bool] = lambda: False,
        following: Callable[[Container[int]], int | None] = lambda known: None,
    ) -> bool:
        """Make one shard, or go on with one that was begun in this folder; `publish` is to follow.

        Args:
            shard: its number.
            on_rows: as of `extract`.
            stop: asked after each batch; True leaves the shard to be resumed.
            following: what shard is likely to be made next, besides those that are known; its images are decoded as
                soon as there is nothing left to decode of this one. None: nobody knows.

        Returns:
            whether it is finished; else it was stopped.

        Raises:
            LayertapError: as of `extract`.
        """
        if self._plan.dataset.path(shard).exists():  # killed after it was finished, and before it was published
            return True
        try:
            return self._fill(shard, on_rows, stop, following)
        except DeadWorkerError:
            if not self._was_ahead:
                raise
        # Perhaps it died of an image of the next shard, for which this one does not answer.
        return self._fill(shard, lambda rows, found: None if found else on_rows(rows, found), stop, lambda known: None)

    def publish(self, shard: int) -> dict[str, Any] | None:
        """Publish a shard that is finished; another thread may make the next one meanwhile.

        Returns:
            its receipt; None: another process was the first.

        Raises:
            LayertapError: the place does not take it; it can be tried again.
        """
        dataset = self._plan.dataset
        final = dataset.path(shard)
        receipt = read_json(final.with_suffix(".json"))
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
        """As of `make`."""
        dataset = self._plan.dataset
        work, batches = self._batches.take(shard, self._work, lambda known: self._fresh(following(known)))
        on_rows(len(dataset.shard_range(shard)) - len(work.rows), True)
        try:
            forward = self._open_forward()
            summary = Summary(n_rows=dataset.n_rows, computation=forward.computation)
            extract_shard(
                self._plan,
                work,
                stop_on_machine_errors(batches, self._plan.images.source),
                forward,
                summary,
                Callbacks(on_rows, self._on_computation, stop),
            )
        except BaseException:
            self._was_ahead = self._batches.is_ahead
            self._batches.close()
            raise
        if summary.stopped:
            self._batches.close()
        return not summary.stopped

    def _work(self, shard: int) -> ShardWork:
        part = self._plan.dataset.path(shard, part=True)
        work = work_at(self._plan.dataset, shard, Whereabouts(part=0 if part.exists() else None))
        assert work is not None
        return work

    def _fresh(self, shard: int | None) -> ShardWork | None:
        """The work of a shard of which nothing is there yet; others are looked at when it is their turn."""
        if shard is None or any(self._plan.dataset.path(shard, part=part).exists() for part in (False, True)):
            return None
        return work_at(self._plan.dataset, shard, Whereabouts())

    def give_up(self, shard: int) -> None:
        """Remove what there is of a shard that is not wanted any more."""
        discard(self._plan.dataset.path(shard, part=True))
        self._plan.dataset.withdraw(self._plan.dataset.path(shard))

    def _open_forward(self) -> ValidatedForward:
        if self._forward is None:
            forward = validated_forward(self._plan, self._has_rows_elsewhere)
            self._forward = self._open_now.enter_context(forward)
        return self._forward

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()
        self._forward = None
        self._open_now.close()


@contextlib.contextmanager
def scratch_folder(out: str, place: Place, dataset: DataSet, base: Path | None = None) -> Iterator[Path]:
    """A folder on this machine in which one process builds shards of a data set; the same one for the next run.

    What was begun in it is resumed by whoever has it next. At the end, what is of no use any more is removed, in
    folders of processes that were killed, too.

    Args:
        out: where the data set is.
        place: the same.
        dataset: it.
        base: folder for it; None: that for temporary files.

    Raises:
        LayertapError: it cannot be written to.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    what = "\0".join([out, dataset.fingerprint, dataset.images["paths_xxh3"]])
    name = f"layertap-{os.getuid()}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    with contextlib.ExitStack() as at_the_end:
        folder = _first_free(base, name, at_the_end)
        try:
            yield folder
        finally:
            with contextlib.suppress(LayertapError):  # what cannot be asked for stays
                published = place.published()
                _tidy(folder, published)
                for other in base.glob(f"{name}-*"):
                    with contextlib.suppress(LayertapError), locked(other):  # else it is in use
                        _tidy(other, published)


def _tidy(folder: Path, published: NDArray[np.int64]) -> None:
    """Remove what is of no use any more; the folder, if nothing is left."""
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
            folder.mkdir(mode=0o700, exist_ok=True)  # whoever may write to it could change features
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            at_the_end.enter_context(locked(folder))
        except LockedError:  # another process of this machine has it
            continue
        except OSError as error:
            raise LayertapError(f"cannot write to {folder}: {error.strerror}") from error
        return folder
    raise LayertapError(f"{base}: no free folder to build shards in, of {_AT_ONCE:,}")
