"""How alike rows of features are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["cosines", "deviation"]


def cosines(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """(R,) the cosine of each pair of rows, flattened; 1 for equal ones, also if they have no direction.

    Args:
        rows: (R, *shape).
        others: (R, *shape).
    """
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (rows, others))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("rd,rd->r", a, b)
    found: NDArray[np.float64] = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
    found[(a == b).all(1)] = 1.0
    return found


def deviation(values: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference, as a part of the largest value expected."""
    largest = float(np.abs(expected.astype(np.float64)).max(initial=0))
    apart = float(np.abs(values.astype(np.float64) - expected.astype(np.float64)).max(initial=0))
    return apart / largest if largest else apart
