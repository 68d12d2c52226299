"""Predict masks of pictures from stored tokens: `segmentation_probe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.dense.dense_probe import SEGMENTATION, DenseProbe, pixels_of_image, scores_of_images
from extract.analysis.dense.upsampling import predicted_mask
from extract.analysis.probe.metrics import Estimate, resampled
from extract.analysis.probe.probing import MOST_IN_A_TABLE, ProbeResult
from extract.errors import InputError
from extract.store.tokens.token_array import TokenArray

__all__ = ["Masks", "PixelCounts", "segmentation_metrics", "segmentation_probe"]

_FEW_IMAGES = 100  # below, the coverage of mIoU was less than 0.92 in simulations (docs/intervals.md)


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

    Args:
        tokens: tokens of a feature, or of several with the same grid, which are then concatenated.
        masks: mask of each image, by its number in `tokens.rows`, as in `TokenArray.labels`.
        train: numbers of the training images.
        test: numbers of the test images.
        val: numbers of the images for choosing the strength; None: a tenth of the training images, at least one.
        classes: names of the K classes; None: the numbers from 0 to the largest in the masks.
        protocol: one of `SEGMENTATION`.
        iterations: of a protocol of earlier versions; must be None.
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
    probe = DenseProbe(SEGMENTATION, protocol, tokens, (train, val, test), iterations, seed, device, memory_bytes)

    def mask_of(image: int) -> NDArray[np.int64]:
        mask = pixels_of_image(masks, image, "mask", "iub", "integers")
        if classes is not None and mask.max() >= len(classes):
            raise InputError(
                f"the mask of image {image} has the label {mask.max()}; expected labels below {len(classes)}, the "
                "number of classes, and negative numbers for no label"
            )
        return np.asarray(np.maximum(mask.astype(np.int64), -1))

    names = np.array(list(_numbered(mask_of, probe) if classes is None else classes))
    labels = np.stack([probe.features[0].labels(mask_of(image), ignore=-1) for image in probe.learned.tolist()])
    fitted, present, notes = probe.fit_tokens(labels, names, "one label")
    counts = PixelCounts(len(probe.test), len(names))
    number_of = np.append(present, -1)  # the last is for pixels outside the crop
    for number, (image, scores) in enumerate(scores_of_images(probe.features, fitted.scores, probe.test)):
        truth = mask_of(image)
        predicted = number_of[predicted_mask(probe.features[0], scores, (truth.shape[1], truth.shape[0]))]
        counts.add(number, truth, predicted)
        if on_prediction is not None:
            on_prediction(image, predicted)
    if not counts.truth.any():
        raise InputError("the masks of the test images have no labels inside the crop")
    untrained = np.setdiff1d(np.flatnonzero(counts.truth.any(0)), present)
    if len(untrained):
        missing = ", ".join(names[untrained[:5]].tolist())
        notes.append(f"the training images do not show the class {missing}: its pixels count as wrong")
    model = None if fitted.model is None else replace(fitted.model, classes_=names[present])
    return probe.result(
        "segmentation", names, segmentation_metrics(counts, seed), fitted, notes, model=model,
        per_class=counts.by_class(), per_image=counts.by_image(), confusion=counts.confusion,
    )  # fmt: skip


def _numbered(mask_of: Callable[[int], NDArray[np.int64]], probe: DenseProbe) -> list[str]:
    """Return the numbers from 0 to the largest label as names of classes."""
    largest = max(int(mask_of(image).max()) for image in [*probe.learned.tolist(), *probe.test.tolist()])
    if largest >= MOST_IN_A_TABLE:
        raise InputError(
            f"the masks have the label {largest:,}; expected classes from 0 to {MOST_IN_A_TABLE - 1}",
            hint="numbers of objects are not classes; if they are classes, name them with `classes`",
        )
    return [str(number) for number in range(largest + 1)]


class PixelCounts:
    """Numbers of pixels of test images by class; pixels without a label do not count.

    Args:
        images: N.
        n_classes: K.

    Attributes:
        right: (N, K) pixels of each class that are predicted correctly.
        truth: (N, K) pixels of each class.
        predicted: (N, K) pixels that are predicted as each class.
        confusion: (K, K) pixels of class i that are predicted as class j, of all images; None for more than 1,000
            classes.
    """

    def __init__(self, images: int, n_classes: int):
        self.right = np.zeros((images, n_classes), np.int64)
        self.truth, self.predicted = np.zeros_like(self.right), np.zeros_like(self.right)
        self.confusion = None if n_classes > MOST_IN_A_TABLE else np.zeros((n_classes, n_classes), np.int64)

    def add(self, image: int, truth: NDArray[np.int64], predicted: NDArray[np.int64]) -> None:
        """Count pixels of an image: arrays of the same shape; pixels that are negative in either do not count."""
        k, counted = self.right.shape[1], (truth >= 0) & (predicted >= 0)
        truth, predicted = truth[counted], predicted[counted]
        self.right[image] += np.bincount(truth[truth == predicted], minlength=k)
        self.truth[image] += np.bincount(truth, minlength=k)
        self.predicted[image] += np.bincount(predicted, minlength=k)
        if self.confusion is not None:
            self.confusion += np.bincount(truth * k + predicted, minlength=k * k).reshape(k, k)

    def by_class(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """Return (K,) columns: n, number of pixels; iou and accuracy, NaN for classes without pixels."""
        sums = (self.right.sum(0), self.truth.sum(0), self.predicted.sum(0))
        return {"n": sums[1], "iou": _iou(*sums), "accuracy": _share(sums[0], sums[1])}

    def by_image(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """Return (N,) columns: n, pixels with a label; pixel_accuracy, mIoU; NaN for images without such pixels."""
        n = self.truth.sum(1)
        return {
            "n": n,
            "pixel_accuracy": _share(self.right.sum(1), n),
            "mIoU": _mean(_iou(self.right, self.truth, self.predicted)),
        }


def segmentation_metrics(counts: PixelCounts, seed: int) -> dict[str, Estimate]:
    """Compute mIoU, pixel_accuracy and mean_accuracy over the pixels of all images.

    The intersection over union of a class (Everingham et al. 2010) is that of its pixels in all images; mIoU is the
    mean over classes that are in the truth or predicted, and mean_accuracy the mean share of correct pixels over
    classes in the truth, both as in MMSegmentation.

    Args:
        counts: pixels of the test images.
        seed: seed of the resampling of images for intervals.
    """

    def compute(images: NDArray[np.int64] | slice) -> dict[str, float]:
        right, truth, predicted = (part[images].sum(0) for part in (counts.right, counts.truth, counts.predicted))
        return {
            "mIoU": float(_mean(_iou(right, truth, predicted))),
            "pixel_accuracy": float(_share(right.sum(), truth.sum())),
            "mean_accuracy": float(_mean(_share(right, truth))),
        }

    return resampled(compute, len(counts.truth), seed, _FEW_IMAGES, "images")


def _iou(right: NDArray[np.int64], truth: NDArray[np.int64], predicted: NDArray[np.int64]) -> NDArray[np.float64]:
    return _share(right, truth + predicted - right)


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0))


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the last axis, without NaN."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    sums = np.where(known, values, 0).sum(-1)
    return np.asarray(np.divide(sums, count, out=np.full(count.shape, np.nan), where=count > 0))
