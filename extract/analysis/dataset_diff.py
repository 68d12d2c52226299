"""Compare two data sets: the settings that their numbers depend on, and the features of shared images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.compute.agreement import cosines, deviation
from extract.row_status import Status
from extract.store.format.dataset import DataSet, changes
from extract.store.format.shard import BLOCK_BYTES
from extract.store.reader import FeatureReader

__all__ = ["Comparison", "Similarity", "compare", "shared_images"]


@dataclass(frozen=True)
class Similarity:
    """Cosine similarity of the features of shared images; 1 means the same direction.

    Attributes:
        least, median: over the images.
        path: path of the image with the least cosine, in the first data set.
        deviation: largest difference between two values, relative to the first data set's largest value in the same
            block of rows.
    """

    least: float
    median: float
    path: str
    deviation: float


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two data sets.

    Attributes:
        changes: (dotted key, first value, second value) for each entry of `depends_on` that differs.
        same: number of images with features in both data sets, matched by the hash of their bytes.
        only: number of images with features only in the first data set, and only in the second.
        features: name -> similarity, or the reason why it cannot be computed.
    """

    changes: list[tuple[str, Any, Any]]
    same: int
    only: tuple[int, int]
    features: dict[str, Similarity | str]


def compare(first: Path, second: Path) -> Comparison:
    """Compare two data sets. Images match if their bytes are equal, regardless of their names.

    Args:
        first: folder of the first data set, which may be incomplete.
        second: folder of the second data set, which may be incomplete.

    Raises:
        InputError: a folder is not a data set.
        LayertapError: a data set cannot be read.
    """
    found = changes(DataSet.open(first).depends_on, DataSet.open(second).depends_on)
    with FeatureReader(first, partial=True) as one, FeatureReader(second, partial=True) as other:
        mine, theirs = shared_images(one, other)
        features: dict[str, Similarity | str] = {}
        for name in dict.fromkeys([*one.layers, *other.layers]):
            if name not in one.layers or name not in other.layers:
                features[name] = f"only in {first if name in one.layers else second}"
            elif one[name].shape[1:] != other[name].shape[1:]:
                features[name] = f"different shapes, {one[name].shape[1:]} and {other[name].shape[1:]}"
            elif not len(mine):
                features[name] = "no shared images"
            else:
                features[name] = _similarity(one, other, name, mine, theirs)
        only = len(_images(one)[1]) - len(mine), len(_images(other)[1]) - len(theirs)
        return Comparison(found, len(mine), only, features)


def shared_images(one: FeatureReader, other: FeatureReader) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows (M,) of each data set that have features of the same images, in the order of the first."""
    (hashes, rows), (other_hashes, other_rows) = _images(one), _images(other)
    _, mine, theirs = np.intersect1d(hashes, other_hashes, assume_unique=True, return_indices=True)
    order = np.argsort(rows[mine])
    return rows[mine][order], other_rows[theirs][order]


def _images(reader: FeatureReader) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct hashes of images with features, and the first row of each."""
    good = np.flatnonzero(reader.status == Status.OK)
    hashes = np.ascontiguousarray(reader.column("source_hash")[good]).view("V16").reshape(-1)
    unique, rows = np.unique(hashes, return_index=True)
    return unique, good[rows]


def _similarity(
    one: FeatureReader, other: FeatureReader, name: str, mine: NDArray[np.int64], theirs: NDArray[np.int64]
) -> Similarity:
    found, largest = np.empty(len(mine)), 0.0
    step = max(1, BLOCK_BYTES // (16 * max(1, int(np.prod(one[name].shape[1:])))))
    for start in range(0, len(mine), step):
        here = slice(start, start + step)
        a, b = one[name][mine[here]], other[name][theirs[here]]
        found[here] = cosines(a, b)
        largest = max(largest, deviation(b, a))
    least = int(found.argmin())
    return Similarity(float(found[least]), float(np.median(found)), one.paths[int(mine[least])], largest)
