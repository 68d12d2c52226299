"""What this machine can do for a backbone, measured: decoding, and the forward in each way there is.

settings, measured = fastest("photos", backbone=backbone)
extract_features("photos", out="outputs/photos", backbone=backbone, **settings[0])
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.compute.agreement import Agreement, agreement, refusal
from extract.compute.backbone import Backbone
from extract.compute.backends import default_engine, engine_for, open_forward
from extract.compute.feature_choice import Choice, choose_features
from extract.errors import InputError, first_line
from extract.extraction.plan import how_begun
from extract.extraction.settings import PRECISIONS
from extract.extraction.validation import decoded_both_ways
from extract.images import Batch, Decoding, ImageList, list_images, load_batches
from extract.row_status import Status
from extract.system.torch_state import evaluating, full_float32

__all__ = [
    "Measured", "Way", "batch_rates", "best_batch_size", "decode_rate", "fastest", "forward_rates", "pictures_of",
    "ranked", "ways_for",
]  # fmt: skip

_AT_LEAST_S = 1.0  # of repeated forwards; one that takes longer is timed once, after one that is not timed
_TIMED, _TIMED_PER_CORE = 16, 8  # pictures of a forward that is timed on a CPU; more take longer and tell no more
_DIFFERENT = 128  # pictures at most that are decoded to measure forwards; larger batches repeat them
_GAIN, _WORTHWHILE = 1.03, 1.1  # what a larger batch must gain, and another than the default
_BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128), "gpu": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class Way:
    """One way to compute features."""

    precision: str
    engine: str

    @property
    def compile(self) -> str:
        """What `extract_features` calls the engine."""
        return "off" if self.engine == "eager" else self.engine

    def __str__(self) -> str:
        return f"{self.precision}, {self.engine}"


_PLAIN = Way("float32", "eager")


@dataclass(frozen=True)
class Measured:
    """A forward that was timed.

    Attributes:
        way: it was computed.
        images_per_s: of batches that lie in memory; 0 where it failed, or was not timed.
        start_s: seconds until the first batch was computed, with compiling.
        agreement: feature -> how it agrees with eager float32.
        decoding: feature -> how that of fast decoded images agrees with eager float32 of exactly decoded ones; empty
            where there is no fast decoding.
        why_not: it may not be taken; empty: it may.
        why_not_fast: it may not be taken with fast decoding; empty: it may, or there is none.
    """

    way: Way
    images_per_s: float = 0.0
    start_s: float = 0.0
    agreement: dict[str, Agreement] = field(default_factory=dict)
    decoding: dict[str, Agreement] = field(default_factory=dict)
    why_not: str = ""
    why_not_fast: str = ""

    @property
    def decode(self) -> str:
        """The faster of the ways to decode that go with it."""
        return "fast" if self.decoding and not self.why_not_fast else "exact"


def ways_for(
    device: torch.device, *, precision: str | None = None, compile: str | None = None, thorough: bool = False
) -> list[Way]:
    """The ways to compute on a device, those in float32 first.

    Args:
        device: of the backbone.
        precision: only this.
        compile: only what this means, as of `extract_features`; None or "auto": any.
        thorough: also those that are seldom the fastest and take long to compile: inductor on a CPU, beside OpenVINO.

    Raises:
        UnknownNameError: no such value of `compile`.
        InputError: `compile` and `precision` do not go together.
    """
    ways = []
    by_openvino = default_engine(device, "float32") == "openvino"
    for one in [precision] if precision else PRECISIONS[: 2 if device.type == "cpu" else 3]:
        if compile not in (None, "auto"):
            try:
                ways.append(Way(one, engine_for(str(compile), device, one)))
            except InputError:
                if precision or one == "float32":
                    raise
            continue
        engines = ["eager", "openvino"] if default_engine(device, one) == "openvino" else ["eager"]
        ways += [Way(one, engine) for engine in [*engines, *(["inductor"] if thorough or not by_openvino else [])]]
    return ways


def pictures_of(
    images: ImageList,
    preprocessing: Preprocessing,
    count: int,
    max_pixels: int = defaults.MAX_PIXELS,
    *,
    both_ways: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The first images that can be decoded, up to 128 of them, repeated up to `count`.

    Args:
        images: as listed.
        preprocessing: of the backbone.
        count: of pictures.
        max_pixels: as of `extract_features`.
        both_ways: whether they are also to be decoded fast.

    Returns:
        (count, ...) as `Preprocessing.prepare` makes them, and (count, ...) the same pictures, decoded fast, or None.

    Raises:
        InputError: none of the first can be decoded.
    """
    different = min(count, _DIFFERENT)
    if both_ways:
        fast, exact = decoded_both_ways(images, preprocessing.faster(), max_pixels, different)
        return _repeated(exact, count), _repeated(fast, count)
    batch = _decoded(images, preprocessing, different, max_pixels)
    if not len(batch.images):
        reason = next(iter(batch.reasons.values()))
        raise InputError(f"none of the first {len(batch.rows)} images can be decoded: {reason}")
    return _repeated(batch.images, count), None


