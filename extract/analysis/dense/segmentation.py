"""Predict masks of pictures from stored tokens: `segmentation_probe`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from extract.analysis.dense.linear_head import train_linear_head
from extract.analysis.dense.segmentation_metrics import PixelCounts, segmentation_metrics
from extract.analysis.dense.upsampling import Upsampling
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.memory import free_bytes
from extract.analysis.probe.probing import ProbeResult, probe_device
from extract.analysis.probe.protocols import PROTOCOLS, Fitted, Labelled, Scorer, Settings
from extract.errors import InputError, unknown_name
from extract.store.tokens.token_array import TokenArray

__all__ = ["SEGMENTATION", "Masks", "predicted_masks", "segmentation_probe"]

_MOST_TOKENS = 500_000  # that a classifier of tokens is fitted on
_BAND_VALUES = 1 << 24  # of upsampled scores held at once
_IMAGES = 64  # scored at once


class Masks(Protocol):
    """Masks of images, such as a list of arrays."""

    def __getitem__(self, image: int, /) -> NDArray[Any]:
        """Return (H, W) numbers of classes from 0; a negative number means no label."""


@dataclass(frozen=True)
class SegmentationProtocol:
    """How masks are predicted.

    Attributes:
        of_tokens: the protocol of `extract.analysis.probe` that classifies single tokens; empty: the linear head.
        scaling: scaling of the tokens.
        about: short description.
    """

    of_tokens: str
    scaling: str
    about: str


SEGMENTATION = {
    "segmentation": SegmentationProtocol(
        "clip", "standardise", "logistic regression of tokens, 96 lambdas searched from coarse to fine"
    ),
    "segmentation-knn": SegmentationProtocol(
        "knn", "l2", "10, 20, 100 or 200 nearest tokens by cosine, temperature 0.07"
    ),
    "segmentation-dinov3": SegmentationProtocol(
        "", "standardise", "batch norm and a linear layer, trained on upsampled logits"
    ),
}


def segmentation_probe(
    tokens: TokenArray | Sequence[TokenArray],
    masks: Masks,
    train: ArrayLike,
    test: ArrayLike,
    *,
    val: ArrayLike | None = None,
    classes: Sequence[str] | None = None,
    protocol: str = "segmentation",
    iterations: int | None = None,
    seed: int = 0,
    device: str = "auto",
    memory_bytes: int | None = None,
) -> ProbeResult:
    """Evaluate tokens by a simple classifier that predicts the class of each pixel.

        tokens = reader.tokens("blocks.11")
        result = segmentation_probe(tokens, masks, train=range(150), test=range(150, 200))
        result.metrics["mIoU"]       # Estimate(value=0.61, low=0.57, high=0.65)
        result.per_class["iou"]

    Scores of tokens are upsampled bilinearly to the pixels of each mask. Pixels that the crop left out, and those
    without a label, do not count. The protocols:

    - "segmentation": logistic regression of tokens with one label for half of their pixels; its strength is chosen on
      validation images, by the share of their tokens that are classified correctly.
    - "segmentation-knn": the nearest tokens, as in the protocol "knn".
    - "segmentation-dinov3": the linear evaluation of DINOv3 on the stored tokens, see `train_linear_head`.

    Args:
        tokens: tokens of a feature, or of several with the same grid, which are then concatenated.
        masks: mask of each image, by its number in `tokens.rows`, as in `TokenArray.labels`.
        train: numbers of the training images.
        test: numbers of the test images.
        val: numbers of the images for choosing the strength; None: a tenth of the training images, at least one.
        classes: names of the K classes; None: the numbers from 0 to the largest in the masks.
        protocol: one of `SEGMENTATION`.
        iterations: of "segmentation-dinov3"; None: 40,000.
        seed: seed of all random choices.
        device: "auto", "cpu", "cuda", ...
        memory_bytes: limit for tokens and variables held at once; None: half of the free memory.

    Returns:
        the result with numbers of images in place of rows; `per_class` has n (pixels), iou and accuracy, `per_image`
        n, pixel_accuracy and mIoU of the test images, and `confusion` pixels.

    Raises:
        InputError: an image is in two of the sets, grids or images differ, or labels are missing or out of range.
        UnknownNameError: there is no such protocol.
    """
    started = time.perf_counter()
    if protocol not in SEGMENTATION:
        raise unknown_name("protocol", protocol, SEGMENTATION)
    definition = SEGMENTATION[protocol]
    if iterations is not None and (definition.of_tokens or iterations < 1):
        raise InputError(f"iterations={iterations}; expected a positive number for the protocol segmentation-dinov3")
    features = _same_grid([tokens] if isinstance(tokens, TokenArray) else list(tokens))
    train_images, val_images, test_images = _image_sets(len(features[0].rows), train, val, test)
    checked = _CheckedMasks(masks, None if classes is None else len(classes))
    if classes is None:
        everywhere = np.concatenate([train_images, val_images, test_images]).tolist()
        classes = [str(number) for number in range(1 + max(int(checked[image].max()) for image in everywhere))]
    classes = list(classes)
    settings = Settings(
        "classification", np.array(classes), definition.scaling, False, seed, probe_device(device),
        free_bytes() // 2 if memory_bytes is None else memory_bytes,
    )  # fmt: skip
    if definition.of_tokens:
        fitted, present, notes = _fit_tokens(definition, features, checked, train_images, val_images, settings)
    else:
        fitted, present, notes = _fit_head(
            features, checked, np.union1d(train_images, val_images), settings, iterations
        )
    counts = PixelCounts(len(test_images), len(classes))
    predictions = predicted_masks(features, fitted.scores, test_images, lambda image: checked[image].shape)
    for number, (image, bands) in enumerate(predictions):
        truth = checked[image]
        for rows, columns, best in bands:
            counts.add(number, truth[rows, columns], present[best])
    if not counts.truth.any():
        raise InputError("the masks of the test images have no labels inside the crop")
    untrained = np.setdiff1d(np.flatnonzero(counts.truth.any(0)), present)
    if len(untrained):
        names = ", ".join(classes[i] for i in untrained[:5])
        notes.append(f"no training token has the class {names}: its pixels count as wrong")
    return ProbeResult(
        protocol=protocol,
        task="segmentation",
        scaling=definition.scaling,
        metrics=segmentation_metrics(counts, seed),
        classes=np.array(classes),
        n_train=len(train_images) + len(val_images),
        n_val=len(val_images) if fitted.curve else 0,
        n_test=len(test_images),
        truth=np.empty(0),
        swept=fitted.swept,
        chosen=fitted.chosen,
        chosen_on=fitted.chosen_on,
        curve=fitted.curve,
        per_class=counts.by_class(),
        per_image=counts.by_image(),
        confusion=counts.confusion,
        objective=fitted.objective,
        model=None if fitted.model is None else replace(fitted.model, classes_=np.array(classes)[present]),
        notes=[*notes, *fitted.notes],
        seconds=time.perf_counter() - started,
    )


Bands = Iterator[tuple[slice, slice, NDArray[np.int64]]]


def predicted_masks(
    features: Sequence[TokenArray],
    scores: Scorer,
    images: NDArray[np.int64],
    size_of: Callable[[int], tuple[int, ...]],
) -> Iterator[tuple[int, Bands]]:
    """Yield for each image its number and its predicted mask, in bands of rows: rows, columns, (R, C) class numbers.

    Args:
        features: tokens of the concatenated features.
        scores: function of rows of tokens that returns (N, K) scores, and probabilities or None.
        images: numbers of images.
        size_of: function of the number of an image that returns (height, width) of its mask.
    """
    per_image, grid = features[0].per_image, features[0].grid
    for start in range(0, len(images), _IMAGES):
        some = images[start : start + _IMAGES]
        values, _ = scores(FeatureRows.of(list(features), _numbers(some, per_image)))
        for image, of_image in zip(some.tolist(), values.reshape(len(some), *grid, -1), strict=True):
            height, width = size_of(image)
            upsampling = Upsampling.of(features[0], (width, height))
            on_grid = torch.from_numpy(np.ascontiguousarray(of_image, np.float32)).permute(2, 0, 1)
            yield (
                image,
                (
                    (rows, upsampling.columns, band.argmax(0).numpy())
                    for rows, band in upsampling.bands(on_grid, _BAND_VALUES)
                ),
            )


class _CheckedMasks:
    """Masks with numbers of classes below K, if that is known, and -1 for no label."""

    def __init__(self, masks: Masks, n_classes: int | None):
        self._masks, self._n_classes = masks, n_classes

    def __getitem__(self, image: int) -> NDArray[np.int64]:
        mask = np.asarray(self._masks[image])
        if mask.ndim != 2 or mask.dtype.kind not in "iub" or not mask.size:
            shape = "(" + ", ".join(map(str, mask.shape)) + ")"
            raise InputError(
                f"the mask of image {image} is an array of {mask.dtype} with shape {shape}; expected integers (H, W)"
            )
        if self._n_classes is not None and mask.max() >= self._n_classes:
            raise InputError(
                f"the mask of image {image} has the label {mask.max()}; expected labels below {self._n_classes}, the "
                "number of classes, and negative numbers for no label"
            )
        return np.asarray(np.maximum(mask.astype(np.int64), -1))


def _same_grid(features: list[TokenArray]) -> list[TokenArray]:
    if not features:
        raise InputError("there are no tokens; expected at least one feature")
    first = features[0]
    for other in features[1:]:
        if other.grid != first.grid or not np.array_equal(other.rows, first.rows):
            grids = " and ".join(f"{rows} x {columns} tokens" for rows, columns in (first.grid, other.grid))
            raise InputError(f"features with {grids} cannot be concatenated; expected the same grid and images")
    return features


def _image_sets(count: int, train: ArrayLike, val: ArrayLike | None, test: ArrayLike) -> tuple[NDArray[np.int64], ...]:
    """Return the sorted numbers of training, validation and test images."""
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


def _numbers(images: NDArray[np.int64], per_image: int) -> NDArray[np.int64]:
    """Return the numbers of all tokens of some images."""
    return (images[:, None] * per_image + np.arange(per_image)).reshape(-1)


def _fit_tokens(
    definition: SegmentationProtocol,
    features: list[TokenArray],
    masks: _CheckedMasks,
    train: NDArray[np.int64],
    val: NDArray[np.int64],
    settings: Settings,
) -> tuple[Fitted, NDArray[np.int64], list[str]]:
    """Fit a classifier of tokens; return it, the numbers of its classes, and notes."""
    chosen_on = "validation images"
    if not len(val):
        chosen_on = "a tenth of the training images"
        if len(train) < 2:
            raise InputError("a single training image leaves none for choosing the strength; expected at least two")
        held_out = max(1, len(train) // 10)
        order = np.random.default_rng(settings.seed).permutation(train)
        train, val = np.sort(order[held_out:]), np.sort(order[:held_out])
    numbers, labels = _labelled_tokens(features[0], masks, np.union1d(train, val))
    notes = [
        f"{len(numbers):,} of {(len(train) + len(val)) * features[0].per_image:,} tokens of the training images have "
        "one label for half of their pixels"
    ]
    if len(numbers) > _MOST_TOKENS:
        notes.append(f"{_MOST_TOKENS:,} of them are drawn, with seed {settings.seed}")
        drawn = np.random.default_rng(settings.seed).permutation(len(numbers))[:_MOST_TOKENS]
        numbers, labels = numbers[np.sort(drawn)], labels[np.sort(drawn)]
    for_choice = np.isin(numbers // features[0].per_image, val)
    present = np.unique(labels[~for_choice])
    if len(present) < 2:
        raise InputError(
            f"the tokens of {len(train)} training images have {len(present)} classes; expected at least two",
            hint="are the labels right, and those of pixels without a class ignored?",
        )
    for_choice &= np.isin(labels, present)
    if not for_choice.any():
        raise InputError("no token of the images for choosing the strength has a label that training tokens have")
    train_tokens, val_tokens = (
        Labelled(_held(features, numbers[chosen], settings), np.searchsorted(present, labels[chosen]))
        for chosen in (~np.isin(numbers // features[0].per_image, val), for_choice)
    )
    fit = PROTOCOLS[definition.of_tokens].fit
    assert fit is not None
    fitted = fit(train_tokens, val_tokens, replace(settings, classes=settings.classes[present]))
    return replace(fitted, chosen_on=chosen_on), present, notes


def _labelled_tokens(
    tokens: TokenArray, masks: _CheckedMasks, images: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of tokens with a label, and the labels."""
    labels = np.concatenate([tokens.labels(masks[image], ignore=-1) for image in images.tolist()])
    chosen = np.flatnonzero(labels >= 0)
    return _numbers(images, tokens.per_image)[chosen], labels[chosen]


