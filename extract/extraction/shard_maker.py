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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from extract.errors import LayertapError, LockedError
from extract.extraction.pipeline import Summary, batches_of, checked_batches, extract_shard
from extract.extraction.plan import Plan
from extract.extraction.run import work_at
from extract.extraction.validation import Computation, ValidatedForward
from extract.images import load_batches
from extract.store.format.dataset import DataSet, ShardFiles
from extract.store.format.receipt import checked_receipt, read_receipt
from extract.store.places.destination import Destination
from extract.system.atomic_files import locked, own_folder
from extract.system.foreign_code import exits_refused

__all__ = ["ShardMaker"]


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
        self._published = set(place.published().tolist())
        self.callback(self._remove_published)
        self._remove_published()
        self._forward = self.enter_context(ValidatedForward(plan, bool(self._published), on_computation))

    def build(
        self, shard: int, on_rows: Callable[[int, bool], None] = lambda rows, resumed: None
    ) -> dict[str, Any] | None:
        """Build and publish a shard; return its receipt, or None if another process has published it first.

        Args:
            shard: its number.
            on_rows: called with a number of rows, and whether an earlier run stored them.

        Raises:
            LayertapError: see `extract`; or the place cannot take a shard. The maker builds no more then.
        """
        if shard in self._published:  # by a process that died before it could report this
            return None
        plan = self._plan
        with self._open(shard) as dataset:
            final, n_rows = dataset.path(shard), len(dataset.shard_range(shard))
            if final.exists():  # an earlier process was killed before it published the shard
                on_rows(n_rows, True)
            else:
                is_begun = dataset.path(shard, part=True).exists()
                work = work_at(dataset, shard, ShardFiles(part=0 if is_begun else None))
                assert work is not None
                on_rows(n_rows - len(work.rows), True)
                loaded = load_batches(plan.images, batches_of(work.rows, plan), plan.decoding)
                with contextlib.closing(loaded), exits_refused():
                    publish = extract_shard(
                        replace(plan, dataset=dataset), work, checked_batches(loaded, plan.images, self._note),
                        self._forward, Summary(n_rows=n_rows), on_rows,
                    )  # fmt: skip
                    assert publish is not None
                    publish()
            receipt = checked_receipt(final, n_rows)
            is_first = self._place.publish(final, receipt)
            dataset.withdraw(final)
        return receipt if is_first else None

    def _note(self, note: str) -> None:
        """Pass on the first note of this process: thousands of images may have the same."""
        self._on_note(note)
        self._on_note = lambda note: None

    @contextlib.contextmanager
    def _open(self, shard: int) -> Iterator[DataSet]:
        """Context manager: lock a folder for a shard; yield the data set with this folder in place of its own.

        Raises:
            LayertapError: the folder cannot be written to.
        """
        with contextlib.ExitStack() as lock:
            for number in itertools.count():  # other processes of this machine may build the same shard
                folder = self._base / f"{self._name}-{shard:06d}-{number}"
                try:
                    self._base.mkdir(parents=True, exist_ok=True)
                    folder.mkdir(mode=0o700, exist_ok=True)  # a user who can write to it could change features
                    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                        continue
                    lock.enter_context(locked(folder))
                    own_folder(folder / "shards")
                    break
                except LockedError:
                    continue
                except OSError as error:
                    raise LayertapError(f"cannot write to {folder}: {error.strerror}") from error
            lock.callback(_remove_without_shards, folder)
            dataset = replace(self._plan.dataset, out=folder)
            final = dataset.path(shard)
            if read_receipt(final, len(dataset.shard_range(shard))) is None:
                final.unlink(missing_ok=True)  # a file without a receipt cannot be published
            yield dataset

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
