"""Decoded batches that are kept on disk, for several runs over the same images."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import torch

from extract.errors import MachineError
from extract.images.image_list import ImageList
from extract.images.loading import Batch, Decoding, load_batches

__all__ = ["KeptBatches"]


class KeptBatches:  # on disk: in memory, they would take as much as the largest backbone
    """Batches that are decoded once. The runs that load them have the same images, transform and batch size.

    After a run that was interrupted, batches of others may have other rows; these are decoded again.

    Args:
        folder: empty folder, in which each batch gets a file.
        stop: called after each batch is decoded; if True, decoding ends early.
    """

    def __init__(self, folder: Path, stop: Callable[[], bool] = lambda: False) -> None:
        self._folder, self._stop = folder, stop
        self._files: dict[tuple[int, ...], Path] = {}

    def load(self, images: ImageList, batches: Iterable[list[int]], decoding: Decoding) -> Generator[Batch, None, None]:
        """Decode those of the batches that are not kept, then yield all; see `load_batches`.

        All are decoded before the first is yielded: decoding beside the first forward would make that backbone look
        slow.

        Raises:
            MachineError: while iterating; the disk has no space for decoded images.
        """
        wanted = [tuple(rows) for rows in batches]
        missing = [list(rows) for rows in wanted if rows not in self._files]
        # The worker processes start at once, as those of `load_batches`.
        return self._yielded(wanted, load_batches(images, missing, decoding) if missing else None)

    def _yielded(self, wanted: list[tuple[int, ...]], loaded: Iterator[Batch] | None) -> Generator[Batch, None, None]:
        with contextlib.closing(loaded) if loaded is not None else contextlib.nullcontext():  # type: ignore[type-var]
            for batch in loaded or ():
                self._write(batch)
                if self._stop():  # the batches so far are computed, and stop the run
                    break
            for rows in wanted:
                if rows in self._files:
                    with self._files[rows].open("rb") as file:
                        batch = pickle.load(file)
                    yield batch._replace(images=torch.from_numpy(batch.images))

    def _write(self, batch: Batch) -> None:
        path = self._folder / str(len(self._files))
        try:
            with path.open("wb") as file:
                pickle.dump(batch._replace(images=batch.images.numpy()), file, pickle.HIGHEST_PROTOCOL)  # type: ignore[arg-type]
        except OSError as error:
            raise MachineError(
                f"{self._folder}: decoded images cannot be kept: {error.strerror}. Stored rows are safe",
                hint="free space on this disk, and run again",
            ) from error
        self._files[tuple(batch.rows.tolist())] = path
