"""Build shards of a data set in several processes, and publish them.

A process builds each shard in a folder of its own, and publishes it at the place of the data set. If another process
has published the shard first, that shard stays. A hard link, or a conditional upload, is all that this needs: no lock
that a network file system or a bucket would have to give. Another machine cannot continue an unfinished shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from extract.errors import LayertapError, LockedError
from extract.store.format.dataset import DataSet
from extract.store.format.receipt import checked_receipt, read_receipt
from extract.store.places.destination import Destination
from extract.system.atomic_files import locked, own_folder

__all__ = ["Building"]


class Building(contextlib.ExitStack):
    """Context manager: the folders of a machine in which its processes build the shards of a data set.

    A killed process leaves its unfinished shards. The next process of this machine that builds them resumes them.

    Args:
        dataset: the data set.
        place: where finished shards are published.
        scratch: folder of these folders; None: the folder for temporary files.
    """

    def __init__(self, dataset: DataSet, place: Destination, scratch: Path | None = None):
        super().__init__()
        self._dataset, self._place = dataset, place
        self._base = Path(tempfile.gettempdir()) if scratch is None else scratch
        where = os.path.relpath(dataset.out, self._base)  # that of a folder in the data set stays when both are moved
        content = "\0".join([where, dataset.fingerprint, dataset.images["paths_xxh3"]])
        self._name = f"layertap-{os.getuid()}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        self.callback(self._remove_published)
        self._remove_published()

    @contextlib.contextmanager
    def open(self, shard: int, *, alone: bool = False) -> Iterator[DataSet]:
        """Context manager: lock a folder for a shard; yield the data set with this folder in place of its own.

        Args:
            shard: its number.
            alone: whether to refuse a shard that another process of this machine builds; otherwise both build it.

        Raises:
            LockedError: another process of this machine builds the shard.
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
                    if alone:
                        raise
                    continue
                except OSError as error:
                    raise LayertapError(f"cannot write to {folder}: {error.strerror}") from error
            lock.callback(_remove_without_shards, folder)
            dataset = replace(self._dataset, out=folder)
            final = dataset.path(shard)
            if read_receipt(final, len(dataset.shard_range(shard))) is None:
                final.unlink(missing_ok=True)  # a file without a receipt cannot be published
            yield dataset

    def publish(self, dataset: DataSet, shard: int) -> dict[str, Any] | None:
        """Publish a finished shard, and remove it from its folder; return its receipt.

        None: another process has published the shard first.

        Raises:
            LayertapError: the place cannot take the shard, which stays in its folder.
        """
        final = dataset.path(shard)
        receipt = checked_receipt(final, len(dataset.shard_range(shard)))
        is_first = self._place.publish(final, receipt)
        dataset.withdraw(final)
        return receipt if is_first else None

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
