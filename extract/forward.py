"""Pictures through the backbone, to features: for the rows of a data set, and in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract import defaults
from extract.backbones import Backbone
from extract.engines import compiled
from extract.errors import LayertapError
from extract.features import Choice, Feature
from extract.hooks import Taps
from extract.images import Batch
from extract.settings import evaluating, full_float32, keeping_freed_memory
from extract.status import Status

__all__ = ["Forward", "ready", "rows_of"]

# (B, ...) as `Preprocessing.prepare` returns them, stacked -> feature name -> (B, *shape), on the CPU
Forward = Callable[[Tensor], dict[str, NDArray[Any]]]


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
    if engine != "eager":
        with evaluating(backbone.model), full_float32(), keeping_freed_memory():
            yield compiled(engine, backbone, choice, dtype, precision, batch_size)
        return
    lower = torch.autocast(backbone.device.type, getattr(torch, precision), enabled=precision != "float32")
    with (
        torch.inference_mode(),
        lower,
        evaluating(backbone.model),
        full_float32(),
        keeping_freed_memory(),
        choice.kept_by(Taps(backbone.model, stop=True), getattr(torch, dtype)) as taps,
    ):

        def forward(images: Tensor) -> dict[str, NDArray[Any]]:
            taps(backbone.preprocessing.to_input(images.to(backbone.device, non_blocking=True)))
            return {feature.name: taps.record[feature.site][feature.name].numpy() for feature in choice.features}

        yield _halving(forward, on_smaller)


def _halving(forward: Forward, on_smaller: Callable[[int], None]) -> Forward:
    """A forward that computes a batch in parts where the memory does not suffice for all of it."""
    at_once: int | None = None

    def compute(images: Tensor) -> dict[str, NDArray[Any]]:
        nonlocal at_once
        while True:
            try:
                parts = [forward(part) for part in torch.split(images, at_once or len(images))]
                break
            except torch.OutOfMemoryError as error:
                size = min(at_once or len(images), len(images))
                if size == 1:
                    raise LayertapError(f"the memory of the device does not suffice for one image: {error}") from error
            at_once = -(-size // 2)
            torch.cuda.empty_cache()  # not while the error holds the tensors of its frames
            on_smaller(at_once)
        return parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    return compute


def rows_of(
    batch: Batch, forward: Forward, features: Sequence[Feature], dtype: str
) -> tuple[dict[str, NDArray[Any]], NDArray[np.uint8], dict[int, str]]:
    """The rows of a batch as they are stored.

    Returns:
        feature name -> (R, *shape), NaN where there was no picture; (R,) the status of each row; row -> why it failed.
    """
    good = batch.status == Status.OK
    found = forward(batch.images) if len(batch.images) else {}
    rows: dict[str, NDArray[Any]] = {}
    for feature in features:
        if found and good.all():
            rows[feature.name] = found[feature.name]
            continue
        rows[feature.name] = np.full((len(good), *feature.shape), np.nan, dtype)
        if found:
            rows[feature.name][good] = found[feature.name]
    return rows, *_checked(batch, rows)


def _checked(batch: Batch, features: dict[str, NDArray[Any]]) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """The status of each row after the forward, and the reasons of those that are not ok."""
    status, reasons = batch.status.copy(), dict(batch.reasons)
    for name, values in features.items():
        finite = np.isfinite(values).reshape(len(values), -1).all(1)
        for row in np.flatnonzero(~finite & (status == Status.OK)).tolist():
            status[row] = Status.NOT_FINITE
            beyond = "; float16 ends at 65504, try float32" if values.dtype == np.float16 else ""
            reasons[int(batch.rows[row])] = f"{name} has NaN or infinite values{beyond}"
    return status, reasons
