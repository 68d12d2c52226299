"""Predict masks of pictures from stored tokens: `segmentation_probe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.dense.dense_probe import DenseProbe
from extract.analysis.dense.linear_head import train_segmentation_head
from extract.analysis.dense.protocols import SEGMENTATION
from extract.analysis.dense.segmentation_metrics import PixelCounts, segmentation_metrics
from extract.analysis.dense.token_classifier import fit_token_classifier, with_validation
from extract.analysis.dense.token_images import held, remembered, scores_of_images, token_numbers
from extract.analysis.dense.upsampling import pixels_of_input, predicted_mask
from extract.analysis.probe.probing import MOST_IN_A_TABLE, ProbeResult
from extract.analysis.probe.protocols import Fitted
from extract.errors import InputError
from extract.store.tokens.token_array import TokenArray

__all__ = ["Masks", "segmentation_probe"]


class Masks(Protocol):
    """Masks of images, such as a list of arrays."""

    def __getitem__(self, image: int, /) -> NDArray[Any]:
        """Return (H, W) numbers of classes from 0; a negative number means no label."""


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
    on_prediction: Callable[[int, NDArray[np.int64]], None] | None = None,
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
    - "segmentation-dinov3": batch norm and a linear layer, trained on upsampled logits with the settings of DINOv3 for
      ADE20K, but without augmentation. It chooses nothing, and is trained on the validation images too.

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
        on_prediction: called for each test image with its number and the predicted classes (H, W) of the pixels of its
            mask; -1 for those that the crop left out.

    Returns:
        the result; its numbers of rows are numbers of images.

    Raises:
        InputError: an image is in two of the sets, grids or images differ, a mask or all labels are missing, a label is
            out of range, or a token has NaN.
        UnknownNameError: there is no such protocol.
    """
    probe = DenseProbe.of(SEGMENTATION, protocol, tokens, (train, val, test), iterations, seed, device, memory_bytes)
    checked = _CheckedMasks(masks, None if classes is None else len(classes))
    if classes is None:
        classes = _numbered(checked, np.concatenate([probe.learned, probe.test]).tolist())
    names = np.array(list(classes))
    probe = replace(probe, settings=replace(probe.settings, classes=names))
    fit = _fit_head if probe.definition.of_tokens is None else _fit_tokens
    fitted, present, trained, notes = fit(probe, checked)
    counts = PixelCounts(len(probe.test), len(names))
    number_of = np.append(present, -1)  # the last is for pixels outside the crop
    for number, (image, scores) in enumerate(scores_of_images(probe.features, fitted.scores, probe.test)):
        truth = checked[image]
        predicted = number_of[predicted_mask(probe.features[0], scores, (truth.shape[1], truth.shape[0]))]
        counts.add(number, truth, predicted)
        if on_prediction is not None:
            on_prediction(image, predicted)
    if not counts.truth.any():
        raise InputError("the masks of the test images have no labels inside the crop")
    untrained = np.setdiff1d(np.flatnonzero(counts.truth.any(0)), trained)
    if len(untrained):
        missing = ", ".join(names[untrained[:5]].tolist())
        notes.append(f"the training images do not show the class {missing}: its pixels count as wrong")
    model = None if fitted.model is None else replace(fitted.model, classes_=names[present])
    return probe.result(
        "segmentation", names, segmentation_metrics(counts, seed), fitted, notes, model=model,
        per_class=counts.by_class(), per_image=counts.by_image(), confusion=counts.confusion,
    )  # fmt: skip


class _CheckedMasks:
    """Masks with numbers of classes below K, if that is known, and -1 for no label."""

    def __init__(self, masks: Masks, n_classes: int | None):
        self._masks, self._n_classes = masks, n_classes

    def __getitem__(self, image: int) -> NDArray[np.int64]:
        try:
            mask = np.asarray(self._masks[image])
        except LookupError as error:
            raise InputError(f"masks has no mask of image {image}") from error
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


def _numbered(masks: _CheckedMasks, images: list[int]) -> list[str]:
    """Return the numbers from 0 to the largest label as names of classes."""
    largest = max(int(masks[image].max()) for image in images)
    if largest >= MOST_IN_A_TABLE:
        raise InputError(
            f"the masks have the label {largest:,}; expected classes from 0 to {MOST_IN_A_TABLE - 1}",
            hint="numbers of objects are not classes; if they are classes, name them with `classes`",
        )
    return [str(number) for number in range(largest + 1)]


def _fit_tokens(
    probe: DenseProbe, masks: _CheckedMasks
) -> tuple[Fitted, NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Fit a classifier of tokens; return it, the numbers of its classes, those that it was trained on, and notes."""
    train, val, chosen_on = with_validation(probe.train, probe.val, probe.settings.seed)
    images = np.union1d(train, val)
    labels = np.stack([probe.features[0].labels(masks[image], ignore=-1) for image in images.tolist()])
    fitted, present, notes = fit_token_classifier(probe, images, labels, val, probe.settings)
    count = f"{(labels >= 0).sum():,} of {labels.size:,} tokens of the training images"
    notes = [f"{count} have one label for half of their pixels", *notes]
    return replace(fitted, chosen_on=chosen_on), present, present, notes


def _fit_head(
    probe: DenseProbe, masks: _CheckedMasks
) -> tuple[Fitted, NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Train the linear head; return it, the numbers of its classes, those that it was trained on, and notes."""
    tokens, images, settings = probe.features[0], probe.learned, probe.settings
    if len(settings.classes) < 2:
        raise InputError(f"the masks have the class {settings.classes[0]} alone; expected at least two")

    trained: set[int] = set()

    def labels_of(number: int) -> NDArray[np.int32]:
        labels = pixels_of_input(tokens, masks[int(images[number])].astype(np.int32), -1)
        trained.update(np.unique(labels).tolist())
        return labels

    model = train_segmentation_head(
        held(probe.features, token_numbers(images, tokens.per_image), settings), tokens.grid,
        remembered(labels_of, settings), len(settings.classes),
        iterations=probe.iterations, seed=settings.seed, device=settings.device,
    )  # fmt: skip
    fitted = Fitted(lambda tokens: (model.scores(tokens), None), len(images), model=model)
    return fitted, np.arange(len(settings.classes)), np.array(sorted(trained)), []
