"""Settings of the process and the model for computing features, restored afterwards."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from extract.errors import InputError, LayertapError, first_line
from extract.taps.torch_internals import Switch

__all__ = [
    "check_device_exists",
    "device_named",
    "evaluating",
    "full_float32",
    "has_tensor_float32",
    "keeping_freed_memory",
    "limited_threads",
    "lower_precision",
    "tensor_float32",
    "with_gradients",
]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: set the model to evaluation mode, and restore the mode of every submodule afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def with_gradients() -> Iterator[None]:
    """Context manager: autograd records what is computed, also inside `torch.no_grad` or `torch.inference_mode`.

    Raises:
        InputError: a tensor that takes part, such as a weight, was made in inference mode.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except RuntimeError as error:
        if "nference tensor" not in first_line(error):  # "Inference tensors cannot be saved for backward", for example
            raise
        raise InputError(
            "no gradient can be computed: a tensor that takes part was made in torch.inference_mode()",
            hint="load the model, and make inputs and targets, outside of it; the model's forward must not use it",
        ) from error


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Context manager: compute float32 in full precision, without TF32 on NVIDIA GPUs or bfloat16 on CPUs.

    TF32 has 10 of 23 mantissa bits; PyTorch allows it in cuDNN by default. PyTorch has two APIs for this setting. After
    the newer one (`fp32_precision`) is used, reading the older one raises an error, and `torch.export` reads it.
    Therefore the older API is used, and the newer one only for settings that the program has made with it.
    """
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    settings = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    with contextlib.ExitStack() as restore:
        try:
            older_api = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        except RuntimeError:  # the program uses the newer API
            pass
        else:
            restore.callback(setattr, cudnn, "allow_tf32", older_api[1])
            restore.callback(torch.set_float32_matmul_precision, older_api[0])
            cudnn.allow_tf32 = False
            torch.set_float32_matmul_precision("highest")
        for setting in settings:
            if setting.fp32_precision in ("tf32", "bf16"):
                restore.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
                setting.fp32_precision = "ieee"
        yield


@contextlib.contextmanager
def tensor_float32() -> Iterator[None]:
    """Context manager: compute convolutions and matrix products of float32 in TF32 on a GPU that has it."""
    backends: Any = torch.backends
    cuda, cudnn = backends.cuda, backends.cudnn
    with full_float32(), contextlib.ExitStack() as restore:
        name: str = "allow_tf32"
        value: Any = True
        settings = [cuda.matmul, cudnn]
        try:
            before = [getattr(setting, name) for setting in settings]
        except RuntimeError:  # the program uses the newer API, see `full_float32`
            name, value, settings = "fp32_precision", "tf32", [cuda.matmul, cudnn.conv, cudnn.rnn]
            before = [getattr(setting, name) for setting in settings]
        for setting, initial in zip(settings, before, strict=True):
            restore.callback(setattr, setting, name, initial)
            setattr(setting, name, value)
        yield


def has_tensor_float32(device: torch.device) -> bool:
    """Return whether a device computes in TF32, and fast in bfloat16: an NVIDIA GPU from Ampere (8.0) on."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def lower_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: compute in a precision of 16 bits by autocast; nothing changes for "float32" and "tf32"."""
    if precision in ("float32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


@contextlib.contextmanager
def limited_threads(most: int) -> Iterator[None]:
    """Context manager: PyTorch computes with at most so many threads on the CPU, and with at least one.

    OpenMP's threads spin while they wait for each other. Where operations are short, they do so most of the time, and
    much longer if another process has one of the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, most)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# glibc's mallopt parameters (malloc.h), and the largest values that its dynamic adjustment can reach (mallopt(3)).
_TRIM_THRESHOLD = -1
_TRIM_THRESHOLD_BYTES = 64 << 20
_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 << 20


def _keep_freed_memory() -> Callable[[], None]:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library, another system
        return lambda: None
    libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)

    def restore() -> None:
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        libc.malloc_trim(0)

    return restore


_FREED_MEMORY_KEPT = Switch(_keep_freed_memory)


def keeping_freed_memory() -> AbstractContextManager[None]:
    """Context manager: let glibc reuse the memory of one batch's activations for the next, and free it at the end.

    By default glibc maps and unmaps the memory of each large activation, and the kernel zeroes its pages every time.
    This takes more than half of the time of a forward on a CPU (efficientnet_lite0, batches of 64: 49 images/s, against
    220 with this setting). Setting a threshold turns off glibc's dynamic adjustment of it. The thresholds are therefore
    left at the largest values that the adjustment can reach. With other C libraries, nothing is changed.
    """
    return _FREED_MEMORY_KEPT.active()


def device_named(name: str) -> torch.device:
    """Return a usable device; "auto" is CUDA if available, else MPS if available, else the CPU.

    Raises:
        InputError: there is no device of this name.
        LayertapError: the device cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:  # PyTorch's message lists all backends that it was ever built with
        raise InputError(f"device {name!r} is unknown; expected {_DEVICES}") from error
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why, remedy = _why_unusable(device, error)
        raise LayertapError(f"device {name!r} cannot be used: {why}", hint=remedy) from error
    return device


def check_device_exists(name: str) -> None:
    """Raise a LayertapError if there is no CUDA device of this name. No memory of a device is taken for the check."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why, remedy = _why_unusable(device)
        raise LayertapError(f"device {name!r} cannot be used: {why}", hint=remedy)


_DEVICES = "auto, cpu, cuda, cuda:N or mps"


def _why_unusable(device: torch.device, error: Exception | None = None) -> tuple[str, str]:
    """Return in one line why a device cannot be used, and what can be; the second may be empty."""
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "PyTorch was installed without CUDA" if torch.version.cuda is None else "or its driver is missing"
        return f"this machine has no CUDA device ({built})", "use cpu, or leave out --device"
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        return f"the number of CUDA devices on this machine is {count}, and they are counted from cuda:0", ""
    if device.type == "mps":
        return "this machine has no MPS device, the GPU of an Apple computer", "use cpu, or leave out --device"
    if error and device.type in ("cpu", "cuda"):
        return first_line(error), ""
    return f"PyTorch cannot use it on this machine; expected {_DEVICES}", "use cpu, or leave out --device"
