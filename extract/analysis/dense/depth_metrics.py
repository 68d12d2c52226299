"""Metrics of predicted depths, with intervals for the random choice of test images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe import metrics
from extract.analysis.probe.intervals import Estimate, bootstrap

__all__ = ["DepthErrors", "depth_metrics"]

_FEW_IMAGES = 50  # as the rows of a regression
_WITHIN = 1.25  # ratio of predicted and true depth


class DepthErrors:
    """Errors of test images; pixels that are NaN in either map do not count.

    Args:
        images: N.

    Attributes:
        n: (N,) pixels that count.
        rmse: (N,) root of the mean squared error, in the unit of the depths.
        abs_rel: (N,) mean error as a share of the true depth.
        delta1: (N,) share of pixels whose depth is predicted within a factor of 1.25.
    """

    def __init__(self, images: int):
        self.n = np.zeros(images, np.int64)
        self.rmse, self.abs_rel, self.delta1 = (np.full(images, np.nan) for _ in range(3))

    def add(self, image: int, truth: NDArray[np.float32], predicted: NDArray[np.float32]) -> None:
        """Measure an image: arrays of the same shape with positive numbers."""
        known = ~(np.isnan(truth) | np.isnan(predicted))
        true, guess = truth[known].astype(np.float64), predicted[known].astype(np.float64)
        self.n[image] = len(true)
        if not len(true):
            return
        self.rmse[image] = np.sqrt(((guess - true) ** 2).mean())
        self.abs_rel[image] = (np.abs(guess - true) / true).mean()
        self.delta1[image] = (np.maximum(guess / true, true / guess) < _WITHIN).mean()

    def by_image(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """Return the columns n, rmse, abs_rel and delta1; NaN for images without pixels that count."""
        return {"n": self.n, "rmse": self.rmse, "abs_rel": self.abs_rel, "delta1": self.delta1}


def depth_metrics(errors: DepthErrors, seed: int) -> dict[str, Estimate]:
    """Compute delta1, rmse and abs_rel (Eigen et al. 2014): means over images, as in the evaluation of DINOv3.

    Args:
        errors: errors of the test images.
        seed: seed of the resampling of images for intervals.
    """
    known = np.flatnonzero(errors.n)
    columns = {name: errors.by_image()[name][known] for name in ("delta1", "rmse", "abs_rel")}

    def compute(images: NDArray[np.int64] | slice) -> dict[str, float]:
        return {name: float(values[images].mean()) for name, values in columns.items()}

    estimates = bootstrap(compute, len(known), seed, metrics.RESAMPLES)
    if len(known) >= _FEW_IMAGES:
        return estimates
    return {name: metrics.too_narrow(value, f"there are only {len(known)} images") for name, value in estimates.items()}
