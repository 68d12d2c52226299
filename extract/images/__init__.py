"""List images in a fixed order, decode them, and load them through a DataLoader as uint8.

    list_images(where) -> Images -> load_batches -> Batch

A file is decoded completely or not at all. A file that cannot be decoded keeps its row, with a status and a reason: it
is never replaced by a placeholder picture and never dropped from the count.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extract.images.image_list import Images
    from extract.images.listing import list_images, listed_again
    from extract.images.loading import Batch, Decoding, load_batches

# Imported on first use, so that listing a folder does not import torch.
_HOMES = {
    "Batch": "loading",
    "Decoding": "loading",
    "Images": "image_list",
    "list_images": "listing",
    "listed_again": "listing",
    "load_batches": "loading",
}

__all__ = ["Batch", "Decoding", "Images", "list_images", "listed_again", "load_batches"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'extract.images' has no attribute {name!r}")
    return getattr(importlib.import_module(f"extract.images.{_HOMES[name]}"), name)
