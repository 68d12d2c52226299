"""Tokens as a PyTorch `IterableDataset`, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from extract.store.feature_array import FeatureArray
from extract.store.tokens.token_batches import TokenPass, token_batches
from extract.store.tokens.token_layout import TokenLayout

__all__ = ["TokenStream"]


class TokenStream(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches of tokens, as returned by `tokens.stream(...)`: (values, rows, cells) as tensors, for one epoch.

        stream = reader.tokens("blocks.11").stream(4096, shuffle=True, seed=epoch)
        for values, rows, cells in DataLoader(stream, batch_size=None, num_workers=2): ...

    The stream makes the batches, so the `DataLoader` has `batch_size=None`. Its workers divide the images and the
    memory. The order depends on their number, and not on the machine.

    To resume an interrupted epoch, give the number of batches that were used as `start`, with the same other arguments
    and number of workers. `seed` and this number are the whole state.

    Args:
        array: the feature.
        layout: where the tokens of a row are.
        rows: (R,) int64, rows of the images.
        how: see `TokenArray.stream`.
    """

    def __init__(self, array: FeatureArray, layout: TokenLayout, rows: NDArray[np.int64], how: TokenPass):
        self._array, self._layout, self._rows, self._how = array, layout, rows, how

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        worker, how = get_worker_info(), self._how
        if worker is not None:
            how = how.of_worker(worker.id, worker.num_workers, len(self._rows), self._layout.count)
        for batch in token_batches(self._array, self._layout, self._rows, how):
            values, rows, cells = map(torch.from_numpy, batch)
            yield values, rows, cells
