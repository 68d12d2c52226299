"""Similar images of a data set, for a report: copies, near-duplicates, outliers and neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.dataset_diff import shared_images
from extract.analysis.nearest_rows import MEMORY_BYTES, Neighbours, nearest, overlap
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.store.reader import FeatureArray, FeatureReader

__all__ = [
    "NEAR_DUPLICATE_COSINE",
    "K",
    "SimilarImages",
    "copies",
    "neighbours_of",
    "shared_neighbours",
    "similar_images",
]

K = 10  # neighbours per image
NEAR_DUPLICATE_COSINE = 0.95  # minimum cosine of near-duplicates
_PRODUCTS = 5e11  # multiplications of a search: about 15 s on two cores
_SHARED_ROWS = 2000  # images on which two data sets are compared, drawn at random


@dataclass(frozen=True)
class SimilarImages:
    """Neighbours of images; byte-identical images count as a single image.

    Attributes:
        among: (M,) rows that were compared; of images with the same bytes, the first row.
        queries: (Q,) rows whose neighbours were searched, ascending: all of `among`, or a random subset.
        near: (Q, K) neighbours of the queries, without the queries themselves.
    """

    among: NDArray[np.int64]
    queries: NDArray[np.int64]
    near: Neighbours

    @property
    def means(self) -> NDArray[np.float64]:
        """(Q,) mean cosine of each query to its neighbours; NaN if it has no neighbours."""
        count = np.isfinite(self.near.cosines).sum(1)
        total = np.nansum(self.near.cosines, 1)
        means: NDArray[np.float64] = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
        return means

    def pairs(self) -> list[tuple[int, int, float]]:
        """Return near-duplicates as (row, row, cosine): each pair once, largest cosine first."""
        cosines: dict[tuple[int, int], float] = {}
        for place, rank in np.argwhere(self.near.cosines >= NEAR_DUPLICATE_COSINE).tolist():
            row, other_row = int(self.queries[place]), int(self.near.rows[place, rank])
            cosines[min(row, other_row), max(row, other_row)] = float(self.near.cosines[place, rank])
        pairs = [(row, other_row, cosine) for (row, other_row), cosine in cosines.items()]
        return sorted(pairs, key=lambda pair: (-pair[2], pair))


def similar_images(array: FeatureArray, hashes: NDArray[np.uint8], good: NDArray[np.int64], seed: int) -> SimilarImages:
    """Find the neighbours of as many images as can be compared with all others in about 15 s on two cores.

    Args:
        array: array of the feature.
        hashes: (N, 16) hashes of the images' bytes.
        good: rows with features, ascending.
        seed: seed of the choice of queries, if not all images can be queries.
    """
    among = _first_of_each(hashes, good)
    width = max(1, int(np.prod(array.shape[1:])))
    max_queries = int(max(1, _PRODUCTS // max(1, len(among) * width)))
    queries = among
    if max_queries < len(among):
        queries = np.sort(np.random.default_rng(seed).permutation(among)[:max_queries])
    return SimilarImages(among, queries, neighbours_of(array, queries, among))


def neighbours_of(array: FeatureArray, queries: NDArray[np.int64], among: NDArray[np.int64], k: int = K) -> Neighbours:
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
    keys, known = _keys(hashes, good)
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1], [True]]))
    groups = [known[order[start:stop]].tolist() for start, stop in pairwise(edges) if stop - start > 1]
    return sorted(groups, key=lambda group: (-len(group), group))


def _first_of_each(hashes: NDArray[np.uint8], good: NDArray[np.int64]) -> NDArray[np.int64]:
    keys, known = _keys(hashes, good)
    _, first = np.unique(keys, return_index=True)
    return np.sort(np.concatenate([known[first], np.setdiff1d(good, known)]))


def _keys(hashes: NDArray[np.uint8], good: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the hashes as sortable values, and the rows that have a hash."""
    known = good[hashes[good].any(1)]
    return np.ascontiguousarray(hashes[known]).view("V16").reshape(-1), known


def shared_neighbours(
    first: FeatureReader, second: FeatureReader, layers: list[tuple[str, str]], seed: int
) -> tuple[int, list[tuple[str, str, float, float]]]:
    """Compare the neighbours of images in two data sets.

    Args:
        first: reader of a data set.
        second: reader of another data set.
        layers: pairs of a layer of `first` and a layer of `second`.
        seed: seed of the choice of images.

    Returns:
        the number of images in the comparison, and (layer, layer, share, chance) for each pair: the mean share of
        the K nearest neighbours that are the same images, and the share expected for random neighbours.
    """
    first_rows, theirs = shared_images(first, second)
    order = np.random.default_rng(seed).permutation(len(first_rows))[:_SHARED_ROWS]
    first_rows, theirs = first_rows[order], theirs[order]
    shares = []
    if len(first_rows) > 1:
        k = min(K, len(first_rows) - 1)
        for layer, other_layer in layers:
            tables = []
            for array, rows in ((first[layer], first_rows), (second[other_layer], theirs)):
                block = FeatureRows.of(array, np.sort(rows)).between(0, len(rows))[np.argsort(np.argsort(rows))]
                tables.append(nearest(block, block, k, without=np.arange(len(block))).rows)
            shares.append((layer, other_layer, float(overlap(*tables).mean()), k / (len(first_rows) - 1)))
    return len(first_rows), shares
