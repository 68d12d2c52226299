"""Running statistics of activations and gradients: a few numbers for each channel, without storing activations.

    statistics = Statistics()
    for activation in batches:                             # (B, C, H, W)
        statistics.add(summarise(activation, [2, 3]))
    statistics.mean, statistics.std, statistics.quantile(0.99), statistics.dead

`summarise` runs in a hook, on the device of the activation. `Statistics` accumulates the results in float64.

Every number is exact up to rounding (relative error at most 1e-5, for any float32 values), except quantiles: they come
from a histogram whose bins are the values of bfloat16, so they are accurate to 1/128 of their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.errors import InputError

__all__ = ["Statistics", "Summary", "are_constant", "effective_number", "norm_of", "summarise"]

# Counting by the upper half of the bits takes a nanosecond a value, and needs no range beforehand; zeros, signs and
# infinities have separate bins.
_BINS = 1 << 16  # values of the upper half of float32's 32 bits: sign, exponent, 7 bits of the fraction
_AT_ONCE = 1 << 20  # values, few enough that several passes find them in the cache
# Outside this range, squares of float32 values overflow, underflow or lose precision.
_LARGE = 1e15
_SMALL = 1e-15
# A channel whose range is at most _CONSTANT times the _USUAL quantile of the channels' stds is constant up to rounding.
_CONSTANT = 1e-6
_USUAL = 0.75
# A value is saturated if it is this near to a bound of a function such as the sigmoid, as a share of the range.
_NEAR_A_BOUND = 0.01


# Numbers of one batch for `Statistics`, as tensors on the CPU, which `Taps` can keep:
#   count: (B, C) number of finite values.
#   mean, m2: (B, C) mean of the finite values, and sum of squared deviations from it; 0 without finite values.
#   low, high: (B, C) smallest and largest finite value; infinity and minus infinity without finite values.
#   near_a_bound: (B, C) number of saturated values.
#   nan, infinite: (B,) number of such values.
#   bins: (65536,) counts, by the upper half of the bits of each value in float32.
Summary = Mapping[str, Tensor]
_COLUMNS = ("count", "mean", "m2", "low", "high", "near_a_bound", "nan", "infinite")


def summarise(values: Tensor, positions: Sequence[int], bounds: tuple[float, float] | None = None) -> dict[str, Tensor]:
    """Summarise one batch on its device.

    Args:
        values: (B, ...) floating point, images on axis 0, at most one axis of channels.
        positions: the axes that are neither images nor channels.
        bounds: bounds of the function that computed the values; None: unbounded.

    Raises:
        InputError: `values` have another dtype or other axes.
    """
    channels = [axis for axis in range(1, values.ndim) if axis not in positions]
    if values.ndim < 1 or len(channels) > 1 or not values.is_floating_point():
        raise InputError(
            f"{values.dtype} of shape {tuple(values.shape)}, positions {list(positions)}: expected floating-point "
            "values with images on axis 0 and at most one channel axis"
        )
    values = values.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    parts, bins = [], np.zeros(_BINS, np.int64)
    for chunk in torch.split(values, max(1, _AT_ONCE // max(1, values[:1].numel()))):
        by_channel = chunk.movedim(channels[0], 1) if channels else chunk[:, None]
        parts.append(_moments(by_channel.flatten(2) if positions else by_channel[..., None], bounds))
        bins += _histogram(chunk)
    columns = dict(zip(_COLUMNS, map(np.concatenate, zip(*parts, strict=True)), strict=True)) | {"bins": bins}
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def _moments(values: Tensor, bounds: tuple[float, float] | None) -> tuple[NDArray[Any], ...]:
    """Compute the columns `_COLUMNS` of values (B, C, positions)."""
    if not values.numel():
        empty, none = np.zeros(values.shape[:2]), np.zeros(len(values), np.int64)
        count_of_none = empty.astype(np.int64)
        return count_of_none, empty, empty, empty + np.inf, empty - np.inf, count_of_none, none, none
    near_a_bound = torch.zeros(values.shape[:2])
    if bounds is not None:
        margin = _NEAR_A_BOUND * (bounds[1] - bounds[0])
        near_a_bound = ((values <= bounds[0] + margin) | (values >= bounds[1] - margin)).sum(2)
    low, high = values.amin(2), values.amax(2)
    count = torch.full(low.shape, values.shape[2], device=values.device)
    nan, infinite, finite = torch.zeros(len(values)), torch.zeros(len(values)), None
    size = torch.maximum(low.abs(), high.abs()).amax(1)  # NaN if a value is
    if not bool(((size == 0) | ((size > _SMALL) & (size < _LARGE))).all()):
        values = values.cpu().double()  # mps has no double precision
        nan, infinite, finite = values.isnan().sum((1, 2)), values.isinf().sum((1, 2)), values.isfinite()
        low, high = values.where(finite, torch.inf).amin(2), values.where(finite, -torch.inf).amax(2)
        count, values = finite.sum(2), values.where(finite, 0.0)
    at_least_one = count.clamp(min=1)
    rough_mean = values.sum(2) / at_least_one
    deviations = values - rough_mean[..., None]
    if finite is not None:
        deviations = deviations.where(finite, 0.0)
    # The mean is rounded; its error is removed from the sums.
    mean, first, second, low, high = (
        column.cpu().double() for column in (rough_mean, deviations.sum(2), deviations.square_().sum(2), low, high)
    )
    count, at_least_one = count.cpu(), at_least_one.cpu()
    mean, m2 = mean + first / at_least_one, (second - first**2 / at_least_one).clamp(min=0)
    columns = (count, mean, m2, low, high, *(column.long().cpu() for column in (near_a_bound, nan, infinite)))
    return tuple(column.numpy() for column in columns)


def norm_of(values: Tensor) -> dict[str, Tensor]:
    """Return the L2 norm of the finite values, and the number of others: for tensors too large for `summarise`."""
    values = values.coalesce().values() if values.is_sparse else values
    norm = torch.linalg.vector_norm(values.float() if values.element_size() < 4 else values)
    not_finite = torch.zeros((), dtype=torch.int64)
    if not _SMALL < float(norm) < _LARGE:
        wide = values.cpu().double()  # mps has no double precision
        finite = wide.isfinite()
        norm, not_finite = wide.where(finite, 0.0).norm(), (~finite).sum()
    return {"norm": norm, "not_finite": not_finite}


def _histogram(values: Tensor) -> NDArray[np.int64]:
    """Count the values by their upper 16 bits in float32."""
    # The order of values does not matter; the order in memory needs no copy.
    order = sorted(range(values.ndim), key=values.stride, reverse=True)
    flat = values.permute(order).reshape(-1).float()
    counts = torch.bincount((flat.view(torch.int32) >> 16) + _BINS // 2, minlength=_BINS).cpu().numpy()
    return np.roll(counts, _BINS // 2)  # the shift is arithmetic: negative numbers come first


def are_constant(
    low: NDArray[Any], high: NDArray[Any], stds: NDArray[Any], within: float = _CONSTANT
) -> NDArray[np.bool_]:
    """Return whether each channel (C,) has one value up to rounding, as seen from the others.

    Args:
        low: (C,) smallest value.
        high: (C,) largest value.
        stds: (C,) standard deviation.
        within: largest range, as a share of the upper quartile of the standard deviations.
    """
    # Not the standard deviation of all values: one channel may be far larger than the others.
    usual = np.quantile(stds[np.isfinite(stds)], _USUAL) if np.isfinite(stds).any() else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        constant: NDArray[np.bool_] = high - low <= within * usual
    return constant


def effective_number(amounts: NDArray[Any]) -> float:
    """Return the exponential of the entropy of amounts (K,): the number of those above 0 if these are equal."""
    shares = amounts[amounts > 0] / amounts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


@dataclass
class Statistics:
    """Statistics of one layer's activations or gradients over all images added.

    Only finite values count, except for `nan` and `infinite`.

    Attributes:
        images: number of images added.
        count: (C,) number of values of each channel.
        channel_mean, m2: (C,) mean of each channel, and sum of squared deviations from it.
        low, high: (C,) smallest and largest value.
        near_a_bound: (C,) number of saturated values.
        nan, infinite: number of such values.
        not_finite_images: positions of the first images with values that are not finite, at most 100.
        bins: (65536,) histogram, by the upper half of the bits of each value in float32.
    """

    images: int = 0
    count: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    channel_mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    m2: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    low: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    high: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    near_a_bound: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    nan: int = 0
    infinite: int = 0
    not_finite_images: list[int] = field(default_factory=list)
    bins: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def add(self, summary: Summary, first_image: int | None = None) -> None:
        """Add one batch.

        Args:
            summary: summary of the batch.
            first_image: position of the batch's first image among all images; None: after the images added so far.

        Raises:
            InputError: the number of channels differs from that of earlier batches.
        """
        n_images, n_channels = summary["count"].shape
        count, mean, m2, low, high, near_a_bound, nan, infinite = (summary[name].numpy() for name in _COLUMNS)
        if self.images and n_channels != self.channels:
            raise InputError(f"the batch has {n_channels} channels; earlier batches have {self.channels}")
        low, high, near_a_bound = low.min(0, initial=np.inf), high.max(0, initial=-np.inf), near_a_bound.sum(0)
        with np.errstate(over="ignore", invalid="ignore"):
            moments = _combined(count, mean, m2)
            if self.images:
                earlier = (self.count, self.channel_mean, self.m2)
                moments = _combined(*(np.stack(pair) for pair in zip(earlier, moments, strict=True)))
                low, high = np.minimum(self.low, low), np.maximum(self.high, high)
                near_a_bound = self.near_a_bound + near_a_bound
        self.count, self.channel_mean, self.m2 = moments
        self.low, self.high, self.near_a_bound = low, high, near_a_bound
        start = self.images if first_image is None else first_image
        broken = np.flatnonzero(nan + infinite)[:_REMEMBERED]
        self.not_finite_images = sorted([*self.not_finite_images, *(start + broken).tolist()])[:_REMEMBERED]
        self.images += n_images
        self.nan += int(nan.sum())
        self.infinite += int(infinite.sum())
        self.bins = self.bins + summary["bins"].numpy()

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.count)

    @property
    def total(self) -> int:
        """Number of finite values in all channels."""
        return int(self.count.sum())

    @property
    def mean(self) -> float:
        """Mean of all values; NaN without values, like all scalars below."""
        return float(self._all()[1])

    @property
    def std(self) -> float:
        """Population standard deviation of all values."""
        count, _, m2 = self._all()
        return float(np.sqrt(m2 / count)) if count else np.nan

    @property
    def channel_std(self) -> NDArray[np.float64]:
        """Population standard deviation (C,) of each channel."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)

    @property
    def rms(self) -> float:
        """Root mean square: the norm of an image's values divided by the square root of their number."""
        return float(np.hypot(self.mean, self.std))

    @property
    def min(self) -> float:
        """Smallest value."""
        return float(self.low.min()) if self.total else np.nan

    @property
    def max(self) -> float:
        """Largest value."""
        return float(self.high.max()) if self.total else np.nan

    @property
    def zeros(self) -> float:
        """Share of values that are zero, or below 1e-40 in size."""
        return float(self.bins[0] + self.bins[_BINS // 2]) / self.total if self.total else np.nan

    @property
    def saturated(self) -> NDArray[np.float64]:
        """Share (C,) of each channel's values that are near a bound of the layer's function."""
        return self.near_a_bound / np.maximum(self.count, 1)

    @property
    def dead(self) -> NDArray[np.int64]:
        """Channels with a single value at all positions of all images; after a ReLU, they were never active."""
        return self.constant(_CONSTANT)

    def constant(self, within: float) -> NDArray[np.int64]:
        """Return the channels whose range is at most `within` times the upper quartile of the channels' stds."""
        return np.flatnonzero(are_constant(self.low, self.high, self.channel_std, within) & (self.count > 0))

    def quantile(self, part: float) -> float:
        """Return a quantile of all values, accurate to 1/128 of its size.

        Args:
            part: share of the values below the quantile, from 0 to 1.
        """
        edges, counts = _EDGES, self.bins[_ASCENDING]
        below = np.cumsum(counts)
        if not below[-1]:
            return np.nan
        rank = part * (below[-1] - 1)
        at = int(np.searchsorted(below, rank, side="right"))
        start = below[at - 1] if at else 0
        inside = (rank - start + 0.5) / counts[at]
        value = edges[at] + inside * (edges[at + 1] - edges[at])
        return float(np.clip(value, self.min, self.max))

    def histogram(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Count the values between neighbouring edges; the count of a bin cut by an edge is divided proportionally."""
        below = np.concatenate([[0], np.cumsum(self.bins[_ASCENDING])])
        return np.diff(np.interp(edges, _EDGES, below))

    def _all(self) -> tuple[Any, Any, Any]:
        if not self.total:
            return 0, np.nan, np.nan
        with np.errstate(over="ignore", invalid="ignore"):
            return _combined(self.count, self.channel_mean, self.m2)


_REMEMBERED = 100  # positions of images with values that are not finite


def _ascending() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the bins of finite values in ascending order, and their edges.

    The two bins of zero, +0 and -0, are a single point between the smallest negative and the smallest positive bin.
    """
    exponent_255 = 255 << 7
    positive = np.arange(exponent_255, dtype=np.int64)
    starts = (positive.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    ends = np.append(starts[1:], 2.0**128)
    bins = np.concatenate([positive[::-1] + _BINS // 2, positive])
    # The innermost bins hold zeros, and values so small that they count as zero: the bins have no width.
    edges = np.concatenate([-ends[:0:-1], [0.0, 0.0, 0.0], ends[1:]])
    return bins, edges


_ASCENDING, _EDGES = _ascending()


def _combined(count: NDArray[Any], mean: NDArray[Any], m2: NDArray[Any]) -> tuple[Any, Any, Any]:
    """Combine count, mean and M2 of the groups of values along axis 0 (Chan, Golub, LeVeque 1979)."""
    total = count.sum(0)
    middle = (mean * (count / np.maximum(total, 1))).sum(0)
    return total, middle, m2.sum(0) + (count * (mean - middle) ** 2).sum(0)
