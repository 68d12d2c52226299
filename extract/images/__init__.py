"""Images: list them in a fixed order, wherever they are, decode them, and send them through a DataLoader as uint8.

    list_images(where) -> Images -> load_batches -> Batch

A file is decoded whole or not at all. A file that cannot be decoded is still an item, with a status and a reason: it is
never replaced by a made-up picture and never dropped from the count.
"""

from __future__ import annotations

from extract.images.decoding import decode, to_picture
from extract.images.images import Images
from extract.images.listing import list_images, listed_again
from extract.images.loading import Batch, load_batches

__all__ = ["Batch", "Images", "decode", "list_images", "listed_again", "load_batches", "to_picture"]
