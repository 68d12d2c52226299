"""Similar images of a data set: copies, near-duplicates and neighbours; and outliers, which resemble no other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.nearest_rows import MEMORY_BYTES, Neighbours, nearest
from extract.store.reader import FeatureArray

__all__ = [
    "QUICK_PRODUCTS",
    "K",
    "SimilarImages",
    "copies",
    "image_numbers",
    "map_neighbours",
    "near_duplicate_cosine",
    "outlier_cosine",
    "similar_images",
]

K = 10  # neighbours per image
_FEWEST = 30  # nearest cosines from which a threshold of near-duplicates is computed
_MODIFIED_Z = 3.5  # of outliers (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993)
QUICK_PRODUCTS = 5e11  # multiplications of a search: about 15 s on two cores


@dataclass(frozen=True)
class SimilarImages:
    """Neighbours of images; byte-identical images count as a single image, and would fill all lists otherwise.

    Attributes:
        among: (M,) rows that were compared; of images with the same bytes, the first row.
        queries: (Q,) rows whose neighbours were searched, ascending: all of `among`, or a random subset.
        near: (Q, K) neighbours of the queries, without the queries themselves.
    """

    among: NDArray[np.int64]
    queries: NDArray[np.int64]
    near: Neighbours

    @property
    def nearest(self) -> NDArray[np.float64]:
        """Cosine of each query to its nearest neighbour; queries without neighbours are left out."""
        first = self.near.cosines[:, 0] if self.near.cosines.size else np.empty(0)
        return first[np.isfinite(first)]

    @property
    def farthest(self) -> NDArray[np.float64]:
        """(Q,) cosine of each query to its K-th neighbour; NaN if it has fewer."""
        full = self.near.cosines.shape[1] == K
        return self.near.cosines[:, -1] if full else np.full(len(self.queries), np.nan)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the pairs of queries and their neighbours, each once and the largest cosine first.

        Returns:
            (P, 2) rows, the smaller one first; and (P,) cosines.
        """
        rows = np.broadcast_to(self.queries[:, None], self.near.rows.shape)
        valid = self.near.rows >= 0
        both = np.sort(np.stack([rows[valid], self.near.rows[valid]], 1), 1)
        both, first = np.unique(both, axis=0, return_index=True)
        cosines = self.near.cosines[valid][first]
        order = np.argsort(-cosines, kind="stable")
        return both[order], cosines[order]


def near_duplicate_cosine(nearest: NDArray[np.float64]) -> float | None:
    """Return the cosine from which a nearest image is unusually near, or None if there are too few images to tell.

    How near unrelated images are depends on the backbone and on the data set: the median cosine of an image and its
    nearest is 0.97 for handwritten digits, 0.75 for CIFAR-10 and 0.4 for photos of 200 kinds. So the threshold is
    relative to the distribution of log(1 - cosine): pairs are near-duplicates if their modified z-score,
    (x - median) * 0.6745 / MAD, is below -3.5, and their distance 1 - cosine is at most half the median. A fixed cosine
    of 0.95 gave 8,838 pairs of digits, and none of CIFAR-10, which has copies of photographs at 0.86 to 0.93.

    Args:
        nearest: (N,) cosine of each image to its nearest image.
    """
    usual = _usual_distance(nearest)
    return None if usual is None else float(1 - np.exp(usual[0] - max(_MODIFIED_Z * usual[1], np.log(2))))


def outlier_cosine(farthest: NDArray[np.float64]) -> float | None:
    """Return the cosine to the K-th neighbour below which an image is like no other, or None for too few images.

    The rule is that of `near_duplicate_cosine` on the other side: the modified z-score of log(1 - cosine) is above 3.5.
    Images without any relation, such as one of each of 200 kinds, have no outliers. By the K-th neighbour
    (Ramaswamy, Rastogi and Shim 2000), up to K outliers that are like each other do not hide each other.

    Args:
        farthest: (N,) cosine of each image to its K-th neighbour; NaN if it has fewer.
    """
    usual = _usual_distance(farthest[np.isfinite(farthest)])
    return None if usual is None else float(1 - np.exp(usual[0] + _MODIFIED_Z * usual[1]))


