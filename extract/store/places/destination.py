"""Where a data set is stored: in a folder, or in a bucket."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from extract.store.format.dataset import DataSet
from extract.store.places.bucket import Bucket
from extract.store.places.shared_folder import SharedFolder
from extract.system.urls import is_url

__all__ = ["Destination", "data_set_at", "destination_of"]


class Destination(Protocol):
    """Destination to which several processes publish finished shards of a data set at once."""

    def open_or_create(self, dataset: DataSet) -> DataSet | None:
        """Create the data set, or check that the existing data set is the same; return that, or None if created.

        Raises:
            InputError: the destination holds another data set.
        """

    def keep_axes(self, files: Mapping[str, Path]) -> None:
        """Copy files of principal axes, by their sha256, to the data set, unless it has them."""

    @property
    def dataset(self) -> DataSet:
        """The description of the data set.

        Raises:
            InputError: there is no data set.
        """

    def published(self) -> NDArray[np.int64]:
        """Return (n,) int64, the numbers of the published shards, ascending."""

    def receipts(self, known: Container[str]) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
        """Yield (name, shard, receipt) of each published shard whose name is not in `known`.

        In a folder, the receipt is None if it is missing or damaged.
        """

    def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
        """Publish a finished shard; return False if another process has published it first."""

    def clean(self) -> None:
        """Remove what processes that were killed, or were not first, have left beside published shards."""


def destination_of(out: str) -> Destination:
    """Return the destination for an output folder or a URL."""
    return Bucket(out) if is_url(out) else SharedFolder(Path(out))


def data_set_at(out: str | Path) -> DataSet:
    """Return the description of the data set in a folder or behind a URL.

    Raises:
        InputError: there is no data set.
        LayertapError: the store does not answer.
    """
    return destination_of(str(out)).dataset
