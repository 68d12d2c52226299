"""How long several extractions take, measured on a few images."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from extract import defaults
from extract.compute.backends import open_forward
from extract.errors import LayertapError
from extract.extraction.first_images import decode_seconds, decoded_in, timed_s
from extract.extraction.several import Member, decoding_of, plan_of
from extract.images import Images
from extract.system.foreign_code import own_faults_refused

__all__ = ["Costs", "costs_of"]

_DECODED = 16  # images, drawn


class Costs(NamedTuple):
    """Seconds of several extractions.

    Attributes:
        fixed_s: seconds for loading the backbones.
        image_s: seconds for each image.
    """

    fixed_s: float
    image_s: float


@contextmanager
def _failure_in(failures: list[LayertapError]) -> Iterator[None]:
    """Context manager: add an error to a list; `extract_several` reports it."""
    try:
        yield
    except LayertapError as error:
        failures.append(error)
    except MemoryError:
        failures.append(LayertapError("out of memory"))


def costs_of(images: Images, members: Sequence[Member], seed: int, stop: Callable[[], bool] = lambda: False) -> Costs:
    """Estimate how long `extract_several` takes. Forwards are timed without a compiler, which is used only if it pays.

    Args:
        images: listed images, of which a few are decoded.
        members: the extractions; members that fail are left out.
        seed: seed of the draw of images.
        stop: called before each member; True ends the measurement.

    Raises:
        LayertapError: no backbone can be measured.
    """
    rows = np.random.default_rng(seed).choice(len(images), min(_DECODED, len(images)), replace=False)
    drawn = images.select(sorted(rows.tolist()))
    fixed_s, forward_s, decoded_s = 0.0, 0.0, dict[Hashable, float]()
    failures: list[LayertapError] = []
    for member in members:
        if stop():
            break
        with _failure_in(failures), own_faults_refused(()):
            start = time.perf_counter()
            planned = plan_of(drawn, member)
            load_s = time.perf_counter() - start
            preprocessing, settings = planned.backbone.preprocessing, planned.settings
            (pictures,) = decoded_in(drawn, [preprocessing], settings.max_pixels, settings.batch_size)
            with open_forward(planned.backbone, planned.choice, "float32", settings.precision) as forward:
                first_s = timed_s(partial(forward, pictures))
                each_s = timed_s(partial(forward, pictures)) / len(pictures)
            decoding = decoding_of(member.name, preprocessing)
            if decoding not in decoded_s:
                at_once = max(1, min(settings.workers, defaults.CORES))
                decoded_s[decoding] = decode_seconds(drawn, preprocessing, settings.max_pixels) / at_once
            fixed_s += 2 * load_s + first_s  # it is loaded to look at it, and to compute
            forward_s += each_s
        gc.collect()  # the modules of a backbone refer to each other in circles
    if failures and not decoded_s:
        raise failures[0]
    return Costs(fixed_s, forward_s + sum(decoded_s.values()))
