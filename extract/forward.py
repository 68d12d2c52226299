"""What a forward is, whatever runs it: from pictures to features, and to the rows of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.features import Feature
from extract.images import Batch
from extract.status import Status

__all__ = ["Forward", "Rows", "Values", "joined", "rows_begun", "rows_of"]

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
