"""Copy images to the device and features back to the CPU; asynchronously on a GPU.

    images -> pinned memory -> GPU       in a separate stream: the next batch is copied while one is computed
    features -> pinned memory -> CPU     in the compute stream: no later operation can change them first

`wait` waits for copies that were started. Until then the GPU computes and copies by itself, and this process decodes,
launches the next batch, and writes the previous one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Gpu", "Pinned", "transfers_for"]

# Per direction, so that images need not wait for features. PyTorch's own pool of pinned memory would keep as much as
# was ever in transit at once, which is gigabytes for maps of many layers.
RING_BYTES = 128 << 20
_SLOTS = 32  # of the ring: larger copies are split, so that one slot is filled while others are being copied


class Gpu:
    """Operations of an NVIDIA or AMD GPU that `Pinned` needs; only this class uses its streams and events."""

    def __init__(self, device: torch.device):
        number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, number)
        self._upward: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> Tensor:
        """Allocate (size,) uint8 memory that the GPU can access directly."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty_like(self, images: Tensor) -> Tensor:
        """Allocate GPU memory for `upload`."""
        with torch.cuda.stream(self._upward):  # memory that this stream can fill at once, during any computation
            return torch.empty(images.shape, dtype=images.dtype, device=self.device)

    def upload(self, to: Tensor, pinned: Tensor) -> torch.cuda.Event:
        """Start copying pinned memory to the GPU; return the event of the end."""
        with torch.cuda.stream(self._upward):
            to.copy_(pinned, non_blocking=True)
        return self._event(self._upward)

    def use(self, uploaded: Tensor) -> None:
        """Make later computations wait for the copies, and keep the memory until they are done."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_stream(self._upward)
        uploaded.record_stream(compute)

    def download(self, pinned: Tensor, tensor: Tensor) -> torch.cuda.Event:
        """Start copying to pinned memory, after all queued computations; return the event of the end."""
        pinned.copy_(tensor, non_blocking=True)
        return self._event(torch.cuda.current_stream(self.device))

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking: a process that waits leaves its core to the decoding processes.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class _Copy(NamedTuple):
    """A copy that may be in progress: its number, its slot, and a function that completes it."""

    number: int
    slot: Tensor
    end: Callable[[], None]


# (piece of a tensor, pinned memory for it, its target) -> function that waits until it is copied there
_Begin = Callable[[Tensor, Tensor, Tensor], Callable[[], None]]


class _Ring:
    """Slots of pinned memory; that of the oldest copy is used again when the copy has ended."""

    def __init__(self, gpu: Gpu, size: int):
        self._gpu, self._size = gpu, size
        self._free: list[Tensor] = []
        self._copies: deque[_Copy] = deque()  # oldest first
        self._started = 0

    def copy(self, source: Tensor, target: Tensor, begin: _Begin) -> None:
        """Copy a tensor, in pieces that fit.

        Args:
            source: contiguous tensor.
            target: contiguous tensor of the same size.
            begin: starts copying a piece of the source, through pinned memory, to a piece of the target; returns a
                function that waits until the copy has ended.
        """
        size = self._size // _SLOTS
        for some, there in zip(torch.split(_bytes(source), size), torch.split(_bytes(target), size), strict=True):
            if not self._free and not self._copies:  # on first use, because pinning is slow
                self._free.extend(torch.split(self._gpu.pinned(self._size), size))
            if not self._free:
                self._end_oldest()
            slot = self._free[-1]
            end = begin(some, slot[: len(some)], there)
            self._started += 1
            self._copies.append(_Copy(self._started, self._free.pop(), end))

    @property
    def last(self) -> int:
        """Number of the last copy that was started; 0 if all have ended."""
        return self._copies[-1].number if self._copies else 0

    def wait(self, number: int) -> None:
        """Wait until this copy, and all before it, have ended."""
        while self._copies and self._copies[0].number <= number:
            self._end_oldest()

    def _end_oldest(self) -> None:
        self._copies[0].end()
        # Last, so that a copy whose wait was interrupted does not count as ended.
        self._free.append(self._copies.popleft().slot)


class Pinned:
    """Copies through two rings of pinned memory, one for each direction.

    Pinned memory is therefore bounded, however large the features of a batch are. When a ring is full, this process
    waits for the GPU, so features do not accumulate on the GPU either.

    Args:
        gpu: the device.
        size: bytes of each ring.
    """

    def __init__(self, gpu: Gpu, size: int):
        self._gpu = gpu
        self._upward, self._downward = _Ring(gpu, size), _Ring(gpu, size)

    def to_device(self, images: Tensor) -> Tensor:
        """Copy a batch to the device, unless it was decoded there."""
        if images.device.type == "cuda":
            return images
        with torch.inference_mode(False):
            given = images.contiguous()
            on_gpu = self._gpu.empty_like(given)
            self._upward.copy(given, on_gpu, self._begin_upward)
            self._gpu.use(on_gpu)
        return on_gpu

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor to the CPU; `wait` completes the copy. The device may change the tensor meanwhile."""
        with torch.inference_mode(False), torch.no_grad():
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if tensor.device == self._gpu.device:
                self._downward.copy(tensor.contiguous(), kept, self._begin_downward)
            else:  # the model is spread over several devices
                kept.copy_(tensor)
        return kept

    def last_started(self) -> int:
        """Return the number of the last copy to the CPU that was started; 0 if all have ended."""
        return self._downward.last

    def wait(self, number: int) -> None:
        """Wait until this copy to the CPU, and all before it, have ended."""
        self._downward.wait(number)

    def _begin_upward(self, source: Tensor, pinned: Tensor, target: Tensor) -> Callable[[], None]:
        return self._gpu.upload(target, pinned.copy_(source)).synchronize

    def _begin_downward(self, source: Tensor, pinned: Tensor, target: Tensor) -> Callable[[], None]:
        return partial(self._arrive, self._gpu.download(pinned, source), pinned, target)

    def _arrive(self, end: torch.cuda.Event, pinned: Tensor, target: Tensor) -> None:
        end.synchronize()
        target.copy_(pinned)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    # A tensor with a single element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def transfers_for(device: torch.device) -> Pinned | None:
    """Return the asynchronous transfers for a device; None if it is not a GPU, and copies are synchronous."""
    return Pinned(Gpu(device), RING_BYTES) if device.type == "cuda" else None
