"""Build shards of a data set in several processes, independently and in any order.

A process that builds shards knows nothing of the others. It builds each shard in a folder of its own, as `extract`
does, and publishes it at the place of the data set. If another process has published the shard first, that shard stays.
A hard link, or a conditional upload, is all that this needs: no lock that a network file system or a bucket would have
to give. Another machine cannot continue an unfinished shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from extract.errors import LayertapError, LockedError
from extract.extraction.pipeline import ShardWork, Summary, batches_of, checked_batches, extract_shard
from extract.extraction.plan import Plan
from extract.extraction.run import work_at
from extract.extraction.validation import Computation, ValidatedForward
from extract.images import load_batches
from extract.images.loading import Batch
from extract.store.format.dataset import DataSet, ShardFiles
from extract.store.format.receipt import checked_receipt, read_receipt
from extract.store.places.destination import Destination
from extract.system.atomic_files import locked, own_folder
from extract.system.foreign_code import exits_refused

__all__ = ["ShardMaker"]

_WRITERS = 1000  # processes of a machine that build the same shard


class _OpenShard(NamedTuple):
    """A shard and the locked folder in which it is built.

    Attributes:
        work: its missing rows.
        dataset: the data set, with this folder in place of its own.
        close: unlocks the folder, and removes it unless it has a file of the shard; may be called twice.
    """

    work: ShardWork
    dataset: DataSet
    close: Callable[[], None]


class ShardMaker(contextlib.ExitStack):
    """Context manager that builds and publishes shards.

    A killed process leaves its unfinished shards. The next process of this machine that builds them resumes them.

    Args:
        plan: plan of the run.
        place: where finished shards are published.
        scratch: folder for shards in progress; None: the folder for temporary files.
        on_computation, on_note: see `extract`.

    Attributes:
        about: the device that computes.
    """

    def __init__(
        self,
        plan: Plan,
        place: Destination,
        scratch: Path | None = None,
        on_computation: Callable[[Computation], None] = lambda computation: None,
        on_note: Callable[[str], None] = lambda note: None,
    ):
        super().__init__()
        self._plan, self._place, self._on_note = plan, place, on_note
        self._base = Path(tempfile.gettempdir()) if scratch is None else scratch
        content = "\0".join([os.path.abspath(plan.dataset.out), plan.dataset.fingerprint, plan.images.paths_xxh3])  # noqa: PTH100
        self._name = f"layertap-{os.getuid()}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        self.about: str = plan.provenance["device"]
        place.open_or_create(plan.dataset)
        place.keep_axes(plan.choice.axes_files)
        has_stored_rows = bool(len(place.published()))
        self.callback(self._remove_published)
        self._remove_published()
        self._forward = self.enter_context(ValidatedForward(plan, has_stored_rows, on_computation))

    def build(
        self,
        shards: Iterable[int],
        on_rows: Callable[[int, int, bool], None] = lambda shard, rows, resumed: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Build shards in this order; images of the next are decoded, and the previous is published, meanwhile.

        After an error or a stop, the maker builds no more: forwards of another shard may be in progress.

        Args:
            shards: numbers of the shards; read when there is room for more images.
            on_rows: called with a shard, a number of rows, and whether an earlier run stored them.
            stop: called after each batch; True leaves the shard to be resumed.

        Yields:
            (shard, receipt) of each published shard; None: another process published it first.

        Raises:
            LayertapError: see `extract`; or the place cannot take a shard.
        """
        plan = self._plan
        with contextlib.ExitStack() as at_the_end, ThreadPoolExecutor(1, "publisher") as publisher:
            opened, read_ahead = itertools.tee(self._open(shard, at_the_end) for shard in shards)
            rows = itertools.chain.from_iterable(batches_of(shard.work.rows, plan) for shard in read_ahead)
            loaded = at_the_end.enter_context(contextlib.closing(load_batches(plan.images, rows, plan.decoding)))
            batches = checked_batches(loaded, plan.images, self._note)
            published: Future[tuple[int, dict[str, Any] | None]] | None = None
            try:
                for shard in opened:
                    if not self._fill(shard, batches, on_rows, stop):
                        break
                    if published is not None:
                        yield published.result()
                    published = publisher.submit(self._publish, shard)
            except Exception:
                if published is not None:  # it is published, and would be built again if nobody heard of it
                    yield published.result()
                raise
            if published is not None:
                yield published.result()

    def _fill(
        self,
        shard: _OpenShard,
        batches: Iterator[Batch],
        on_rows: Callable[[int, int, bool], None],
        stop: Callable[[], bool],
    ) -> bool:
        """Compute the missing rows of a shard; return False if it was stopped."""
        work, n_rows = shard.work, len(shard.dataset.shard_range(shard.work.shard))
        on_rows(work.shard, n_rows - len(work.rows), True)
        if shard.dataset.path(work.shard).exists():  # an earlier run was killed before it published the shard
            return True
        summary = Summary(n_rows=n_rows)
        own_batches = itertools.islice(batches, sum(1 for _ in batches_of(work.rows, self._plan)))
        with exits_refused():
            extract_shard(
                replace(self._plan, dataset=shard.dataset), work, own_batches, self._forward, summary,
                lambda rows, resumed: on_rows(work.shard, rows, resumed), stop,
            )  # fmt: skip
        return not summary.stopped

    def _publish(self, shard: _OpenShard) -> tuple[int, dict[str, Any] | None]:
        number = shard.work.shard
        final = shard.dataset.path(number)
        receipt = checked_receipt(final, len(shard.dataset.shard_range(number)))
        is_first = self._place.publish(final, receipt)
        shard.dataset.withdraw(final)
        shard.close()
        return number, receipt if is_first else None

    def _note(self, note: str) -> None:
        """Pass on the first note of this process: thousands of images may have the same."""
        self._on_note(note)
        self._on_note = lambda note: None

    def _open(self, shard: int, at_the_end: contextlib.ExitStack) -> _OpenShard:
        """Lock the folder of a shard, and find out which rows an earlier run has left there.

        Raises:
            LayertapError: the folder cannot be written to, or none is free.
        """
        lock = at_the_end.enter_context(contextlib.ExitStack())
        for number in range(_WRITERS):
            folder = self._base / f"{self._name}-{shard:06d}-{number}"
            try:
                self._base.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)  # a user who can write to it could change features
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                lock.enter_context(locked(folder))
                lock.callback(_remove_without_shards, folder)
                own_folder(folder / "shards")
            except LockedError:  # another process of this machine builds the shard
                continue
            except OSError as error:
                raise LayertapError(f"cannot write to {folder}: {error.strerror}") from error
            dataset = replace(self._plan.dataset, out=folder)
            final, rows = dataset.path(shard), dataset.shard_range(shard)
            if read_receipt(final, len(rows)) is not None and final.exists():
                return _OpenShard(ShardWork(shard, 0, range(0)), dataset, lock.close)  # finished, but not published
            final.unlink(missing_ok=True)  # a file without a receipt cannot be published
            is_begun = dataset.path(shard, part=True).exists()
            work = work_at(dataset, shard, ShardFiles(part=0 if is_begun else None))
            assert work is not None
            return _OpenShard(work, dataset, lock.close)
        raise LayertapError(f"{self._base}: {_WRITERS:,} processes build shard {shard}")

    def _remove_published(self) -> None:
        """Remove what killed processes of this machine have left of shards that are published now."""
        folders = list(self._base.glob(f"{self._name}-{'[0-9]' * 6}-*"))
        with contextlib.suppress(LayertapError):  # files stay if the place does not answer
            published = set(self._place.published().tolist()) if folders else set()
            for folder in folders:
                if int(folder.name[len(self._name) + 1 :][:6]) in published and not folder.is_symlink():
                    with contextlib.suppress(LayertapError), locked(folder):  # locked: in use
                        shutil.rmtree(folder, ignore_errors=True)


def _remove_without_shards(folder: Path) -> None:
    if not any((folder / "shards").glob("*.h5*")):
        shutil.rmtree(folder, ignore_errors=True)
