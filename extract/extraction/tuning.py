"""Measure the speed of decoding, and of the forward with each precision and engine, on this machine.

Usage:

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
from extract.extraction.plan import settings_of_existing
from extract.extraction.settings import PRECISIONS
from extract.extraction.validation import decoded_both_ways
from extract.images import Batch, Decoding, ImageList, list_images, load_batches
from extract.row_status import Status
from extract.system.torch_state import evaluating, full_float32

__all__ = [
    "ComputeOption",
    "Measured",
    "batch_rates",
    "best_batch_size",
    "compute_options",
    "decode_rate",
    "fastest",
    "forward_rates",
    "pictures_of",
    "ranked",
]  # fmt: skip

_AT_LEAST_S = 1.0  # total of repeated forwards, after an untimed one; a longer forward is timed once
_TIMED, _TIMED_PER_CORE = 16, 8  # pictures per timed forward on a CPU; more take longer and give the same rate
_DIFFERENT = 128  # pictures decoded at most to measure forwards; larger batches repeat them
_GAIN, _WORTHWHILE = 1.03, 1.1  # required speed-up of a larger batch, and of a size other than the default
_BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128), "gpu": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class ComputeOption:
    """How to compute features: a precision and an engine."""

    precision: str
    engine: str

    @property
    def compile(self) -> str:
        """The engine as the argument `compile` of `extract_features`."""
        return "off" if self.engine == "eager" else self.engine

    def __str__(self) -> str:
        return f"{self.precision}, {self.engine}"


_PLAIN = ComputeOption("float32", "eager")


@dataclass(frozen=True)
class Measured:
    """A forward that was timed.

    Attributes:
        way: precision and engine of the forward.
        images_per_s: rate for batches in memory; 0 if the forward failed or was not timed.
        start_s: seconds until the first batch was computed, including compilation.
        agreement: feature -> agreement with eager float32.
        decoding: feature -> agreement of fast decoded images with eager float32 of exactly decoded ones; empty without
            fast decoding.
        why_not: why the option is refused; empty if it is accepted.
        why_not_fast: why it is refused with fast decoding; empty if it is accepted, or without fast decoding.
    """

    way: ComputeOption
    images_per_s: float = 0.0
    start_s: float = 0.0
    agreement: dict[str, Agreement] = field(default_factory=dict)
    decoding: dict[str, Agreement] = field(default_factory=dict)
    why_not: str = ""
    why_not_fast: str = ""

    @property
    def decode(self) -> str:
        """The faster accepted decoding, "fast" or "exact"."""
        return "fast" if self.decoding and not self.why_not_fast else "exact"


def compute_options(
    device: torch.device, *, precision: str | None = None, compile: str | None = None, thorough: bool = False
) -> list[ComputeOption]:
    """Return the compute options of a device, float32 first.

    Args:
        device: device of the backbone.
        precision: only this precision; None: any.
        compile: only the engine of this value, see `extract_features`; None or "auto": any.
        thorough: also the option that is seldom the fastest and slow to compile: inductor on a CPU that has OpenVINO.

    Raises:
        UnknownNameError: `compile` has no such value.
        InputError: `compile` does not support the device or `precision`.
    """
    options = []
    by_openvino = default_engine(device, "float32") == "openvino"
    for candidate in [precision] if precision else PRECISIONS[: 2 if device.type == "cpu" else 3]:
        if compile not in (None, "auto"):
            try:
                options.append(ComputeOption(candidate, engine_for(str(compile), device, candidate)))
            except InputError:
                if precision or candidate == "float32":
                    raise
            continue
        engines = ["eager", "openvino"] if default_engine(device, candidate) == "openvino" else ["eager"]
        if thorough or not by_openvino:
            engines.append("inductor")
        options += [ComputeOption(candidate, engine) for engine in engines]
    return options


def pictures_of(
    images: ImageList,
    preprocessing: Preprocessing,
    count: int,
    max_pixels: int = defaults.MAX_PIXELS,
    *,
    both_ways: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the first images that can be decoded, at most 128, repeated up to `count`.

    Args:
        images: listed images.
        preprocessing: preprocessing of the backbone.
        count: number of pictures.
        max_pixels: see `extract_features`.
        both_ways: also decode them fast.

    Returns:
        (count, ...) stacked results of `Preprocessing.cpu_transform`, and (count, ...) the same pictures decoded
        fast, or None.

    Raises:
        InputError: none of the first images can be decoded.
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
    """Return the images per second that one core reads, decodes and preprocesses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        good = int((_decoded(images, preprocessing, count, max_pixels).status == Status.OK).sum())
        return good / _median_s(functools.partial(_decoded, images, preprocessing, count, max_pixels))
    finally:
        torch.set_num_threads(threads)


