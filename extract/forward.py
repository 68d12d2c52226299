"""Pictures through the backbone, to features: for the rows of a data set, and in memory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from extract import defaults
from extract.backbones import Backbone
from extract.engines import compiled
from extract.errors import LayertapError
from extract.features import Choice, Feature
from extract.hooks import Taps
from extract.images import Batch
from extract.record import Reduce, Site
from extract.settings import evaluating, full_float32, keeping_freed_memory
from extract.status import Status
from extract.transfers import Transfers, transfers_for

__all__ = ["Forward", "Rows", "Values", "ready", "rows_begun", "rows_of"]

# feature name -> (B, *shape), on the CPU
Values = dict[str, NDArray[Any]]


class Rows(NamedTuple):
    """Rows of a data set, as they are stored.

    Attributes:
        features: name -> (R, *shape), NaN where there was no picture.
        status: (R,) of each row.
        reasons: row of the data set -> why it failed.
    """

    features: Values
    status: NDArray[np.uint8]
    reasons: dict[int, str]


class Forward(ABC):
    """Features of batches, (B, ...) as `Preprocessing.prepare` returns their images, stacked."""

    @abstractmethod
    def begin(self, images: Tensor) -> Callable[[], Values]:
        """Have a batch computed; returns a function that waits for its features.

        A GPU can be given the next batch before the features of the last one are waited for, in the same order.
        """

    def __call__(self, images: Tensor) -> Values:
        """The features of a batch."""
        return self.begin(images)()

    @property
    @abstractmethod
    def ahead(self) -> bool:
        """Whether the device computes by itself what was begun last; else its features are there."""

    @property
    @abstractmethod
    def copying_s(self) -> float:
        """Seconds that copies have taken until now, as far as something waited for them."""


@contextlib.contextmanager
def ready(
    backbone: Backbone,
    choice: Choice,
    dtype: str,
    precision: str = defaults.PRECISION,
    engine: str = "eager",
    batch_size: int = defaults.BATCH_SIZE,
    on_smaller: Callable[[int], None] = lambda size: None,
) -> Iterator[Forward]:
    """The backbone, with everything set for computing; gives the function that does it.

    Args:
        backbone: as loaded.
        choice: of features.
        dtype: of what is returned.
        precision: "float32", "bfloat16" or "float16"; PyTorch computes in the lower ones under autocast.
        engine: "eager", under its taps; "inductor" or "openvino", compiled.
        batch_size: images at most that a compiled forward is given.
        on_smaller: called when the memory does not suffice for an eager forward of a batch, with the number of images
            that are computed at once from then on.
    """
    transfers = transfers_for(backbone.device)
    if engine != "eager":
        parts = compiled(engine, backbone, choice, dtype, precision, batch_size, transfers)
        with evaluating(backbone.model), full_float32(), keeping_freed_memory():
            yield _Ready(parts, transfers)
        return
    lower = torch.autocast(backbone.device.type, getattr(torch, precision), enabled=precision != "float32")
    taps = _SentTaps(backbone.model, transfers) if transfers.ahead else Taps(backbone.model, stop=True)
    with (
        torch.inference_mode(),
        lower,
        evaluating(backbone.model),
        full_float32(),
        keeping_freed_memory(),
        choice.kept_by(taps, getattr(torch, dtype)),
    ):

        def begin(images: Tensor) -> Values:
            taps(backbone.preprocessing.to_input(transfers.up(images)))
            return {feature.name: taps.record[feature.site][feature.name].numpy() for feature in choice.features}

        yield _Ready(_halving(begin, on_smaller), transfers)


class _SentTaps(Taps):
    """Taps that begin to copy what they keep, and do not wait for it."""

    def __init__(self, model: nn.Module, transfers: Transfers):
        super().__init__(model, stop=True)
        self._transfers = transfers

    def _take(self, tensor: Tensor, reduce: Reduce | None, site: Site) -> Any:
        assert reduce is not None
        return {name: self._transfers.down(part) for name, part in reduce(tensor.detach()).items()}


class _Ready(Forward):
    """A forward, of a function that gives the features of a batch in parts, which are there when copies have ended."""

    def __init__(self, parts: Callable[[Tensor], list[Values]], transfers: Transfers):
        self._parts, self._transfers = parts, transfers

    def begin(self, images: Tensor) -> Callable[[], Values]:
        parts, last = self._parts(images), self._transfers.begun()

        def values() -> Values:
            self._transfers.wait(last)
            return (
                parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
            )

        return values

    @property
    def ahead(self) -> bool:
        return self._transfers.ahead

    @property
    def copying_s(self) -> float:
        return self._transfers.seconds


def _halving(begin: Callable[[Tensor], Values], on_smaller: Callable[[int], None]) -> Callable[[Tensor], list[Values]]:
    """Begins a batch in parts where the memory does not suffice for all of it."""
    at_once: int | None = None

    def parts(images: Tensor) -> list[Values]:
        nonlocal at_once
        while True:
            try:
                return [begin(part) for part in torch.split(images, at_once or len(images))]
            except torch.OutOfMemoryError as error:
                size = min(at_once or len(images), len(images))
                if size == 1:
                    raise LayertapError(f"the memory of the device does not suffice for one image: {error}") from error
            at_once = -(-size // 2)
            torch.cuda.empty_cache()  # not while the error holds the tensors of its frames
            on_smaller(at_once)

    return parts


def rows_of(batch: Batch, forward: Forward, features: Sequence[Feature], dtype: str) -> Rows:
    """The rows of a batch as they are stored."""
    return rows_begun(batch, forward, features, dtype)()


def rows_begun(batch: Batch, forward: Forward, features: Sequence[Feature], dtype: str) -> Callable[[], Rows]:
    """Have a batch computed; returns a function that waits for its rows."""
    values = forward.begin(batch.images) if len(batch.images) else dict

    def rows() -> Rows:
        good, found = batch.status == Status.OK, values()
        stored: Values = {}
        for feature in features:
            if found and good.all():
                stored[feature.name] = found[feature.name]
                continue
            stored[feature.name] = np.full((len(good), *feature.shape), np.nan, dtype)
            if found:
                stored[feature.name][good] = found[feature.name]
        return Rows(stored, *_checked(batch, stored))

    return rows


def _checked(batch: Batch, features: Values) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """The status of each row after the forward, and the reasons of those that are not ok."""
    status, reasons = batch.status.copy(), dict(batch.reasons)
    for name, values in features.items():
        finite = np.isfinite(values).reshape(len(values), -1).all(1)
        for row in np.flatnonzero(~finite & (status == Status.OK)).tolist():
            status[row] = Status.NOT_FINITE
            beyond = "; float16 ends at 65504, try float32" if values.dtype == np.float16 else ""
            reasons[int(batch.rows[row])] = f"{name} has NaN or infinite values{beyond}"
    return status, reasons
