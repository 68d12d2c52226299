"""The first images of a run, decoded before it starts: to compare decoders and options, and to time them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.errors import InputError
from extract.images import Batch, Decoding, Images, load_batches
from extract.row_status import Status

__all__ = ["FIRST_DECODED", "decode_seconds", "decoded_in", "timed_s"]

FIRST_DECODED = 16


def decoded_in(
    images: Images, ways: Sequence[Preprocessing], max_pixels: int, count: int = FIRST_DECODED
) -> list[Tensor]:
    """Return the first images that can be decoded in each way: for each way (B, ...), with B up to `count`.

    Raises:
        InputError: no image can be decoded in all ways.
    """
    for first in range(0, len(images), count):
        batches = [_decoded(images, way, max_pixels, range(first, min(first + count, len(images)))) for way in ways]
        good = np.flatnonzero(np.all([batch.status == Status.OK for batch in batches], axis=0)).tolist()
        if good:
            return [batch.select(good).images for batch in batches]
    if len(ways) == 1:
        raise InputError(
            f"none of the {len(images):,} images can be decoded: {next(iter(batches[0].reasons.values()))}"
        )
    raise InputError(
        f"none of the {len(images):,} images can be decoded both fast and exactly", hint="use --decode exact"
    )


def _decoded(images: Images, way: Preprocessing, max_pixels: int, rows: range) -> Batch:
    batches = load_batches(images, [list(rows)], Decoding.for_preprocessing(way, max_pixels))
    with contextlib.closing(batches):
        return next(batches)


def decode_seconds(
    images: Images, preprocessing: Preprocessing, max_pixels: int = defaults.MAX_PIXELS, count: int = FIRST_DECODED
) -> float:
    """Return the seconds of one core to decode an image, measured on the first `count`."""
    threads, rows = torch.get_num_threads(), range(min(count, len(images)))
    torch.set_num_threads(1)  # as in a worker
    try:
        _decoded(images, preprocessing, max_pixels, rows[:1])  # the first time, libraries are imported
        return timed_s(functools.partial(_decoded, images, preprocessing, max_pixels, rows)) / len(rows)
    finally:
        torch.set_num_threads(threads)


def timed_s(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