def batch_rates(backbone: Backbone, choice: Choice, pictures: Tensor) -> dict[int, float]:
    """Return batch size -> images per second, eager in float32, for the batch sizes that fit into memory.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        pictures: stacked results of `Preprocessing.cpu_transform`; repeated for larger batches.

    Raises:
        InputError: memory is insufficient for the smallest batch size.
    """
    rates: dict[int, float] = {}
    for size in _BATCH_SIZES["cpu" if backbone.device.type == "cpu" else "gpu"]:
        batch = _repeated(pictures, size)
        with open_forward(backbone, choice, "float32") as forward:
            forward(batch)
            if forward.images_at_once:  # memory is insufficient for the whole batch
                break
            rates[size] = size / _median_s(functools.partial(forward, batch))
    if not rates:
        raise InputError(f"insufficient memory on {backbone.device} for {size} images at once")
    return rates


def best_batch_size(rates: dict[int, float]) -> int:
    """Return the default if no size is faster by a tenth; otherwise the smallest size within 3 % of the fastest.

    The gain of a smaller batch in an isolated forward is lost when images are decoded at the same time.
    """
    most = max(rates.values())
    if rates.get(defaults.BATCH_SIZE, 0.0) * _WORTHWHILE >= most:
        return defaults.BATCH_SIZE
    return next(size for size, rate in rates.items() if rate * _GAIN >= most)


def forward_rates(
    backbone: Backbone,
    choice: Choice,
    pictures: Tensor,
    options: Iterable[ComputeOption],
    min_cosine: float = defaults.MIN_COSINE,
    fast: Tensor | None = None,
    *,
    refused_too: bool = False,
) -> list[Measured]:
    """Time forwards of one batch, and compare their features with the reference.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        pictures: batch from `pictures_of`, all of which is compared.
        options: options to time.
        min_cosine: lowest accepted cosine of a feature in lower precision or of a fast decoded image.
        fast: the same pictures decoded fast; None without fast decoding.
        refused_too: also time options that are refused.
    """
    options = list(options)
    measured = []
    timed = pictures[: _enough(backbone.device, len(pictures))]
    with open_forward(backbone, choice, "float32") as plain:
        start = time.perf_counter()
        expected = plain(pictures)
        start_s = time.perf_counter() - start
        if _PLAIN in options:
            options.remove(_PLAIN)
            decoding = {} if fast is None else agreement(plain(fast), expected)
            rate = len(timed) / _median_s(functools.partial(plain, timed))
            why_not = refusal(decoding, min_cosine)
            measured.append(Measured(_PLAIN, rate, start_s, decoding=decoding, why_not_fast=why_not))
    for option in options:
        try:
            start = time.perf_counter()
            with open_forward(backbone, choice, "float32", option.precision, option.engine, len(timed)) as forward:
                agreements = agreement(forward(pictures), expected)
                start_s = time.perf_counter() - start
                decoding = {} if fast is None else agreement(forward(fast), expected)
                why_not = refusal(agreements, None if option.precision == "float32" else min_cosine)
                rate = 0.0
                if refused_too or not why_not:
                    rate = len(timed) / _median_s(functools.partial(forward, timed))
        except Exception as error:  # a compiler may fail in any way
            measured.append(Measured(option, why_not=first_line(error)))
            continue
        finally:
            _free(option, backbone.device)
        measured.append(Measured(option, rate, start_s, agreements, decoding, why_not, refusal(decoding, min_cosine)))
    return measured


