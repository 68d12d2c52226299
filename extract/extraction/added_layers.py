"""Add layers to a complete data set: each row gets its stored features beside those that are computed.

`extract.store.format.dataset` describes how the new shards replace the old ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from extract.compute.forward import Values
from extract.errors import InputError
from extract.images import Batch, Images
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.row_hash import hash_rows
from extract.store.reader import FeatureReader

__all__ = ["EarlierRows"]


class EarlierRows(contextlib.ExitStack):
    """Context manager: the rows of a data set to which layers are added.

    Args:
        dataset: the data set with the new layers, in the folder of the old one, which is locked.
        existing: the old data set.
        images: the images of both.

    Raises:
        LockedError: the data set was changed meanwhile.
        LayertapError: its rows cannot be read, or its folder cannot be written to.
    """

    def __init__(self, dataset: DataSet, existing: DataSet, images: Images):
        super().__init__()
        dataset.begin_to_add(existing)
        self._reader = self.enter_context(FeatureReader(existing.out))
        self._images = images
        self._reasons = {row: reason for row, _, _, reason in self._reader.failures}
        for shard, _, _, path in dataset.files():
            try:
                is_usable = self._are_in(dataset, shard, path)
            except InputError:  # damaged
                is_usable = False
            if not is_usable:
                dataset.withdraw(path)

    def _are_in(self, dataset: DataSet, shard: int, path: Path) -> bool:
        """Whether the rows that an interrupted run has stored in a file have the features that are stored now.

        They have others if, for example, failed rows of the old data set were computed meanwhile.
        """
        layers, hashes, images = self._reader.layers, *map(self._reader.column, ("row_hash", "source_hash"))
        first_row = dataset.shard_range(shard).start
        with dataset.open_shard(shard, path) as opened:
            for start, stop, block in opened.blocks(np.flatnonzero(opened.column("status") != Status.PENDING)):
                rows = slice(first_row + start, first_row + stop)
                if block is None or (hash_rows({name: block[name] for name in layers}) != hashes[rows]).any():
                    return False
                if (opened.column("source_hash")[start:stop] != images[rows]).any():
                    return False
        return True

    @property
    def compress(self) -> str | None:
        """Compression of the stored features."""
        return next((kind for kind, _ in self._reader.compression.values()), None)

    def checked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on whose images are those of the stored features.

        Raises:
            InputError: an image has changed, or can be decoded only now or no more.
        """
        hashes, status = self._reader.column("source_hash"), self._reader.status
        for batch in batches:
            had_image = np.isin(status[batch.rows], [Status.OK, Status.NOT_FINITE])
            same = (batch.source_hash == hashes[batch.rows]).all(1) & (had_image == (batch.status == Status.OK))
            if not same.all():
                row = int(batch.rows[np.argmin(same)])
                path, reason = self._images.slice(row, row + 1).paths[0], batch.reasons.get(row, "it has changed")
                raise InputError(
                    f"{path} is not the image of its stored row: {reason}; no layers were added",
                    hint="restore it; or, if it failed before, run the first command again with --retry-failed",
                )
            yield batch

    def beside(
        self, rows: NDArray[np.int64], status: NDArray[np.uint8], reasons: Mapping[int, str]
    ) -> tuple[Values, NDArray[np.uint8], dict[int, str]]:
        """Return the stored features of rows, as they are kept, and status and reasons of the rows with all features.

        Args:
            rows: (R,) rows of the data set.
            status: (R,) status by the computed features.
            reasons: row -> why it failed, by the computed features.

        Raises:
            InputError: a stored row does not match its hashes.
        """
        not_finite = self._reader.status[rows] == Status.NOT_FINITE
        earlier = {row: self._reasons.get(row, "") for row in rows[not_finite].tolist()}
        return self._reader.checked(rows), np.where(not_finite, Status.NOT_FINITE, status), {**reasons, **earlier}
