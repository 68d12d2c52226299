"""Responses to images: means over repeated presentations (trials), and how well any model could predict them.

Two noise ceilings come from trials:

- Split half: the trials of each image are halved at random. The correlation r of the means of halves over images is
  corrected to k r / (1 + (k - 1) r), with k the ratio of the mean of 1/n over halves to that over images, 2 for even
  numbers (Spearman 1910; Brown 1910), and averaged over splits.
- Allen et al. 2022, "Noise ceiling estimation": the variance of noise is that of the trials of an image, averaged over
  images; the variance of signal is that of all trials minus it, at least 0. Their ratio, as standard deviations, is
  `ncsnr`. The ceiling of R^2 is ncsnr^2 / (ncsnr^2 + 1/n), with the mean of 1/n over images of n trials.

Both are ceilings of R^2; that of r is the root.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError

__all__ = ["Responses", "known_mean"]

Floats = NDArray[np.float64]

_SPLITS = 10  # of trials into halves
_LARGEST = 1e100  # target: sums of squares must be finite


class Responses:
    """Targets of N images, read some at a time.

    Args:
        source: (P, T) array, memory map or HDF5 data set of numbers; NaN: a trial that was not measured.
        images: (P,) number of the image of each trial; -1: none.
        names: (T,) names of the targets; None: their numbers from 0.

    Raises:
        InputError: the array is not of shape (P, T) with T above 0, has no real numbers, or no trial has an image.
    """

    def __init__(self, source: Any, images: NDArray[np.int64], names: list[str] | None = None):
        shape, kind = tuple(getattr(source, "shape", ())), getattr(source, "dtype", np.dtype(object))
        if len(shape) != 2 or not shape[1] or kind.kind not in "fiub":
            raise InputError(f"the targets are {kind} of shape {shape}; expected numbers, (images or trials, targets)")
        if not (images >= 0).any():
            raise InputError("no row of targets has an image")
        self._source, self._names, self.n_targets = source, names, int(shape[1])
        self._rows = np.argsort(images, kind="stable")[int((images < 0).sum()) :]
        self.images, self._image = np.unique(images[self._rows], return_inverse=True)
        self.n_trials = len(self._rows)

    def read(self, chosen: slice) -> tuple[Floats, Floats]:
        """Return the trials (P', T') of some targets, image by image, and their means (N, T').

        Raises:
            InputError: a value is infinite or above 1e100, or an image has no trial in which a target was measured.
        """
        trials = np.asarray(self._source[:, chosen])[self._rows].astype(np.float64)
        means = _means(trials, self._image)
        if len(wrong := np.argwhere(~(np.abs(means) <= _LARGEST))):
            image, column = wrong[0].tolist()
            row, target = self._rows[np.searchsorted(self._image, image)], chosen.start + column
            hint = "leave out the image or the target; of several subjects, give each a file of its own images"
            found = f"target {self._names[target] if self._names else target} is {means[image, column]}"
            expected = f"expected a number, up to {_LARGEST}, in one trial at least"
            raise InputError(f"{found} for the image of row {row}; {expected}", hint=hint)
        return trials, means

    def ceilings(self, chosen: slice, seed: int) -> Floats:
        """Return the noise ceilings (3, T') of some targets: that of R^2 by ncsnr, ncsnr, and that by split halves.

        They are NaN unless two images have two trials, and for constant targets. Split halves may be negative.
        """
        counts = np.bincount(self._image)
        if (counts > 1).sum() < 2:
            return np.full((3, chosen.stop - chosen.start), np.nan)
        trials, _ = self.read(chosen)
        generator = np.random.default_rng(seed)
        noise = np.mean(1 / _counts(trials, self._image), 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            halves = [self._split_half(trials, generator, noise) for _ in range(_SPLITS)]
            return np.stack([*self._by_ncsnr(trials), np.mean(halves, 0)])

    def _by_ncsnr(self, trials: Floats) -> tuple[Floats, Floats]:
        squares = _means((trials - _means(trials, self._image)[self._image]) ** 2, self._image)
        counts = _counts(trials, self._image)
        noise = known_mean(np.where(counts > 1, squares * counts / (counts - 1), np.nan))
        total = np.nanvar(trials, 0, ddof=1)
        signal = np.where(total > 0, np.maximum(total - noise, 0), np.nan)
        return signal / (signal + noise * np.mean(1 / counts, 0)), np.sqrt(signal / noise)

    def _split_half(self, trials: Floats, generator: np.random.Generator, noise: Floats) -> Floats:
        """Return the correlation (T',) of two random halves of the trials, corrected for the number of trials.

        Args:
            trials: (P, T').
            generator: of the halves.
            noise: (T',) mean of 1/n over images of n trials.
        """
        order = np.lexsort((generator.random(len(trials)), self._image))
        rank = np.arange(len(trials)) - np.searchsorted(self._image, self._image)
        # Of an odd number, the last one is left out: both halves are as reliable.
        paired = rank < np.bincount(self._image)[self._image] // 2 * 2
        sides = [paired & (rank % 2 == side) for side in (0, 1)]
        halves = np.stack([_means(trials[order[side]], self._image[side]) for side in sides])
        counts = np.stack([_counts(trials[order[side]], self._image[side]) for side in sides])
        halves[:, (unknown := np.isnan(halves).any(0))] = np.nan
        ratio = known_mean(np.where(unknown, np.nan, (1 / counts).mean(0))) / noise
        centred = np.nan_to_num(halves - np.stack([known_mean(half) for half in halves])[:, None])
        r = centred.prod(0).sum(0) / np.sqrt((centred**2).sum(1).prod(0))
        return np.asarray(ratio * r / (1 + (ratio - 1) * r))


def _counts(trials: Floats, image: NDArray[np.int64]) -> Floats:
    """Return the number (N, T) of known trials (P, T) of each image (P,), which ascends."""
    starts, known = np.flatnonzero(np.diff(image, prepend=-1)), ~np.isnan(trials)
    if known.all():
        return np.repeat(np.diff(starts, append=len(image)).astype(np.float64)[:, None], trials.shape[1], 1)
    return np.asarray(np.add.reduceat(known, starts, dtype=np.float64))


def _means(trials: Floats, image: NDArray[np.int64]) -> Floats:
    """Return the mean (N, T) of the known trials (P, T) of each image (P,), which ascends; NaN if there is none."""
    counts = _counts(trials, image)
    sums = np.add.reduceat(np.where(np.isnan(trials), 0, trials), np.flatnonzero(np.diff(image, prepend=-1)))
    return np.asarray(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))


def known_mean(values: Floats) -> Floats:
    """Return the mean (T,) of the known values of each column (n, T); NaN if there is none."""
    counts = (~np.isnan(values)).sum(0)
    return np.asarray(np.divide(np.nansum(values, 0), counts, out=np.full(len(counts), np.nan), where=counts > 0))
