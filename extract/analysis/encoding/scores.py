"""Scores of predictions in folds, their intervals by bootstrap over images, and tests by permutation.

A score is that of each fold, averaged over folds, as in `cross_val_score` of scikit-learn: differences
between the means of folds have no part in it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.analysis.encoding.responses import Floats

__all__ = ["q_values", "scores"]

_DEPENDENCE = 2**0.5  # of folds, see `_permuted`
_COLUMNS = 256  # targets drawn at once: their rows stay in the caches of the processor
_CONSTANT = 1e-12  # standard deviation, of the largest value


def scores(
    predictions: Floats, targets: Floats, folds: NDArray[np.int64], groups: NDArray[np.int64], draws: int, seed: int
) -> tuple[Floats, ...]:
    """Score predictions.

    The interval has percentiles over draws of groups of images in each fold, with replacement. Fits stay as they are,
    and rows of one fold are fitted for the others: in simulations, 87 to 93 % of intervals have the r of more images.

    Args:
        predictions: (N, T).
        targets: (N, T).
        folds: (N,) fold of each row.
        groups: (N,) group of each row; groups are drawn whole.
        draws: number of draws; 0: the interval and p are NaN.
        seed: seed of the draws.

    Returns:
        r (F, T) and R^2 (F, T) of each fold; low, high and p (T,) of their mean r. They are NaN for constant targets,
        and all but R^2 for constant predictions; low and high if a fold has one group, and p if each has.
    """
    order = np.lexsort((groups, folds))  # the groups of each fold one after the other
    predictions, targets, folds, groups = predictions[order], targets[order], folds[order], groups[order]
    starts = np.flatnonzero(np.diff(folds, prepend=-1))
    p, y = (np.concatenate([*map(_normed, np.split(each, starts[1:]))]) for each in (predictions, targets))
    r, errors = np.add.reduceat(p * y, starts), np.add.reduceat((predictions - targets) ** 2, starts)
    spread = np.stack([((known - known.mean(0)) ** 2).sum(0) for known in np.split(targets, starts[1:])])
    r2, bounds = 1 - errors / np.where(np.isnan(y[starts]), np.nan, spread), np.full((3, targets.shape[1]), np.nan)
    if draws:
        places = [np.unique(each, return_inverse=True)[1] for each in np.split(groups, starts[1:])]
        weights, orders = _weights(places, draws, seed), _orders(places, draws, seed)
        drawn_p, drawn_y = (torch.from_numpy(np.nan_to_num(each).astype(np.float32)) for each in (p, y))
        for start in range(0, targets.shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            some = drawn_p[:, columns].contiguous(), drawn_y[:, columns].contiguous()
            bounds[:2, columns], bounds[2, columns] = _interval(*some, weights), _permuted(*some, orders)
        bounds[:, np.isnan(r).all(0)] = np.nan
        n_groups = [place.max() + 1 for place in places]
        bounds[: 2 if min(n_groups) == 1 else 0] = np.nan  # without a draw, the fold would seem certain
        bounds[2:] = np.nan if max(n_groups) == 1 else bounds[2:]
    return r, r2, *bounds


def _normed(values: Floats) -> Floats:
    """Return columns (n, T) minus their means, of length 1; NaN for constant ones, up to rounding."""
    centred = values - values.mean(0)
    lengths = np.sqrt((centred**2).sum(0))
    lengths[lengths <= _CONSTANT * np.sqrt(len(values)) * np.abs(values).max(0)] = np.nan
    return np.asarray(centred / lengths)


def _weights(places: list[NDArray[np.int64]], draws: int, seed: int) -> list[Tensor]:
    """Draw groups with replacement: how often (draws, n) each row is drawn, for each fold.

    Args:
        places: number (n,) of the group in its fold of each row, for each fold.
        draws: number of draws.
        seed: seed of the draws.
    """
    generator, sizes = np.random.default_rng(seed), [int(place.max()) + 1 for place in places]
    drawn = [generator.multinomial(size, np.full(size, 1 / size), draws) for size in sizes]
    return [torch.from_numpy(each[:, place].astype(np.float32)) for each, place in zip(drawn, places, strict=True)]


def _orders(places: list[NDArray[np.int64]], draws: int, seed: int) -> list[Tensor]:
    """Draw orders (N,) of the rows, in which the groups of each fold are in random order; see `_weights`."""
    generator, count, orders = np.random.default_rng(seed), sum(map(len, places)), []
    for _ in range(draws):
        keys = [fold * count + generator.permutation(place.max() + 1)[place] for fold, place in enumerate(places)]
        order = np.argsort(np.concatenate(keys), kind="stable")
        orders.append(torch.from_numpy(order.astype(np.int32)))  # half the memory of int64
    return orders


def _interval(p: Tensor, y: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the 95 % interval (2, T) of r over draws; see `_permuted`."""
    sizes = [each.shape[1] for each in weights]
    parts = zip(p.split_with_sizes(sizes), y.split_with_sizes(sizes), weights, strict=True)
    r = torch.stack([_weighted_correlation(*part) for part in parts]).nanmean(0)
    return r.nanquantile(torch.tensor([0.025, 0.975]), 0)


def _weighted_correlation(p: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the correlation (draws, T) of columns p and y (n, T) with weights (draws, n) of the rows."""
    count = weights.sum(1, keepdim=True)
    mean_p, mean_y, pp, yy, py = (weights @ each / count for each in (p, y, p * p, y * y, p * y))
    spread = (pp - mean_p**2) * (yy - mean_y**2)
    return torch.where(spread > 1e-12 * pp * yy, (py - mean_p * mean_y) / spread.clamp(min=0).sqrt(), torch.nan)


def _permuted(p: Tensor, y: Tensor, orders: list[Tensor]) -> Tensor:
    """Return the p-value (T,) of r, one-sided: (1 + draws that reach it) / (1 + draws).

    A draw gives images the predictions of other images of their fold. Groups stay together: those of a fold are put one
    after the other in random order, and laid beside the same rows in their own order.

    Without an effect, the r of two folds are not independent: the product of their targets and features is part of
    both. For linear fits, the variance of their mean is up to twice that of independent ones, so drawn r are multiplied
    by the root of 2. On noise, 10 to 12 % of p-values are below 0.05 without this, and 2 to 5 % with it.

    Args:
        p: (N, T) predictions, fold by fold and group by group, normed in each fold; 0 if constant.
        y: (N, T) targets, as `p`.
        orders: (N,) each, drawn.
    """
    seen = (torch.einsum("nt,nt->t", p, y) - 1e-6) / _DEPENDENCE  # rounding of float32
    above = torch.zeros_like(seen)
    for order in orders:
        above += torch.einsum("nt,nt->t", p[order], y) >= seen
    return (1 + above.double()) / (1 + len(orders))


def q_values(p: Floats) -> Floats:
    """Return p-values (T,) corrected for the false discovery rate (Benjamini and Hochberg 1995); NaN stays NaN."""
    q = np.full(len(p), np.nan)
    order = np.argsort(-p)[: (~np.isnan(p)).sum()]  # NaN is last
    q[order] = np.minimum.accumulate(p[order] * len(order) / np.arange(len(order), 0, -1)).clip(max=1)
    return q
