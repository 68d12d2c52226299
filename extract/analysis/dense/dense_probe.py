"""What all dense probes have in common: the protocols, checked arguments, a classifier of tokens, and the result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.memory import free_bytes
from extract.analysis.probe.metrics import Estimate
from extract.analysis.probe.probing import ProbeResult, probe_device
from extract.analysis.probe.protocols import PROTOCOLS, Fitted, Labelled, Scorer, Settings
from extract.errors import InputError, unknown_name
from extract.store.tokens.token_array import TokenArray

__all__ = ["DEPTH", "SEGMENTATION", "DenseProbe", "pixels_of_image", "scores_of_images", "with_validation"]

_MOST_TOKENS = 500_000  # that a classifier is fitted on
_IMAGES = 64  # scored at once


@dataclass(frozen=True)
class DenseProtocol:
    """How the pixels of pictures are predicted from tokens.

    Attributes:
        of_tokens: the protocol of `extract.analysis.probe` that predicts single tokens.
        scaling: scaling of the tokens.
        about: short description.
    """

    of_tokens: str
    scaling: str
    about: str


# A classifier of tokens, whose scores are upsampled to pixels, gave the mean IoU of DINOv3's head, which is trained on
# upsampled scores, within 0.3 points in a fortieth of its time. Depth is classified too: it is not linear in the tokens
# (see `depth`).
SEGMENTATION = {
    "segmentation": DenseProtocol(
        "clip", "standardise", "logistic regression of tokens, 96 lambdas searched from coarse to fine"
    ),
    "segmentation-knn": DenseProtocol("knn", "l2", "10, 20, 100 or 200 nearest tokens by cosine, temperature 0.07"),
}
DEPTH = {
    "depth": DenseProtocol(
        "clip", "standardise", "logistic regression of tokens to 16 bins of depth, and the mean of the bins"
    ),
}


class DenseProbe:
    """Checked arguments of a probe.

    Args:
        protocols: the protocols of the task.
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

    Raises:
        InputError: see `segmentation_probe`.
        UnknownNameError: there is no such protocol.
    """

    def __init__(
        self,
        protocols: Mapping[str, DenseProtocol],
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
        self._settings = Settings(
            "classification", np.array([]), self._definition.scaling, False, seed, probe_device(device),
            free_bytes() // 2 if memory_bytes is None else memory_bytes,
        )  # fmt: skip

    def with_validation(self) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
        """Return what the function of this name does for the images of this probe."""
        return with_validation(self.train, self.val, self._settings.seed)

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
        train, val, chosen_on = self.with_validation()
        chosen, settings = np.flatnonzero(labels >= 0), self._settings
        count = f"{len(chosen):,} of {labels.size:,} tokens of the training images"
        notes = [f"{count} have {what} for half of their pixels"]
        numbers, of_tokens = _token_numbers(self.learned, labels.shape[1])[chosen], labels.reshape(-1)[chosen]
        if len(numbers) > _MOST_TOKENS:
            notes.append(f"{_MOST_TOKENS:,} of them are drawn, with seed {settings.seed}")
            drawn = np.sort(np.random.default_rng(settings.seed).permutation(len(numbers))[:_MOST_TOKENS])
            numbers, of_tokens = numbers[drawn], of_tokens[drawn]
        held_out = np.isin(numbers // labels.shape[1], val)
        present = np.unique(of_tokens[~held_out])
        if len(present) < 2:
            raise InputError(
                f"classes among the tokens of {len(train)} training images: {len(present)}; expected at least two",
                hint="check the values in the files; a token has a class if half of its pixels have",
            )
        for_choice = held_out & np.isin(of_tokens, present)
        if not for_choice.any():
            raise InputError("no token of the images for choosing the strength has a label that training tokens have")
        train_tokens, val_tokens = (
            Labelled(self._rows(numbers[some]), np.searchsorted(present, of_tokens[some]))
            for some in (~held_out, for_choice)
        )
        fit = PROTOCOLS[self._definition.of_tokens].fit
        assert fit is not None
        fitted = fit(train_tokens, val_tokens, replace(settings, classes=classes[present]))
        return replace(fitted, chosen_on=chosen_on), present, notes

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
    train: NDArray[np.int64], val: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return the images to fit on, the images for choosing, and what these are, in words: `val`, or a tenth of `train`.

    Raises:
        InputError: a single training image leaves none for choosing.
    """
    if len(val):
        return train, val, "validation images"
    if len(train) < 2:
        raise InputError("a single training image leaves none for choosing the strength; expected at least two")
    count = max(1, len(train) // 10)
    order = np.random.default_rng(seed).permutation(train)
    return np.sort(order[count:]), np.sort(order[:count]), "a tenth of the training images"


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
        values, _ = scores(FeatureRows.of(features, _token_numbers(some, per_image)))
        of_images = torch.from_numpy(values).float().reshape(len(some), *grid, -1).permute(0, 3, 1, 2)
        yield from zip(some.tolist(), of_images, strict=True)
