"""Similarity of feature rows, and agreement of features computed in two ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FULL_PRECISION", "Agreement", "agreement", "cosines", "deviations", "refusal"]

FULL_PRECISION = 1e-5  # largest deviation of compiled float32 code, relative to the largest value


def cosines(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """Return the (R,) cosines of pairs of flattened rows. Equal rows have cosine 1, even if both are zero.

    Args:
        rows: (R, *shape).
        others: (R, *shape).
    """
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (rows, others))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("rd,rd->r", a, b)
    cosines: NDArray[np.float64] = np.divide(dots, lengths, out=np.zeros_like(dots), where=~(lengths <= 0))
    cosines[(a == b).all(1)] = 1.0
    return cosines


def deviations(rows: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """Return the (R,) largest differences of rows, relative to the largest expected value (absolute if that is 0).

    Args:
        rows: (R, *shape), R at least 1.
        expected: (R, *shape), flattened or not. The result is NaN where a value of either is.
    """
    values, others = (values.reshape(len(values), -1).astype(np.float64) for values in (rows, expected))
    largest = np.abs(others).max(1, initial=0)
    with np.errstate(invalid="ignore"):  # from infinite values
        apart: NDArray[np.float64] = np.abs(values - others).max(1, initial=0) / np.where(largest == 0, 1, largest)
    return apart


@dataclass(frozen=True)
class Agreement:
    """Agreement of a feature with its reference; not finite if the feature is not finite where the reference is.

    Attributes:
        min_cosine: smallest cosine between an image's feature and its reference.
        max_deviation: largest difference, relative to the largest value of the reference.
    """

    min_cosine: float
    max_deviation: float


def agreement(computed: Mapping[str, NDArray[Any]], plain: Mapping[str, NDArray[Any]]) -> dict[str, Agreement]:
    """Compare features with reference features of the same images. Rows with a non-finite reference are ignored."""
    agreements = {}
    for name, values in plain.items():
        cosine, apart, largest = 1.0, 0.0, 0.0
        for expected, other in zip(values, computed[name], strict=True):  # row by row, since maps are large
            if np.isfinite(expected).all():
                cosine = float(np.minimum(cosine, cosines(other[None], expected[None])[0]))
                apart = float(np.maximum(apart, np.abs(other.astype(np.float64) - expected).max(initial=0)))
                largest = max(largest, float(np.abs(expected).max(initial=0)))
        agreements[name] = Agreement(cosine, apart / largest if largest else apart)
    return agreements


def refusal(
    agreements: Mapping[str, Agreement], min_cosine: float | None, reference: str = "eager float32"
) -> str | None:
    """Return why features do not agree with the reference; None if they do.

    Args:
        agreements: feature -> its agreement.
        min_cosine: lowest accepted cosine, for other pixels or lower precision; None accepts only rounding
            differences, up to `FULL_PRECISION`.
        reference: what they were compared with.
    """
    for name, values in agreements.items():
        if min_cosine is None and not values.max_deviation <= FULL_PRECISION:
            return (
                f"{name} is off by {values.max_deviation:.1e} of the largest value; "
                f"at most {FULL_PRECISION:.0e} is rounding"
            )
        if min_cosine is not None and not values.min_cosine >= min_cosine:
            return f"{name} has a cosine of {values.min_cosine:.6f} to {reference}; at least {min_cosine} is required"
    return None
