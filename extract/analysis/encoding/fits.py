"""Ridge regression and partial least squares (PLS) of many targets, in nested folds.

Each fold is predicted once, by weights that are fitted on the other folds. The strength of a target is chosen on these
other folds: each of them is predicted from the rest, and the strength of the least mean squared error, averaged over
them, is taken, as in `RidgeCV` of himalaya (Dupre la Tour et al. 2022). Means and scales come from fitted rows alone.

The products X^T X of each fold are summed once. Those of any training set are sums of them, so that one decomposition
serves all strengths and targets, and the set without the folds i and j serves both the choice for i and that for j.

Columns are scaled to a mean variance of 1 in each band: strengths mean the same in all layers. Banded ridge multiplies
the bands by the roots of weights, drawn from a Dirichlet distribution, and chooses a draw along with the strength.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.analysis.encoding.responses import Floats
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.errors import InputError
from extract.system.optional_libraries import library

__all__ = ["Fit", "RidgeFolds", "band_draws", "fit_pls"]

# Predictions (N, T), each row by the fit without its fold; and (F, T): the mean squared error on the other folds, on
# which strength and draw were chosen; the chosen strength; and the number of the chosen draw of band weights.
Fit = tuple[NDArray[Any], ...]
Weights = tuple[float, ...] | None  # of bands

_NEGLIGIBLE = 1e-12  # of the largest eigenvalue: the rest is rounding
_ITERATIONS = 5000  # of the power method of PLS, which settles late where two components explain the same
_ROUNDING = 1e-6  # of the largest component: features are float32
_SETTLED = 1e-10  # squared change of a unit vector


class _Training(NamedTuple):
    """Decomposed products of centred and scaled rows: (x - mean) @ vectors are the rows along K eigenvectors."""

    size: float  # number of rows
    mean: Tensor  # (D,)
    values: Tensor  # (K,) above 0
    vectors: Tensor  # (D, K), times the scales of columns


class RidgeFolds:
    """Products of the columns of each fold, from one pass over the rows, and ridge regression with them.

    Args:
        rows: (N, D) finite numbers, in bands side by side.
        bands: number of columns of each band, and of values that it was computed from, if it was rotated.
        folds: (N,) fold of each row, 0 to F - 1.
        block_bytes: of rows read at once.
        device: device to compute on.
    """

    def __init__(
        self, rows: FeatureRows, bands: Sequence[tuple[int, int]], folds: NDArray[np.int64], block_bytes: int,
        device: torch.device,
    ):  # fmt: skip
        self._rows, self._block_bytes, self._device = rows, block_bytes, device
        self._folds, self._all = torch.from_numpy(folds), range(int(folds.max()) + 1)
        self._products = self.products(None)
        decomposed = functools.partial(_decomposed, self._products, bands)
        # All training sets are kept, with one draw of weights.
        self._training = functools.lru_cache(len(self._all) * (len(self._all) + 1) // 2)(decomposed)

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (fold, row numbers, rows (n, 1 + D) after a column of ones) of each fold in each block."""
        for start, block in self._rows.blocks(self._block_bytes):
            folds = self._folds[start : start + len(block)]
            for fold in np.unique(folds).tolist():
                at = torch.nonzero(folds == fold)[:, 0]
                values = torch.from_numpy(block)[at].to(self._device).double()
                yield fold, (start + at).to(self._device), torch.nn.functional.pad(values, (1, 0), value=1.0)

    def products(self, y: Tensor | None) -> Tensor:
        """Return the products (F, 1 + D, T) of ones and columns with targets (N, T); None: with ones and columns."""
        width = 1 + self._rows.width
        shape = len(self._all), width, width if y is None else y.shape[1]
        total = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for fold, at, rows in self._parts():
            total[fold] += rows.T @ (rows if y is None else y[at])
        return total

    def fit(self, targets: Floats, strengths: Sequence[float], draws: Sequence[Weights]) -> Fit:
        """Choose a strength, and a draw of band weights, for each target and fold; predict each fold without it.

        Args:
            targets: (N, T).
            strengths: strengths to choose from.
            draws: weights of the bands to choose from; empty: 1 for each.
        """
        y = torch.from_numpy(targets).to(self._device)
        middle, spread = y.mean(0), y.std(0, correction=0)
        spread[spread == 0] = 1
        y = (y - middle) / spread  # errors are computed in float32
        products, in_order = self.products(y), torch.tensor(strengths, dtype=torch.float64, device=self._device)
        best = torch.full_like(products[:, 0], torch.inf)
        chosen, drawn = torch.full_like(best, strengths[0]), torch.zeros_like(best, dtype=torch.int64)
        fitted = torch.zeros_like(products)
        for number, weights in enumerate(draws or [None]):
            errors, places = self._errors(y, products, strengths, weights).min(1)
            better = errors < best
            best[better], chosen[better], drawn[better] = errors[better], in_order[places[better]], number
            for fold, at in enumerate(better):
                fitted[fold, :, at] = self.weights(fold, products[:, :, at], chosen[fold, at], weights)
        predictions = torch.empty_like(y)
        for fold, at, rows in self._parts():
            predictions[at] = rows @ fitted[fold]
        return tuple(each.cpu().numpy() for each in (predictions * spread + middle, best * spread**2, chosen, drawn))

    def _errors(self, y: Tensor, products: Tensor, strengths: Sequence[float], weights: Weights) -> Tensor:
        """Return the mean squared error (F, S, T) of each strength on the folds that are not left out, averaged."""
        pairs = {pair: self._along(pair, weights, products) for pair in combinations(self._all, 2)}
        errors = torch.zeros(len(self._all), len(strengths), y.shape[1], dtype=torch.float64, device=self._device)
        for fold, at, rows in self._parts():
            for outer in set(self._all) - {fold}:
                training, along, mean = pairs[min(fold, outer), max(fold, outer)]
                turned, centred = (rows[:, 1:] - training.mean).float() @ training.vectors, (y[at] - mean).float()
                for number, strength in enumerate(strengths):
                    missed = torch.addmm(centred, turned, along / (training.values[:, None] + strength), alpha=-1)
                    errors[outer, number] += missed.square_().sum(0) / self._products[fold, 0, 0]
        return errors / (len(self._all) - 1)

    def weights(self, fold: int, products: Tensor, strengths: Tensor, weights: Weights) -> Tensor:
        """Return the biases and weights (1 + D, T) that predict a fold, with a strength for each target."""
        training, along, mean = self._along((fold,), weights, products)
        fitted = training.vectors @ (along / (training.values[:, None] + strengths))
        return torch.cat([(mean - training.mean @ fitted)[None], fitted])

    def _along(self, without: tuple[int, ...], weights: Weights, products: Tensor) -> tuple[_Training, Tensor, Tensor]:
        """Return a training set, the products (K, T) of its rows along eigenvectors with targets, and their means."""
        training = self._training(without, weights)
        total = _rest(products, without)
        along = (total[1:] - torch.outer(training.mean, total[0])).to(training.vectors.dtype)
        return training, training.vectors.T @ along, total[0] / training.size


