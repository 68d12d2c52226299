"""Settings of the process and of the model that hold while features are computed, and are put back."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from extract.errors import LayertapError, first_line
from extract.taps.switches import Switch

__all__ = ["device_named", "evaluating", "full_float32", "keeping_freed_memory"]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every submodule gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 on NVIDIA GPUs (10 bits of 23), which PyTorch allows in cuDNN by default; no bfloat16 on CPUs.

    Of PyTorch's two ways to say so, the newer one (`fp32_precision`) makes reading the older one raise, as
    `torch.export` does. So the older is taken, and the newer one only for what a program has set by it.
    """
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    places = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    with contextlib.ExitStack() as back:
        try:
            before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        except RuntimeError:  # the program uses the newer way
            pass
        else:
            back.callback(setattr, cudnn, "allow_tf32", before[1])
            back.callback(torch.set_float32_matmul_precision, before[0])
            cudnn.allow_tf32 = False
            torch.set_float32_matmul_precision("highest")
        for place in places:
            if place.fp32_precision in ("tf32", "bf16"):
                back.callback(setattr, place, "fp32_precision", place.fp32_precision)
                place.fp32_precision = "ieee"
        yield


# glibc's mallopt parameters (malloc.h), and the largest values that its dynamic rule reaches by itself (mallopt(3)).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES, _MMAP_THRESHOLD_BYTES = 64 << 20, 32 << 20


def _keep_freed_memory() -> Callable[[], None]:
    try:
        libc = ctypes.CDLL("libc.so.6") if sys.platform == "linux" else None
    except OSError:
        libc = None
    if libc is None:
        return lambda: None
    libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)

    def back() -> None:
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        libc.malloc_trim(0)

    return back


_FREED_MEMORY_KEPT = Switch(_keep_freed_memory)


def keeping_freed_memory() -> AbstractContextManager[None]:
    """Let glibc reuse the memory of one batch's activations for the next, and give it back at the end.

    By default each large activation is mapped from the kernel and unmapped again, which zeroes its pages every time:
    more than half of the time of a forward on a CPU (efficientnet_lite0, batches of 64: 49 images/s, 220 with this).
    Setting a threshold once ends glibc's own adjustment of it, so the process is left with the largest values that
    adjustment would have reached. Where the C library is another one, nothing is done.
    """
    return _FREED_MEMORY_KEPT.turned()


def device_named(name: str) -> torch.device:
    """A device that can be used; "auto" is a GPU where there is one.

    Raises:
        LayertapError: it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise LayertapError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device
