"""Compute images with the same bytes once, and store their features in each of their rows.

Duplicates are found within a shard only: shards are computed independently, in any order and perhaps on several
machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.images import Batch
from extract.row_status import Status
from extract.store.format.writer import ShardWriter

__all__ = ["Split", "split_duplicates"]


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


def split_duplicates(batches: Iterable[Batch], writer: ShardWriter) -> Iterator[Split]:
    """Split each batch of a shard into rows to compute and rows to copy.

    Args:
        batches: batches of the shard.
        writer: writer of the shard; its rows that are OK are origins, too.
    """
    good = np.flatnonzero(writer.status == Status.OK)
    hashes = writer.column("source_hash")[good]
    # Built in reverse, so that the first of several rows with the same image is the origin.
    row_with = dict(zip((one.tobytes() for one in hashes[::-1]), (good[::-1] + writer.first_row).tolist(), strict=True))
    for batch in batches:
        kept, copied, origins = [], [], []
        for position, (row, status) in enumerate(zip(batch.rows.tolist(), batch.status.tolist(), strict=True)):
            content = batch.source_hash[position].tobytes()
            if status != Status.OK or row_with.setdefault(content, row) == row:
                kept.append(position)
            else:
                copied.append(position)
                origins.append(row_with[content])
        if not copied:
            yield Split(batch, None, np.empty(0, np.int64))
        else:
            yield Split(batch.only(kept), batch.only(copied), np.array(origins, np.int64))
