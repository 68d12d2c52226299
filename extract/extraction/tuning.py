"""Choose how to compute features on this machine: `--fast`.

Usage:

    plan = resolve(settings, images, backbone, existing_at("outputs/photos"))
    extract(plan.computed_otherwise(**fastest(plan).settings[0]))

On a CPU, the options of the device compute a few images twice: first to be compared with eager float32, then to be
timed. Precision and decoding are in the fingerprint, so they cannot change between batches. Each option is timed once:
repeating until the order was sure took a minute that a job of 600 photos never won back (1.7 times the time of a strict
run). The run compares its whole first batch in any case; if the fastest option is refused there, the next is used.

On an NVIDIA or AMD GPU nothing is timed: the order of the options is known, and the first one that agrees is used.
"""

from __future__ import annotations

import functools
import itertools
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
from extract.compute.backends import WITH_WEIGHTS, default_engine, engine_for, open_forward, openvino_computes_in
from extract.compute.feature_choice import Choice
from extract.compute.forward import Values
from extract.errors import InputError, first_line
from extract.extraction.plan import Plan
from extract.extraction.validation import FIRST_DECODED, decoded_alone, decoded_in
from extract.images import Images
from extract.system.torch_state import has_tensor_float32, limited_threads

__all__ = [
    "PLAIN", "ComputeOption", "Measured", "Tuned", "compute_options", "decode_seconds", "fastest", "forward_rates",
    "ranked",
]  # fmt: skip

