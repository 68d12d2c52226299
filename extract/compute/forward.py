"""From images to features, and to rows of a data set: the interface of a forward, and the one by eager PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from extract.backbones import LoadedBackbone
from extract.compute.feature_choice import WHOLE_TYPES, Choice, Feature
from extract.compute.transfers import Pinned
from extract.errors import InputError, LayertapError
from extract.images import Batch
from extract.row_status import Status
from extract.taps.capture import Variant, copy_out
from extract.taps.taps import Taps, taps_of

__all__ = [
    "DeviceForward",
    "EagerForward",
    "Forward",
    "HasImages",
    "StoredRows",
    "Values",
    "check_count",
    "forward_taps",
    "joined",
    "rows_of",
]

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


class DeviceForward(Forward):
    """Forward by PyTorch on the device of a backbone.

    Args:
        device: the device.
        transfers: asynchronous copies to the device and back; None copies synchronously.
    """

    def __init__(self, device: torch.device, transfers: Pinned | None):
        self._transfers = transfers
        self._to_device: Callable[[Tensor], Tensor]
        self._to_device = partial(Tensor.to, device=device) if transfers is None else transfers.to_device
        self.ahead = 0 if transfers is None else 1

    @property
    def copying_s(self) -> float:
        """See `Forward`."""
        return 0.0 if self._transfers is None else self._transfers.seconds

    def start(self, images: Tensor) -> Callable[[], Values]:
        """See `Forward`."""
        parts = self._parts(images)
        if self._transfers is None:
            return partial(joined, parts)
        return partial(self._arrived, parts, self._transfers, self._transfers.last_started())

    @abstractmethod
    def _parts(self, images: Tensor) -> list[Values]:
        """Return the features of the parts of a batch; with transfers, they are complete when the copies have ended."""

    def _arrived(self, parts: list[Values], transfers: Pinned, last: int) -> Values:
        transfers.wait(last)
        return joined(parts)


def forward_taps(model: nn.Module, transfers: Pinned | None) -> Taps:
    """Return the taps of an eager forward. With transfers, they start copying kept tensors and do not wait for them."""
    return taps_of(
        model,
        Variant(
            copy_out if transfers is None else partial(copy_out, to_cpu=transfers.to_host),
            reduce_calls_layers=False,  # they are poolings
            has_other_callers=False,  # compiled forwards of other backbones, and code of the user, stay compiled
        ),
        stop=True,
    )


class EagerForward(DeviceForward):
    """Forward of the backbone under taps. A batch is computed in parts if memory is insufficient for all of it.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        taps: open taps that keep these features.
        transfers: see `DeviceForward`.
    """

    def __init__(self, backbone: LoadedBackbone, choice: Choice, taps: Taps, transfers: Pinned | None):
        super().__init__(backbone.device, transfers)
        self._to_input, self._features, self._taps = backbone.preprocessing.to_input, choice.features, taps

    def _part(self, images: Tensor) -> Values:
        self._taps(self._to_input(self._to_device(images)))
        values = self._taps.record.by_site
        return {feature.name: values[feature.site][feature.name].numpy() for feature in self._features}

    def _parts(self, images: Tensor) -> list[Values]:
        while True:
            try:
                return [self._part(part) for part in torch.split(images, self.images_at_once or len(images))]
            except torch.OutOfMemoryError as error:
                size = min(self.images_at_once or len(images), len(images))
                if size == 1:
                    raise LayertapError(f"insufficient device memory for one image: {error}") from error
            self.images_at_once = -(-size // 2)
            torch.cuda.empty_cache()  # outside the except block: the error's frames hold tensors


def joined(parts: Sequence[Values]) -> Values:
    """Concatenate the features of the parts of a batch."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_count(features: Values, count: int) -> None:
    """Check that every feature has one row for each of `count` images.

    Raises:
        InputError: it has more or fewer.
    """
    for name, values in features.items():
        if len(values) != count:
            raise InputError(
                f"{name} has {len(values):,} rows for a batch of {count:,} pictures: the number of rows depends on "
                "the pictures, so they cannot be stored",
                hint="choose other layers",
            )


def rows_of(batch: Batch, values: Values, features: Sequence[Feature], dtype: str) -> StoredRows:
    """Return the rows of a batch as stored: features, and a status for each row.

    Rows without an image are NaN, and for whole numbers the smallest of their type.

    Args:
        batch: the rows, and which of them have an image.
        values: feature -> (B, *shape) for the images; empty if there are none.
        features: features of the data set.
        dtype: dtype of the values of the data set, except whole numbers.

    Raises:
        InputError: a feature does not have one row for each image.
    """
    check_count(values, len(batch.images))
    good = batch.status == Status.OK
    stored: Values = {}
    for feature in features:
        kind = WHOLE_TYPES.get(feature.source_dtype, dtype)  # as `Feature.stored_as`
        if values and good.all():
            stored[feature.name] = _rounded(values[feature.name], kind)
            continue
        missing = np.iinfo(kind).min if feature.source_dtype in WHOLE_TYPES else np.nan
        stored[feature.name] = np.full((len(good), *feature.shape), missing, kind)
        if values:
            stored[feature.name][good] = _rounded(values[feature.name], kind)
    return StoredRows(stored, *_checked(batch, stored))


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Cast to another dtype. Values beyond its range become infinite, and the row gets the status NOT_FINITE."""
    return values if values.dtype == dtype else torch.from_numpy(values).to(getattr(torch, dtype)).numpy()


def _checked(batch: Batch, features: Values) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Return the status of each row after the forward, and the reasons of rows that are not OK."""
    status, reasons = batch.status.copy(), dict(batch.reasons)
    for name, values in features.items():
        whole = values.dtype.kind == "i"
        finite = values != np.iinfo(values.dtype).min if whole else np.isfinite(values)
        finite = finite.all(axis=tuple(range(1, values.ndim)))
        for row in np.flatnonzero(~finite & (status == Status.OK)).tolist():
            status[row] = Status.NOT_FINITE
            beyond = "; the largest float16 is 65504, use float32" if values.dtype == np.float16 else ""
            what = f"the smallest {values.dtype}, which means no value" if whole else f"NaN or infinite values{beyond}"
            reasons[int(batch.rows[row])] = f"{name} has {what}"
    return status, reasons
