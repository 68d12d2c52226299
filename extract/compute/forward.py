"""The interface of a forward: from images to features, and to the rows of a data set."""

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

__all__ = ["Forward", "HasImages", "StoredRows", "Values", "check_rows", "joined", "rows_of"]

_CHECKED_ALONE = 4  # pictures of the first batch; a layer that mixes up rows is unlikely to leave all in place
# Tolerances for rounding between batches: relative to the same value in the checked pictures (float32 as computed, or
# float16 as stored), and relative to the largest value of all. The second is small, because vision transformers have a
# few values that are a thousand times larger than all others.
_OF_THE_SAME_VALUE = {"float32": 1e-3, "float16": 2e-3}
_OF_THE_LARGEST = 1e-5
# A picture differs if more than this part of the values that distinguish pictures exceed the tolerance.
_DIFFERENT = 0.1

# feature name -> (B, *shape), on the CPU
Values = dict[str, NDArray[Any]]


class StoredRows(NamedTuple):
    """Rows of a data set, as stored.

    Attributes:
        features: name -> (R, *shape), NaN for rows without an image.
        status: (R,) uint8, the `Status` of each row.
        reasons: row of the data set -> why it failed.
    """

    features: Values
    status: NDArray[np.uint8]
    reasons: dict[int, str]


class HasImages(Protocol):
    """A batch with images.

    Attributes:
        images: (B, ...) stacked results of `Preprocessing.cpu_transform`; B may be 0.
    """

    @property
    def images(self) -> Tensor:
        """See the class."""


B = TypeVar("B", bound=HasImages)


class Forward(ABC):
    """Computes features of batches of images: (B, ...) stacked results of `Preprocessing.cpu_transform`.

    Attributes:
        ahead: batches that the device computes while this process continues: 0 or 1.
        images_at_once: images per forward, if memory was insufficient for a whole batch; otherwise None.
        compiling_s: seconds spent on compilation so far.
    """

    ahead: int = 0
    images_at_once: int | None = None
    compiling_s: float = 0.0

    @property
    def copying_s(self) -> float:
        """Seconds that this process has waited for copies to the device and back."""
        return 0.0

    @abstractmethod
    def start(self, images: Tensor) -> Callable[[], Values]:
        """Start computing a batch; return a function that waits for its features, (B, *shape) each, and returns them.

        The function may be called at most once. The next batch may be started before it is called.

        Raises:
            LayertapError: the batch cannot be computed; also raised by the function.
        """

    def __call__(self, images: Tensor) -> Values:
        """Compute the features of one batch."""
        return self.start(images)()

    def map(self, batches: Iterable[B]) -> Iterator[tuple[B, Values]]:
        """Compute batches in order and yield (batch, features); features are empty for a batch without images.

        If the device computes asynchronously, a batch is yielded while the next one is computed. If the next batch
        cannot be read or started, the batches before it are yielded first, and then the error is raised.
        """
        started: deque[tuple[B, Callable[[], Values]]] = deque()
        try:
            for batch in batches:
                started.append((batch, self.start(batch.images) if len(batch.images) else dict))
                if len(started) > self.ahead:
                    yield _finished(started)
        except GeneratorExit:
            raise
        except BaseException as error:  # including Ctrl-C
            while started:
                try:
                    finished = _finished(started)
                except Exception as later:  # the first error is the one to report
                    error.add_note(f"some batches before it could not be stored: {later}")
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
    started.popleft()  # last, so that after an interrupted wait the batch is waited for again
    return batch, values


def joined(parts: Sequence[Values]) -> Values:
    """Concatenate the features of the parts of a batch."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


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
    _check_count(features, len(images))
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
        rounding = _OF_THE_SAME_VALUE[str(features[name].dtype)] * sizes.max(0) + _OF_THE_LARGEST * sizes.max(initial=0)
        with np.errstate(invalid="ignore"):  # from infinite values
            telling = np.ptp(np.where(finite, alone, 0), axis=0) > rounding
            others = (finite & (np.abs(batched - alone) > rounding))[:, telling]
        wrong = (np.isfinite(batched) != finite).any(1) | (others.sum(1) > _DIFFERENT * max(1, telling.sum()))
        if wrong.any():
            position = positions[int(wrong.argmax())]
            raise InputError(
                f"{name} of picture {position} in the first batch, of {len(images)}, differs from that of the same "
                "picture alone: its rows are not the images. Nothing of this batch was stored; choose other layers"
            )


def _check_count(features: Values, count: int) -> None:
    for name, values in features.items():
        if len(values) != count:
            raise InputError(
                f"{name} has {len(values):,} rows for a batch of {count:,} pictures: the number of rows depends on "
                "the pictures, so they cannot be stored; choose other layers"
            )


def rows_of(batch: Batch, values: Values, features: Sequence[Feature], dtype: str) -> StoredRows:
    """Return the rows of a batch as stored: features, NaN for rows without an image, and a status for each row.

    Args:
        batch: the rows, and which of them have an image.
        values: feature -> (B, *shape) for the images; empty if there are none.
        features: features of the data set.
        dtype: dtype of the data set.

    Raises:
        InputError: a feature does not have one row for each image.
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
    return StoredRows(stored, *_checked(batch, stored))


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Cast to another dtype. Values beyond its range become infinite, and the row gets the status NOT_FINITE."""
    return values if values.dtype == dtype else torch.from_numpy(values).to(getattr(torch, dtype)).numpy()


def _checked(batch: Batch, features: Values) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Return the status of each row after the forward, and the reasons of rows that are not OK."""
    status, reasons = batch.status.copy(), dict(batch.reasons)
    for name, values in features.items():
        finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        for row in np.flatnonzero(~finite & (status == Status.OK)).tolist():
            status[row] = Status.NOT_FINITE
            beyond = "; the largest float16 is 65504, use float32" if values.dtype == np.float16 else ""
            reasons[int(batch.rows[row])] = f"{name} has NaN or infinite values{beyond}"
    return status, reasons
