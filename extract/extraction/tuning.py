"""Choose how to compute features on this machine: `--fast`.

Usage:

    tuned = fastest("photos", backbone=backbone)
    extract_features("photos", out="outputs/photos", backbone=backbone, **tuned.settings[0])

The options of a device are tried in a fixed order: eager ones, then compiled ones. Each computes a few images twice:
first to be compared with eager float32, then to be timed. An option is left out if preparing it takes longer than the
job could gain by it.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from extract import defaults
from extract.compute.agreement import agreement, refusal
from extract.compute.backbone import Backbone
from extract.compute.backends import default_engine, engine_for, open_forward
from extract.compute.compiled import openvino_computes_in, sharing_graphs
from extract.compute.feature_choice import Choice, choose_features
from extract.compute.forward import Values
from extract.errors import InputError, first_line
from extract.extraction.first_images import FIRST_DECODED, decode_seconds, decoded_in, timed_s
from extract.extraction.plan import settings_of_existing
from extract.images import ImageList, list_images
from extract.system.torch_state import evaluating, full_float32

__all__ = ["PLAIN", "ComputeOption", "Measured", "Tuned", "compute_options", "fastest", "forward_rates", "ranked"]

# What an option is expected to take and to save, before it is tried.
_MEASURING_S = 1.0  # seconds to decode images, to compute the reference, and to compare fast decoding
_PREPARING_S = {"eager": 0.0, "openvino": 2.5, "inductor": 40.0}  # seconds until a compiler has prepared a forward
_SAME_GRAPH_S = 0.5  # the same for another precision of a graph that OpenVINO has
_IMAGES_MORE = 24 + defaults.BATCH_SIZE  # images computed to try an option, and by the run to compare its first batch
_LOWER_PRECISION_SAVES = 0.35  # of the time of the best option so far; likewise:
_COMPILER_SAVES = {"eager": 0.05, "openvino": 0.1, "inductor": 0.1}
_COMPILER_SAVES_INSTEAD = 0.25  # in float32, where lower precision is too inexact: mostly networks of many small layers
_FAST_DECODING_SAVES_S = 0.0015  # of a core, for an image
_HANDICAP = {"exact": 1.0, "fast": 1.03}  # of the estimated time, so that noise does not decide
_COMPARED_PER_CORE, _LEAST_COMPARED = 4, 8  # pictures on a CPU; on a GPU a batch


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


PLAIN = ComputeOption("float32", "eager")


@dataclass(frozen=True)
class Measured:
    """A forward that was tried.

    Attributes:
        way: precision and engine of the forward.
        images_per_s: rate for images in memory; 0 if it was not timed.
        start_s: seconds until the first images were computed, including compilation.
        why_not: why the option is refused; empty if it is accepted.
        why_not_fast: why it is refused with fast decoding; empty if it is accepted, or without fast decoding.
    """

    way: ComputeOption
    images_per_s: float = 0.0
    start_s: float = 0.0
    why_not: str = ""
    why_not_fast: str = ""


def compute_options(
    device: torch.device, *, precision: str | None = None, compile: str | None = None
) -> list[ComputeOption]:
    """Return the options of a device in the order in which they are tried: eager before compiled.

    Args:
        device: device of the backbone.
        precision: only this precision; None: any.
        compile: only the engine of this value, see `extract_features`; None or "auto": any.

    Raises:
        UnknownNameError: `compile` has no such value.
        InputError: `compile` does not support the device or `precision`.
    """
    precisions = [precision] if precision else ["float32", *_lower_precisions(device)]
    if compile in (None, "auto"):
        compiled = [ComputeOption(each, default_engine(device, each)) for each in reversed(precisions)]
        eager = (
            [PLAIN] if device.type == "cpu" and not precision else [ComputeOption(each, "eager") for each in precisions]
        )
        return [*eager, *compiled]
    options = []
    for each in precisions:
        try:
            options.append(ComputeOption(each, engine_for(str(compile), device, each)))
        except InputError:
            if precision or each == "float32":
                raise
    return options


def _lower_precisions(device: torch.device) -> list[str]:
    """Return the precisions below float32 in which a device is likely to be faster: a CPU by OpenVINO only."""
    if device.type != "cpu":
        return ["bfloat16", "float16"]
    by_openvino = default_engine(device, "float32") == "openvino"
    return ["bfloat16"] if by_openvino and openvino_computes_in("bfloat16") else []


def forward_rates(
    backbone: Backbone,
    choice: Choice,
    pictures: dict[str, Tensor],
    options: Sequence[ComputeOption],
    *,
    min_cosine: float = defaults.MIN_COSINE,
    n_images: float = math.inf,
) -> tuple[Measured, list[Measured]]:
    """Return eager float32, and the options that were tried: those that a job of this size may gain by.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        pictures: "exact" and perhaps "fast" -> (B, ...) images decoded in this way, from `decoded_in`.
        options: from `compute_options`.
        min_cosine: lowest accepted cosine of a feature in lower precision or of a fast decoded image.
        n_images: number of images of the job.
    """
    measured: dict[ComputeOption, Measured] = {}
    expected: Values = {}
    on_cpu = backbone.device.type == "cpu"
    all_compiled = all(option.engine != "eager" for option in options)  # as the user asks for
    with sharing_graphs():
        for option in dict.fromkeys([PLAIN, *options]):
            same_precision = measured.get(ComputeOption(option.precision, "eager"))
            if same_precision and same_precision.why_not and same_precision.images_per_s:  # too inexact, not broken
                measured[option] = Measured(option, why_not=same_precision.why_not)
            elif option.engine == "eager" or all_compiled or _tries(option, measured, n_images, on_cpu):
                measured[option] = _tried(backbone, choice, option, pictures, expected, min_cosine)
    return measured[PLAIN], [measured[option] for option in options if option in measured]


def _tries(option: ComputeOption, measured: dict[ComputeOption, Measured], n_images: float, on_cpu: bool) -> bool:
    """Return whether a compiled option is tried after the measured ones."""
    best = max((each for each in measured.values() if not each.why_not), key=lambda each: each.images_per_s)
    if option.engine == "inductor" and option.precision != best.way.precision:  # it takes too long to try each
        return False
    if option.precision == "float32" and best.way.engine == "openvino":  # in lower precision, which is faster
        return False
    same_graph = any(way.engine == "openvino" and each.images_per_s for way, each in measured.items())
    preparing_s = _SAME_GRAPH_S if same_graph else _PREPARING_S[option.engine]
    saves = _expected_saving(option, on_cpu)
    if option.engine == "openvino" and any(each.why_not for each in measured.values()):
        saves = max(saves, _COMPILER_SAVES_INSTEAD)
    return _pays(saves, n_images / best.images_per_s, preparing_s, 1 / measured[PLAIN].images_per_s)


def _expected_saving(option: ComputeOption, on_cpu: bool) -> float:
    lower = option.precision != "float32" and option.engine == ("openvino" if on_cpu else "eager")
    return 0.0 if option == PLAIN else _LOWER_PRECISION_SAVES if lower else _COMPILER_SAVES[option.engine]


def _pays(saves: float, job_s: float, preparing_s: float, eager_s: float) -> bool:
    """Return whether a share of the forwards of a job takes longer than trying what saves it; `eager_s`: an image."""
    return job_s * saves > preparing_s + _IMAGES_MORE * eager_s


def _tried(
    backbone: Backbone, choice: Choice, option: ComputeOption, pictures: dict[str, Tensor], expected: Values,
    min_cosine: float,
) -> Measured:  # fmt: skip
    """Compare an option with the expected features, which eager float32 fills in, and time it."""
    start, exact = time.perf_counter(), pictures["exact"]
    try:
        with open_forward(backbone, choice, "float32", option.precision, option.engine, len(exact)) as forward:
            features = forward(exact)
            start_s = time.perf_counter() - start
            if option == PLAIN:
                expected.update(features)
            least = None if option.precision == "float32" else min_cosine
            why_not = refusal(agreement(features, expected), least) or ""
            why_not_fast = ""
            if "fast" in pictures:
                why_not_fast = refusal(agreement(forward(pictures["fast"]), expected), min_cosine) or ""
            seconds = timed_s(functools.partial(forward, exact))
    except Exception as error:  # a compiler may fail in any way
        if option == PLAIN:
            raise
        return Measured(option, why_not=first_line(error))
    finally:
        if option.engine == "inductor":
            torch.compiler.reset()
        gc.collect()
        if backbone.device.type == "cuda":
            torch.cuda.empty_cache()
    return Measured(option, len(exact) / seconds, start_s, why_not, why_not_fast)


def ranked(
    plain: Measured,
    tried: Sequence[Measured],
    decode_s: dict[str, float],
    *,
    on_cpu: bool,
    n_images: float = math.inf,
    decode: str | None = None,
) -> list[tuple[Measured, str]]:
    """Return the accepted options, each with its decoding of images, by the estimated time of a job, shortest first.

    Fast decoding must save 3 %.

    Args:
        plain: measured eager float32.
        tried: measured options.
        decode_s: "exact" and perhaps "fast" -> seconds of a core to decode an image.
        on_cpu: whether decoding and the forward share the cores.
        n_images: number of images to compute; infinite: the time of a start does not count.
        decode: only options with this decoding; None: either.

    Raises:
        InputError: no option is accepted.
    """
    good = [
        (each, way)
        for way in decode_s
        for each in tried
        if decode in (None, way) and not each.why_not and not (way == "fast" and each.why_not_fast)
    ]
    if not good:
        reasons = [f"{each.way}: {each.why_not or each.why_not_fast}" for each in tried]
        raise InputError("every requested compute option was rejected:\n  " + "\n  ".join(reasons))

    def job_s(accepted: tuple[Measured, str]) -> float:  # of one image, if there are infinitely many
        measured, way = accepted
        forward_s, decoding_s = 1 / measured.images_per_s, decode_s[way] / defaults.CORES
        image_s = forward_s + decoding_s if on_cpu else max(forward_s, decoding_s)
        # OpenVINO starts from the graph that it has; inductor compiles again.
        start_s = measured.start_s if measured.way.engine == "inductor" else 0.0
        if measured.way != PLAIN:  # the first batch is also computed by the reference
            start_s += min(n_images, defaults.BATCH_SIZE) / plain.images_per_s
        if way == "fast":  # the first images are decoded and computed in both ways
            start_s += min(n_images, FIRST_DECODED) * (sum(decode_s.values()) + 1 / plain.images_per_s + forward_s)
        return (image_s if math.isinf(n_images) else start_s + n_images * image_s) * _HANDICAP[way]

    return sorted(good, key=job_s)


@dataclass(frozen=True)
class Tuned:
    """How to compute a job.

    Attributes:
        settings: settings of each accepted option, the fastest first: `precision`, `compile`, `decode` and `batch_size`
            as `extract_features` takes them.
        measured: the options that were tried; empty if there are none.
        source: "measured"; "resumed": the settings of existing rows; "short": the job is too short to try options.
    """

    settings: list[dict[str, Any]]
    measured: list[Measured]
    source: Literal["measured", "resumed", "short"]


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
    anything is stored if an option disagrees; then use the next option. A job that is too short to gain by any option
    is computed in float32 on exactly decoded images.

    Args:
        images: see `extract_features`; the first images are computed with each option.
        backbone: loaded backbone.
        layers: see `extract_features`.
        choice: the features of these layers, if they are known.
        out: data set to resume; if it has rows, their settings are returned and nothing is measured.
        batch_size: images per forward; None: the default.
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
    plain = {"precision": "float32", "compile": "auto", "decode": "exact", "batch_size": defaults.BATCH_SIZE}
    if out is not None and (existing := settings_of_existing(Path(out))):
        return Tuned([plain | existing | given], [], "resumed")
    listed = list_images(images, limit) if isinstance(images, str | os.PathLike) else images
    options = compute_options(backbone.device, precision=precision, compile=compile)
    preprocessing, n_images, on_cpu = backbone.preprocessing, len(listed), backbone.device.type == "cpu"
    if choice is None:
        with evaluating(backbone.model), full_float32():
            choice = choose_features(backbone, [layers] if isinstance(layers, str) else layers)
    both_ways = decode == "fast" or (decode is None and preprocessing.can_be_faster)
    if not _measuring_pays(backbone, choice, options, n_images, both_ways):
        return Tuned([plain | given], [], "short")
    on_measuring()
    size = batch_size or defaults.BATCH_SIZE
    count = min(size, max(_COMPARED_PER_CORE * defaults.CORES, _LEAST_COMPARED)) if on_cpu else min(size, n_images)
    ways = {"exact": preprocessing} | ({"fast": preprocessing.faster()} if both_ways else {})
    pictures = dict(zip(ways, decoded_in(listed, list(ways.values()), max_pixels, count), strict=True))
    decode_s = {name: decode_seconds(listed, way, max_pixels, _LEAST_COMPARED) for name, way in ways.items()}
    reference, tried = forward_rates(backbone, choice, pictures, options, min_cosine=min_cosine, n_images=n_images)
    order = ranked(reference, tried, decode_s, on_cpu=on_cpu, n_images=n_images, decode=decode)
    # Where no compiler was tried, the number of images decides whether float32 is compiled.
    compiled = any(each.way.precision == "float32" and each.way.engine != "eager" for each in tried)
    settings = []
    for measured, way in order:
        compile = "auto" if measured.way == PLAIN and not compiled else measured.way.compile
        settings.append(plain | {"precision": measured.way.precision, "compile": compile, "decode": way} | given)
    return Tuned(settings, tried, "measured")


def _measuring_pays(
    backbone: Backbone, choice: Choice, options: list[ComputeOption], n_images: int, both_ways: bool
) -> bool:
    """Return whether a job is likely to gain by any option, from one or two eager forwards of two empty pictures."""
    on_cpu = backbone.device.type == "cpu"
    pictures = torch.zeros(2, *backbone.preprocessing.crop_px, 3, dtype=torch.uint8)

    def pays(eager_s: float) -> bool:
        by_decoding_s = n_images * _FAST_DECODING_SAVES_S / defaults.CORES if both_ways else 0.0
        return by_decoding_s > _MEASURING_S + _IMAGES_MORE * eager_s or any(
            _pays(_expected_saving(each, on_cpu), n_images * eager_s, _MEASURING_S + _PREPARING_S[each.engine], eager_s)
            for each in options
        )

    with open_forward(backbone, choice, "float32") as forward:  # the first may have been disturbed
        return all(pays(timed_s(functools.partial(forward, pictures)) / len(pictures)) for _ in range(2))
