"""Where data sets are: in a folder, or in a bucket."""

from __future__ import annotations

from pathlib import Path

from extract.extraction.shard_maker import Place
from extract.store.format.dataset import DataSet
from extract.store.places.bucket import Bucket
from extract.store.places.shared_folder import SharedFolder
from extract.system.urls import is_url

__all__ = ["data_set_at", "place_of"]


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
