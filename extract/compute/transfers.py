"""Copy images to the device and features back to the CPU; asynchronously on a GPU.

    images -> pinned memory -> GPU       in a separate stream: the next batch is copied while one is computed
    features -> pinned memory -> CPU     in the compute stream: no later operation can change them first

`wait` waits for copies that were started. Until then the GPU computes and copies by itself, and this process decodes,
launches the next batch, and writes the previous one.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

__all__ = ["Gpu", "Pinned", "transfers_for"]

# For features. PyTorch's own pool of pinned memory would keep as much as was ever in transit at once, which is
# gigabytes for maps of many layers.
PINNED_BYTES = 128 << 20
_SLOTS = 256  # of the memory: a copy takes one at least; larger ones are split, so that one is read while others fill


class Gpu:
    """Operations of an NVIDIA or AMD GPU that `Pinned` needs; only this class uses its streams and events."""

    def __init__(self, device: torch.device):
        number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, number)
        self._upward: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def upload(self, images: Tensor) -> Tensor:
        """Start copying a batch to the GPU; later computations wait for it."""
        with torch.cuda.stream(self._upward):  # PyTorch keeps the pinned copy until it has arrived
            on_gpu = images.pin_memory().to(self.device, non_blocking=True)
        compute = torch.cuda.current_stream(self.device)
        compute.wait_stream(self._upward)
        on_gpu.record_stream(compute)
        return on_gpu

    def pinned(self, size: int) -> Tensor:
        """Allocate (size,) uint8 memory that the GPU can access directly."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def download(self, pinned: Tensor, tensor: Tensor) -> torch.cuda.Event:
        """Start copying to pinned memory, after all queued computations; return the event of the end."""
        pinned.copy_(tensor, non_blocking=True)
        # Blocking: a process that waits leaves its core to the decoding processes.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class Pinned:
    """Copies to a GPU, and back through slots of pinned memory, of which each is used again when its copy has ended.

    Pinned memory is therefore bounded, however large the features of a batch are. When no slot is free, this process
    waits for the GPU, so features do not accumulate on the GPU either.

    Args:
        gpu: the device.
        size: bytes of all slots.
    """

    def __init__(self, gpu: Gpu, size: int):
        self._gpu, self._size = gpu, size
        self._free: list[Tensor] = []
        # Copies to the CPU that may be in progress, oldest first: number, slot of pinned memory, target, and end.
        self._copies: deque[tuple[int, Tensor, Tensor, torch.cuda.Event]] = deque()
        self._started = 0

    def to_device(self, images: Tensor) -> Tensor:
        """Copy a batch to the device, unless it was decoded there."""
        with torch.inference_mode(False):
            return images if images.device.type == "cuda" else self._gpu.upload(images)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor to the CPU; `wait` completes the copy. The device may change the tensor meanwhile."""
        with torch.inference_mode(False), torch.no_grad():
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if tensor.device == self._gpu.device:
                self._start(_bytes(tensor.contiguous()), _bytes(kept))
            else:  # the model is spread over several devices
                kept.copy_(tensor)
        return kept

    def last_started(self) -> int:
        """Return the number of the last copy to the CPU that was started."""
        return self._started

    def wait(self, number: int) -> None:
        """Wait until this copy to the CPU, and all before it, have ended."""
        while self._copies and self._copies[0][0] <= number:
            self._end_oldest()

    def _start(self, source: Tensor, target: Tensor) -> None:
        size = self._size // _SLOTS
        for some, there in zip(torch.split(source, size), torch.split(target, size), strict=True):
            if not self._free and not self._copies:  # on first use, because pinning is slow
                self._free.extend(torch.split(self._gpu.pinned(self._size), size))
            if not self._free:
                self._end_oldest()
            slot = self._free.pop()
            self._started += 1
            self._copies.append((self._started, slot, there, self._gpu.download(slot[: len(some)], some)))

    def _end_oldest(self) -> None:
        _, slot, target, arrived = self._copies.popleft()
        arrived.synchronize()
        target.copy_(slot[: len(target)])
        self._free.append(slot)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    # A tensor with a single element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def transfers_for(device: torch.device) -> Pinned | None:
    """Return the asynchronous transfers for a device; None if it is not a GPU, and copies are synchronous."""
    return Pinned(Gpu(device), PINNED_BYTES) if device.type == "cuda" else None
