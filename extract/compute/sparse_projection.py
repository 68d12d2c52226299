"""Sparse random projection of activations (Li, Hastie and Church, "Very sparse random projections", KDD 2006).

    y = R x        R: (K, n), entries +s, 0, -s;  P(not 0) = 1 / sqrt(n), both signs alike;  s = sqrt(sqrt(n) / K)

Distances between rows of x are kept on average, as by scikit-learn's `SparseRandomProjection` with its default density.
R is never stored: `entries` draws it from raw bits of PCG64 by integer arithmetic, whose results do not depend on the
machine, nor on the version of NumPy. Samplers of NumPy and functions such as `log` may change, and are not used.
"""

from __future__ import annotations

import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from extract.errors import InputError

__all__ = [
    "SparseProjection", "compute_alone", "entries", "sparse_projection", "values_for_distortion",
]  # fmt: skip

# Tiles of 32,768 inputs of 16 images take 2 MB, and so stay near a core while their entries are added up. Measured for
# 802,816 -> 4,096 on one core: 0.84 ms an image; tiles of 8,192 or 65,536 inputs 1.09 and 0.88 ms; 8 images at once
# 1.09 ms; without tiles 2.3 ms; image by image 7 ms.
_TILE = 1 << 15
_IMAGES = 16
_WIDTH = 4  # the kernel of PyTorch for fewer columns is ten times slower
_DRAWN = 1 << 20  # random words at once; the result does not depend on it


def values_for_distortion(images: int, distortion: float) -> int:
    """Return the number of values for which all distances of `images` rows are likely kept within `distortion`.

    The bound of Johnson and Lindenstrauss as in Dasgupta and Gupta (2003), theorem 2.1; squared distances are kept
    within a factor of 1 - distortion to 1 + distortion. It does not depend on the number of inputs.

    Args:
        images: number of rows.
        distortion: above 0, below 1.
    """
    return max(1, int(4 * math.log(images) / (distortion**2 / 2 - distortion**3 / 3)))


