"""What a forward is, whatever runs it: from pictures to features, and to the rows of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.feature_choice import Feature
from extract.errors import InputError
from extract.images import Batch
from extract.row_status import Status

__all__ = ["Forward", "Rows", "Values", "check_rows", "joined", "rows_begun", "rows_of"]

_CHECKED_ALONE = 4  # pictures of the first batch; one that a batch has mixed up is hardly in its own place four times
# The same picture in another batch may differ by rounding: by a part of what a value is in the checked pictures (in
# float32 as computed, or float16 as stored), and by a part of the largest value of all. The second is small, since
# vision transformers have a few values that are a thousand times larger than all others.
_OF_THE_SAME_VALUE = {"float32": 1e-3, "float16": 2e-3}
_OF_THE_LARGEST = 1e-5
# A picture is another one if more of the values that tell pictures apart differ by more than that.
_DIFFERENT = 0.1

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
    """Features of batches, (B, ...) as `Preprocessing.prepare` returns their images, stacked.

    Attributes:
        ahead: whether what was begun last is computed while this process goes on; else its features are there.
        copying_s: seconds until now that copies to a device and from it took, as far as something waited for them.
        compiling_s: seconds until now of what is done once, before anything is computed.
    """

    ahead: bool = False
    copying_s: float = 0.0
    compiling_s: float = 0.0

    @abstractmethod
    def begin(self, images: Tensor) -> Callable[[], Values]:
        """Have a batch computed; returns a function that waits for its features, (B, *shape) each, and gives them once.

        The next batch can be begun before this one is waited for. One that nobody waits for any more does no harm.

        Raises:
            LayertapError: it cannot be computed; also from the function.
        """

    def __call__(self, images: Tensor) -> Values:
        """The features of a batch."""
        return self.begin(images)()


def joined(parts: Sequence[Values]) -> Values:
    """Features of the parts of a batch as those of all of it."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_rows(forward: Forward, images: Tensor, features: Values) -> None:
    """See that some pictures of a batch have the features that they have alone.

    Trial forwards have shown that of made-up pictures; a layer may still mix, drop or pad real ones by what is in them.

    Args:
        forward: of the features, in float32.
        images: (B, ...), as the forward takes them.
        features: of the batch.

    Raises:
        InputError: a feature of a picture is another one in the batch than alone.
    """
    _check_count(features, len(images))
    if len(images) == 1:
        return
    positions = np.unique(np.linspace(0, len(images) - 1, _CHECKED_ALONE).round().astype(int)).tolist()
    lone = {position: forward(images[position : position + 1]) for position in positions}
    for name in features:
        alone = np.stack([lone[position][name][0] for position in positions]).astype(np.float64)  # (C, *shape)
        found = features[name][positions].astype(np.float64)
        alone, found = (values.reshape(len(positions), -1) for values in (alone, found))
        finite = np.isfinite(alone)
        sizes = np.abs(np.where(finite, alone, 0))
        rounding = _OF_THE_SAME_VALUE[str(features[name].dtype)] * sizes.max(0) + _OF_THE_LARGEST * sizes.max(initial=0)
        with np.errstate(invalid="ignore"):  # of infinite values
            telling = np.ptp(np.where(finite, alone, 0), axis=0) > rounding
            others = (finite & (np.abs(found - alone) > rounding))[:, telling]
        wrong = (np.isfinite(found) != finite).any(1) | (others.sum(1) > _DIFFERENT * max(1, telling.sum()))
        if wrong.any():
            position = positions[int(wrong.argmax())]
            raise InputError(
                f"{name} of picture {position} in the first batch, of {len(images)}, differs from that of the same "
                "picture alone: its rows are not the images. Nothing of this batch was stored; name other layers"
            )


def _check_count(features: Values, count: int) -> None:
    for name, values in features.items():
        if len(values) != count:
            raise InputError(
                f"{name} has {len(values):,} rows for a batch of {count:,} pictures: how many there are depends on the "
                "pictures, so they cannot be stored as theirs; name other layers"
            )


def rows_of(batch: Batch, forward: Forward, features: Sequence[Feature], dtype: str) -> Rows:
    """The rows of a batch as they are stored."""
    return rows_begun(batch, forward, features, dtype)()


def rows_begun(batch: Batch, forward: Forward, features: Sequence[Feature], dtype: str) -> Callable[[], Rows]:
    """Have a batch computed; returns a function that waits for its rows."""
    values = forward.begin(batch.images) if len(batch.images) else dict

    def rows() -> Rows:
        good, found = batch.status == Status.OK, values()
        _check_count(found, len(batch.images))
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
