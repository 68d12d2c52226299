"""What a forward is, whatever runs it: from pictures to features, and to the rows of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.feature_choice import Feature
from extract.errors import InputError
from extract.images import Batch
from extract.row_status import Status

__all__ = ["Forward", "HasImages", "Rows", "Values", "check_rows", "joined", "rows_of"]

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


class HasImages(Protocol):
    """A batch with images.

    Attributes:
        images: (B, ...) as `Preprocessing.prepare` returns them, stacked; B may be 0.
    """

    @property
    def images(self) -> Tensor:
        """See above."""


B = TypeVar("B", bound=HasImages)


class Forward(ABC):
    """Computes features of batches of images, (B, ...) as `Preprocessing.prepare` returns them, stacked.

    Attributes:
        ahead: batches that the device computes while this process goes on: 0 or 1.
        images_at_once: images of one forward, if memory did not suffice for a whole batch; else None.
        compiling_s: seconds spent so far on what is done once, before the first batch.
    """

    ahead: int = 0
    images_at_once: int | None = None
    compiling_s: float = 0.0

    @property
    def copying_s(self) -> float:
        """Seconds so far that this process waited for copies to the device and back."""
        return 0.0

    @abstractmethod
    def start(self, images: Tensor) -> Callable[[], Values]:
        """Start to compute a batch; returns a function that waits for its features, (B, *shape) each, and gives them.

        The function may be called once. The next batch may be started before it is called, and it need not be called.

        Raises:
            LayertapError: the batch cannot be computed; also from the function.
        """

    def __call__(self, images: Tensor) -> Values:
        """The features of one batch."""
        return self.start(images)()

    def map(self, batches: Iterable[B]) -> Iterator[tuple[B, Values]]:
        """Compute batches in order: (batch, its features), none for a batch without images.

        Where the device computes by itself, a batch is handed out while the next one is computed. If the next one
        cannot be had or started, the batches before it are handed out first, and then the error is raised.
        """
        started: deque[tuple[B, Callable[[], Values]]] = deque()
        try:
            for batch in batches:
                started.append((batch, self.start(batch.images) if len(batch.images) else dict))
                if len(started) > self.ahead:
                    yield _finished(started)
        except GeneratorExit:
            raise
        except BaseException as error:  # Ctrl-C, too
            while started:
                try:
                    finished = _finished(started)
                except Exception as later:  # the first error is the one to report
                    error.add_note(f"what was computed before could not all be stored: {later}")
                    break
                yield finished
            raise
        while started:
            yield _finished(started)


def _finished(started: deque[tuple[B, Callable[[], Values]]]) -> tuple[B, Values]:
    batch, features = started[0]
    try:
        values = features()
    except Exception:
        started.popleft()
        raise
    started.popleft()  # not before: who is interrupted while waiting waits again
    return batch, values


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


def rows_of(batch: Batch, values: Values, features: Sequence[Feature], dtype: str) -> Rows:
    """The rows of a batch as they are stored: NaN where there is no picture, and a status each.

    Args:
        batch: the rows, and which of them have an image.
        values: feature -> (B, *shape) of the images; empty if there are none.
        features: of the data set.
        dtype: of the data set.

    Raises:
        InputError: a feature has not one row for each image.
    """
    _check_count(values, len(batch.images))
    good = batch.status == Status.OK
    stored: Values = {}
    for feature in features:
        if values and good.all():
            stored[feature.name] = _rounded(values[feature.name], dtype)
            continue
        stored[feature.name] = np.full((len(good), *feature.shape), np.nan, dtype)
        if values:
            stored[feature.name][good] = _rounded(values[feature.name], dtype)
    return Rows(stored, *_checked(batch, stored))


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """In another dtype; what it cannot hold becomes infinite, and a row with a status that says so."""
    return values if values.dtype == dtype else torch.from_numpy(values).to(getattr(torch, dtype)).numpy()


def _checked(batch: Batch, features: Values) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """The status of each row after the forward, and the reasons of those that are not ok."""
    status, reasons = batch.status.copy(), dict(batch.reasons)
    for name, values in features.items():
        finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        for row in np.flatnonzero(~finite & (status == Status.OK)).tolist():
            status[row] = Status.NOT_FINITE
            beyond = "; float16 ends at 65504, try float32" if values.dtype == np.float16 else ""
            reasons[int(batch.rows[row])] = f"{name} has NaN or infinite values{beyond}"
    return status, reasons
