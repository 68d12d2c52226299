"""Decoded batches that are kept on disk, for several runs over the same images.

In memory, a gigabyte of them raised the peak of a run by nearly as much.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, BinaryIO

import torch

from extract.errors import MachineError
from extract.images.image_list import Images
from extract.images.loading import Batch, Decoding, load_batches

__all__ = ["KeptBatches"]


class KeptBatches:
    """Batches that are decoded once. The runs that load them have the same images, transform and batch size.

    After a run that was interrupted, batches of others may have other rows; these are decoded again.

    Args:
        file: empty, unbuffered file. It needs no name: what is read from it is unpickled, and nobody else can open it.
        stop: called after each batch is decoded; if True, decoding ends early.
    """

    def __init__(self, file: BinaryIO, stop: Callable[[], bool] = lambda: False) -> None:
        self._file, self._stop, self._end = file, stop, 0
        self._starts: dict[tuple[int, ...], int] = {}  # position in the file

    def load(self, images: Images, batches: Iterable[list[int]], decoding: Decoding) -> Generator[Batch, None, None]:
        """Decode those of the batches that are not kept, then yield all; see `load_batches`.

        All are decoded before the first is yielded: decoding beside the first forward would make that backbone look
        slow.

        Raises:
            MachineError: while iterating; the disk has no space for decoded images.
        """
        wanted = [tuple(rows) for rows in batches]
        missing = [list(rows) for rows in wanted if rows not in self._starts]
        # The worker processes start at once, as those of `load_batches`.
        return self._yielded(wanted, load_batches(images, missing, decoding) if missing else None)

    def _yielded(self, wanted: list[tuple[int, ...]], loaded: Iterator[Batch] | None) -> Generator[Batch, None, None]:
        with contextlib.closing(loaded) if loaded is not None else contextlib.nullcontext():  # type: ignore[type-var]
            for batch in loaded or ():
                self._write(batch)
                if self._stop():  # the batches so far are computed, and stop the run
                    break
            for rows in wanted:
                if rows in self._starts:
                    self._file.seek(self._starts[rows])
                    batch = pickle.load(self._file)
                    yield batch._replace(images=torch.from_numpy(batch.images))

    def _write(self, batch: Batch) -> None:
        without_tensor: Any = batch._replace(images=batch.images.cpu().numpy())  # type: ignore[arg-type]
        content = memoryview(pickle.dumps(without_tensor, pickle.HIGHEST_PROTOCOL))
        self._starts[tuple(batch.rows.tolist())] = self._end
        try:
            while content:
                written = os.pwrite(self._file.fileno(), content, self._end)
                content, self._end = content[written:], self._end + written
        except OSError as error:
            raise MachineError(
                f"decoded images cannot be kept: {error.strerror}. Stored rows are safe",
                hint="free space on the disk of the comparison, and run again",
            ) from error
