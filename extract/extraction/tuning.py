"""Choose how to compute features on this machine: measured once for a backbone, and kept.

Usage:

    tuned = fastest("photos", backbone=backbone)
    extract_features("photos", out="outputs/photos", backbone=backbone, **tuned.settings[0])
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.compute.backbone import Backbone
from extract.compute.backends import default_engine, open_forward
from extract.compute.feature_choice import Choice, choose_features
from extract.errors import InputError, LayertapError
from extract.extraction.forward_rates import (
    PLAIN,
    ComputeOption,
    Measured,
    compute_options,
    eager_instead,
    enough_pictures,
    forward_rates,
)
from extract.extraction.kept_measurements import Measurements, keep_measurements, kept_measurements
from extract.extraction.plan import settings_of_existing
from extract.extraction.rounds import SAME, in_rounds, timed_s
from extract.extraction.validation import FIRST_DECODED, decoded_both_ways
from extract.images import Batch, Decoding, ImageList, list_images, load_batches
from extract.row_status import Status
from extract.system.torch_state import evaluating, full_float32

__all__ = [
    "Accepted",
    "Tuned",
    "batch_rates",
    "best_batch_size",
    "decode_rate",
    "decode_seconds",
    "fastest",
    "pictures_of",
    "ranked",
]  # fmt: skip

_AT_LEAST_S = 1.0  # total of repeated forwards, after an untimed one; a longer forward is timed once
_DIFFERENT = 128  # pictures decoded at most to measure forwards; larger batches repeat them
_GAIN, _WORTHWHILE = 1.03, 1.1  # required speed-up of a larger batch, and of a size other than the default
_BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128), "gpu": (32, 64, 128, 256, 512, 1024)}
_DECODED_IN_TURN = 4  # images decoded each way in a round
_DECODING_S = 1.0

# Seconds of eager forwards, as estimated from two pictures, from which a job is measured if nothing is kept. With
# OpenVINO, measuring takes 4 to 6 s, most of which compiles programs that the job uses; with inductor, it takes a
# minute or more.
_PAYS_FROM_S = {"openvino": 20.0, "inductor": 120.0}


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
    with _one_thread():
        good = int((_decoded(images, preprocessing, count, max_pixels).status == Status.OK).sum())
        return good / _median_s(functools.partial(_decoded, images, preprocessing, count, max_pixels))


def decode_seconds(
    images: ImageList, preprocessing: Preprocessing, max_pixels: int = defaults.MAX_PIXELS, *, both_ways: bool = False
) -> dict[str, float]:
    """Return "exact" (and "fast", if both ways) -> seconds of one core for an image, measured in turn.

    Raises:
        InputError: see `pictures_of`.
    """
    ways = {"exact": preprocessing, **({"fast": preprocessing.faster()} if both_ways else {})}

    def decode(way: Preprocessing) -> float:
        return timed_s(functools.partial(_decoded, images, way, _DECODED_IN_TURN, max_pixels))

    count = min(_DECODED_IN_TURN, len(images))
    with _one_thread():
        for way in ways.values():  # the first time, libraries are imported
            decode(way)
        rounds = in_rounds({name: functools.partial(decode, way) for name, way in ways.items()}, _DECODING_S)
    return {name: rounds.time_s(name) / count for name in ways}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager: let PyTorch use one thread, as in a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def batch_rates(
    backbone: Backbone, choice: Choice, pictures: Tensor, option: ComputeOption = PLAIN
) -> dict[int, float]:
    """Return batch size -> images per second with an option, for the batch sizes that fit into memory.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        pictures: stacked results of `Preprocessing.cpu_transform`; repeated for larger batches.
        option: how to compute.

    Raises:
        InputError: memory is insufficient for the smallest batch size.
        LayertapError: see `open_forward`.
    """
    rates: dict[int, float] = {}
    for size in _BATCH_SIZES["cpu" if backbone.device.type == "cpu" else "gpu"]:
        batch = _repeated(pictures, size)
        try:
            with open_forward(backbone, choice, "float32", option.precision, option.engine, size) as forward:
                forward(batch)
                if forward.images_at_once:  # memory is insufficient for the whole batch
                    break
                rates[size] = size / _median_s(functools.partial(forward, batch))
        except LayertapError:  # compiled code is not computed in parts
            if not rates:
                raise
            break
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


def _median_s(call: Callable[[], object]) -> float:
    times: list[float] = []
    while not times or sum(times) < _AT_LEAST_S:
        times.append(timed_s(call))
    return statistics.median(times)


class Accepted(NamedTuple):
    """An option that agrees with the reference, and the decoding of images with it: "exact" or "fast"."""

    measured: Measured
    decode: str


def ranked(
    measurements: Measurements,
    n_images: float = math.inf,
    decode: str | None = None,
    batch_size: int = defaults.BATCH_SIZE,
) -> list[Accepted]:
    """Return the accepted options by the estimated time of a run, the shortest first.

    Of options that differ by at most 2 %, the one that is measured first comes first: eager before compiled, float32
    before lower precision, exact before fast decoding. So noise does not decide.

    Args:
        measurements: rates of the forwards and of decoding.
        n_images: number of images to compute; infinite: the time of a start does not count.
        decode: only options with this decoding; None: either.
        batch_size: images per batch, the first of which is also computed by the reference.

    Raises:
        InputError: no option is accepted.
    """
    good: list[Accepted] = []
    refused = []
    for measured in measurements.measured:
        why_not = measured.why_not or (measured.why_not_fast if decode == "fast" else "")
        if why_not:
            refused.append(f"{measured.way}: {why_not}")
            continue
        good += [Accepted(measured, "exact")] if decode != "fast" else []
        fast_agrees = bool(measured.decoding) and not measured.why_not_fast
        good += [Accepted(measured, "fast")] if decode == "fast" or (decode is None and fast_agrees) else []
    if not good:
        raise InputError("every requested compute option was rejected:\n  " + "\n  ".join(refused))
    left = [(_job_s(accepted, measurements, n_images, batch_size), accepted) for accepted in good]
    order = []
    while left:
        shortest = min(seconds for seconds, _ in left)
        first = next(position for position, (seconds, _) in enumerate(left) if seconds <= SAME * shortest)
        order.append(left.pop(first)[1])
    return order


def _job_s(accepted: Accepted, measurements: Measurements, n_images: float, batch_size: int) -> float:
    """Return the estimated seconds of a run; of one image, if there are infinitely many."""
    measured, decode_s = accepted.measured, measurements.decode_s
    forward_s = 1 / measured.images_per_s
    decoding_s = decode_s.get(accepted.decode, 0.0) / defaults.CORES
    # On a CPU, decoding and the forward share the cores.
    image_s = forward_s + decoding_s if measurements.on_cpu else max(forward_s, decoding_s)
    if math.isinf(n_images):
        return image_s
    start_s = measured.starting_again_s
    if measured.way != PLAIN:
        start_s += min(n_images, batch_size) * measurements.eager_s
    if accepted.decode == "fast":  # the first images are decoded and computed in both ways
        start_s += min(n_images, FIRST_DECODED) * (sum(decode_s.values()) + measurements.eager_s + forward_s)
    return start_s + n_images * image_s


@dataclass(frozen=True)
class Tuned:
    """How to compute a job.

    Attributes:
        settings: settings of each accepted option, the fastest first: `precision`, `compile`, `decode` and `batch_size`
            as `extract_features` takes them.
        measured: the measurements; empty if there are none.
        source: "measured" now; "unsure": measured now, but the order is not sure, and nothing is kept; "kept" from an
            earlier measurement; "resumed": the settings of existing rows; "short": the job is too short to measure.
    """

    settings: list[dict[str, Any]]
    measured: list[Measured]
    source: Literal["measured", "unsure", "kept", "resumed", "short"]


def fastest(
    images: str | os.PathLike[str] | ImageList,
    *,
    backbone: Backbone,
    layers: str | Sequence[str] = defaults.LAYERS,
    choice: Choice | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    precision: str | None = None,
    compile: str | None = None,
    decode: str | None = None,
    min_cosine: float = defaults.MIN_COSINE,
    limit: int | None = None,
    max_pixels: int = defaults.MAX_PIXELS,
    on_measuring: Callable[[], None] = lambda: None,
) -> Tuned:
    """Return the options to compute features of these images that agree with the reference, the fastest first.

    They are compared on a few images only. A run compares its whole first batch, and raises `DisagreementError` before
    anything is stored if an option disagrees; then use the next option.

    Measurements are kept in the user's cache folder, and taken from there for later jobs with the same backbone and
    layers. A job that is too short to pay for them is computed in float32 on exactly decoded images.

    Args:
        images: see `extract_features`; the first images are computed with each option.
        backbone: loaded backbone.
        layers: see `extract_features`.
        choice: the features of these layers, if they are known.
        out: data set to resume; if it has rows, their settings are returned and nothing is measured.
        batch_size: images per forward; None: the default on a CPU, measured on a GPU.
        precision: only this precision; None: any.
        compile: only this value; None or "auto": any.
        decode: only this value; None: either.
        min_cosine: lowest accepted cosine of features in lower precision or of fast decoded images.
        limit: maximum number of images.
        max_pixels: see `extract_features`.
        on_measuring: called before options are measured.

    Raises:
        InputError: see `extract_features`; or no option agrees.
    """
    asked = {"precision": precision, "compile": compile, "decode": decode, "batch_size": batch_size}
    given = {name: value for name, value in asked.items() if value is not None}
    if out is not None and (existing := settings_of_existing(Path(out))):
        return Tuned([{"batch_size": defaults.BATCH_SIZE, **existing, **given}], [], "resumed")
    listed = list_images(images, limit) if isinstance(images, str | os.PathLike) else images
    options = compute_options(backbone.device, precision=precision, compile=compile)
    fallbacks = [] if compile not in (None, "auto") else eager_instead(options)
    preprocessing = backbone.preprocessing
    if choice is None:
        with evaluating(backbone.model), full_float32():
            choice = choose_features(backbone, [layers] if isinstance(layers, str) else layers)
    both_ways = decode == "fast" or (decode is None and preprocessing.can_be_faster)
    what = {"options": list(map(str, options)), "both_ways": both_ways, "batch_size": batch_size, "cosine": min_cosine}
    measurements = kept_measurements(backbone, choice, what)
    source: Literal["kept", "measured", "unsure"] = "kept"
    if measurements is None:
        pays_from_s = _PAYS_FROM_S[default_engine(backbone.device, "float32")]
        eager_image_s = _eager_image_s(backbone, choice, len(listed), pays_from_s)
        if eager_image_s * len(listed) < pays_from_s:
            plain = {"precision": "float32", "compile": "auto", "decode": "exact", "batch_size": defaults.BATCH_SIZE}
            return Tuned([plain | given], [], "short")
        on_measuring()
        measurements, is_sure = _measurements(
            listed, backbone, choice, options, batch_size, fallbacks, min_cosine, max_pixels, both_ways, eager_image_s
        )
        source = "measured" if is_sure else "unsure"
        if is_sure:
            keep_measurements(backbone, choice, what, measurements)
    size = measurements.batch_size
    settings = [
        {
            "precision": measured.way.precision,
            "compile": measured.way.compile,
            "decode": decoded,
            "batch_size": size,
        }
        for measured, decoded in ranked(measurements, len(listed), decode, size)
    ]
    return Tuned(settings, measurements.measured, source)


def _eager_image_s(backbone: Backbone, choice: Choice, n_images: int, pays_from_s: float) -> float:
    """Return the estimated seconds of an eager forward for an image, from one or two forwards of empty pictures."""
    count = 2 if backbone.device.type == "cpu" else defaults.BATCH_SIZE
    pictures = torch.zeros(count, *backbone.preprocessing.crop_px, 3, dtype=torch.uint8)
    with open_forward(backbone, choice, "float32") as forward:
        image_s = timed_s(functools.partial(forward, pictures)) / count
        if image_s * n_images < pays_from_s:
            return image_s
        return min(image_s, timed_s(functools.partial(forward, pictures)) / count)  # the first may have been disturbed


def _measurements(
    images: ImageList, backbone: Backbone, choice: Choice, options: list[ComputeOption], batch_size: int | None,
    fallbacks: list[ComputeOption], min_cosine: float, max_pixels: int, both_ways: bool, eager_image_s: float,
) -> tuple[Measurements, bool]:  # fmt: skip
    """Measure the options, and the fallbacks if no compiler is accepted; return whether the order is sure, too."""
    preprocessing, on_cpu = backbone.preprocessing, backbone.device.type == "cpu"
    count = enough_pictures(backbone.device, min(batch_size or defaults.BATCH_SIZE, len(images)))
    pictures, fast = pictures_of(images, preprocessing, count, max_pixels, both_ways=both_ways)
    if not on_cpu:  # a GPU is timed with whole batches
        batch_size = batch_size or best_batch_size(batch_rates(backbone, choice, pictures))
        count = min(batch_size, len(images))
        pictures, fast = _repeated(pictures, count), None if fast is None else _repeated(fast, count)
    measured, is_sure = forward_rates(backbone, choice, pictures, options, min_cosine, fast)
    if fallbacks and all(each.why_not for each in measured if each.way.engine != "eager"):
        more = forward_rates(backbone, choice, pictures, fallbacks, min_cosine, fast)
        measured, is_sure = measured + more.measured, is_sure and more.is_sure
    decode_s = decode_seconds(images, preprocessing, max_pixels, both_ways=both_ways)
    rates = {each.way: each.images_per_s for each in measured}
    eager_s = 1 / rates[PLAIN] if rates.get(PLAIN) else eager_image_s
    return Measurements(measured, decode_s, eager_s, on_cpu, batch_size or defaults.BATCH_SIZE), is_sure