def _usual_distance(cosines: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the median of log(1 - cosine), and its deviation: MAD / 0.6745; None for too few cosines."""
    if len(cosines) < _FEWEST:
        return None
    distances = np.log(np.maximum(1 - cosines, 1e-7))  # float32 cosines of equal directions differ from 1 by as much
    median = float(np.median(distances))
    return median, float(np.median(np.abs(distances - median))) / 0.6745


def similar_images(
    array: FeatureArray, hashes: NDArray[np.uint8], good: NDArray[np.int64], seed: int, max_products: float = math.inf
) -> SimilarImages:
    """Find the neighbours of all images, or of as many as the limit permits.

    Args:
        array: array of the feature.
        hashes: (N, 16) hashes of the images' bytes.
        good: rows with features, ascending.
        seed: seed of the choice of queries, if not all images can be queries.
        max_products: limit for the number of multiplications.
    """
    among = _first_of_each(hashes, good)
    width = max(1, int(np.prod(array.shape[1:])))
    count = int(min(len(among), max(1, max_products / max(1, len(among) * width))))
    queries = among
    if count < len(among):
        queries = np.sort(np.random.default_rng(seed).permutation(among)[:count])
    return SimilarImages(among, queries, _neighbours_of(array, queries, among))


def map_neighbours(array: FeatureArray, points: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the places (P, K) in `points`, ascending rows, of the neighbours of each among the others; -1: fewer.

    None is returned for rows so wide that this would take longer than `similar_images`.
    """
    width = max(1, int(np.prod(array.shape[1:])))
    if len(points) ** 2 * width > QUICK_PRODUCTS:
        return None
    rows = _neighbours_of(array, points, points).rows
    return np.where(rows >= 0, np.searchsorted(points, rows), -1)


def _neighbours_of(array: FeatureArray, queries: NDArray[np.int64], among: NDArray[np.int64], k: int = K) -> Neighbours:
    """Find the neighbours of rows of a feature among other rows; queries are read in blocks that fit into memory."""
    width = max(1, int(np.prod(array.shape[1:])))
    step = max(1, MEMORY_BYTES // (4 * 4 * width))
    parts = []
    for start in range(0, len(queries), step):
        block = queries[start : start + step]
        vectors = FeatureRows.of(array, block).between(0, len(block))
        parts.append(nearest(array, vectors, k, among=among, without=block))
    if not parts:
        return Neighbours(np.empty((0, k), np.int64), np.empty((0, k)))
    return Neighbours(np.concatenate([part.rows for part in parts]), np.concatenate([part.cosines for part in parts]))


def copies(hashes: NDArray[np.uint8], good: NDArray[np.int64]) -> list[list[int]]:
    """Return the rows of images with the same bytes: a list for each repeated image, longest first."""
    keys, hashed = _keys(hashes, good)
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1], [True]]))
    groups = [hashed[order[start:stop]].tolist() for start, stop in pairwise(edges) if stop - start > 1]
    return sorted(groups, key=lambda group: (-len(group), group))


def image_numbers(hashes: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number (N,) of the image of each row, from 0; rows with the same bytes have the same number."""
    numbers = np.arange(len(rows))
    for group in copies(hashes, rows):
        numbers[np.searchsorted(rows, group)] = np.searchsorted(rows, group[0])
    return np.unique(numbers, return_inverse=True)[1]


def _first_of_each(hashes: NDArray[np.uint8], good: NDArray[np.int64]) -> NDArray[np.int64]:
    keys, hashed = _keys(hashes, good)
    _, first = np.unique(keys, return_index=True)
    return np.sort(np.concatenate([hashed[first], np.setdiff1d(good, hashed)]))


def _keys(hashes: NDArray[np.uint8], good: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the hashes as sortable values, and the rows that have a hash."""
    hashed = good[hashes[good].any(1)]
    return np.ascontiguousarray(hashes[hashed]).view("V16").reshape(-1), hashed
