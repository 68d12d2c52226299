"""Check that the rows of a feature are the images of the batch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from extract.compute.forward import Forward, Values, check_count
from extract.errors import InputError

__all__ = ["check_rows"]

_CHECKED_ALONE = 4  # pictures of the first batch; a layer that mixes up rows is unlikely to leave all in place
# Tolerances for rounding between batches: relative to the same value in the checked pictures (float32 as computed, or
# float16 as stored), and relative to the largest value of all. The second is small, because vision transformers have a
# few values that are a thousand times larger than all others.
_OF_THE_SAME_VALUE = {"float32": 1e-3, "float16": 2e-3}
_OF_THE_LARGEST = 1e-5
# A picture differs if more than this part of the values that distinguish pictures exceed the tolerance.
_DIFFERENT = 0.1


def check_rows(forward: Forward, images: Tensor, features: Values) -> None:
    """Check that some pictures of a batch have the same features in the batch as alone.

    Trial forwards have shown this for random pictures. A layer may still mix, drop or pad rows depending on content.

    Args:
        forward: forward that computes in float32.
        images: (B, ...), as the forward takes them.
        features: features of the batch.

    Raises:
        InputError: a feature of a picture differs between the batch and the picture alone, or does not have one row
            per picture.
    """
    check_count(features, len(images))
    if len(images) == 1:
        return
    positions = np.unique(np.linspace(0, len(images) - 1, _CHECKED_ALONE).round().astype(int)).tolist()
    lone = {position: forward(images[position : position + 1]) for position in positions}
    for name in features:
        alone = np.stack([lone[position][name][0] for position in positions]).astype(np.float64)  # (C, *shape)
        batched = features[name][positions].astype(np.float64)
        alone, batched = (values.reshape(len(positions), -1) for values in (alone, batched))
        finite = np.isfinite(alone)
        sizes = np.abs(np.where(finite, alone, 0))
        rounding = _OF_THE_SAME_VALUE.get(str(features[name].dtype), 0) * sizes.max(0) + _OF_THE_LARGEST * sizes.max(
            initial=0
        )
        with np.errstate(invalid="ignore"):  # from infinite values
            telling = np.ptp(np.where(finite, alone, 0), axis=0) > rounding
            others = (finite & (np.abs(batched - alone) > rounding))[:, telling]
        wrong = (np.isfinite(batched) != finite).any(1) | (others.sum(1) > _DIFFERENT * max(1, telling.sum()))
        if wrong.any():
            position = positions[int(wrong.argmax())]
            raise InputError(
                f"{name} of picture {position} in the first batch, of {len(images)}, differs from that of the same "
                "picture alone: its rows are not the images, or the network amplifies rounding, as networks with "
                "random weights do. Nothing of this batch was stored",
                hint="choose other layers",
            )
