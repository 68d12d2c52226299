"""Time the forward with each precision and engine, and compare its features with the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from extract import defaults
from extract.compute.agreement import Agreement, agreement, refusal
from extract.compute.backbone import Backbone
from extract.compute.backends import default_engine, engine_for, open_forward
from extract.compute.compiled import sharing_graphs
from extract.compute.feature_choice import Choice
from extract.compute.forward import Forward, Values
from extract.errors import InputError, first_line
from extract.extraction.rounds import in_rounds, timed_s
from extract.extraction.settings import PRECISIONS
from extract.system.torch_state import keeping_freed_memory

__all__ = [
    "PLAIN",
    "ComputeOption",
    "ForwardRates",
    "Measured",
    "compute_options",
    "eager_instead",
    "enough_pictures",
    "forward_rates",
]

_COMPARED, _COMPARED_PER_CORE = 16, 8  # pictures compared on a CPU
# Pictures per core in a timed forward: two chunks for each core; eager forwards use all cores for each picture.
_TIMED_PER_CORE, _EAGER_PER_CORE = 4, 2


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
    """A forward that was timed.

    Attributes:
        way: precision and engine of the forward.
        images_per_s: rate for batches in memory; 0 if the forward failed or was not timed.
        start_s: seconds until the first batch was computed, including compilation.
        starting_again_s: seconds that compilation takes in a later run, when the program is kept.
        agreement: feature -> agreement with eager float32.
        decoding: feature -> agreement of fast decoded images with eager float32 of exactly decoded ones; empty without
            fast decoding.
        why_not: why the option is refused; empty if it is accepted.
        why_not_fast: why it is refused with fast decoding; empty if it is accepted, or without fast decoding.
    """

    way: ComputeOption
    images_per_s: float = 0.0
    start_s: float = 0.0
    starting_again_s: float = 0.0
    agreement: dict[str, Agreement] = field(default_factory=dict)
    decoding: dict[str, Agreement] = field(default_factory=dict)
    why_not: str = ""
    why_not_fast: str = ""


class ForwardRates(NamedTuple):
    """Rates of forwards.

    Attributes:
        measured: the rate of each option, in the order of the options.
        is_sure: whether the order of the rates is sure.
    """

    measured: list[Measured]
    is_sure: bool


def compute_options(
    device: torch.device, *, precision: str | None = None, compile: str | None = None, thorough: bool = False
) -> list[ComputeOption]:
    """Return the compute options of a device, float32 first.

    Args:
        device: device of the backbone.
        precision: only this precision; None: any.
        compile: only the engine of this value, see `extract_features`; None or "auto": any.
        thorough: also options that are seldom the fastest, on a CPU that has OpenVINO: inductor, which compiles slowly,
            and eager in lower precision.

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
        engines = ["openvino"] if default_engine(device, candidate) == "openvino" else []
        if thorough or not engines or candidate == "float32":
            engines.insert(0, "eager")
        if thorough or not by_openvino:
            engines.append("inductor")
        options += [ComputeOption(candidate, engine) for engine in engines]
    return options


def eager_instead(options: Iterable[ComputeOption]) -> list[ComputeOption]:
    """Return the eager options in lower precision that `compute_options` leaves out because OpenVINO has them.

    OpenVINO is several times faster where it computes in lower precision, but it cannot compile every model.
    """
    lower = [option.precision for option in options if option.engine == "openvino" and option.precision != "float32"]
    return [ComputeOption(precision, "eager") for precision in lower]


