"""From a batch of images to features on the CPU: the interface of a forward, and eager PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.backbones import LoadedBackbone
from extract.compute.feature_choice import Choice
from extract.compute.transfers import Pinned
from extract.errors import InputError, LayertapError
from extract.taps.taps import Taps, capture_of

__all__ = ["DeviceForward", "EagerForward", "Forward", "Values", "check_count", "check_rows", "joined"]

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

    @abstractmethod
    def start(self, images: Tensor) -> Callable[[], Values]:
        """Start computing a batch; return a function that waits for its features, (B, *shape) each, and returns them.

        The next batch may be started before the function is called, and a forward may outlive a shard that failed: the
        function returns the features of its own batch.

        Raises:
            LayertapError: the batch cannot be computed; also raised by the function.
        """

    def __call__(self, images: Tensor) -> Values:
        """Compute the features of one batch."""
        return self.start(images)()


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
        self._to_input, self._features = backbone.preprocessing.to_input, choice.features
        self._model, self._capture = backbone.model, capture_of(taps)

    def _part(self, images: Tensor) -> Values:
        values = self._capture.run_until_kept(self._model, (self._to_input(self._to_device(images)),), {}).by_site
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
