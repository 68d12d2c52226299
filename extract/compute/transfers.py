"""Images to the device, features back to the CPU; on a GPU without waiting for it.

    images -> pinned memory -> GPU           in a stream of its own: the next batch comes while one is computed
    features -> pinned memory -> CPU         in the stream that computes: nothing can change them before

What is begun is waited for later, by `wait`. Meanwhile the GPU computes and copies by itself, and this process decodes,
launches the next batch, and writes the last one.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

__all__ = ["Direct", "Gpu", "Pinned", "Transfers", "transfers_for"]

RING_BYTES = 128 << 20  # of each direction
_PIECES = 4  # of the ring: a larger copy is made in pieces, so that one is filled while another is on its way
_ALIGNED = 64


class Transfers(Protocol):
    """Copies between this process and a device.

    Attributes:
        ahead: whether the device goes on by itself: what `down` returns is there only after `wait`.
        seconds: spent copying, as far as something waited for it.
    """

    ahead: bool
    seconds: float

    def up(self, images: Tensor) -> Tensor:
        """A batch, on the device."""

    def down(self, tensor: Tensor) -> Tensor:
        """A tensor of the device, on the CPU; the device may compute on, and change the tensor."""

    def begun(self) -> int:
        """The number of the copy that was begun last; 0: all have ended."""

    def wait(self, number: int) -> None:
        """Wait until this copy, and all before it, have ended."""


class Direct:
    """Copies that have ended when they return: on a CPU, there is nothing to copy."""

    ahead = False
    seconds = 0.0

    def __init__(self, device: torch.device):
        self._device = device

    def up(self, images: Tensor) -> Tensor:
        """See `Transfers`."""
        return images.to(self._device)

    def down(self, tensor: Tensor) -> Tensor:
        """See `Transfers`."""
        return tensor.cpu()

    def begun(self) -> int:
        """See `Transfers`."""
        return 0

    def wait(self, number: int) -> None:
        """See `Transfers`."""


class Event(Protocol):
    """A point in what a GPU has to do."""

    def synchronize(self) -> None:
        """Wait until the GPU has come there."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from here to there, of which both have passed."""


class Gpu:
    """What `Pinned` asks of an NVIDIA or AMD GPU; here alone are its streams and events."""

    def __init__(self, device: torch.device):
        number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, number)
        self._upward: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> Tensor:
        """(size,) uint8 that the GPU can reach by itself."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty_like(self, images: Tensor) -> Tensor:
        """Memory of the GPU, for `upload`."""
        with torch.cuda.stream(self._upward):  # memory that this stream may fill at once, whatever is being computed
            return torch.empty(images.shape, dtype=images.dtype, device=self.device)

    def upload(self, to: Tensor, pinned: Tensor) -> Event:
        """Begin to copy pinned memory to that of the GPU."""
        with torch.cuda.stream(self._upward):
            to.copy_(pinned, non_blocking=True)
        return self._event(self._upward)

    def use(self, uploaded: Tensor) -> None:
        """Let what is computed from now on wait for the copies, and the memory be kept until that is done."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_stream(self._upward)
        uploaded.record_stream(compute)

    def download(self, pinned: Tensor, tensor: Tensor) -> tuple[Event, Event]:
        """Begin to copy to pinned memory when all is computed that was asked for; its begin and its end."""
        compute = torch.cuda.current_stream(self.device)
        begin = self._event(compute)
        pinned.copy_(tensor, non_blocking=True)
        return begin, self._event(compute)

    def _event(self, stream: torch.cuda.Stream) -> Event:
        # Blocking: who waits for it leaves the core to those who decode.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return cast(Event, event)


class _Copy(NamedTuple):
    """A copy that may not have ended: its number, where its part of the ring begins, and what waits for and ends it."""

    number: int
    place: int
    end: Callable[[], None]


# (a piece of a tensor, pinned memory for it, its place) -> what waits until it is copied there
_Begin = Callable[[Tensor, Tensor, Tensor], Callable[[], None]]