def forward_rates(
    backbone: Backbone,
    choice: Choice,
    pictures: Tensor,
    options: Iterable[ComputeOption],
    min_cosine: float = defaults.MIN_COSINE,
    fast: Tensor | None = None,
    *,
    refused_too: bool = False,
) -> ForwardRates:
    """Compare forwards of one batch with the reference, and time those that agree, in turn.

    On a GPU, where programs and their buffers take much of the memory, each option is timed alone.

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
    groups = [options] if backbone.device.type == "cpu" else [[option] for option in options]
    measured: list[Measured] = []
    is_sure = True
    for group in groups:
        rates = _rates_in_turn(backbone, choice, pictures, group, min_cosine, fast, refused_too)
        measured, is_sure = measured + rates.measured, is_sure and rates.is_sure
    return ForwardRates(measured, is_sure)


def enough_pictures(device: torch.device, batch_size: int) -> int:
    """Return the number of pictures that suffices to compare and to time a forward."""
    return min(batch_size, max(_COMPARED, _COMPARED_PER_CORE * defaults.CORES)) if device.type == "cpu" else batch_size


def _rates_in_turn(
    backbone: Backbone, choice: Choice, pictures: Tensor, options: list[ComputeOption], min_cosine: float,
    fast: Tensor | None, refused_too: bool,
) -> ForwardRates:  # fmt: skip
    on_cpu, cores = backbone.device.type == "cpu", defaults.CORES
    timed, timed_eager = ((pictures[: cores * n] if on_cpu else pictures) for n in (_TIMED_PER_CORE, _EAGER_PER_CORE))
    measured: dict[ComputeOption, Measured] = {}
    ways: dict[ComputeOption, Callable[[], float]] = {}
    # Otherwise memory that is freed between the turns of eager forwards is mapped again in each turn.
    with keeping_freed_memory(), sharing_graphs(), contextlib.ExitStack() as open_now:
        expected: Values = {}
        for option in [PLAIN, *(option for option in options if option != PLAIN)]:
            opened = open_forward(backbone, choice, "float32", option.precision, option.engine, len(timed))
            try:
                if option.engine == "eager":  # hooks and autocast would change the other options: open in each turn
                    with opened as forward:
                        result, features = _compared(forward, option, pictures, expected, fast, min_cosine)
                    ways[option] = functools.partial(_eager_image_s, backbone, choice, option, timed_eager)
                else:
                    forward = open_now.enter_context(opened)
                    result, features = _compared(forward, option, pictures, expected, fast, min_cosine)
                    ways[option] = functools.partial(_image_s, forward, timed)
            except Exception as error:  # a compiler may fail in any way
                if option == PLAIN:
                    raise
                measured[option] = Measured(option, why_not=first_line(error))
                continue
            if option == PLAIN:
                expected, result = features, dataclasses.replace(result, agreement={})
            measured[option] = result
            if (result.why_not and not refused_too) or option not in options:
                del ways[option]
        rounds = in_rounds(ways)
    _free(options, backbone.device)
    return ForwardRates(
        [
            dataclasses.replace(measured[option], images_per_s=1 / rounds.time_s(option))
            if option in ways
            else measured[option]
            for option in options
        ],
        rounds.is_sure,
    )


def _compared(
    forward: Forward, option: ComputeOption, pictures: Tensor, expected: Values, fast: Tensor | None, min_cosine: float
) -> tuple[Measured, Values]:
    """Return how an option agrees with the expected features, or with its own if there are none; and its features."""
    start = time.perf_counter()
    features = forward(pictures)
    start_s = time.perf_counter() - start
    agreements = agreement(features, expected or features)
    decoding = {} if fast is None else agreement(forward(fast), expected or features)
    why_not = refusal(agreements, None if option.precision == "float32" else min_cosine)
    starting_again_s = min(start_s, forward.starting_again_s)
    return Measured(
        option, 0.0, start_s, starting_again_s, agreements, decoding, why_not, refusal(decoding, min_cosine)
    ), features


def _image_s(forward: Forward, pictures: Tensor) -> float:
    """Return the seconds of a forward for an image."""
    return timed_s(functools.partial(forward, pictures)) / len(pictures)


def _eager_image_s(backbone: Backbone, choice: Choice, option: ComputeOption, pictures: Tensor) -> float:
    """Return the seconds of an eager forward for an image, without those for opening it."""
    with open_forward(backbone, choice, "float32", option.precision) as forward:
        return _image_s(forward, pictures)


def _free(options: list[ComputeOption], device: torch.device) -> None:
    """Release the memory of forwards that are no longer needed."""
    if any(option.engine == "inductor" for option in options):
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