def _held(features: list[TokenArray], numbers: NDArray[np.int64], settings: Settings) -> FeatureRows:
    """Return tokens, in memory if they take a small part of the limit."""
    rows = FeatureRows.of(list(features), numbers)
    return rows.held() if rows.nbytes <= settings.memory_bytes // 4 else rows


def _fit_head(
    features: list[TokenArray],
    masks: _CheckedMasks,
    images: NDArray[np.int64],
    settings: Settings,
    iterations: int | None,
) -> tuple[Fitted, NDArray[np.int64], list[str]]:
    """Train the linear head; return it, the numbers of its classes, and notes."""
    tokens = features[0]
    rows = _held(features, _numbers(images, tokens.per_image), settings)
    of_input: dict[int, NDArray[np.int16]] = {}
    most = settings.memory_bytes // 4 // (2 * tokens.input_px[0] * tokens.input_px[1])

    def labels_of(number: int) -> NDArray[np.int64]:
        if number in of_input:
            return of_input[number].astype(np.int64)
        resized = _resized(tokens, masks[int(images[number])])
        if len(of_input) < most:
            of_input[number] = resized.astype(np.int16)
        return resized

    model = train_linear_head(
        rows, tokens.grid, labels_of, len(settings.classes),
        iterations=iterations, seed=settings.seed, device=settings.device,
    )  # fmt: skip
    fitted = Fitted(lambda tokens: (model.scores(tokens), None), len(images), model=model)
    return fitted, np.arange(len(settings.classes)), []


def _resized(tokens: TokenArray, mask: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the labels of the pixels of the backbone's input: those of the nearest pixels of the mask."""
    height, width = mask.shape
    boxes = tokens.boxes((width, height))
    (left, top), (right, bottom) = boxes[0, :2].tolist(), boxes[-1, 2:].tolist()
    rows_px, columns_px = tokens.input_px
    rows = np.floor(top + (np.arange(rows_px) + 0.5) * (bottom - top) / rows_px).astype(np.int64)
    columns = np.floor(left + (np.arange(columns_px) + 0.5) * (right - left) / columns_px).astype(np.int64)
    resized: NDArray[np.int64] = mask[np.clip(rows, 0, height - 1)[:, None], np.clip(columns, 0, width - 1)]
    resized[(rows < 0) | (rows >= height)] = -1  # the crop is larger than the picture
    resized[:, (columns < 0) | (columns >= width)] = -1
    return resized