# Images from which trying the options of a CPU pays: OpenVINO takes about 2.5 s to convert a graph, and saves a third
# or more in bfloat16. The number of images decides alone, as for `compile="auto"`.
_PAYS_FROM = 1_000
# On a GPU, inductor takes 10 to 20 s, and saves 23 us for each image (resnet50 on an H200 in bfloat16, 15,545 and
# 24,363 images/s; vit_b_16 was not faster). The number of images decides alone, so that nothing is timed. On a CPU it
# is not tried: it takes 40 s, and `compile="auto"` takes it for jobs that are long enough.
_INDUCTOR_PAYS_FROM_ON_GPU = 1_000_000
_FAST_DECODING_PAYS_FROM = 1_000  # images per core, each of which saves 1 to 2 ms
_COMPARED_PER_CORE = 4  # pictures
_LEAST_COMPARED = 8


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
        why_not: why the option is refused; empty if it is accepted.
    """

    way: ComputeOption
    images_per_s: float = 0.0
    why_not: str = ""

    @property
    def remark(self) -> str:
        """Why it is refused, to be printed after its rate; empty if it is accepted."""
        return f"  rejected: {self.why_not}" if self.why_not else ""


def compute_options(
    device: torch.device, n_images: float = math.inf, *, precision: str | None = None, compile: str | None = None
) -> list[ComputeOption]:
    """Return the options of a device: those of a CPU in the order in which they are tried, of a GPU the fastest first.

    Args:
        device: device of the backbone.
        n_images: number of images of the job. On a GPU, only a long one is compiled, unless `compile` says otherwise.
        precision: only this precision; None: any.
        compile: only the engine of this value, see `extract_features`; None or "auto": any.

    Raises:
        InputError: `compile` does not support the device or `precision`.
    """
    precisions = [precision] if precision else [*_lower_precisions(device), "float32"]
    if compile not in (None, "auto"):
        return [ComputeOption(each, engine_for(str(compile), device, each)) for each in precisions]
    eager = [ComputeOption(each, "eager") for each in precisions]
    if _is_gpu(device) or device.type == "mps":
        compiled = [ComputeOption(precisions[0], "inductor")] if n_images >= _INDUCTOR_PAYS_FROM_ON_GPU else []
        return [*compiled, *eager]
    by_openvino = [ComputeOption(each, "openvino") for each in precisions if default_engine(device, each) == "openvino"]
    return [*(eager if precision else [PLAIN]), *by_openvino]  # lower precision is slow on a CPU without a compiler


def _lower_precisions(device: torch.device) -> list[str]:
    """Return the precisions below float32 in which a device is likely to be faster, the fastest first."""
    if has_tensor_float32(device):
        return [WITH_WEIGHTS, "bfloat16", "tf32"]
    if device.type != "cpu":
        return ["float16", "bfloat16"]
    by_openvino = default_engine(device, "float32") == "openvino"
    return ["bfloat16"] if by_openvino and openvino_computes_in("bfloat16") else []


def forward_rates(
    backbone: Backbone,
    choice: Choice,
    pictures: Tensor,
    options: Sequence[ComputeOption],
    *,
    min_cosine: float = defaults.MIN_COSINE,
) -> tuple[Measured, list[Measured]]:
    """Return eager float32, and each option, as they were tried.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        pictures: (B, ...) exactly decoded images, from `decoded_in`.
        options: from `compute_options`.
        min_cosine: lowest accepted cosine of a feature in lower precision.
    """
    expected: Values = {}
    measured = {
        option: _tried(backbone, choice, option, pictures, expected, min_cosine)
        for option in dict.fromkeys([PLAIN, *options])
    }
    return measured[PLAIN], [measured[option] for option in options]


def _tried(
    backbone: Backbone, choice: Choice, option: ComputeOption, pictures: Tensor, expected: Values, min_cosine: float
) -> Measured:
    """Compare an option with the expected features, which eager float32 fills in, and time it."""
    try:
        with open_forward(backbone, choice, "float32", option.precision, option.engine, len(pictures)) as forward:
            features = forward(pictures)
            if option == PLAIN:
                expected.update(features)
            least = None if option.precision == "float32" else min_cosine
            why_not = refusal(agreement(features, expected), least) or ""
            seconds = _timed_s(functools.partial(forward, pictures))
    except Exception as error:  # a compiler may fail in any way
        if option == PLAIN:
            raise
        return Measured(option, why_not=first_line(error))
    return Measured(option, len(pictures) / seconds, why_not)


def ranked(tried: Sequence[Measured]) -> list[Measured]:
    """Return the accepted options, the fastest first; starts do not count, since `sharing_graphs` keeps graphs.

    Raises:
        InputError: no option is accepted.
    """
    good = [each for each in tried if not each.why_not]
    if not good:
        reasons = [f"{each.way}: {each.why_not}" for each in tried]
        raise InputError("every requested compute option was rejected:\n  " + "\n  ".join(reasons))
    return sorted(good, key=lambda each: -each.images_per_s)


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
        InputError: no option agrees, or no image can be decoded.
    """
    settings, backbone, images = plan.settings, plan.backbone, plan.images
    plain = {"precision": "float32", "compile": "auto", "decode": "exact"}
    given: dict[str, Any] = {name: getattr(settings, name) for name in plain if name in fixed}
    if plan.existing.made is not None:
        return Tuned([plan.existing.made | given], [], "resumed")
    if any(feature.is_whole for feature in plan.choice.features):
        return Tuned([plain | given], [], "whole")
    n_images, exact = len(images), backbone.preprocessing.exact()
    # Fast decoding saves time on each image: on a CPU in any case, and on a GPU, which waits for the cores that decode.
    has_many = n_images > _FAST_DECODING_PAYS_FROM * defaults.CORES and exact.can_be_faster
    decodings = ["fast", "exact"] if has_many and "decode" not in given else [given.get("decode", "exact")]
    is_gpu = _is_gpu(backbone.device)
    if not is_gpu and n_images < _PAYS_FROM:
        return Tuned([plain | given], [], "short")
    options = compute_options(backbone.device, n_images, precision=given.get("precision"), compile=given.get("compile"))
    tried: list[Measured] = []
    if not is_gpu:
        on_measuring()
        count = min(plan.batch_size, max(_COMPARED_PER_CORE * defaults.CORES, _LEAST_COMPARED))
        (pictures,) = decoded_in(images, [exact], settings.max_pixels, count)
        _, tried = forward_rates(backbone, plan.choice, pictures, options, min_cosine=settings.min_cosine)
        options = [measured.way for measured in ranked(tried)]
    # Where no compiler was tried, the number of images decides whether float32 is compiled.
    is_compiled_slower = any(each.way.precision == "float32" and each.way.engine != "eager" for each in tried)
    chosen: list[dict[str, Any]] = []
    for option, decode in itertools.product(options, decodings):
        compile = "auto" if option == PLAIN and not is_compiled_slower else option.compile
        each = {"precision": option.precision, "compile": compile, "decode": decode} | given
        if each not in chosen:
            chosen.append(each)
    return Tuned(chosen, tried, "ordered" if is_gpu else "measured")


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def decode_seconds(images: Images, preprocessing: Preprocessing, count: int = FIRST_DECODED) -> float:
    """Return the seconds of one core to decode an image, measured on the first `count`."""
    rows = range(min(count, len(images)))
    with limited_threads(1):  # as in a worker
        most = defaults.MAX_PIXELS
        decoded_alone(images, preprocessing, most, rows[:1])  # the first time, libraries are imported
        return _timed_s(functools.partial(decoded_alone, images, preprocessing, most, rows)) / len(rows)


def _timed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
