"""Choose how to compute features on this machine: `--fast`.

Usage:

    plan = resolve(settings, images, backbone, existing_at("outputs/photos"))
    extract(plan.computed_otherwise(**fastest(plan).settings[0]))

The options of a device are tried in a fixed order: eager ones, then compiled ones. Each computes a few images twice:
first to be compared with eager float32, then to be timed. A compiler is tried if the job is long enough for it.
Precision and decoding are in the fingerprint, so they cannot change between batches. Each option is timed once:
repeating until the order was sure took a minute that a job of 600 photos never won back (1.7 times the time of a strict
run). The run compares its whole first batch in any case; if the fastest option is refused there, the next is used.

On an NVIDIA or AMD GPU nothing is timed: the order of the options is known, and the first one that agrees is used.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.compute.agreement import agreement, refusal
from extract.compute.backbone import Backbone
from extract.compute.backends import WITH_WEIGHTS, default_engine, engine_for, open_forward
from extract.compute.compiled import openvino_computes_in, sharing_graphs
from extract.compute.feature_choice import Choice
from extract.compute.forward import Values
from extract.errors import InputError, first_line
from extract.extraction.first_images import decode_seconds, decoded_in, timed_s
from extract.extraction.plan import Plan
from extract.system.torch_state import has_tensor_float32

__all__ = [
    "PLAIN", "ComputeOption", "Measured", "Tuned", "compute_options", "fastest", "forward_rates", "options_of_gpu",
    "ranked",
]  # fmt: skip

# Seconds of the forwards of a job from which trying options pays. OpenVINO takes about 2.5 s to convert a graph, and
# saves a third or more in bfloat16, about a tenth in float32. Inductor takes 40 s. A run also computes its first batch
# twice.
_PAYS_FROM_S = 25.0
_OPENVINO_IN_FLOAT32_PAYS_FROM_S = 70.0
_INDUCTOR_PAYS_FROM_S = 450.0
# On a GPU: it takes 10 to 20 s, and saves 23 us for each image (resnet50 on an H200 in bfloat16, 15,545 and 24,363
# images/s; vit_b_16 was not faster). The number of images decides alone, so that nothing is timed.
_INDUCTOR_PAYS_FROM_ON_GPU = 1_000_000
_FAST_DECODING_PAYS_FROM = 1_000  # images per core, each of which saves 1 to 2 ms
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

    @property
    def remark(self) -> str:
        """Why it is refused, to be printed after its rate; empty if it is accepted."""
        if self.why_not:
            return f"  rejected: {self.why_not}"
        return f"  fast decoding rejected: {self.why_not_fast}" if self.why_not_fast else ""


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
    if has_tensor_float32(device):
        return ["tf32", "bfloat16", WITH_WEIGHTS]  # slowest first
    if device.type != "cpu":
        return ["bfloat16", "float16"]
    by_openvino = default_engine(device, "float32") == "openvino"
    return ["bfloat16"] if by_openvino and openvino_computes_in("bfloat16") else []


def options_of_gpu(
    device: torch.device, n_images: int, *, precision: str | None = None, compile: str | None = None
) -> list[ComputeOption]:
    """Return the options of a GPU, the fastest first.

    Args:
        device: the GPU.
        n_images: number of images of the job. Only a long one is compiled, unless `compile` says otherwise.
        precision: see `compute_options`.
        compile: see `compute_options`.
    """
    if compile not in (None, "auto"):
        return compute_options(device, precision=precision, compile=compile)[::-1]
    precisions = [precision] if precision else [*reversed(_lower_precisions(device)), "float32"]
    engines = ["inductor", "eager"] if n_images >= _INDUCTOR_PAYS_FROM_ON_GPU else ["eager"]
    first = [ComputeOption(precisions[0], engine) for engine in engines]
    return [*first, *(ComputeOption(each, "eager") for each in precisions[1:])]


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
    all_compiled = all(option.engine != "eager" for option in options)  # as the user asks for
    with sharing_graphs():
        for option in dict.fromkeys([PLAIN, *options]):
            same_precision = measured.get(ComputeOption(option.precision, "eager"))
            if same_precision and same_precision.why_not and same_precision.images_per_s:  # too inexact, not broken
                measured[option] = Measured(option, why_not=same_precision.why_not)
            elif option.engine == "eager" or all_compiled or _tries(option, measured, n_images):
                measured[option] = _tried(backbone, choice, option, pictures, expected, min_cosine)
    return measured[PLAIN], [measured[option] for option in options if option in measured]


def _tries(option: ComputeOption, measured: dict[ComputeOption, Measured], n_images: float) -> bool:
    """Return whether a compiled option is tried after the measured ones."""
    best = max((each for each in measured.values() if not each.why_not), key=lambda each: each.images_per_s)
    job_s = n_images / best.images_per_s
    if option.engine == "inductor":  # it takes too long to try each precision
        return option.precision == best.way.precision and job_s > _INDUCTOR_PAYS_FROM_S
    if option.precision != "float32":
        return job_s > _PAYS_FROM_S
    if best.way.engine == "openvino":  # in lower precision, which is faster
        return False
    # Where lower precision is too inexact, its graph is there, and mostly saves as much.
    has_graph = any(way.engine == "openvino" for way in measured)
    return job_s > (_PAYS_FROM_S if has_graph else _OPENVINO_IN_FLOAT32_PAYS_FROM_S)


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
        return (image_s if math.isinf(n_images) else start_s + n_images * image_s) * _HANDICAP[way]

    return sorted(good, key=job_s)


@dataclass(frozen=True)
class Tuned:
    """How to compute a job.

    Attributes:
        settings: settings of each accepted option, the fastest first: `precision`, `compile` and `decode` as
            `extract_features` takes them.
        measured: the options that were tried; empty if there are none.
        source: "measured"; "resumed": the settings of existing rows; "short": the job is too short to try options;
            "ordered": the order of the options of a GPU; "whole": whole numbers are computed in one way only.
    """

    settings: list[dict[str, Any]]
    measured: list[Measured]
    source: Literal["measured", "resumed", "short", "ordered", "whole"]


def fastest(plan: Plan, fixed: Collection[str] = (), on_measuring: Callable[[], None] = lambda: None) -> Tuned:
    """Return the options to compute a plan that agree with the reference, the fastest first.

    They are compared on a few images only. A run compares its whole first batch, and raises `DisagreementError` before
    anything is stored if an option disagrees; then use the next option. A job that is too short to gain by any option
    is computed in float32 on exactly decoded images.

    Args:
        plan: plan of the job; the first of its images are computed with each option. If its data set has rows, their
            settings are returned and nothing is measured.
        fixed: which of `precision`, `compile` and `decode` stay as they are in the settings of the plan.
        on_measuring: called before options are measured.

    Raises:
        InputError: no option agrees, or an image cannot be decoded in any way.
    """
    settings, backbone, images = plan.settings, plan.backbone, plan.images
    plain = {"precision": "float32", "compile": "auto", "decode": "exact"}
    given: dict[str, Any] = {name: getattr(settings, name) for name in plain if name in fixed}
    if plan.existing.made is not None:
        return Tuned([plan.existing.made | given], [], "resumed")
    if any(feature.is_whole for feature in plan.choice.features):
        return Tuned([plain | given], [], "whole")
    on_cpu, decode, n_images = backbone.device.type == "cpu", given.get("decode"), len(images)
    ways = {"exact": backbone.preprocessing.exact()}
    if decode == "fast" or (decode is None and ways["exact"].can_be_faster):
        ways["fast"] = ways["exact"].faster()
    if _is_gpu(backbone.device):
        return _ordered(plan, given, ways)
    options = compute_options(backbone.device, precision=given.get("precision"), compile=given.get("compile"))
    if not _measuring_pays(plan, "fast" in ways):
        return Tuned([plain | given], [], "short")
    on_measuring()
    decode_s = _decode_s(plan, ways)
    most = max(_COMPARED_PER_CORE * defaults.CORES, _LEAST_COMPARED) if on_cpu else n_images
    pictures = decoded_in(images, list(ways.values()), settings.max_pixels, min(plan.batch_size, most))
    reference, tried = forward_rates(
        backbone, plan.choice, dict(zip(ways, pictures, strict=True)), options,
        min_cosine=settings.min_cosine, n_images=n_images,
    )  # fmt: skip
    order = ranked(reference, tried, decode_s, on_cpu=on_cpu, n_images=n_images, decode=decode)
    # Where no compiler was tried, the number of images decides whether float32 is compiled.
    compiled = any(each.way.precision == "float32" and each.way.engine != "eager" for each in tried)
    tuned = []
    for measured, way in order:
        compile = "auto" if measured.way == PLAIN and not compiled else measured.way.compile
        tuned.append({"precision": measured.way.precision, "compile": compile, "decode": way} | given)
    return Tuned(tuned, tried, "measured")


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _ordered(plan: Plan, given: dict[str, Any], ways: dict[str, Preprocessing]) -> Tuned:
    """Return the options of a GPU in their order; only decoding, which takes no time of the GPU, is timed."""
    n_images, decodings = len(plan.images), ["exact"]
    if n_images > _FAST_DECODING_PAYS_FROM * defaults.CORES:
        seconds = _decode_s(plan, ways)
        decodings = sorted(ways, key=lambda way: seconds[way] * _HANDICAP[way])
    options = options_of_gpu(
        plan.backbone.device, n_images, precision=given.get("precision"), compile=given.get("compile")
    )
    tuned: list[dict[str, Any]] = []
    for option in options:
        compile = "auto" if option == PLAIN else option.compile
        for way in decodings:
            settings = {"precision": option.precision, "compile": compile, "decode": way} | given
            if settings not in tuned:
                tuned.append(settings)
    return Tuned(tuned, [], "ordered")


def _decode_s(plan: Plan, ways: dict[str, Preprocessing]) -> dict[str, float]:
    """Return the seconds of a core to decode an image in each way."""
    limit = plan.settings.max_pixels
    return {name: decode_seconds(plan.images, way, limit, _LEAST_COMPARED) for name, way in ways.items()}


def _measuring_pays(plan: Plan, both_ways: bool) -> bool:
    """Return whether a job may gain by any option; eager forwards of two empty pictures tell how long it takes."""
    if both_ways and len(plan.images) > _FAST_DECODING_PAYS_FROM * defaults.CORES:
        return True
    pictures = torch.zeros(2, *plan.backbone.preprocessing.crop_px, 3, dtype=torch.uint8)
    with open_forward(plan.backbone, plan.choice, "float32") as forward:
        seconds = min(timed_s(functools.partial(forward, pictures)) for _ in range(2))  # one may have been disturbed
    return len(plan.images) * seconds / len(pictures) > _PAYS_FROM_S