def _repeated(pictures: Tensor, count: int) -> Tensor:
    return torch.cat([pictures] * -(-count // len(pictures)))[:count]


def _decoded(images: ImageList, preprocessing: Preprocessing, count: int, max_pixels: int) -> Batch:
    rows = [list(range(min(count, len(images))))]
    batches = load_batches(images, rows, Decoding.for_preprocessing(preprocessing, max_pixels))
    with contextlib.closing(batches):
        return next(batches)


def decode_rate(
    images: ImageList, preprocessing: Preprocessing, count: int, max_pixels: int = defaults.MAX_PIXELS
) -> float:
    """Images per second that one core reads, decodes and prepares."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        good = int((_decoded(images, preprocessing, count, max_pixels).status == Status.OK).sum())
        return good / _median_s(functools.partial(_decoded, images, preprocessing, count, max_pixels))
    finally:
        torch.set_num_threads(threads)


def batch_rates(backbone: Backbone, choice: Choice, pictures: Tensor) -> dict[int, float]:
    """Images a forward -> images per second, eagerly and in float32, until the memory ends.

    Args:
        backbone: as loaded.
        choice: of features.
        pictures: as `Preprocessing.prepare` makes them; repeated for larger batches.
    """
    rates: dict[int, float] = {}
    for size in _BATCH_SIZES["cpu" if backbone.device.type == "cpu" else "gpu"]:
        batch = _repeated(pictures, size)
        with open_forward(backbone, choice, "float32") as forward:
            forward(batch)
            if forward.images_at_once:  # the memory does not suffice for the whole batch
                break
            rates[size] = size / _median_s(functools.partial(forward, batch))
    if not rates:
        raise InputError(f"the memory of {backbone.device} does not suffice for {size} images at once")
    return rates


def best_batch_size(rates: dict[int, float]) -> int:
    """The default, where none is faster by a tenth; else the smallest than which none is faster by more than noise.

    What a smaller batch gains in a forward by itself, it loses beside decoding.
    """
    most = max(rates.values())
    if rates.get(defaults.BATCH_SIZE, 0.0) * _WORTHWHILE >= most:
        return defaults.BATCH_SIZE
    return next(size for size, rate in rates.items() if rate * _GAIN >= most)


def forward_rates(
    backbone: Backbone,
    choice: Choice,
    pictures: Tensor,
    ways: Iterable[Way],
    min_cosine: float = defaults.MIN_COSINE,
    fast: Tensor | None = None,
    *,
    refused_too: bool = False,
) -> list[Measured]:
    """Time forwards of one batch, and compare what they give with the plain one.

    Args:
        backbone: as loaded.
        choice: of features.
        pictures: a batch, as `pictures_of` gives it; compared are all of them.
        ways: to be timed.
        min_cosine: from which on a feature in lower precision, or of fast decoded images, may be taken.
        fast: the same pictures, decoded fast; None: there is no fast decoding.
        refused_too: time also those that may not be taken.
    """
    ways = list(ways)
    measured = []
    timed = pictures[: _enough(backbone.device, len(pictures))]
    with open_forward(backbone, choice, "float32") as plain:
        start = time.perf_counter()
        expected = plain(pictures)
        start_s = time.perf_counter() - start
        if _PLAIN in ways:
            ways.remove(_PLAIN)
            decoding = {} if fast is None else agreement(plain(fast), expected)
            rate = len(timed) / _median_s(functools.partial(plain, timed))
            why_not = refusal(decoding, min_cosine)
            measured.append(Measured(_PLAIN, rate, start_s, decoding=decoding, why_not_fast=why_not))
    for way in ways:
        try:
            start = time.perf_counter()
            with open_forward(backbone, choice, "float32", way.precision, way.engine, len(timed)) as forward:
                found = agreement(forward(pictures), expected)
                start_s = time.perf_counter() - start
                decoding = {} if fast is None else agreement(forward(fast), expected)
                why_not = refusal(found, None if way.precision == "float32" else min_cosine)
                rate = 0.0
                if refused_too or not why_not:
                    rate = len(timed) / _median_s(functools.partial(forward, timed))
        except Exception as error:  # a compiler may fail in any way
            measured.append(Measured(way, why_not=first_line(error)))
            continue
        finally:
            _free(way, backbone.device)
        measured.append(Measured(way, rate, start_s, found, decoding, why_not, refusal(decoding, min_cosine)))
    return measured


def _enough(device: torch.device, batch_size: int) -> int:
    """Pictures of a batch that tell how fast a forward is."""
    return min(batch_size, max(_TIMED, _TIMED_PER_CORE * defaults.CORES)) if device.type == "cpu" else batch_size


def _free(way: Way, device: torch.device) -> None:
    """Give back the memory of a forward that is not needed any more."""
    if way.engine == "inductor":
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _median_s(call: Callable[[], object]) -> float:
    times: list[float] = []
    while not times or sum(times) < _AT_LEAST_S:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ranked(measured: Iterable[Measured], n_images: float = math.inf, decode: str | None = None) -> list[Measured]:
    """Those that may be taken; first the one that takes the least time for so many images, with compiling.

    Args:
        measured: as of `forward_rates`.
        n_images: to be computed.
        decode: "fast": only those that may be taken with it.

    Raises:
        InputError: none may be taken.
    """
    good, refused = [], []
    for one in measured:
        if why_not := one.why_not or (one.why_not_fast if decode == "fast" else ""):
            refused.append(f"{one.way}: {why_not}")
        else:
            good.append(one)
    if not good:
        raise InputError("no way to compute may be taken of those asked for:\n  " + "\n  ".join(refused))
    return sorted(good, key=lambda one: 1 / one.images_per_s + one.start_s / n_images)


def fastest(
    images: str | os.PathLike[str] | ImageList,
    *,
    backbone: Backbone,
    layers: str | Sequence[str] = defaults.LAYERS,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    precision: str | None = None,
    compile: str | None = None,
    decode: str | None = None,
    min_cosine: float = defaults.MIN_COSINE,
    limit: int | None = None,
    max_pixels: int = defaults.MAX_PIXELS,
) -> tuple[list[dict[str, Any]], list[Measured]]:
    """The ways to compute features of these images that agree with the plain one, the fastest first.

    They are compared on a few images only, since the run compares its whole first batch, and ends with a
    `DisagreementError` before anything is stored if it disagrees: then the next way is to be taken.

    Args:
        images: as of `extract_features`; the first of them are computed in each way.
        backbone: as loaded.
        layers: as of `extract_features`.
        out: a data set that is to be gone on with: what its features depend on stays, and nothing is measured.
        batch_size: images a forward; None: the default on a CPU, measured on a GPU.
        precision: only this; None: any.
        compile: only this; None or "auto": any.
        decode: only this; None: either.
        min_cosine: from which on features in lower precision, or of fast decoded images, agree.
        limit: only so many images.
        max_pixels: as of `extract_features`.

    Returns:
        `precision`, `compile`, `decode` and `batch_size` as `extract_features` takes them, of each way, of which there
        is at least one; and what was measured.

    Raises:
        InputError: as of `extract_features`, or none of the ways that are left agrees.
    """
    if out is not None and (begun := how_begun(Path(out))):
        asked = {"precision": precision, "compile": compile, "decode": decode, "batch_size": batch_size}
        given = {name: value for name, value in asked.items() if value is not None}
        return [{"batch_size": defaults.BATCH_SIZE, **begun, **given}], []
    found = list_images(images, limit) if isinstance(images, str | os.PathLike) else images
    ways = ways_for(backbone.device, precision=precision, compile=compile)
    preprocessing = backbone.preprocessing
    with evaluating(backbone.model), full_float32():
        choice = choose_features(backbone, [layers] if isinstance(layers, str) else layers)
    count = _enough(backbone.device, min(batch_size or defaults.BATCH_SIZE, len(found)))
    both_ways = decode == "fast" or (decode is None and preprocessing.can_be_faster)
    pictures, fast = pictures_of(found, preprocessing, count, max_pixels, both_ways=both_ways)
    if backbone.device.type != "cpu":  # it is timed with whole batches
        batch_size = batch_size or best_batch_size(batch_rates(backbone, choice, pictures))
        count = min(batch_size, len(found))
        pictures, fast = _repeated(pictures, count), None if fast is None else _repeated(fast, count)
    measured = forward_rates(backbone, choice, pictures, ways, min_cosine, fast)
    settings = [
        {
            "precision": one.way.precision,
            "compile": one.way.compile,
            "decode": decode or one.decode,
            "batch_size": batch_size or defaults.BATCH_SIZE,
        }
        for one in ranked(measured, len(found), decode)
    ]
    return settings, measured
