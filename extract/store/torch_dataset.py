"""Features as a PyTorch data set, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["FeatureDataset"]


class LabelledFeatures(Protocol):
    """What samples are read from, as `extract.store.reader.FeatureReader` is.

    Attributes:
        labels: (N,) the label of each row.
    """

    @property
    def labels(self) -> NDArray[np.int64]: ...

    def __getitem__(self, layer: str) -> Any: ...


class FeatureDataset(Dataset[tuple[Any, int]]):
    """Pairs of features and label, as `reader.dataset(...)` makes them.

        loader = DataLoader(reader.dataset("layer4", split="train"), 256, shuffle=True, num_workers=2)
        for x, y in loader: ...

    A `DataLoader` asks for a whole batch at once (`__getitems__`), which reads it in one go. Its workers may be forked
    or spawned.

    Args:
        reader: where the rows are.
        layers: one name, and the features of a sample are a tensor (*shape); or several, and they are a dict.
        rows: (R,) int64, the rows of the reader that are samples.
        transform: applied to the features of each sample.

    Attributes:
        rows: (R,) the row of the reader that each sample is.
        labels: (R,) the label of each.
    """

    def __init__(
        self,
        reader: LabelledFeatures,
        layers: str | Sequence[str],
        rows: NDArray[np.int64],
        transform: Callable[[Any], Any] | None = None,
    ):
        self._reader = reader
        self._layers = [layers] if isinstance(layers, str) else list(layers)
        self._single = isinstance(layers, str)
        for layer in self._layers:
            reader[layer]  # an unknown name is told now, not by a worker
        self.rows = rows
        self.labels: NDArray[np.int64] = reader.labels[rows]
        self._transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """The samples at these positions, read together."""
        where = np.asarray(indices, np.int64)
        columns = {layer: torch.from_numpy(self._reader[layer][self.rows[where]]) for layer in self._layers}
        labels = self.labels[where].tolist()
        samples = []
        for i, label in enumerate(labels):
            features: Tensor | dict[str, Tensor] = {layer: column[i] for layer, column in columns.items()}
            if self._single:
                features = columns[self._layers[0]][i]
            samples.append((self._transform(features) if self._transform else features, label))
        return samples
