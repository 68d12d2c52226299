"""How alike rows of features are, and whether features computed in two ways agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FULL_PRECISION", "Agreement", "agreement", "cosines", "deviation", "refusal"]

FULL_PRECISION = 1e-5  # of the largest value: how far compiled code in float32 may be off


def cosines(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """(R,) the cosine of each pair of rows, flattened; 1 for equal ones, also if they have no direction.

    Args:
        rows: (R, *shape).
        others: (R, *shape).
    """
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (rows, others))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("rd,rd->r", a, b)
    found: NDArray[np.float64] = np.divide(dots, lengths, out=np.zeros_like(dots), where=~(lengths <= 0))
    found[(a == b).all(1)] = 1.0
    return found


def deviation(values: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference, as a part of the largest value expected."""
    largest = float(np.abs(expected.astype(np.float64)).max(initial=0))
    apart = float(np.abs(values.astype(np.float64) - expected.astype(np.float64)).max(initial=0))
    return apart / largest if largest else apart


@dataclass(frozen=True)
class Agreement:
    """How a feature of some images, computed in another way, agrees with the plain one; NaN where it is not finite.

    Attributes:
        min_cosine: the least cosine of an image's two features.
        max_deviation: the largest difference, as a part of the largest value.
    """

    min_cosine: float
    max_deviation: float


def agreement(found: Mapping[str, NDArray[Any]], plain: Mapping[str, NDArray[Any]]) -> dict[str, Agreement]:
    """How features of the same images agree with the plain ones; rows that are not finite there have no say."""
    agreements = {}
    for name, values in plain.items():
        cosine, apart, largest = 1.0, 0.0, 0.0
        for expected, other in zip(values, found[name], strict=True):  # row by row, since maps are large
            if np.isfinite(expected).all():
                cosine = float(np.minimum(cosine, cosines(other[None], expected[None])[0]))
                apart = float(np.maximum(apart, np.abs(other.astype(np.float64) - expected).max(initial=0)))
                largest = max(largest, float(np.abs(expected).max(initial=0)))
        agreements[name] = Agreement(cosine, apart / largest if largest else apart)
    return agreements


def refusal(found: Mapping[str, Agreement], min_cosine: float | None) -> str:
    """Why features may not be taken for the plain ones; empty: they may.

    Args:
        found: feature -> how it agrees.
        min_cosine: of what is computed from other pixels or in lower precision; None: the same but for rounding.
    """
    for name, one in found.items():
        if min_cosine is None and not one.max_deviation <= FULL_PRECISION:
            apart = f"off by {one.max_deviation:.1e} of the largest value"
            return f"{name} is {apart}; at most {FULL_PRECISION:.0e} is rounding"
        if min_cosine is not None and not one.min_cosine >= min_cosine:
            return f"{name} has a cosine of {one.min_cosine:.6f} to eager float32; at least {min_cosine} is wanted"
    return ""
