"""The tokens of one feature, indexed as a NumPy array (N, C)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError
from extract.store.feature_array import FeatureArray, numbers_of
from extract.store.tokens.token_batches import TokenBatch, TokenPass, token_batches
from extract.store.tokens.token_layout import TokenLayout, recorded_crop, token_boxes, token_labels

if TYPE_CHECKING:  # imports torch, which is not needed to read arrays
    from extract.store.tokens.token_stream import TokenStream

__all__ = ["TokenArray", "TokenStatistics"]

_READ_BYTES = 4 << 20  # of whole rows at once, while some of their tokens are read
_MEASURED_BYTES = 8 << 20  # of float64 values at once in `statistics`


class TokenStatistics(NamedTuple):
    """Statistics of tokens.

    Attributes:
        mean: (C,) float64.
        std: (C,) float64, divided by the number of tokens.
        mean_norm: mean Euclidean norm of a token.
        tokens: number of tokens measured.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    mean_norm: float
    tokens: int


class TokenArray:
    """Tokens of one feature of the images with status ok: positions of maps, or patch tokens; (N, C).

        tokens = reader.tokens("blocks.11")
        tokens[1000:1010]              # (10, 384)
        tokens.grid                    # (14, 14)
        tokens.row(1000), tokens.cell(1000)    # row of the image in the reader; cell of the grid, counted row by row
        tokens.boxes((640, 480))       # (196, 4), pixels of a picture of 640 x 480 that each cell covers

    Class tokens and registers are not among them; `reader[layer]` has these.

    Attributes:
        rows: (R,) int64, row of the reader for each image. Token t is in row `rows[t // per_image]`.
        per_image: tokens of an image.
        grid: (rows, columns) of the tokens of an image.
        prefix: names of the tokens in `reader[layer]` before the patch tokens.
        dtype: dtype of the values.
        shape: (N, C).
    """

    def __init__(
        self, array: FeatureArray, layout: TokenLayout, rows: NDArray[np.int64], preprocessing: Mapping[str, Any]
    ):
        self._array, self._layout, self._preprocessing = array, layout, preprocessing
        self.rows, self.per_image, self.grid, self.prefix = rows, layout.count, layout.grid, layout.prefix
        self.dtype: np.dtype[Any] = array.dtype
        self.shape: tuple[int, int] = (len(rows) * layout.count, layout.channels)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"TokenArray({self.shape}, {self.dtype}, grid {self.grid[0]} x {self.grid[1]})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """Read tokens: an int gives (C,); a slice, a mask, or an array of ints in any order, (n, C)."""
        numbers = numbers_of(index, len(self), "tokens")
        values = self._take(np.atleast_1d(numbers))
        return values if numbers.ndim else values[0]

    def _take(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        values = np.empty((len(numbers), self.shape[1]), self.dtype)
        images, cells = np.divmod(numbers, self.per_image)
        chosen, positions = np.unique(images, return_inverse=True)
        order = np.argsort(positions, kind="stable")
        at_once = max(1, _READ_BYTES // max(1, self._array.row_bytes))
        starts = np.arange(0, len(chosen), at_once)
        for start, here in zip(starts, np.split(order, np.searchsorted(positions[order], starts[1:])), strict=False):
            tokens = self._layout.split(self._array.take(self.rows[chosen[start : start + at_once]]))
            values[here] = tokens[positions[here] - start, len(self.prefix) + cells[here]]
        return values

    def row(self, index: Any) -> Any:
        """Return the row in the reader of the image of each token; `index` as in `tokens[index]`."""
        return self.rows[numbers_of(index, len(self), "tokens") // self.per_image]

    def cell(self, index: Any) -> Any:
        """Return the cell of each token in the grid, counted row by row; `index` as in `tokens[index]`."""
        return numbers_of(index, len(self), "tokens") % self.per_image

    @property
    def input_px(self) -> tuple[int, int]:
        """Height and width of the backbone's input, in pixels.

        Raises:
            InputError: the backbone's library resizes and crops in its own way.
        """
        return recorded_crop(self._preprocessing)

    def window(self, picture_px: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return the part of a picture that all cells cover, which the crop left: left, top, right, bottom in pixels.

        It reaches beyond a picture that is smaller than the crop.

        Args:
            picture_px: see `boxes`.

        Raises:
            InputError: see `boxes`.
        """
        boxes = self.boxes(picture_px)
        return float(boxes[0, 0]), float(boxes[0, 1]), float(boxes[-1, 2]), float(boxes[-1, 3])

    def boxes(self, picture_px: tuple[int, int]) -> NDArray[np.float64]:
        """Return the part of a picture that each cell of the grid covers.

        What a token depends on may be larger, up to the whole input.

        Args:
            picture_px: (width, height) of the picture as it was decoded: upright, `exif_transpose(picture).size`, or
                `picture.size` if the data set was made with the orientation "ignore".

        Returns:
            (per_image, 4), left, top, right and bottom in pixels.

        Raises:
            InputError: the backbone's library resizes and crops in its own way.
        """
        return token_boxes(self.grid, self._preprocessing, picture_px)

    def labels(self, mask: Any, *, ignore: int | None = None, min_share: float = 0.5) -> NDArray[np.int64]:
        """Return the label of each cell of the grid by a mask of the picture: the most frequent one of its pixels.

            mask = np.asarray(Image.open("masks/0001.png"))
            y = tokens.labels(mask, ignore=255)

        A pixel counts for the cell that has its centre. Pixels that the crop left out are not used.

        Args:
            mask: (H, W) labels from 0, in the size of the picture or with its aspect ratio, turned as in `boxes`.
            ignore: a label that no token takes, such as 255 for borders; it may be negative.
            min_share: smallest share of the pixels of a cell that must have its label.

        Returns:
            (per_image,) int64; -1 where no label has this share, or the cell has no pixels.

        Raises:
            InputError: the mask does not hold labels, or see `boxes`.
        """
        return token_labels(self.grid, self._preprocessing, mask, ignore, min_share)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        memory_bytes: int = 256 << 20,
    ) -> Iterator[TokenBatch]:
        """Return an iterator over batches (values, rows, cells): (B, C), (B,) and (B,) int64.

            for values, rows, cells in tokens.batches(4096, shuffle=True, seed=epoch):

        Shuffled, it reads blocks of neighbouring images (about a megabyte each) in random order, and mixes the tokens
        of as many blocks as fit in half the memory, while a thread reads the next ones. The same arguments give the
        same order on any machine.

        Args:
            batch_size: tokens in each batch; the last may have fewer.
            shuffle: whether to mix the tokens; otherwise they come in the stored order.
            seed: seed of the order.
            start: batches to leave out, without reading them: resumes after this number of batches.
            rank: number of this process, of `world_size` that share the images evenly. Up to `world_size - 1` images
                are left out, so that all have the same number of batches; shuffled, others with each seed.
            world_size: number of processes.
            memory_bytes: maximum allocation, apart from the returned batch and 8 bytes per image.

        Raises:
            TypeError: an argument is not an int.
            ValueError: an argument is out of range, or the memory is too small for the images that are read at once.
        """
        how = TokenPass(batch_size, shuffle, seed, start, rank, world_size, memory_bytes)
        return token_batches(self._array, self._layout, self.rows, how)

    def stream(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        memory_bytes: int = 256 << 20,
    ) -> TokenStream:
        """Return the batches as a `torch.utils.data.IterableDataset`, see `TokenStream`; as `batches` in all else."""
        from extract.store.tokens.token_stream import TokenStream

        how = TokenPass(batch_size, shuffle, seed, start, rank, world_size, memory_bytes)
        token_batches(self._array, self._layout, self.rows, how)  # raises here, not in a worker, if memory is too small
        return TokenStream(self._array, self._layout, self.rows, how)

    def statistics(self, at_most: int = 1_000_000, seed: int = 0) -> TokenStatistics:
        """Return mean, standard deviation and mean norm of tokens, such as for the input of a sparse autoencoder.

        Args:
            at_most: number of tokens, rounded up to whole images, which are chosen at random.
            seed: seed of the choice.

        Raises:
            InputError: there are no tokens, or `at_most` is below 1.
        """
        if at_most < 1:
            raise InputError(f"at_most is {at_most}; it must be at least 1")
        if not len(self):
            raise InputError("there are no tokens: no image has the status ok")
        count = min(len(self), int(at_most))
        images = -(-count // self.per_image)
        rows = np.sort(np.random.default_rng(seed).choice(self.rows, images, replace=False))
        total, squares, norms, n = np.zeros(self.shape[1]), np.zeros(self.shape[1]), 0.0, 0
        shift: NDArray[np.float64] | None = None  # near the mean, so that squares do not cancel
        measured = TokenPass(max(1, _MEASURED_BYTES // (8 * max(1, self.shape[1]))))
        for batch in token_batches(self._array, self._layout, rows, measured):
            values = batch.values.astype(np.float64)
            norms += float(np.sqrt((values * values).sum(1)).sum())
            shift = values.mean(0) if shift is None else shift
            values -= shift
            total += values.sum(0)
            squares += (values * values).sum(0)
            n += len(values)
        assert shift is not None
        deviations = np.sqrt(np.maximum(squares / n - (total / n) ** 2, 0))
        return TokenStatistics(shift + total / n, deviations, norms / n, n)
