"""Compute images with the same bytes once, and store their features in each of their rows.

Duplicates are found within a shard only: shards are computed independently, in any order and perhaps on several
machines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.images import Batch
from extract.row_status import Status
from extract.store.format.writer import ShardWriter

__all__ = ["Duplicates", "Split"]


class Split(NamedTuple):
    """A batch, split into rows to compute and rows with the image of an earlier row.

    Attributes:
        unique: rows to compute, and rows whose images failed.
        copies: the other rows; None if there are none.
        origins: (len(copies.rows),) earlier row of the shard with the same image.
    """

    unique: Batch
    copies: Batch | None
    origins: NDArray[np.int64]

    @property
    def images(self) -> Tensor:
        """(B, ...) images to compute."""
        return self.unique.images

    def __len__(self) -> int:
        return len(self.unique.rows) + len(self.origins)


class Duplicates:
    """The contents of the images of one shard.

    Args:
        writer: writer of the shard; an image of its rows that are OK is not computed again.
    """

    def __init__(self, writer: ShardWriter):
        good = np.flatnonzero(writer.status == Status.OK)
        # In reverse order, so that the first of several rows with the same image is the origin.
        hashes, rows = writer.column("source_hash")[good[::-1]], good[::-1] + writer.first_row
        self._row_with = {content.tobytes(): row for content, row in zip(hashes, rows.tolist(), strict=True)}

    def split(self, batch: Batch) -> Split:
        """Split a batch into rows to compute and rows to copy from earlier ones."""
        unique, copies, origins = [], [], []
        for position, (row, status) in enumerate(zip(batch.rows.tolist(), batch.status.tolist(), strict=True)):
            content = batch.source_hash[position].tobytes()
            if status != Status.OK or self._row_with.setdefault(content, row) == row:
                unique.append(position)
            else:
                copies.append(position)
                origins.append(self._row_with[content])
        if not copies:
            return Split(batch, None, np.empty(0, np.int64))
        return Split(batch.select(unique), batch.select(copies), np.array(origins, np.int64))