class _Ring:
    """Pinned memory in which the place of the oldest copy is taken again when that has ended."""

    def __init__(self, gpu: Gpu, size: int):
        self._gpu, self._size = gpu, size
        self._memory: Tensor | None = None  # pinned when it is needed: that takes a while
        self._next = 0  # where the next copy begins, if it fits in before the end
        self._copies: deque[_Copy] = deque()  # the oldest first
        self._numbers = itertools.count(1)

    def copy(self, source: Tensor, target: Tensor, begin: _Begin) -> None:
        """Copy a tensor, in pieces that fit.

        Args:
            source: contiguous.
            target: as large.
            begin: begins to copy a piece of the source, by way of pinned memory, to one of the target; gives what waits
                until that has ended.
        """
        size = self._size // _PIECES
        for some, there in zip(torch.split(_bytes(source), size), torch.split(_bytes(target), size), strict=True):
            pinned, place = self._place(len(some))
            end = begin(some, pinned, there)
            self._copies.append(_Copy(next(self._numbers), place, end))

    @property
    def last(self) -> int:
        """The number of the copy that was begun last; 0: all have ended."""
        return self._copies[-1].number if self._copies else 0

    def wait(self, number: int) -> None:
        """Wait until this copy, and all before it, have ended."""
        while self._copies and self._copies[0].number <= number:
            self._end_oldest()

    def _place(self, size: int) -> tuple[Tensor, int]:
        """Some of the memory that no copy needs any more, and where it begins."""
        if self._memory is None:
            self._memory = self._gpu.pinned(self._size)
        while not self._fits(size):
            self._end_oldest()
        start = self._next
        self._next += -(-size // _ALIGNED) * _ALIGNED
        return self._memory[start : start + size], start

    def _fits(self, size: int) -> bool:
        """Whether so much is free behind the newest copy, or else at the start of the ring, where it goes on then."""
        if not self._copies:
            self._next = 0
        elif (oldest := self._copies[0].place) >= self._next:  # the newest ones are at the start of the ring
            return self._next + size <= oldest
        elif self._next + size > self._size:
            if size > oldest:
                return False
            self._next = 0
        return True

    def _end_oldest(self) -> None:
        self._copies[0].end()
        self._copies.popleft()  # not before: whoever is interrupted here must not take it for ended


class Pinned:
    """Copies through two rings of pinned memory, one for each direction.

    So this memory is bounded, however much is kept of a batch. Where a ring is full, this process waits for the GPU; so
    what is kept does not pile up there, either.

    Args:
        gpu: the device.
        size: bytes of each ring.
    """

    ahead = True

    def __init__(self, gpu: Gpu, size: int):
        self._gpu = gpu
        self._upward, self._downward = _Ring(gpu, size), _Ring(gpu, size)
        self.seconds = 0.0

    def up(self, images: Tensor) -> Tensor:
        """See `Transfers`."""
        with torch.inference_mode(False):
            given = images.contiguous()
            on_gpu = self._gpu.empty_like(given)
            self._upward.copy(given, on_gpu, self._begin_upward)
            self._gpu.use(on_gpu)
        return on_gpu

    def down(self, tensor: Tensor) -> Tensor:
        """See `Transfers`."""
        with torch.inference_mode(False), torch.no_grad():
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if tensor.device == self._gpu.device:
                self._downward.copy(tensor.contiguous(), kept, self._begin_downward)
            else:  # of a model that lies on several devices
                kept.copy_(tensor)
        return kept

    def begun(self) -> int:
        """See `Transfers`."""
        return self._downward.last

    def wait(self, number: int) -> None:
        """See `Transfers`."""
        self._downward.wait(number)

    def _begin_upward(self, source: Tensor, pinned: Tensor, target: Tensor) -> Callable[[], None]:
        before = time.perf_counter()
        pinned.copy_(source)
        self.seconds += time.perf_counter() - before
        return self._gpu.upload(target, pinned).synchronize

    def _begin_downward(self, source: Tensor, pinned: Tensor, target: Tensor) -> Callable[[], None]:
        return partial(self._arrive, *self._gpu.download(pinned, source), pinned, target)

    def _arrive(self, begin: Event, end: Event, pinned: Tensor, target: Tensor) -> None:
        before = time.perf_counter()
        end.synchronize()
        waited = time.perf_counter() - before
        target.copy_(pinned)
        self.seconds += min(waited, begin.elapsed_time(end) / 1e3) + time.perf_counter() - before - waited


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; one with a single element may have any stride, which no view takes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def transfers_for(device: torch.device) -> Transfers:
    """The copies that suit a device."""
    return Pinned(Gpu(device), RING_BYTES) if device.type == "cuda" else Direct(device)
