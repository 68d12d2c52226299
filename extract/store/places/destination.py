"""Where data sets are: in a folder, or in a bucket."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from extract.store.format.dataset import DataSet
from extract.store.places.bucket import Bucket
from extract.store.places.shared_folder import SharedFolder
from extract.system.urls import is_url

__all__ = ["Place", "data_set_at", "place_of"]


class Place(Protocol):
    """Where finished shards of a data set go, of several processes at once."""

    def open_or_create(self, dataset: DataSet) -> DataSet | None:
        """Begin a data set, or see that what is there is the same; returns what is there already.

        Raises:
            InputError: another data set is there.
        """

    @property
    def dataset(self) -> DataSet:
        """What is there.

        Raises:
            InputError: no data set.
        """

    def published(self) -> NDArray[np.int64]:
        """(n,) numbers of the shards that are there, ascending."""

    def receipts(self, known: Container[str]) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
        """Name, shard and receipt of each shard that is there, but for known names; None: the receipt is not there."""

    def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
        """Take a finished shard; False: another process was the first to give it, and nothing was done."""


def place_of(out: str) -> Place:
    """The place that an output folder, or a URL, means."""
    return Bucket(out) if is_url(out) else SharedFolder(Path(out))


def data_set_at(out: str | Path) -> DataSet:
    """What is said of the data set there.

    Raises:
        InputError: there is none.
        LayertapError: the store does not answer.
    """
    return place_of(str(out)).dataset
