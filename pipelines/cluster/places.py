"""Where a data set that several workers make goes."""

from __future__ import annotations

from pathlib import Path

from extract.shard_making import Place
from extract.store.bucket import Bucket
from extract.store.shared_folder import SharedFolder
from extract.urls import is_url

__all__ = ["place_of"]


def place_of(out: str) -> Place:
    """The place that an output folder, or a URL, means."""
    return Bucket(out) if is_url(out) else SharedFolder(Path(out))
