"""Predict classes or depths of the pixels of pictures from stored tokens: `segmentation_probe`, `depth_probe`."""

from __future__ import annotations

import math
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from extract.analysis.probe.feature_matrix import FeatureRows, Labelled
from extract.analysis.probe.metrics import Estimate, resampled
from extract.analysis.probe.probing import MOST_IN_A_TABLE, ProbeResult, probe_resources
from extract.analysis.probe.protocols import Fitted, Protocol, Scorer, Settings, clip, knn
from extract.errors import InputError, unknown_name
from extract.store.tokens.token_array import TokenArray

__all__ = ["DEPTH", "SEGMENTATION", "depth_probe", "segmentation_probe"]

_MOST_TOKENS = 500_000  # that a classifier is fitted on
_IMAGES = 64  # scored at once


# A classifier of tokens, whose scores are upsampled to pixels, gave the mean IoU of DINOv3's head, which is trained on
# upsampled scores, within 0.3 points in a fortieth of its time. Depth is classified too: it is not linear in the tokens
# (see `depth`).
SEGMENTATION = {
    "segmentation": Protocol(
        clip, "logistic regression of tokens, 96 lambdas searched from coarse to fine", ("segmentation",), "standardise"
    ),
    "segmentation-knn": Protocol(
        knn, "10, 20, 100 or 200 nearest tokens by cosine, temperature 0.07", ("segmentation",), "l2"
    ),
}
DEPTH = {
    "depth": Protocol(
        clip, "logistic regression of tokens to 16 bins of depth, and the mean of the bins", ("depth",), "standardise"
    ),
}


