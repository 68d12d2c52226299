"""One batch of pictures through the backbone, to the rows that are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.features import Feature
from extract.hooks import Taps
from extract.images import Batch
from extract.planning import Plan
from extract.pooling import pool
from extract.record import Record
from extract.settings import evaluating, full_float32, keeping_freed_memory
from extract.status import Status

__all__ = ["Forward", "ready"]

# Batch -> (feature name -> (R, *shape), NaN where there was no picture; status of each row; row -> why it failed)
Forward = Callable[[Batch], tuple[dict[str, NDArray[Any]], NDArray[np.uint8], dict[int, str]]]


@contextlib.contextmanager
def ready(plan: Plan) -> Iterator[Forward]:
    """The backbone under its taps, with everything set for computing; gives the function that does it."""
    backbone = plan.backbone
    with (
        torch.inference_mode(),
        evaluating(backbone.model),
        full_float32(),
        keeping_freed_memory(),
        _taps(plan) as taps,
    ):

        def forward(batch: Batch) -> tuple[dict[str, NDArray[Any]], NDArray[np.uint8], dict[int, str]]:
            if len(batch.images):
                taps(backbone.preprocessing.to_input(batch.images.to(backbone.device, non_blocking=True)))
            features = _rows_of(batch, taps.record if len(batch.images) else None, plan)
            return features, *_checked(batch, features)

        yield forward


def _taps(plan: Plan) -> Taps:
    """Taps that pool each tensor on the device and copy nothing else."""
    taps = Taps(plan.backbone.model, stop=True)
    dtype = getattr(torch, plan.dataset.features[0].dtype)
    for site in dict.fromkeys(feature.site for feature in plan.choice.features):
        taps.keep(site, reduce=_reduction([f for f in plan.choice.features if f.site == site], dtype))
    return taps


def _reduction(features: Sequence[Feature], dtype: torch.dtype) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda activation: {
        f.name: pool(f.rows.by_image(activation), f.pooling, f.layout).to(dtype) for f in features
    }


def _rows_of(batch: Batch, record: Record | None, plan: Plan) -> dict[str, NDArray[Any]]:
    """Feature name -> (R, *shape), NaN where there was no image."""
    good = batch.status == Status.OK
    found: dict[str, NDArray[Any]] = {}
    for feature, stored in zip(plan.choice.features, plan.dataset.features, strict=True):
        values = None if record is None else record[feature.site][feature.name].numpy()
        if values is None or not good.all():
            rows = np.full((len(good), *stored.shape), np.nan, stored.dtype)
            if values is not None:
                rows[good] = values
            values = rows
        found[feature.name] = values
    return found


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