def _enough(device: torch.device, batch_size: int) -> int:
    """Return the number of pictures that suffices to time a forward."""
    return min(batch_size, max(_TIMED, _TIMED_PER_CORE * defaults.CORES)) if device.type == "cpu" else batch_size


def _free(option: ComputeOption, device: torch.device) -> None:
    """Release the memory of a forward that is no longer needed."""
    if option.engine == "inductor":
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
    """Return the accepted options, ordered by the time for `n_images` images including compilation.

    Args:
        measured: results of `forward_rates`.
        n_images: number of images to compute.
        decode: "fast": only options accepted with fast decoding.

    Raises:
        InputError: no option is accepted.
    """
    good, refused = [], []
    for measurement in measured:
        if why_not := measurement.why_not or (measurement.why_not_fast if decode == "fast" else ""):
            refused.append(f"{measurement.way}: {why_not}")
        else:
            good.append(measurement)
    if not good:
        raise InputError("every requested compute option was rejected:\n  " + "\n  ".join(refused))
    return sorted(good, key=lambda accepted: 1 / accepted.images_per_s + accepted.start_s / n_images)


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
    """Return the options to compute features of these images that agree with the reference, the fastest first.

    They are compared on a few images only. A run compares its whole first batch, and raises `DisagreementError` before
    anything is stored if an option disagrees; then use the next option.

    Args:
        images: see `extract_features`; the first images are computed with each option.
        backbone: loaded backbone.
        layers: see `extract_features`.
        out: data set to resume; if it has rows, their settings are returned and nothing is measured.
        batch_size: images per forward; None: the default on a CPU, measured on a GPU.
        precision: only this precision; None: any.
        compile: only this value; None or "auto": any.
        decode: only this value; None: either.
        min_cosine: lowest accepted cosine of features in lower precision or of fast decoded images.
        limit: maximum number of images.
        max_pixels: see `extract_features`.

    Returns:
        settings of each accepted option, at least one: `precision`, `compile`, `decode` and `batch_size` as
        `extract_features` takes them; and the measurements.

    Raises:
        InputError: see `extract_features`; or no option agrees.
    """
    if out is not None and (existing := settings_of_existing(Path(out))):
        asked = {"precision": precision, "compile": compile, "decode": decode, "batch_size": batch_size}
        given = {name: value for name, value in asked.items() if value is not None}
        return [{"batch_size": defaults.BATCH_SIZE, **existing, **given}], []
    listed = list_images(images, limit) if isinstance(images, str | os.PathLike) else images
    options = compute_options(backbone.device, precision=precision, compile=compile)
    preprocessing = backbone.preprocessing
    with evaluating(backbone.model), full_float32():
        choice = choose_features(backbone, [layers] if isinstance(layers, str) else layers)
    count = _enough(backbone.device, min(batch_size or defaults.BATCH_SIZE, len(listed)))
    both_ways = decode == "fast" or (decode is None and preprocessing.can_be_faster)
    pictures, fast = pictures_of(listed, preprocessing, count, max_pixels, both_ways=both_ways)
    if backbone.device.type != "cpu":  # a GPU is timed with whole batches
        batch_size = batch_size or best_batch_size(batch_rates(backbone, choice, pictures))
        count = min(batch_size, len(listed))
        pictures, fast = _repeated(pictures, count), None if fast is None else _repeated(fast, count)
    measured = forward_rates(backbone, choice, pictures, options, min_cosine, fast)
    settings = [
        {
            "precision": accepted.way.precision,
            "compile": accepted.way.compile,
            "decode": decode or accepted.decode,
            "batch_size": batch_size or defaults.BATCH_SIZE,
        }
        for accepted in ranked(measured, len(listed), decode)
    ]
    return settings, measured