def _rest(products: Tensor, without: tuple[int, ...]) -> Tensor:
    return sum((each for fold, each in enumerate(products) if fold not in without), torch.zeros_like(products[0]))


def _decomposed(
    products: Tensor, bands: Sequence[tuple[int, int]], without: tuple[int, ...], weights: Weights
) -> _Training:
    total = _rest(products, without)
    size, mean = float(total[0, 0]), total[0, 1:] / total[0, 0]  # no view, which would keep `total`
    centred = total[1:, 1:] - size * torch.outer(mean, mean)
    scale = _scale(centred.diagonal() / size, bands, weights)
    values, vectors = torch.linalg.eigh(centred * scale * scale[:, None])
    varying = values > max(_NEGLIGIBLE * float(values.max()), 0)
    # Those of two folds predict for the choice alone.
    kind = torch.float64 if len(without) == 1 else torch.float32
    return _Training(size, mean, values[varying].to(kind), (scale[:, None] * vectors[:, varying]).to(kind))


def _scale(variances: Tensor, bands: Sequence[tuple[int, int]], weights: Weights) -> Tensor:
    """Return the factor (D,) of each column: a mean variance of 1 in each band, times the root of its weight."""
    columns, widths = zip(*bands, strict=True)
    sums = [float(each.sum()) for each in variances.split_with_sizes(columns)]
    factors = [math.sqrt(weight * width / total) if total > 0 else 0.0
               for total, width, weight in zip(sums, widths, weights or (1.0,) * len(bands), strict=True)]  # fmt: skip
    return torch.from_numpy(np.repeat(factors, columns)).to(variances)


