"""Decoded batches that are kept on disk, for several runs over the same images."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from extract.errors import MachineError
from extract.images.image_list import Images
from extract.images.loading import Batch, Decoding, load_batches
from extract.images.sources import ImageSource
from extract.system.torch_state import release_freed_memory

__all__ = ["KeptBatches"]

# What is kept of a batch comes to lie in memory that its images have freed, and the images of the next batch no longer
# fit there: without this, memory grows by nearly all images.
_RELEASED_BYTES = 128 << 20


class _Kept(NamedTuple):
    """A batch without its images, and where these are."""

    batch: Batch
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class KeptBatches:
    """Context manager: batches that were decoded once.

    The runs must have the same images, transform and batch size. After a run that was interrupted, batches of others
    may have other rows; these are decoded again.

    Args:
        folder: folder for decoded images, in a file without a name, which ends with the process.
        source: reads the images; None: that of the images.
        stop: called after each batch is decoded; if True, decoding ends early.
    """

    def __init__(
        self, folder: Path, source: ImageSource | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._folder, self._source, self._stop = folder, source, stop
        try:
            self._file, self._end = tempfile.TemporaryFile(dir=folder, buffering=0), 0  # noqa: SIM115 (see __exit__)
        except OSError as error:
            raise self._not_kept(error) from error
        self._kept: dict[tuple[int, ...], _Kept] = {}

    def load(self, images: Images, batches: Iterable[list[int]], decoding: Decoding) -> Generator[Batch, None, None]:
        """Decode those of the batches that are not kept, then yield all; see `load_batches`.

        All are decoded before the first is yielded, so that decoding takes no time from the first run alone.

        Raises:
            MachineError: while iterating; the disk has no space for decoded images.
        """
        wanted = [tuple(rows) for rows in batches]
        missing = [list(rows) for rows in wanted if rows not in self._kept]
        # The worker processes start at once, as those of `load_batches`.
        return self._yielded(wanted, load_batches(images, missing, decoding, self._source) if missing else None)

    def _yielded(self, wanted: list[tuple[int, ...]], loaded: Iterator[Batch] | None) -> Generator[Batch, None, None]:
        with contextlib.closing(loaded) if loaded is not None else contextlib.nullcontext():  # type: ignore[type-var]
            for batch in loaded or ():
                self._keep(batch)
                if self._stop():  # the batches so far are computed, and stop the run
                    break
            yield from (self._read(self._kept[rows]) for rows in wanted if rows in self._kept)

    def _keep(self, batch: Batch) -> None:
        content, start = _bytes_of(batch.images), self._end
        try:
            while self._end < start + len(content):
                self._end += os.pwrite(self._file.fileno(), content[self._end - start :], self._end)
        except OSError as error:
            raise self._not_kept(error) from error
        without = batch._replace(images=torch.empty(0))
        if self._end // _RELEASED_BYTES > start // _RELEASED_BYTES:
            release_freed_memory()
        self._kept[tuple(batch.rows.tolist())] = _Kept(without, start, batch.images.shape, batch.images.dtype)

    def _not_kept(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._folder}: decoded images cannot be kept: {error.strerror}. Stored rows are safe",
            hint="free space on this disk, and run again",
        )

    def _read(self, kept: _Kept) -> Batch:
        images = torch.empty(kept.shape, dtype=kept.dtype)
        content, got = _bytes_of(images), 0
        while got < len(content):
            count = os.preadv(self._file.fileno(), [content[got:]], kept.offset + got)
            if not count:
                raise MachineError(f"{self._folder}: decoded images cannot be read again", hint="run again")
            got += count
        return kept.batch._replace(images=images)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._kept.clear()


def _bytes_of(images: Tensor) -> memoryview:
    """Return the memory of images."""
    return images.numpy().reshape(-1).view(np.uint8).data
