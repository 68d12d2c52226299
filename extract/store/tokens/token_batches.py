"""Iterate over the tokens of a feature in batches, in order or shuffled, within a fixed amount of memory.

Single tokens in random order are bound by the disk. So blocks of a megabyte are read in random order, and tokens are
mixed in windows of half the memory; all tokens of an image are in one window. The windows follow from the seed, the
sizes of blocks and `memory_bytes`, without reading. So the place of any batch is known, and a pass resumes by counting.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extract.store.batches import Epoch, fitting, prefetch, read_piece, row_pieces
from extract.store.feature_array import FeatureArray
from extract.store.tokens.token_layout import TokenLayout

__all__ = ["TokenBatch", "TokenPass", "token_batches"]

_IN_ORDER_BYTES = 4 << 20  # of a window that is not shuffled: it stays in the caches of the processor
_MOST_TOKENS = (1 << 31) - 1  # of a window, which counts them in 32 bits
_ORDER_BYTES = 4  # of a token's place in a window


class TokenBatch(NamedTuple):
    """A batch of tokens.

    Attributes:
        values: (B, C).
        rows: (B,) int64, row of the reader that each token is from.
        cells: (B,) int64, its cell of the grid, counted row by row.
    """

    values: NDArray[Any]
    rows: NDArray[np.int64]
    cells: NDArray[np.int64]


@dataclass(frozen=True)
class TokenPass(Epoch):
    """How to iterate over tokens once; see `TokenArray.batches`.

    Attributes:
        memory_bytes: maximum allocation.
        worker: number of this worker, of `workers` that divide the images of a rank.
    """

    memory_bytes: int = 256 << 20
    worker: int = 0
    workers: int = 1

    def share(self, images: int) -> tuple[int, int]:
        """Return the range of this worker, (start, stop), among a number of images."""
        each = images // self.world_size
        first = self.rank * each
        return first + each * self.worker // self.workers, first + each * (self.worker + 1) // self.workers

    def of_worker(self, worker: int, workers: int, images: int, per_image: int) -> TokenPass:
        """Return the part of one of several workers, whose batches are taken in turn, after `start` in all."""
        parts = [
            replace(self, worker=number, workers=workers, memory_bytes=self.memory_bytes // workers)
            for number in range(workers)
        ]
        shares = [part.share(images) for part in parts]
        counts = [-(-(stop - start) * per_image // self.batch_size) for start, stop in shares]
        taken = [0] * workers
        turn = 0  # the part that comes next: a DataLoader begins with worker 0
        for _ in range(min(self.start, sum(counts))):
            while taken[turn] == counts[turn]:  # a worker without batches is passed over
                turn = (turn + 1) % workers
            taken[turn] += 1
            turn = (turn + 1) % workers
        part = (worker + turn) % workers
        return replace(parts[part], start=taken[part])


def token_batches(
    array: FeatureArray, layout: TokenLayout, rows: NDArray[np.int64], how: TokenPass
) -> Iterator[TokenBatch]:
    """Return an iterator over the tokens of some rows in batches; see `TokenArray.batches`.

    Args:
        array: the feature.
        layout: where the tokens of a row are.
        rows: (R,) int64, ascending.
        how: batch size, order, share and memory.

    Raises:
        ValueError: `memory_bytes` is too small for the blocks of the feature.
    """
    pieces = row_pieces(array, rows)
    if how.shuffle:
        pieces = [pieces[number] for number in np.random.default_rng(how.seed).permutation(len(pieces))]
    pieces = _between(pieces, *how.share(len(rows)), how.seed if how.shuffle else None)
    image_bytes = max(1, array.row_bytes) + _ORDER_BYTES * layout.count
    largest = max(map(len, pieces), default=0)
    # Two buffers, of which one is filled while the other is read. A piece takes up to three times its size while it is
    # decompressed, decoded or transposed.
    spare = 3 * largest * array.row_bytes
    room = (how.memory_bytes - spare) // (2 * image_bytes)
    if room < largest:
        needed = (2 * largest * image_bytes + spare) * how.workers
        workers = f" with {how.workers} workers" if how.workers > 1 else ""
        raise ValueError(
            f"memory_bytes is {how.memory_bytes * how.workers}; it must be at least {needed}{workers}, as {largest} "
            "images are read at once"
        )
    if not how.shuffle:
        room = min(room, max(largest, _IN_ORDER_BYTES // image_bytes))
    windows = list(fitting(pieces, min(room, _MOST_TOKENS // (layout.count + len(layout.prefix)))))
    seeds = (how.seed, how.rank, how.worker) if how.shuffle else None
    return _batches(array, layout, seeds, windows, how.batch_size, how.start)


def _between(pieces: list[NDArray[np.int64]], start: int, stop: int, seed: int | None) -> list[NDArray[np.int64]]:
    """Return the pieces with the images `start` to `stop`, in the order of the pieces.

    With a seed, random images of a piece go to each of the shares that divide it, so other images are left out in each
    epoch.
    """
    chosen, first = [], 0
    for piece in pieces:
        cut = slice(max(0, start - first), max(0, stop - first))
        part = piece[cut]
        if 0 < len(part) < len(piece) and seed is not None:
            part = np.sort(np.random.default_rng([seed, first]).permutation(piece)[cut])
        if len(part):
            chosen.append(part)
        first += len(piece)
    return chosen


class _Reading:
    """Reads windows into two buffers in turn.

    Args:
        array: the feature.
        layout: where the tokens of a row are.
        seeds: seeds of the order; None for the stored order.
        images: images of the largest window.
    """

    def __init__(self, array: FeatureArray, layout: TokenLayout, seeds: tuple[int, ...] | None, images: int):
        self._array, self._layout, self._seeds = array, layout, seeds
        self._in_row = layout.count + len(layout.prefix)  # tokens of a row
        self._buffers = [np.empty((images, self._in_row, layout.channels), array.dtype) for _ in range(2)]

    def fill(
        self, number: int, pieces: list[NDArray[np.int64]]
    ) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int64]]:
        """Read the window with this number in the epoch, and choose the order of its tokens.

        Returns:
            (M, C) tokens of its images and perhaps of others, (T,) places of its tokens among them, in the order of the
            pass, and the images as rows.
        """
        buffer, filled = self._buffers[number % 2], 0
        prefetch(self._array, pieces)
        for piece in pieces:
            space = buffer[filled : filled + len(piece)]
            if self._layout.channels_first:
                space[...] = self._layout.split(read_piece(self._array, piece))
            else:
                read_piece(self._array, piece, space.reshape(len(piece), *self._array.shape[1:]))  # a view
            filled += len(piece)
        first = np.arange(filled, dtype=np.int32) * self._in_row
        places = np.add.outer(first, np.arange(len(self._layout.prefix), self._in_row, dtype=np.int32)).reshape(-1)
        if self._seeds is not None:
            np.random.default_rng([*self._seeds, 1 + number]).shuffle(places)
        return buffer.reshape(-1, self._layout.channels), places, np.concatenate(pieces)


def _batches(
    array: FeatureArray,
    layout: TokenLayout,
    seeds: tuple[int, ...] | None,
    windows: list[list[NDArray[np.int64]]],
    batch_size: int,
    start: int,
) -> Iterator[TokenBatch]:
    """Yield the tokens of the windows in batches, which may span several windows, from batch number `start`."""
    per_image, prefix = layout.count, len(layout.prefix)
    skipped, first = start * batch_size, 0
    images_of = [sum(map(len, pieces)) for pieces in windows]
    while first < len(windows) and images_of[first] * per_image <= skipped:
        skipped -= images_of[first] * per_image
        first += 1
    if first == len(windows):
        return
    reading = _Reading(array, layout, seeds, max(images_of[first:]))
    remaining = sum(images_of[first:]) * per_image - skipped
    batch, filled = None, 0
    with ThreadPoolExecutor(1, "layertap-tokens") as thread:
        following = thread.submit(reading.fill, first, windows[first])
        for number in range(first, len(windows)):
            window_tokens, window_places, window_rows = following.result()
            if number + 1 < len(windows):
                following = thread.submit(reading.fill, number + 1, windows[number + 1])
            done = skipped if number == first else 0
            while done < len(window_places):
                if batch is None:
                    size = min(batch_size, remaining)
                    values = np.empty((size, layout.channels), array.dtype)
                    batch, filled = TokenBatch(values, np.empty(size, np.int64), np.empty(size, np.int64)), 0
                taken = min(len(batch.rows) - filled, len(window_places) - done)
                places, part = window_places[done : done + taken], slice(filled, filled + taken)
                # "clip" writes directly into `out` (NumPy, "take").
                np.take(window_tokens, places, axis=0, out=batch.values[part], mode="clip")
                images, tokens = np.divmod(places, per_image + prefix)
                batch.rows[part] = window_rows[images]
                batch.cells[part] = tokens - prefix
                done, filled = done + taken, filled + taken
                if filled == len(batch.rows):
                    remaining -= filled
                    yield batch
                    batch = None
