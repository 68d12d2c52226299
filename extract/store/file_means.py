"""Means of the rows of each file, for rows that are parts of files: of the tiles of a slide, the frames of a video."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FileMeans", "file_means"]


class FileMeans(NamedTuple):
    """Means of a feature over the rows of each file.

    Attributes:
        files: (F,) paths, in the order of their first rows.
        means: (F, *shape) float64; NaN for a file without rows with status ok.
        n_rows: (F,) int64, rows of each file with status ok.
    """

    files: list[str]
    means: NDArray[np.float64]
    n_rows: NDArray[np.int64]


def file_means(
    files: Iterable[str], batches: Iterable[tuple[NDArray[Any], NDArray[np.int64]]], shape: Sequence[int]
) -> FileMeans:
    """Return the means of files.

    Args:
        files: file of each row.
        batches: (features (B, *shape), rows (B,)) of the rows to take the means of.
        shape: shape of a feature.
    """
    number: dict[str, int] = {}
    file_of_row = np.fromiter((number.setdefault(file, len(number)) for file in files), np.int64)
    sums, n_rows = np.zeros((len(number), *shape)), np.zeros(len(number), np.int64)
    for features, rows in batches:
        order = np.argsort(file_of_row[rows], kind="stable")
        found, starts, counts = np.unique(file_of_row[rows][order], return_index=True, return_counts=True)
        sums[found] += np.add.reduceat(features[order], starts, axis=0, dtype=np.float64)
        n_rows[found] += counts
    with np.errstate(invalid="ignore"):
        sums /= n_rows.reshape(-1, *[1] * len(shape))  # 0 / 0 is NaN
    return FileMeans(list(number), sums, n_rows)
