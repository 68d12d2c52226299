"""Decoded batches that are kept in memory, for several runs over the same images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator

from extract.images.image_list import ImageList
from extract.images.loading import Batch, Decoding, load_batches

__all__ = ["KeptBatches"]


class KeptBatches:
    """Batches that were decoded once.

    The runs must have the same images, transform and batch size. After a run that was interrupted, batches of others
    may have other rows; these are decoded again.

    Args:
        stop: called after each batch is decoded; if True, decoding ends early.
    """

    def __init__(self, stop: Callable[[], bool] = lambda: False) -> None:
        self._kept: dict[tuple[int, ...], Batch] = {}
        self._stop = stop

    def load(self, images: ImageList, batches: Iterable[list[int]], decoding: Decoding) -> Generator[Batch, None, None]:
        """Decode those of the batches that are not kept, then yield all; see `load_batches`.

        All are decoded before the first is yielded, so that decoding takes no time from the first run alone.
        """
        wanted = [tuple(rows) for rows in batches]
        missing = [list(rows) for rows in wanted if rows not in self._kept]
        # The worker processes start at once, as those of `load_batches`.
        return self._yielded(wanted, load_batches(images, missing, decoding) if missing else None)

    def _yielded(self, wanted: list[tuple[int, ...]], loaded: Iterator[Batch] | None) -> Generator[Batch, None, None]:
        with contextlib.closing(loaded) if loaded is not None else contextlib.nullcontext():  # type: ignore[type-var]
            for batch in loaded or ():
                self._kept[tuple(batch.rows.tolist())] = batch
                if self._stop():  # the batches so far are computed, and stop the run
                    break
            yield from (self._kept[rows] for rows in wanted if rows in self._kept)