class DenseProbe:
    """Checked arguments of a probe.

    Args:
        protocols: the protocols of the task, which classify tokens.
        protocol: name of one of them.
        tokens: tokens of a feature, or of several to concatenate.
        sets: numbers of the training, validation and test images.
        iterations: of protocols of earlier versions; must be None.
        seed: seed of all random choices.
        device: "auto", "cpu", "cuda", ...
        memory_bytes: limit for tokens and variables held at once; None: half of the free memory.

    Attributes:
        features: tokens of the concatenated features.
        train: numbers of the training images, ascending; likewise `val` and `test`.
        learned: numbers of the training and validation images.
        fitted: numbers of the images that the classifier is fitted on.
        left_out: numbers of the images that its strength is chosen on.

    Raises:
        InputError: see `segmentation_probe`.
        UnknownNameError: there is no such protocol.
    """

    def __init__(
        self,
        protocols: Mapping[str, Protocol],
        protocol: str,
        tokens: TokenArray | Sequence[TokenArray],
        sets: tuple[ArrayLike, ArrayLike | None, ArrayLike],
        iterations: int | None,
        seed: int,
        device: str,
        memory_bytes: int | None,
    ):
        self._started = time.perf_counter()
        if protocol not in protocols:
            raise unknown_name("protocol", protocol, protocols)
        if iterations is not None:
            raise InputError(f"iterations={iterations}: no protocol is trained in iterations", hint="leave it out")
        self._protocol, self._definition = protocol, protocols[protocol]
        self.features = [tokens] if isinstance(tokens, TokenArray) else list(tokens)
        _check_same_grid(self.features)
        self.train, self.val, self.test = _image_sets(len(self.features[0].rows), *sets)
        self.learned = np.union1d(self.train, self.val)
        self.fitted, self.left_out, self._chosen_on = with_validation(self.train, self.val, seed)
        self._settings = Settings(
            "classification", np.array([]), self._definition.scaling, False, seed,
            *probe_resources(device, memory_bytes),
        )  # fmt: skip

    def fit_tokens(
        self, labels: NDArray[np.int64], classes: NDArray[Any], what: str
    ) -> tuple[Fitted, NDArray[np.int64], list[str]]:
        """Fit a classifier of tokens by the protocol.

        Args:
            labels: (N, per_image) numbers of classes of the `learned` images; -1 for tokens that are not used.
            classes: names of all classes.
            what: what a token that is used has, in words.

        Returns:
            the classifier, the numbers of its classes, and notes.

        Raises:
            InputError: the training tokens have fewer than two classes, or those for choosing have none of them.
        """
        chosen, settings = np.flatnonzero(labels >= 0), self._settings
        count = f"{len(chosen):,} of {labels.size:,} tokens of the training images"
        notes = [f"{count} have {what} for half of their pixels"]
        numbers, of_tokens = _token_numbers(self.learned, labels.shape[1])[chosen], labels.reshape(-1)[chosen]
        if len(numbers) > _MOST_TOKENS:
            notes.append(f"{_MOST_TOKENS:,} of them are drawn, with seed {settings.seed}")
            drawn = np.sort(np.random.default_rng(settings.seed).permutation(len(numbers))[:_MOST_TOKENS])
            numbers, of_tokens = numbers[drawn], of_tokens[drawn]
        held_out = np.isin(numbers // labels.shape[1], self.left_out)
        present = np.unique(of_tokens[~held_out])
        if len(present) < 2:
            raise InputError(
                f"classes among the tokens of {len(self.fitted)} training images: {len(present)}; "
                "expected at least two",
                hint="check the values in the files; a token has a class if half of its pixels have",
            )
        for_choice = held_out & np.isin(of_tokens, present)
        if not for_choice.any():
            raise InputError("no token of the images for choosing the strength has a label that training tokens have")
        train_tokens, val_tokens = (
            Labelled(self._rows(numbers[some]), np.searchsorted(present, of_tokens[some]))
            for some in (~held_out, for_choice)
        )
        assert self._definition.fit is not None
        fitted = self._definition.fit(train_tokens, val_tokens, replace(settings, classes=classes[present]))
        return replace(fitted, chosen_on=self._chosen_on), present, notes

    def _rows(self, numbers: NDArray[np.int64]) -> FeatureRows:
        """Return tokens, in memory if they take a small part of the limit."""
        rows = FeatureRows.of(self.features, numbers)
        return rows.held() if rows.nbytes <= self._settings.memory_bytes // 4 else rows

    def result(
        self, task: str, classes: NDArray[Any], metrics: dict[str, Estimate], fitted: Fitted, notes: Sequence[str],
        **tables: Any,
    ) -> ProbeResult:  # fmt: skip
        """Return the result; `tables` are more of its attributes."""
        return ProbeResult(
            protocol=self._protocol,
            task=task,
            scaling=self._definition.scaling,
            metrics=metrics,
            classes=classes,
            n_train=len(self.learned),
            n_val=len(self.val),
            n_test=len(self.test),
            truth=np.empty(0),
            notes=[*notes, *fitted.notes],
            seconds=time.perf_counter() - self._started,
            **(fitted.choice | {"validation": math.nan}),  # on tokens, whose labels depend on the grid
            **tables,
        )


def with_validation(
    train: NDArray[np.int64], val: NDArray[np.int64], seed: int, groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return the images to fit on, the images for choosing, and what these are, in words: `val`, or a tenth of `train`.

    Args:
        train: numbers of training images, ascending.
        val: numbers of validation images.
        seed: seed of the draw of a tenth.
        groups: number of the group of each image; none is divided. None: each image is a group.

    Raises:
        InputError: a single training image, or group, leaves none for choosing.
    """
    if len(val):
        return train, val, "validation images"
    of_train = train if groups is None else groups[train]
    drawn = np.random.default_rng(seed).permutation(np.unique(of_train))
    if len(drawn) < 2:
        raise InputError("a single training image leaves none for choosing the strength; expected at least two")
    left_out = np.isin(of_train, drawn[: max(1, len(drawn) // 10)])
    return train[~left_out], train[left_out], "a tenth of the training images"


def _check_same_grid(features: Sequence[TokenArray]) -> None:
    """Check that features can be concatenated token by token."""
    if not features:
        raise InputError("there are no tokens; expected at least one feature")
    first = features[0]
    for other in features[1:]:
        if other.grid != first.grid or not np.array_equal(other.rows, first.rows):
            grids = " and ".join(f"{rows} x {columns} tokens" for rows, columns in (first.grid, other.grid))
            raise InputError(f"features with {grids} cannot be concatenated; expected the same grid and images")


def _image_sets(count: int, train: ArrayLike, val: ArrayLike | None, test: ArrayLike) -> tuple[NDArray[np.int64], ...]:
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
        raise InputError(
            f"the {what} of image {image} is an array of {pixels.dtype} with shape {pixels.shape}; expected {expected} "
            "(H, W)"
        )
    return pixels


def _token_numbers(images: NDArray[np.int64], per_image: int) -> NDArray[np.int64]:
    """Return the numbers of all tokens of some images."""
    return (images[:, None] * per_image + np.arange(per_image)).reshape(-1)


def scores_of_images(
    features: Sequence[TokenArray], scores: Scorer, images: NDArray[np.int64]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield for each image its number and the scores (K, h, w) of its tokens; several features are concatenated."""
    per_image, grid = features[0].per_image, features[0].grid
    for start in range(0, len(images), _IMAGES):
        some = images[start : start + _IMAGES]
        values = scores(FeatureRows.of(features, _token_numbers(some, per_image)))
        of_images = torch.from_numpy(values).float().reshape(len(some), *grid, -1).permute(0, 3, 1, 2)
        yield from zip(some.tolist(), of_images, strict=True)


T = TypeVar("T", bound="np.generic[Any]")

_BAND_VALUES = 1 << 24  # of upsampled scores held at once
_LARGEST = float(np.finfo(np.float32).max)


def _fill(pixels: NDArray[T], tokens: TokenArray, values: Tensor, of_band: Callable[[Tensor], Tensor]) -> NDArray[T]:
    """Fill in the pixels inside the crop from interpolated values, from top to bottom.

    Between the centres of cells, values are interpolated linearly along both axes; outside the outer centres, they are
    those of the nearest cells. For a picture in the size of the crop, this is
    `torch.nn.functional.interpolate(..., mode="bilinear", align_corners=False)`.

    Args:
        pixels: (height, width) of a picture, turned as in `TokenArray.boxes`.
        tokens: tokens of the picture's data set.
        values: (K, h, w) of the grid.
        of_band: function of interpolated values (K, rows, columns) that returns pixels (rows, columns).
    """
    height, width = pixels.shape
    left, top, right, bottom = tokens.window((width, height))
    columns, x = _axis(width, left, right)
    rows, y = _axis(height, top, bottom)
    start = rows.start
    for part in torch.split(y, max(1, _BAND_VALUES // max(1, len(values) * len(x)))):
        places = torch.stack(torch.meshgrid(x, part, indexing="xy"), -1)
        band = grid_sample(values[None], places[None], padding_mode="border", align_corners=False)[0]
        pixels[start : start + len(part), columns] = of_band(band).numpy()
        start += len(part)
    return pixels


def _axis(pixels: int, start: float, end: float) -> tuple[slice, Tensor]:
    """Return the pixels with their centres between `start` and `end`, and these centres on the scale from -1 to 1."""
    places = (np.arange(pixels) + 0.5 - start) / (end - start)
    inside = np.flatnonzero((places >= 0) & (places < 1))
    first = int(inside[0]) if len(inside) else 0
    return slice(first, first + len(inside)), torch.from_numpy((2 * places[inside] - 1).astype(np.float32))


def upsampled(tokens: TokenArray, values: Tensor, picture_px: tuple[int, int]) -> NDArray[np.float32]:
    """Return the interpolated values of a picture, NaN for pixels that the crop left out.

    Args:
        tokens: tokens of the picture's data set.
        values: (h, w), one value for each token of the picture.
        picture_px: (width, height), see `TokenArray.boxes`.

    Returns:
        (height, width).
    """
    return _fill(np.full(picture_px[::-1], np.nan, np.float32), tokens, values[None], lambda band: band[0])


def predicted_mask(tokens: TokenArray, scores: Tensor, picture_px: tuple[int, int]) -> NDArray[np.int64]:
    """Return for each pixel of a picture the class with the highest score.

    Args:
        tokens: tokens of the picture's data set.
        scores: (K, h, w) scores of the classes for the tokens of the picture.
        picture_px: (width, height), see `TokenArray.boxes`.

    Returns:
        (height, width) numbers from 0 to K - 1; -1 for pixels that the crop left out.
    """
    return _fill(np.full(picture_px[::-1], -1, np.int64), tokens, scores, lambda band: band.argmax(0))


def cell_means(tokens: TokenArray, pixels: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the mean of the known pixels of each cell; a pixel counts for the cell that has its centre.

    Args:
        tokens: tokens of the picture's data set.
        pixels: (H, W), NaN for unknown.

    Returns:
        (per_image,); NaN where less than half of the pixels are known.
    """
    height, width = pixels.shape
    left, top, right, bottom = tokens.window((width, height))
    rows = np.floor((np.arange(height) + 0.5 - top) / (bottom - top) * tokens.grid[0]).astype(np.int64)
    columns = np.floor((np.arange(width) + 0.5 - left) / (right - left) * tokens.grid[1]).astype(np.int64)
    inside = ((rows >= 0) & (rows < tokens.grid[0]))[:, None] & ((columns >= 0) & (columns < tokens.grid[1]))
    cells, values = (rows[:, None] * tokens.grid[1] + columns)[inside], pixels[inside].astype(np.float64)
    known = ~np.isnan(values)
    count, n_known = (np.bincount(some, minlength=tokens.per_image) for some in (cells, cells[known]))
    sums = np.bincount(cells[known], values[known], tokens.per_image)
    return _share(sums, np.where(2 * n_known >= count, n_known, 0))


@dataclass(frozen=True)
class DepthBins:
    """How scores of tokens give the depths of pixels.

    Attributes:
        depths: (bins,) float32, depth of each bin.
        largest: depth that is not exceeded.
    """

    depths: NDArray[np.float32]
    largest: float

    def predicted(self, tokens: TokenArray, scores: Tensor, picture_px: tuple[int, int]) -> NDArray[np.float32]:
        """Return the depths (height, width) of a picture, NaN for pixels that the crop left out.

        Args:
            tokens: tokens of the picture's data set.
            scores: (bins, h, w) scores of its tokens.
            picture_px: (width, height), see `TokenArray.boxes`.
        """
        weights = scores.softmax(0)
        of_cells = torch.einsum("khw,k->hw", weights / weights.sum(0), torch.from_numpy(self.depths))
        return upsampled(tokens, of_cells.clamp(max=self.largest), picture_px)

    def as_json(self) -> dict[str, Any]:
        """Return what a saved probe stores."""
        return {"depths": self.depths.tolist(), "weighting": "softmax", "largest": self.largest}

    @staticmethod
    def of_json(described: Any, bins: int) -> DepthBins:
        """Return the bins of a saved probe that gives scores of a number of bins.

        Raises:
            ValueError: it is not a description of so many bins.
        """
        depths = described.get("depths") if isinstance(described, dict) else None
        numbers = [described.get("largest"), *depths] if isinstance(depths, list) else []
        are_depths = all(isinstance(number, float) and 0 < number < _LARGEST for number in numbers)
        if not are_depths or len(numbers) != bins + 1 or described.get("weighting") != "softmax":
            raise ValueError(
                f"depth is {described!r}; expected the depths of {bins} bins, the weighting softmax, and the largest "
                "depth, above 0"
            )
        return DepthBins(np.array(numbers[1:], np.float32), numbers[0])


_FEW_IMAGES = 100  # below, the coverage of mIoU was less than 0.92 in simulations (docs/benchmarks.md)


class Masks(typing.Protocol):
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


def _share(part: NDArray[Any], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0))


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the last axis, without NaN."""
    return _share(np.nansum(values, -1), (~np.isnan(values)).sum(-1))


_FEW_DEPTH_MAPS = 50  # as the rows of a regression
_WITHIN = 1.25  # ratio of predicted and true depth
# Of an image: number of pixels, root of the mean squared error in the unit of the depths, mean error as a share of the
# true depth, and share of pixels whose depth is predicted within a factor of 1.25.
_COLUMNS = ("n", "rmse", "abs_rel", "delta1")
# Of 500 pictures with built depths (78,400 tokens for training, blocks.4 of the bundled backbone): RMSE 1.33 m by ridge
# regression; 1.14, 1.10 and 1.06 m by 8, 16 and 32 bins in 3, 6 and 20 s; 1.10 m by DINOv3's head after 2,000 batches.
_BINS = 16


class DepthMaps(typing.Protocol):
    """Depths of images, such as a list of arrays."""

    def __getitem__(self, image: int, /) -> NDArray[Any]:
        """Return (H, W) depths in any unit; 0, a negative number, NaN or infinity means unknown."""


def depth_probe(
    tokens: TokenArray | Sequence[TokenArray],
    depths: DepthMaps,
    train: ArrayLike,
    test: ArrayLike,
    *,
    val: ArrayLike | None = None,
    max_depth: float | None = None,
    protocol: str = "depth",
    iterations: int | None = None,
    seed: int = 0,
    device: str = "auto",
    memory_bytes: int | None = None,
    on_prediction: Callable[[int, NDArray[np.float32]], None] | None = None,
) -> ProbeResult:
    """Evaluate tokens by a simple regression that predicts the depth of each pixel.

        result = depth_probe(reader.tokens("blocks.11"), depths, train=range(150), test=range(150, 200), max_depth=10.0)
        result.metrics["rmse"], result.metrics["delta1"]

    Depths of tokens are upsampled bilinearly to the pixels of each depth map. Pixels that the crop left out, and those
    of unknown depth, do not count.

    The depths of tokens come from logistic regression to 16 bins, spread evenly over the mean depths of their cells:
    the mean of the bins, weighted by their probabilities. The strength is chosen on validation images, by the share of
    their tokens that are classified correctly.

    Args:
        tokens: tokens of a feature, or of several with the same grid, which are then concatenated.
        depths: depth map of each image, by its number in `tokens.rows`, with the aspect ratio of the picture.
        train: numbers of the training images.
        test: numbers of the test images.
        val: numbers of the images for choosing the strength; None: a tenth of the training images, at least one.
        max_depth: larger depths do not count, and are not predicted; None: the largest depth of the training and
            validation images is not exceeded by predictions.
        protocol: one of `DEPTH`.
        iterations: of a protocol of earlier versions; must be None.
        seed: seed of all random choices.
        device: "auto", "cpu", "cuda", ...
        memory_bytes: limit for tokens and variables held at once; None: half of the free memory.
        on_prediction: called for each test image with its number and the predicted depths (H, W) of the pixels of its
            depth map; NaN for those that the crop left out.

    Returns:
        the result; its numbers of rows are numbers of images, and the classes of its model are bins.

    Raises:
        InputError: an image is in two of the sets, grids or images differ, a depth map or all depths are missing, or a
            token has NaN.
        UnknownNameError: there is no such protocol.
    """
    if max_depth is not None and not 0 < max_depth < np.inf:
        raise InputError(f"max_depth={max_depth}; expected a positive number")
    probe = DenseProbe(DEPTH, protocol, tokens, (train, val, test), iterations, seed, device, memory_bytes)

    def depth_of(image: int) -> NDArray[np.float32]:
        """Return the depth map (H, W) with NaN for pixels that do not count."""
        depth = pixels_of_image(depths, image, "depth map", "iuf", "numbers").astype(np.float32)
        counts = (depth > 0) & (depth < np.inf) & (depth <= (np.inf if max_depth is None else max_depth))
        return np.asarray(np.where(counts, depth, np.float32(np.nan)))

    largest = max(float(np.nanmax(depth_of(image), initial=0.0)) for image in probe.learned.tolist())
    if not largest:
        raise InputError("no pixel of the training images has a known depth")
    largest = largest if max_depth is None else max_depth
    fitted, bins, notes = _fit_tokens(probe, depth_of, largest)
    errors = np.zeros((len(probe.test), len(_COLUMNS)))
    for number, (image, scores) in enumerate(scores_of_images(probe.features, fitted.scores, probe.test)):
        truth = depth_of(image)
        predicted = bins.predicted(probe.features[0], scores, (truth.shape[1], truth.shape[0]))
        errors[number] = _errors(truth, predicted)
        if on_prediction is not None:
            on_prediction(image, predicted)
    by_image = dict(zip(_COLUMNS, errors.T, strict=True)) | {"n": errors[:, 0].astype(np.int64)}
    if not by_image["n"].any():
        raise InputError("the test images have no known depth inside the crop")
    assert fitted.model is not None
    model = replace(fitted.model, about={"depth": bins.as_json()})
    return probe.result(
        "depth", np.array(["depth"]), _depth_metrics(errors[errors[:, 0] > 0], seed), fitted, notes, model=model,
        per_image=by_image,
    )  # fmt: skip


def _fit_tokens(
    probe: DenseProbe, depth_of: Callable[[int], NDArray[np.float32]], largest: float
) -> tuple[Fitted, DepthBins, list[str]]:
    """Fit a classifier of tokens; return it, its bins, and notes."""
    means = np.stack([cell_means(probe.features[0], depth_of(image)) for image in probe.learned.tolist()])
    known, of_train = ~np.isnan(means), np.isin(probe.learned, probe.fitted)
    if not known[of_train].any():
        raise InputError("no token of the training images has a known depth for half of its pixels")
    edges = np.linspace(means[known].min(), means[known].max(), _BINS + 1)[1:-1]
    bins = np.where(known, np.searchsorted(edges, means), -1)
    fitted, present, notes = probe.fit_tokens(bins, np.arange(_BINS).astype(str), "a known depth")
    centres = np.array([means[(bins == number) & of_train[:, None]].mean() for number in present.tolist()], np.float32)
    return fitted, DepthBins(centres, largest), notes


def _errors(truth: NDArray[np.float32], predicted: NDArray[np.float32]) -> tuple[float, ...]:
    """Return the errors of an image, see `_COLUMNS`; pixels that are NaN in either map do not count."""
    counted = ~(np.isnan(truth) | np.isnan(predicted))
    true, guess = truth[counted].astype(np.float64), predicted[counted].astype(np.float64)
    if not len(true):
        return 0, np.nan, np.nan, np.nan
    delta1 = (np.maximum(guess / true, true / guess) < _WITHIN).mean()
    return len(true), np.sqrt(((guess - true) ** 2).mean()), (np.abs(guess - true) / true).mean(), delta1


def _depth_metrics(errors: NDArray[np.float64], seed: int) -> dict[str, Estimate]:
    """Compute delta1, rmse and abs_rel (Eigen et al. 2014): means over images, as in the evaluation of DINOv3.

    Args:
        errors: (N, 4) errors of the test images with pixels that count, see `_COLUMNS`.
        seed: seed of the resampling of images for intervals.
    """

    def compute(images: NDArray[np.int64] | slice) -> dict[str, float]:
        return {name: float(columns[name][images].mean()) for name in ("delta1", "rmse", "abs_rel")}

    columns = dict(zip(_COLUMNS, np.ascontiguousarray(errors.T), strict=True))
    return resampled(compute, len(errors), seed, _FEW_DEPTH_MAPS, "images")