def band_draws(n_bands: int, count: int, seed: int) -> list[tuple[float, ...]]:
    """Draw weights of bands, each draw with the sum 1: equal ones first, then each band alone, then at random.

    As in the random search of himalaya, the concentrations of the Dirichlet distribution are 0.1 and 1 in turn.
    """
    generator = np.random.default_rng(seed)
    random = [generator.dirichlet([(0.1, 1.0)[i % 2]] * n_bands) for i in range(count)]
    return [tuple(each.tolist()) for each in (np.full(n_bands, 1 / n_bands), *np.eye(n_bands), *random)]


def fit_pls(
    rows: FeatureRows, bands: Sequence[tuple[int, int]], targets: Floats, folds: NDArray[np.int64],
    n_components: int, choose: bool,
) -> Fit:  # fmt: skip
    """Predict each fold by a PLS model of the other folds, that of Brain-Score (Schrimpf et al. 2018).

    Args:
        rows: (N, D), read into memory.
        bands: see `RidgeFolds`; they are scaled as there.
        targets: (N, T); components depend on all of them.
        folds: (N,) fold of each row, 0 to F - 1.
        n_components: number of components.
        choose: whether to compute `validation` as for ridge, which fits a model for each pair of folds; else it is NaN.

    Raises:
        InputError: there are more components than columns or training rows, or than axes along which these vary.
        LayertapError: scikit-learn is not installed.
    """
    regression = library("sklearn.cross_decomposition", "sklearn", "PLS").PLSRegression
    x, n_folds = rows.array().astype(np.float64), int(folds.max()) + 1
    predictions, validation = np.empty_like(targets), np.full((n_folds, targets.shape[1]), 0.0 if choose else np.nan)
    for without in [each for size in (1, 2)[: 1 + choose] for each in combinations(range(n_folds), size)]:
        fitted = ~np.isin(folds, without)
        if n_components > (most := min(int(fitted.sum()), x.shape[1])):
            found = f"{fitted.sum():,} training images of {x.shape[1]:,} values have at most {most:,}"
            hint = "use ridge (--fit ridge), a wider layer, or more images"
            raise InputError(f"PLS of {n_components} components: {found}", hint=hint)
        scale = _scale(torch.from_numpy(x[fitted].var(0)), bands, None).numpy()
        model = regression(n_components, scale=False, tol=_SETTLED, max_iter=_ITERATIONS)
        lengths = np.zeros(1)
        with contextlib.suppress(ValueError), np.errstate(invalid="ignore"):  # NaN of a component without variance
            lengths = np.linalg.norm(model.fit(x[fitted] * scale, targets[fitted]).x_scores_, axis=0)
        # Rounding would be amplified. After the last component that the targets need, they are 0.
        if not hasattr(model, "x_scores_") or ((lengths > 0) & (lengths < _ROUNDING * lengths.max())).any():
            found = f"PLS of {n_components} components: {fitted.sum():,} training images vary along fewer axes"
            raise InputError(found, hint="use ridge (--fit ridge), or leave out layers that hardly vary")
        for fold in without:
            predicted = model.predict(x[folds == fold] * scale).reshape(-1, targets.shape[1])
            if len(without) == 1:
                predictions[folds == fold] = predicted
            else:
                errors = ((predicted - targets[folds == fold]) ** 2).mean(0)
                validation[sum(without) - fold] += errors / (n_folds - 1)
    return predictions, validation, np.full(validation.shape, np.nan), np.zeros(validation.shape, np.int64)