def entries(inputs: int, outputs: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Draw the entries of R that are not 0, sorted by row and column.

    Each of the `inputs * outputs` entries is drawn independently: the gaps between entries, counted row by row, have a
    geometric distribution.

    Args:
        inputs: n, columns of R.
        outputs: K, rows of R.
        seed: 0 or above.

    Returns:
        row and column of each entry, and whether it is positive.
    """
    total, words = inputs * outputs, np.random.PCG64([seed, 0])
    longer = _longer_gaps(inputs)
    parts: list[NDArray[np.int64]] = []
    last = -1
    while last < total - 1:
        gaps = 1 + len(longer) - np.searchsorted(longer, words.random_raw(_DRAWN), side="right").astype(np.int64)
        parts.append(last + np.cumsum(gaps))
        last = int(parts[-1][-1])
    places = np.concatenate(parts)
    places = places[: np.searchsorted(places, total)]
    signs = np.random.PCG64([seed, 1]).random_raw(-(-len(places) // 64)).astype("<u8").view(np.uint8)
    positive = np.unpackbits(signs, bitorder="little")[: len(places)].astype(bool)
    rows, columns = np.divmod(places, inputs)
    return rows, columns, positive


def _longer_gaps(inputs: int) -> NDArray[np.uint64]:
    """Return 2**64 * P(gap > g) for each g >= 1, rounded down, ascending, without those that are 0.

    Gaps between entries of R have a geometric distribution. From a random word of 64 bits, a gap is 1, and 1 more for
    each of these numbers that is above the word.
    """
    one = 1 << 128
    remaining = zero = one - math.isqrt((1 << 256) // inputs)  # 2**128 * P(an entry is 0)
    longer = []
    while remaining >> 64:
        longer.append(remaining >> 64)
        remaining = remaining * zero >> 128
    return np.array(longer[::-1], np.uint64)


@dataclass(frozen=True)
class _Tile:
    """The entries of R in a range of inputs.

    Attributes:
        start: first input.
        inputs: (E,) int32, inputs counted from `start`: the positive entries of each output, then the negative.
        starts: (2 K + 1,) int32, where the entries of each sign and output begin.
        unused: (U,) int32, inputs of the activation in this range that have no entry.
    """

    start: int
    inputs: Tensor
    starts: Tensor
    unused: Tensor

    def on(self, device: torch.device) -> _Tile:
        """Return a copy on a device."""
        return _Tile(self.start, self.inputs.to(device), self.starts.to(device), self.unused.to(device))


class SparseProjection:
    """Projects a batch of activations (B, ...) with n values an image to (B, K) float32.

    The result for an image does not depend on the other images of the batch, nor on their number, bit for bit: each
    output is one sum in a fixed order. Maps in channels-last memory are added up in that order, so their sums may
    differ in the last bits. An image with a value that is NaN or infinite becomes NaN.

    R takes 4 bytes for each of its K sqrt(n) entries and each input without one. It is drawn on the first call, and
    kept for each device and order of memory.

    Args:
        inputs: n.
        outputs: K.
        seed: seed of R.

    Raises:
        InputError: K is 0 or larger than n, or R has 2**31 entries or more.
    """

    def __init__(self, inputs: int, outputs: int, seed: int):
        if not 1 <= outputs <= inputs:
            raise InputError(
                f"srp{outputs} of {inputs:,} values: a projection has 1 to {inputs:,} values",
                hint=f"use srpK with K up to {inputs:,}, or none",
            )
        if max(inputs, outputs * (math.isqrt(inputs) + 1) * 2) >= 1 << 31:
            raise InputError(
                f"srp{outputs} of {inputs:,} values has more than 2**31 entries", hint="use fewer values, or grid first"
            )
        self.inputs, self.outputs, self.seed = inputs, outputs, seed
        self._scale = math.sqrt(math.sqrt(inputs) / outputs)
        self._tiles: dict[tuple[torch.device, int], list[_Tile]] = {}  # by device and channels, see `_tiles_on`

    @property
    def name(self) -> str:
        """The pooling that this is."""
        return f"srp{self.outputs}" + (f"s{self.seed}" if self.seed else "")

    def __call__(self, activation: Tensor) -> Tensor:
        """Project a batch: (B, ...) of any float type -> (B, K) float32, on its device, which may be "meta"."""
        if activation.is_meta:
            return activation.new_empty(len(activation), self.outputs, dtype=torch.float32)
        # Only these two kinds of device have the kernel.
        device = activation.device if activation.device.type in ("cpu", "cuda") else torch.device("cpu")
        channels = 1
        is_map = activation.ndim == 4 and not activation.is_contiguous()
        if is_map and activation.is_contiguous(memory_format=torch.channels_last):
            # A copy in the order of the axes would take as long as the projection.
            channels, activation = activation.shape[1], activation.permute(0, 2, 3, 1)
        project = partial(self._projected, self._tiles_on(device, channels))
        if device.type == "cuda":
            return project(activation)
        threads = torch.get_num_threads()
        parts = torch.split(activation.to(device), min(_IMAGES, _multiple(-(-len(activation) // threads))))
        if threads == 1:
            return torch.cat([project(part) for part in parts]).to(activation.device)
        # Each part in a thread of its own. PyTorch's threads would wait for each other after each of a hundred short
        # operations: 70 times as long where other processes, such as those that decode, use a core.
        try:
            with ThreadPoolExecutor(min(threads, len(parts)), initializer=compute_alone) as pool:
                return torch.cat(list(pool.map(project, parts))).to(activation.device)
        finally:
            torch.set_num_threads(threads)  # the number that new threads begin with

    @torch.no_grad()  # in each thread
    def _projected(self, tiles: list[_Tile], images: Tensor) -> Tensor:
        """Project some images: (B, ...) -> (B, K)."""
        count = len(images)
        width = _multiple(count)
        images = images.reshape(count, self.inputs)
        sums = torch.zeros(2 * self.outputs, width, device=images.device)
        zeros = torch.zeros(count, 1, device=images.device)  # NaN for an image with a value that is NaN or infinite
        for tile in tiles:
            some = images[:, tile.start : tile.start + _TILE].t()  # (n of the tile, B)
            some = F.pad(some.float(), (0, width - count)) if width > count else some.float().contiguous()
            sums += F.embedding_bag(tile.inputs, some, tile.starts, mode="sum", include_last_offset=True)
            if len(tile.unused):
                zeros += images.index_select(1, tile.unused).sum(1, keepdim=True, dtype=torch.float32) * 0
        projected = ((sums[: self.outputs] - sums[self.outputs :]) * self._scale)[:, :count].t()
        # Propagate NaN and infinity to every output: each input feeds only a few of them.
        return projected + zeros + projected.sum(1, keepdim=True) * 0

    def _tiles_on(self, device: torch.device, channels: int) -> list[_Tile]:
        """Return R for maps in channels-last memory, (B, H, W, C) with C channels; 1 for the order of the axes."""
        if (device, channels) not in self._tiles:
            # Not in inference mode: the tensors outlive it.
            with torch.inference_mode(False):
                cpu = self._tiles.get((torch.device("cpu"), channels)) or self._drawn(channels)
                self._tiles[device, channels] = [tile.on(device) for tile in cpu]
        return self._tiles[device, channels]

    def _drawn(self, channels: int) -> list[_Tile]:
        rows, columns, positive = entries(self.inputs, self.outputs, self.seed)
        if channels > 1:
            channel, position = np.divmod(columns, self.inputs // channels)
            columns = position * channels + channel
        bags = columns // _TILE * 2 + ~positive
        small = bags.max(initial=0) < 1 << 16  # NumPy has a radix sort for 16 bits, which takes a tenth of the time
        order = np.argsort(bags.astype(np.uint16) if small else bags, kind="stable")
        places = (columns % _TILE).astype(np.int32)[order]
        count = -(-self.inputs // _TILE)
        sizes = np.bincount(bags * self.outputs + rows, minlength=count * 2 * self.outputs)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        unused = np.flatnonzero(np.bincount(columns, minlength=self.inputs) == 0).astype(np.int32)
        unused_of = np.split(unused, np.searchsorted(unused, np.arange(1, count) * _TILE))
        tiles = []
        for number in range(count):
            of_tile = starts[number * 2 * self.outputs : (number + 1) * 2 * self.outputs + 1]
            inputs = places[of_tile[0] : of_tile[-1]]
            tensors = map(torch.from_numpy, (inputs, (of_tile - of_tile[0]).astype(np.int32), unused_of[number]))
            tiles.append(_Tile(number * _TILE, *tensors))
        return tiles


def _multiple(count: int) -> int:
    return -(-count // _WIDTH) * _WIDTH


def compute_alone() -> None:
    """Make operations of PyTorch in this thread use no other thread."""
    torch.get_num_threads()  # the first call in a thread sets the number that it begins with
    torch.set_num_threads(1)


_shared: weakref.WeakValueDictionary[tuple[int, int, int], SparseProjection] = weakref.WeakValueDictionary()


def sparse_projection(inputs: int, outputs: int, seed: int) -> SparseProjection:
    """Return the projection of this size and seed; layers of equal size share it while one of them is in use.

    Raises:
        InputError: see `SparseProjection`.
    """
    projection = _shared.get((inputs, outputs, seed))
    if projection is None:
        projection = _shared[inputs, outputs, seed] = SparseProjection(inputs, outputs, seed)
    return projection
