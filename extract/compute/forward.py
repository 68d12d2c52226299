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
# Of the largest value of a picture: by so much, the same picture may differ in another batch, in float32 as computed or
# as float16 as stored; what is nearer than that to another picture cannot be told from it, and need not be.
_OF_THE_LARGEST = {"float32": 1e-3, "float16": 2e-3}
_OF_ANOTHER_PICTURE = 0.005  # as of a trial, of the distance to the nearest other picture

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
    for position, own in lone.items():
        for name, (alone,) in own.items():
            found = features[name][position]
            others = [lone[other][name][0] for other in positions if other != position]
            bound = max(
                _OF_THE_LARGEST[str(alone.dtype)] * _distance(alone, np.zeros_like(alone)),
                _OF_ANOTHER_PICTURE * min(_distance(alone, other) for other in others),
            )
            same_gaps = np.array_equal(np.isfinite(found), np.isfinite(alone))
            if not same_gaps or _distance(found, alone) > bound:
                raise InputError(
                    f"{name} of picture {position} in the first batch, of {len(images)}, differs from that of the same "
                    "picture alone: its rows are not the images. Nothing of this batch was stored; name other layers"
                )


def _distance(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference, where both are finite."""
    both = np.isfinite(one) & np.isfinite(other)
    return float(np.abs(one[both].astype(np.float64) - other[both]).max(initial=0))


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
