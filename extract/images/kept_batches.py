"""Decoded batches that are kept in memory, for several runs over the same images."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

from extract.images.image_list import ImageList
from extract.images.loading import Batch, Decoding, load_batches

__all__ = ["KeptBatches"]


class KeptBatches:
    """Batches that were decoded once.

    The runs must have the same images, transform and batch size. After a run that was interrupted, batches of others
    may have other rows; these are decoded again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Batch] = {}

    def load(self, images: ImageList, batches: Iterable[list[int]], decoding: Decoding) -> Generator[Batch, None, None]:
        """Decode batches, and keep them; see `load_batches`. Kept batches are not decoded again."""
        rows = [*batches]
        missing = [some for some in rows if tuple(some) not in self._kept]
        # The worker processes start at once, as those of `load_batches`.
        loaded = load_batches(images, missing, decoding) if missing else None

        def of_rows() -> Generator[Batch, None, None]:
            with contextlib.closing(loaded) if loaded is not None else contextlib.nullcontext():
                for some in rows:
                    if tuple(some) not in self._kept:
                        assert loaded is not None
                        self._kept[tuple(some)] = next(loaded)
                    yield self._kept[tuple(some)]

        return of_rows()
