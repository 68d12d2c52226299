"""What runs the forward: PyTorch as it is ("eager"), or its graph compiled by inductor or OpenVINO.

Compiled code computes a batch of one size; a shorter one is filled up with zeros, whose rows are dropped.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.backbones import Backbone
from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.features import Choice
from extract.graph import graph_of
from extract.libraries import library
from extract.transfers import Transfers

__all__ = ["COMPILE", "compiled", "default_engine", "engine_for"]

COMPILE = ("auto", "on", "off", "inductor", "openvino")

_FIRST_CALLS = 3  # with CUDA graphs, the first runs without one, the second records it, and from the third on it is run

# (B, ...) as `Preprocessing.prepare` returns them, on the device -> the features, in order, on the device
_Function = Callable[[Tensor], list[Tensor]]


def engine_for(compile: str, device: torch.device, precision: str) -> str:
    """What `compile` means: "eager", "inductor" or "openvino".

    Args:
        compile: one of `COMPILE`, but "auto".
        device: of the backbone.
        precision: of the computation.

    Raises:
        UnknownNameError: no such value.
        InputError: that compiler cannot do it, or is not installed.
    """
    if compile not in COMPILE:
        raise unknown_name("compile", compile, COMPILE)
    if compile == "off":
        return "eager"
    if compile == "on":
        return default_engine(device, precision)
    if compile == "openvino":
        if device.type != "cpu":
            raise InputError(f"OpenVINO computes on the CPU here; the device is {device}. Take --device cpu")
        _openvino()
        if not _openvino_computes_in(precision):
            raise InputError(f"OpenVINO does not compute in {precision} on this CPU. Take --precision float32")
    return compile


def default_engine(device: torch.device, precision: str) -> str:
    """The faster of the compilers that are there: OpenVINO on a CPU, where it is installed; else inductor."""
    there = device.type == "cpu" and importlib.util.find_spec("openvino") is not None
    return "openvino" if there and _openvino_computes_in(precision) else "inductor"


def _openvino() -> Any:
    """OpenVINO without its telemetry, which would report to its makers, from a process that it forks in mid-run."""
    telemetry = "openvino_telemetry"
    before = sys.modules.get(telemetry)
    sys.modules[telemetry] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        return library("openvino", "openvino", "compile=openvino")
    finally:
        del sys.modules[telemetry]
        if before is not None:
            sys.modules[telemetry] = before


@functools.cache
def _openvino_computes_in(precision: str) -> bool:
    if precision == "float32":
        return True
    return precision == "bfloat16" and "BF16" in _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def compiled(
    engine: str,
    backbone: Backbone,
    choice: Choice,
    dtype: str,
    precision: str,
    batch_size: int,
    transfers: Transfers,
) -> Callable[[Tensor], list[dict[str, NDArray[Any]]]]:
    """A function of a batch that gives its features in parts, compiled; the first call compiles.

    Args:
        engine: "inductor" or "openvino".
        backbone: in eval mode.
        choice: of features.
        dtype: of what is returned.
        precision: of the computation.
        batch_size: images that are computed at once.
        transfers: by which images come to the device, and features from it.

    Raises:
        LayertapError: from the calls: the backbone cannot be compiled, or the memory does not suffice.
    """
    function: _Function | None = None

    def at_once(images: Tensor) -> dict[str, NDArray[Any]]:
        nonlocal function
        batch = transfers.up(_filled(images, batch_size))
        if function is not None:
            found = function(batch)
        else:
            try:
                made = _MAKERS[engine](backbone, choice, dtype, precision, batch)
                for _ in range(_FIRST_CALLS if backbone.device.type == "cuda" else 1):
                    found = made(batch)
            except Exception as error:  # a compiler may fail in any way
                text = f"{backbone.spec} cannot be compiled by {engine}: {first_line(error)}"
                raise LayertapError(text) from error
            function = made
        kept = [transfers.down(values[: len(images)]).numpy() for values in found]
        return {feature.name: values for feature, values in zip(choice.features, kept, strict=True)}

    def parts(images: Tensor) -> list[dict[str, NDArray[Any]]]:
        try:
            return [at_once(part) for part in torch.split(images, batch_size)]
        except torch.OutOfMemoryError as error:
            text = f"the memory of the device does not suffice for {batch_size} images in compiled code: {error}"
            raise LayertapError(f"{text}. Take a smaller --batch-size") from error

    return parts


def _filled(images: Tensor, count: int) -> Tensor:
    if len(images) == count:
        return images
    return torch.cat([images, images.new_zeros(count - len(images), *images.shape[1:])])


def _by_inductor(backbone: Backbone, choice: Choice, dtype: str, precision: str, images: Tensor) -> _Function:
    graph = graph_of(backbone, choice, dtype, precision, images).module()
    on_gpu = backbone.device.type == "cuda"
    # Frozen weights let inductor lay them out, and fold batch norm into convolutions; CUDA graphs spare the launches.
    options: dict[str, Any] = {"triton.cudagraphs": True} if on_gpu else {"freezing": True}
    function = torch.compile(graph, fullgraph=True, dynamic=False, options=options)

    def run(batch: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return list(function(batch))

    return run


def _by_openvino(backbone: Backbone, choice: Choice, dtype: str, precision: str, images: Tensor) -> _Function:
    openvino = _openvino()
    model = openvino.convert_model(graph_of(backbone, choice, dtype, "float32", images))
    wanted = {"float32": "f32", "bfloat16": "bf16"}[precision]
    settings = {
        "INFERENCE_PRECISION_HINT": wanted,
        "PERFORMANCE_HINT": "LATENCY",  # all threads on one batch
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    program = openvino.Core().compile_model(model, "CPU", settings)
    given = program.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if given != wanted:
        raise LayertapError(f"OpenVINO cannot compute in {precision} on this CPU; take --precision float32")
    request = program.create_infer_request()
    order = [program.output(i) for i in range(len(choice.features))]

    def run(batch: Tensor) -> list[Tensor]:
        results = request.infer({0: batch.numpy()}, share_inputs=True)
        return [torch.from_numpy(np.asarray(results[output])) for output in order]

    return run


_MAKERS = {"inductor": _by_inductor, "openvino": _by_openvino}
