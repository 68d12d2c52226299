"""Features as a PyTorch `Dataset`, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from extract.store.feature_array import FeatureArray, numbers_of

__all__ = ["FeatureDataset"]


class FeatureDataset(Dataset[tuple[Any, int]]):
    """Pairs of features and label, as returned by `reader.dataset(...)`.

        loader = DataLoader(reader.dataset("layer4", split="train"), 256, shuffle=True, num_workers=2)
        for x, y in loader: ...

    Rows without a class are left out with a warning if others have one: a loss does not accept their label, -1, and
    fails in the middle of an epoch. If no row has a class, all are there, with the label -1: nobody trains on labels
    then.

    Positions are not rows of the reader, since failed rows are left out, too. Choose and weigh samples by `labels`:

        dogs = Subset(dataset, np.flatnonzero(dataset.labels == reader.classes.index("dog")))
        dataset.rows[5]                  # row of the reader of sample 5, for reader.paths and other columns

    A `DataLoader` requests a whole batch at once (`__getitems__`), which is read in one pass. Its workers may be forked
    or spawned.

    Args:
        arrays: a feature, for samples with a tensor (*shape); or layer -> feature, for samples with a dict of tensors.
        labels: (N,) int64, label of each row of the reader.
        rows: rows of the reader to take, int64.
        transform: applied to the features of each sample.
        unlabelled: whether also to take rows without a class beside rows with one.

    Attributes:
        rows: (R,) int64, row of the reader for each sample.
        labels: (R,) int64, label of each sample.
    """

    def __init__(
        self,
        arrays: FeatureArray | Mapping[str, FeatureArray],
        labels: NDArray[np.int64],
        rows: NDArray[np.int64],
        transform: Callable[[Any], Any] | None = None,
        unlabelled: bool = False,
    ):
        self._arrays, self._transform = arrays, transform
        has_class = labels[rows] >= 0
        if not unlabelled and has_class.any() and not has_class.all():
            message = (
                f"{np.count_nonzero(~has_class):,} of {len(rows):,} rows have no class and are left out; "
                "unlabelled=True takes them with the label -1"
            )
            warnings.warn(message, stacklevel=3)  # at the call of `reader.dataset`
            rows = rows[has_class]
        self.rows = rows
        self.labels: NDArray[np.int64] = labels[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """Return the samples at these positions, read in one batch."""
        positions = np.asarray(indices)  # of a tuple, too: batch samplers may give them
        if positions.dtype == bool:
            raise IndexError("samples are chosen by positions, got a mask; np.flatnonzero gives its positions")
        try:
            positions = numbers_of(positions, len(self), "samples")
        except IndexError as error:
            raise IndexError(
                f"{error}; rows of the reader are no positions: choose by dataset.rows and .labels"
            ) from None
        rows, labels = self.rows[positions], self.labels[positions].tolist()
        samples: Iterable[Any]
        if isinstance(self._arrays, FeatureArray):
            samples = torch.from_numpy(self._arrays[rows])
        else:
            columns = [torch.from_numpy(array[rows]) for array in self._arrays.values()]
            samples = (dict(zip(self._arrays, values, strict=True)) for values in zip(*columns, strict=True))
        return list(zip(map(self._transform, samples) if self._transform else samples, labels, strict=True))
