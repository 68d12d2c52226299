"""Images and their tokens in dense probes: checked sets of images, concatenated features, scores by image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.protocols import Scorer, Settings
from extract.errors import InputError
from extract.store.tokens.token_array import TokenArray

__all__ = [
    "held", "image_sets", "pixels_of_image", "remembered", "same_grid", "scores_of_images", "token_numbers",
]  # fmt: skip

_IMAGES = 64  # scored at once

T = TypeVar("T", bound="np.generic[Any]")


def same_grid(features: list[TokenArray]) -> list[TokenArray]:
    """Return features that can be concatenated token by token.

    Raises:
        InputError: there are none, or grids or images differ.
    """
    if not features:
        raise InputError("there are no tokens; expected at least one feature")
    first = features[0]
    for other in features[1:]:
        if other.grid != first.grid or not np.array_equal(other.rows, first.rows):
            grids = " and ".join(f"{rows} x {columns} tokens" for rows, columns in (first.grid, other.grid))
            raise InputError(f"features with {grids} cannot be concatenated; expected the same grid and images")
    return features


def image_sets(count: int, train: ArrayLike, val: ArrayLike | None, test: ArrayLike) -> tuple[NDArray[np.int64], ...]:
    """Return the sorted numbers of training, validation and test images.

    Raises:
        InputError: a number is out of range or in two sets, or there are no training or no test images.
    """
    sets = {}
    for name, images in (("train", train), ("val", val), ("test", test)):
        numbers = np.asarray([] if images is None else images)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise InputError(f"{name} has shape {numbers.shape} and dtype {numbers.dtype}; expected numbers of images")
        wrong = numbers[(numbers < 0) | (numbers >= count)]
        if len(wrong):
            raise InputError(f"{name} has the image {wrong[0]}; expected 0 to {count - 1}")
        sets[name] = np.unique(numbers).astype(np.int64)
    for one, other in (("train", "test"), ("val", "test"), ("train", "val")):
        if len(both := np.intersect1d(sets[one], sets[other])):
            raise InputError(f"image {both[0]} is in both {one} and {other}")
    if not len(sets["train"]) or not len(sets["test"]):
        raise InputError(
            f"{len(sets['train'])} training images and {len(sets['test'])} test images; expected at least one of each"
        )
    return sets["train"], sets["val"], sets["test"]


def pixels_of_image(source: Any, image: int, what: str, kinds: str, expected: str) -> NDArray[Any]:
    """Return the (H, W) mask or depth map of an image.

    Args:
        source: its items are those of images.
        image: number of the image.
        what: "mask" or "depth map".
        kinds: kinds of NumPy types that are accepted, such as "iub".
        expected: these, in words.

    Raises:
        InputError: it is missing, or has other axes or values.
    """
    try:
        pixels = np.asarray(source[image])
    except LookupError as error:
        raise InputError(f"{what.split()[0]}s has no {what} of image {image}") from error
    if pixels.ndim != 2 or pixels.dtype.kind not in kinds or not pixels.size:
        shape = "(" + ", ".join(map(str, pixels.shape)) + ")"
        raise InputError(
            f"the {what} of image {image} is an array of {pixels.dtype} with shape {shape}; expected {expected} (H, W)"
        )
    return pixels


def token_numbers(images: NDArray[np.int64], per_image: int) -> NDArray[np.int64]:
    """Return the numbers of all tokens of some images."""
    return (images[:, None] * per_image + np.arange(per_image)).reshape(-1)


def held(features: Sequence[TokenArray], numbers: NDArray[np.int64], settings: Settings) -> FeatureRows:
    """Return tokens, in memory if they take a small part of the limit."""
    rows = FeatureRows.of(features, numbers)
    return rows.held() if rows.nbytes <= settings.memory_bytes // 4 else rows


def remembered(target_of: Callable[[int], NDArray[T]], settings: Settings) -> Callable[[int], NDArray[T]]:
    """Return a function that keeps the targets of images as far as memory permits; all have the same size."""
    kept: dict[int, NDArray[T]] = {}

    def target(number: int) -> NDArray[T]:
        if number in kept:
            return kept[number]
        values = target_of(number)
        if (len(kept) + 1) * values.nbytes <= settings.memory_bytes // 4:
            kept[number] = values
        return values

    return target


def scores_of_images(
    features: Sequence[TokenArray], scores: Scorer, images: NDArray[np.int64]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield for each image its number and the scores (K, h, w) of its tokens; several features are concatenated."""
    per_image, grid = features[0].per_image, features[0].grid
    for start in range(0, len(images), _IMAGES):
        some = images[start : start + _IMAGES]
        values, _ = scores(FeatureRows.of(features, token_numbers(some, per_image)))
        of_images = torch.from_numpy(values).float().reshape(len(some), *grid, -1).permute(0, 3, 1, 2)
        yield from zip(some.tolist(), of_images, strict=True)
