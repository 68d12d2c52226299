"""Choose and open a forward: eager PyTorch, or its graph compiled by inductor or OpenVINO."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import torch

from extract import defaults
from extract.backbones import LoadedBackbone
from extract.compute.compiled import ByInductor, ByOpenVino, openvino, openvino_computes_in
from extract.compute.feature_choice import Choice
from extract.compute.forward import EagerForward, Forward, forward_taps
from extract.compute.transfers import transfers_for
from extract.errors import InputError, LayertapError, first_line
from extract.system.foreign_code import exits_refused
from extract.system.torch_state import (
    evaluating,
    full_float32,
    has_tensor_float32,
    keeping_freed_memory,
    lower_precision,
    tensor_float32,
)

__all__ = ["WITH_WEIGHTS", "default_engine", "engine_for", "open_forward"]

# Weights and activations are in bfloat16; under autocast, norms and softmax are in float32, and weights are converted
# in each forward. Bare forwards on an H200: resnet50 15,545 against 15,371 images/s, vit_b_16 10,569 against 6,613.
WITH_WEIGHTS = "bfloat16-weights"

# No engine computes in 8-bit integers: by NNCF 3.4, ResNet-50 ran at 97 images/s (bfloat16: 54), but embeddings of
# efficientnet_lite0 had a least cosine of 0.920 to float32, below the limit of 0.999 that keeps features of several
# runs comparable.


def engine_for(compile: str, device: torch.device, precision: str) -> str:
    """Return the engine that `compile` means: "eager", "inductor" or "openvino".

    Args:
        compile: as of `extract_features`, except "auto".
        device: device of the backbone.
        precision: precision of the computation.

    Raises:
        InputError: OpenVINO does not support the device or the precision, or the device has no TF32.
        LayertapError: OpenVINO is not installed.
    """
    if precision == "tf32" and not has_tensor_float32(device):
        raise InputError(
            f"TF32 needs an NVIDIA GPU of compute capability 8.0 (Ampere) or later; the device is {device}",
            hint="use --precision float32",
        )
    if compile == "off":
        return "eager"
    if compile == "on":
        return default_engine(device, precision)
    if compile == "openvino":
        if device.type != "cpu":
            raise InputError(f"OpenVINO runs on the CPU only; the device is {device}", hint="use --device cpu")
        openvino()
        if not openvino_computes_in(precision):
            raise InputError(f"OpenVINO does not compute in {precision} on this CPU", hint="use --precision float32")
    return compile


def default_engine(device: torch.device, precision: str) -> str:
    """Return the faster compiler: OpenVINO on a CPU if installed and capable of the precision, otherwise inductor."""
    # Images/s on two Zen 4 cores, eager, inductor and OpenVINO: efficientnet_lite0 103, 127, 166; resnet50 22.9, 24.9,
    # 25.8; ViT-S 18.0, 17.5, 19.9. In bfloat16 179, 176, 311; 42.2, 46.5, 50.9; 29.8, 30.8, 37.2.
    there = device.type == "cpu" and importlib.util.find_spec("openvino") is not None
    return "openvino" if there and openvino_computes_in(precision) else "inductor"


@contextlib.contextmanager
def open_forward(
    backbone: LoadedBackbone,
    choice: Choice,
    dtype: str,
    precision: str = defaults.PRECISION,
    engine: str = "eager",
    batch_size: int = defaults.BATCH_SIZE,
) -> Iterator[Forward]:
    """Context manager: prepare the backbone and yield its forward.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        dtype: dtype of the returned features.
        precision: "float32"; "tf32", on a GPU that has it; "bfloat16" or "float16", by autocast or OpenVINO; or
            `WITH_WEIGHTS`: a copy of the model has its weights in bfloat16, channels last.
        engine: "eager" (under taps), or compiled by "inductor" or "openvino".
        batch_size: largest batch that a compiled forward is given.

    Raises:
        InputError: inside; the code of the backbone called `sys.exit`.
        LayertapError: the model cannot be copied or converted.
    """
    transfers = transfers_for(backbone.device)
    products = tensor_float32() if precision == "tf32" else full_float32()
    with exits_refused(), evaluating(backbone.model), products, keeping_freed_memory():
        if precision == WITH_WEIGHTS:
            backbone, precision = _with_weights_in_bfloat16(backbone), "float32"
        if engine == "openvino":
            with contextlib.closing(ByOpenVino(backbone, choice, dtype, precision, batch_size)) as forward:
                yield forward
        elif engine == "inductor":
            yield ByInductor(backbone, choice, dtype, precision, batch_size, transfers)
        else:
            # It leaves the model unchanged. efficientnet_lite0 in bfloat16: least cosine 0.9982, converted 0.9974.
            lower = lower_precision(precision, backbone.device)
            taps = forward_taps(backbone.model, transfers)
            with torch.inference_mode(), lower, choice.kept_by(taps, getattr(torch, dtype)):
                yield EagerForward(backbone, choice, taps, transfers)


def _with_weights_in_bfloat16(backbone: LoadedBackbone) -> LoadedBackbone:
    try:
        model = copy.deepcopy(backbone.model).to(torch.bfloat16).to(memory_format=torch.channels_last)
    except Exception as error:  # of the model's own code, or insufficient memory
        raise LayertapError(f"the weights of {backbone.spec} cannot be in bfloat16: {first_line(error)}") from error
    preprocessing = replace(backbone.preprocessing, input_dtype=torch.bfloat16)
    return replace(backbone, model=model, preprocessing=preprocessing)
