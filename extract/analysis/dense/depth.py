"""Predict depths of the pixels of pictures from stored tokens: `depth_probe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extract.analysis.dense.dense_probe import DEPTH, DenseProbe, pixels_of_image, scores_of_images
from extract.analysis.dense.upsampling import DepthBins, cell_means
from extract.analysis.probe.metrics import Estimate, resampled
from extract.analysis.probe.probing import ProbeResult
from extract.analysis.probe.protocols import Fitted
from extract.errors import InputError
from extract.store.tokens.token_array import TokenArray

__all__ = ["DepthMaps", "depth_probe"]

_FEW_IMAGES = 50  # as the rows of a regression
_WITHIN = 1.25  # ratio of predicted and true depth
# Of an image: number of pixels, root of the mean squared error in the unit of the depths, mean error as a share of the
# true depth, and share of pixels whose depth is predicted within a factor of 1.25.
_COLUMNS = ("n", "rmse", "abs_rel", "delta1")
# Of 500 pictures with built depths (78,400 tokens for training, blocks.4 of the bundled backbone): RMSE 1.33 m by ridge
# regression; 1.14, 1.10 and 1.06 m by 8, 16 and 32 bins in 3, 6 and 20 s; 1.10 m by DINOv3's head after 2,000 batches.
_BINS = 16


class DepthMaps(Protocol):
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
        "depth", np.array(["depth"]), _metrics(errors[errors[:, 0] > 0], seed), fitted, notes, model=model,
        per_image=by_image,
    )  # fmt: skip


def _fit_tokens(
    probe: DenseProbe, depth_of: Callable[[int], NDArray[np.float32]], largest: float
) -> tuple[Fitted, DepthBins, list[str]]:
    """Fit a classifier of tokens; return it, its bins, and notes."""
    train, _, _ = probe.with_validation()
    means = np.stack([cell_means(probe.features[0], depth_of(image)) for image in probe.learned.tolist()])
    known, of_train = ~np.isnan(means), np.isin(probe.learned, train)
    if not known[of_train].any():
        raise InputError("no token of the training images has a known depth for half of its pixels")
    edges = np.linspace(means[known].min(), means[known].max(), _BINS + 1)[1:-1]
    bins = np.where(known, np.searchsorted(edges, means), -1)
    fitted, present, notes = probe.fit_tokens(bins, np.arange(_BINS).astype(str), "a known depth")
    centres = np.array([means[(bins == number) & of_train[:, None]].mean() for number in present.tolist()], np.float32)
    return fitted, DepthBins(centres, "softmax", largest), notes


def _errors(truth: NDArray[np.float32], predicted: NDArray[np.float32]) -> tuple[float, ...]:
    """Return the errors of an image, see `_COLUMNS`; pixels that are NaN in either map do not count."""
    counted = ~(np.isnan(truth) | np.isnan(predicted))
    true, guess = truth[counted].astype(np.float64), predicted[counted].astype(np.float64)
    if not len(true):
        return 0, np.nan, np.nan, np.nan
    delta1 = (np.maximum(guess / true, true / guess) < _WITHIN).mean()
    return len(true), np.sqrt(((guess - true) ** 2).mean()), (np.abs(guess - true) / true).mean(), delta1


def _metrics(errors: NDArray[np.float64], seed: int) -> dict[str, Estimate]:
    """Compute delta1, rmse and abs_rel (Eigen et al. 2014): means over images, as in the evaluation of DINOv3.

    Args:
        errors: (N, 4) errors of the test images with pixels that count, see `_COLUMNS`.
        seed: seed of the resampling of images for intervals.
    """

    def compute(images: NDArray[np.int64] | slice) -> dict[str, float]:
        return {name: float(columns[name][images].mean()) for name in ("delta1", "rmse", "abs_rel")}

    columns = dict(zip(_COLUMNS, np.ascontiguousarray(errors.T), strict=True))
    return resampled(compute, len(errors), seed, _FEW_IMAGES, "images")
