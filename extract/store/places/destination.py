"""Where a data set is stored: in a folder, or in a bucket."""

from __future__ import annotations

from pathlib import Path

from extract.store.format.dataset import DataSet
from extract.store.places.bucket import Bucket
from extract.store.places.shared_folder import SharedFolder
from extract.system.urls import is_url

__all__ = ["Destination", "data_set_at", "destination_of"]


# Where several processes publish finished shards of a data set at once. Both have the same methods.
Destination = Bucket | SharedFolder


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
