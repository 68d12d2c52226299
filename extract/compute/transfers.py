"""Copy images to the device and features back to the CPU; asynchronously on a GPU.

    images -> pinned memory -> GPU       in a separate stream: the next batch is copied while one is computed
    features -> pinned memory -> CPU     in the compute stream: no later operation can change them first

`wait` waits for copies that were started. Until then the GPU computes and copies by itself, and this process decodes,
launches the next batch, and writes the previous one.
"""

from __future__ import annotations

import itertools
import time
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
_PIECES = 4  # of the ring: larger copies are split, so that one piece is filled while another is being copied
_ALIGNED = 64


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

    def download(self, pinned: Tensor, tensor: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Start copying to pinned memory, after all queued computations; return the events of its start and end."""
        compute = torch.cuda.current_stream(self.device)
        begin = self._event(compute)
        pinned.copy_(tensor, non_blocking=True)
        return begin, self._event(compute)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking: a process that waits leaves its core to the decoding processes.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class _Copy(NamedTuple):
    """A copy that may be in progress: its number, its start in the ring, and a function that completes it."""

    number: int
    place: int
    end: Callable[[], None]


# (piece of a tensor, pinned memory for it, its target) -> function that waits until it is copied there
_Begin = Callable[[Tensor, Tensor, Tensor], Callable[[], None]]


class _Ring:
    """Pinned memory in which the place of the oldest copy is reused when that copy has ended."""

    def __init__(self, gpu: Gpu, size: int):
        self._gpu, self._size = gpu, size
        self._memory: Tensor | None = None  # pinned on first use, because pinning is slow
        self._next = 0  # start of the next copy, if it fits before the end
        self._copies: deque[_Copy] = deque()  # oldest first
        self._numbers = itertools.count(1)

    def copy(self, source: Tensor, target: Tensor, begin: _Begin) -> None:
        """Copy a tensor, in pieces that fit.

        Args:
            source: contiguous tensor.
            target: contiguous tensor of the same size.
            begin: starts copying a piece of the source, through pinned memory, to a piece of the target; returns a
                function that waits until the copy has ended.
        """
        size = self._size // _PIECES
        for some, there in zip(torch.split(_bytes(source), size), torch.split(_bytes(target), size), strict=True):
            pinned, place = self._place(len(some))
            end = begin(some, pinned, there)
            self._copies.append(_Copy(next(self._numbers), place, end))

    @property
    def last(self) -> int:
        """Number of the last copy that was started; 0 if all have ended."""
        return self._copies[-1].number if self._copies else 0

    def wait(self, number: int) -> None:
        """Wait until this copy, and all before it, have ended."""
        while self._copies and self._copies[0].number <= number:
            self._end_oldest()

    def _place(self, size: int) -> tuple[Tensor, int]:
        """Reserve `size` bytes, waiting for the oldest copies if needed; return the memory and its start."""
        if self._memory is None:
            self._memory = self._gpu.pinned(self._size)
        while not self._fits(size):
            self._end_oldest()
        start = self._next
        self._next += -(-size // _ALIGNED) * _ALIGNED
        return self._memory[start : start + size], start

    def _fits(self, size: int) -> bool:
        """Return whether `size` bytes are free after the newest copy or at the start of the ring; set `_next` to it."""
        if not self._copies:
            self._next = 0
        elif (oldest := self._copies[0].place) >= self._next:  # the newest copies have wrapped to the start of the ring
            return self._next + size <= oldest
        elif self._next + size > self._size:
            if size > oldest:
                return False
            self._next = 0
        return True

    def _end_oldest(self) -> None:
        self._copies[0].end()
        self._copies.popleft()  # last, so that a copy whose wait was interrupted does not count as ended


class Pinned:
    """Copies through two rings of pinned memory, one for each direction.

    Pinned memory is therefore bounded, however large the features of a batch are. When a ring is full, this process
    waits for the GPU, so features do not accumulate on the GPU either.

    Args:
        gpu: the device.
        size: bytes of each ring.

    Attributes:
        seconds: seconds spent copying, as far as this process waited.
    """

    def __init__(self, gpu: Gpu, size: int):
        self._gpu = gpu
        self._upward, self._downward = _Ring(gpu, size), _Ring(gpu, size)
        self.seconds = 0.0

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
        before = time.perf_counter()
        pinned.copy_(source)
        self.seconds += time.perf_counter() - before
        return self._gpu.upload(target, pinned).synchronize

    def _begin_downward(self, source: Tensor, pinned: Tensor, target: Tensor) -> Callable[[], None]:
        return partial(self._arrive, *self._gpu.download(pinned, source), pinned, target)

    def _arrive(self, begin: torch.cuda.Event, end: torch.cuda.Event, pinned: Tensor, target: Tensor) -> None:
        before = time.perf_counter()
        end.synchronize()
        waited = time.perf_counter() - before
        target.copy_(pinned)
        self.seconds += min(waited, begin.elapsed_time(end) / 1e3) + time.perf_counter() - before - waited


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    # A tensor with a single element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def transfers_for(device: torch.device) -> Pinned | None:
    """Return the asynchronous transfers for a device; None if it is not a GPU, and copies are synchronous."""
    return Pinned(Gpu(device), RING_BYTES) if device.type == "cuda" else None
