"""Similarity of several features of the same images: CKA, Procrustes, mutual nearest neighbours, RSA."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from extract.analysis.network.activation_statistics import effective_number
from extract.analysis.probe.feature_matrix import FeatureRows, Source, mean_of
from extract.analysis.probe.metrics import ranks_of
from extract.analysis.probe.nearest_rows import nearest, overlap
from extract.errors import InputError
from extract.system.dissimilarities import dissimilarities
from extract.system.free_memory import free_bytes

__all__ = [
    "MOST_COLUMNS", "Alikeness", "FeatureSimilarity", "alikeness", "feature_similarity", "linear_cka", "rsa",
]  # fmt: skip

MEMORY_BYTES = 512 << 20
# Both take time that grows with the square of the number of images.
_KNN_ROWS = 10_000
_RSA_ROWS = 2_000
MOST_COLUMNS = 16_384  # of a feature whose product with others is held, and decomposed

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class FeatureSimilarity:
    """How similar M features are, and how many directions each uses.

    Attributes:
        cka: (M, M) linear CKA with the unbiased estimator, of all images; see `linear_cka`.
        procrustes: (M, M) sum of the singular values of X^T Y, for X and Y centred and divided by their lengths, of all
            images; 1 if one feature is a rotated and scaled copy of the other (Williams et al. 2021).
        mutual_knn: (M, M) mean share of the k nearest images, by cosine, that two features have in common (Huh et al.
            2024, "The Platonic Representation Hypothesis").
        rsa: (M, M) representational similarity analysis; see `rsa`.
        effective_rank: (M,) exponential of the entropy of the singular values of X, divided by their sum (Roy and
            Vetterli 2007).
        k: number of nearest images.
        knn_rows: number of images that `mutual_knn` was computed on.
        rsa_rows: number of images that `rsa` was computed on.
    """

    cka: Matrix
    procrustes: Matrix
    mutual_knn: Matrix
    rsa: Matrix
    effective_rank: NDArray[np.float64]
    k: int
    knn_rows: int
    rsa_rows: int


def feature_similarity(
    features: Sequence[Source | FeatureRows], *, k: int = 10, seed: int = 0, memory_bytes: int = MEMORY_BYTES
) -> FeatureSimilarity:
    """Compare features of the same images.

    Rows are read in blocks. Mutual neighbours are computed on at most 10,000 images and RSA on 2,000, drawn with the
    seed.

    Args:
        features: (N, D) or (N, *shape) each, with any D up to 16,384, or of any D if 24 * N * D bytes fit into
            `memory_bytes`; the same images in the same order, N of at least 4.
        k: nearest images of `mutual_knn`.
        seed: seed of the choice of images.
        memory_bytes: limit for products of features and for rows held at once, apart from the images that mutual
            neighbours and RSA are computed on.

    Raises:
        InputError: there are no features, their numbers of rows differ or are below 4, a feature is too wide, or k is
            not below the number of images.
    """
    rows = _same_images(features)
    count, rotated = len(rows[0]), [_in_few_columns(each, memory_bytes) for each in rows]
    draw = np.random.default_rng(seed).permutation(count)
    of_knn, of_rsa = (np.sort(draw[:most]) for most in (_KNN_ROWS, _RSA_ROWS))
    if not 1 <= k < len(of_knn):
        raise InputError(f"k is {k}; expected 1 to {len(of_knn) - 1}")
    cka, procrustes, effective_rank = _products(rotated, memory_bytes)
    shared = mutual_knn((feature.subset(of_knn).between(0, len(of_knn)) for feature in rows), k, memory_bytes)
    distances = [_ranked_distances(feature.subset(of_rsa)) for feature in rows]
    rsa = _symmetric(len(rows), lambda i, j: _correlation(distances[i], distances[j]))
    return FeatureSimilarity(cka, procrustes, shared, rsa, effective_rank, k, len(of_knn), len(of_rsa))


def _same_images(features: Sequence[Source | FeatureRows]) -> list[FeatureRows]:
    rows = [FeatureRows.of(feature) for feature in features]
    if not rows:
        raise InputError("there are no features to compare")
    counts = [len(feature) for feature in rows]
    if len(set(counts)) > 1 or counts[0] < 4:
        raise InputError(f"features have {', '.join(map(str, counts))} rows; expected the same images, at least 4")
    if any(map(_is_dissimilarity_matrix, rows)):
        raise InputError(
            "expected features (N, D), got the dissimilarity matrix (N, N) of images",
            hint="compare matrices by layertap.probe.compare_rdms; reader.rdm(layer) is that of a layer",
        )
    return rows


def _is_dissimilarity_matrix(rows: FeatureRows) -> bool:
    if rows.width != len(rows):
        return False
    values = rows.between(0, len(rows))
    return bool(values.any() and not values.diagonal().any() and (values == values.T).all())


Alikeness = FeatureSimilarity  # deprecated name


def alikeness(
    features: Sequence[Source | FeatureRows], *, k: int = 10, seed: int = 0, memory_bytes: int = MEMORY_BYTES
) -> FeatureSimilarity:
    """Deprecated name of `feature_similarity`, with the same arguments, shapes and errors."""
    warnings.warn("alikeness is now called feature_similarity", DeprecationWarning, stacklevel=2)
    return feature_similarity(features, k=k, seed=seed, memory_bytes=memory_bytes)


def linear_cka(x: Source | FeatureRows, y: Source | FeatureRows) -> float:
    """Compute the linear centred kernel alignment (CKA) of two features of the same images.

    It is 1 if one feature is a rotated and scaled copy of the other. Kornblith et al. 2019, with the unbiased HSIC
    estimator of Song et al. 2012 (as in Nguyen, Raghu and Kornblith 2021): unrelated features give 0 even with more
    columns than rows. The result may be slightly negative. Of features with more values than images, 24 * N * D bytes
    must fit into half of the free memory, unless D is up to 16,384.

    Args:
        x: (N, D), or (N, *shape).
        y: (N, E): the same images in the same order.

    Raises:
        InputError: the numbers of rows differ, or are below 4; or a feature is too wide.
    """
    rows = [_in_few_columns(each, free_bytes() // 2) for each in _same_images([x, y])]
    means = [mean_of(each) for each in rows]
    between, of_x, of_y = (_product(rows, means, pair, MEMORY_BYTES)[1] for pair in ((0, 1), (0, 0), (1, 1)))
    scale = math.sqrt(max(0.0, of_x) * max(0.0, of_y))
    return between / scale if scale else math.nan


def rsa(x: Source | FeatureRows, y: Source | FeatureRows) -> float:
    """Representational similarity analysis (RSA): rank correlation of the image distances in two features.

    Kriegeskorte, Mur and Bandettini 2008: Spearman's correlation of 1 - Pearson's r between all pairs of images.

    Args:
        x: (N, D), or (N, *shape).
        y: (N, E): the same images in the same order.

    Raises:
        InputError: the numbers of rows differ, or are below 4, or one is a dissimilarity matrix.
    """
    return _correlation(*(_ranked_distances(rows) for rows in _same_images([x, y])))


def mutual_knn(features: Iterable[NDArray[np.float32]], k: int, memory_bytes: int = MEMORY_BYTES) -> Matrix:
    """Return (M, M) the mean share of the k nearest rows, by cosine, that two of M features have in common.

    Args:
        features: (N, D) each, finite, of the same images in the same order; each is read once.
        k: number of nearest rows, without the row itself; below N.
        memory_bytes: limit for the rows and cosines held at once, besides a feature.

    Raises:
        InputError: a value is not finite, or k is less than 1.
    """
    neighbours = [
        nearest(rows, rows, k, without=np.arange(len(rows)), memory_bytes=memory_bytes).rows for rows in features
    ]
    return _symmetric(len(neighbours), lambda i, j: float(overlap(neighbours[i], neighbours[j]).mean()))


def _symmetric(count: int, value_of: Callable[[int, int], float]) -> Matrix:
    matrix = np.eye(count)
    for i in range(count):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = value_of(i, j)
    return matrix


def is_too_wide(count: int, width: int, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Return whether features (N, D) cannot be compared."""
    return width > MOST_COLUMNS and not _is_rotated(count, width, memory_bytes)


def _is_rotated(count: int, width: int, memory_bytes: int) -> bool:
    return width > count and 3 * 8 * count * width <= memory_bytes


def _in_few_columns(rows: FeatureRows, memory_bytes: int) -> FeatureRows:
    """Return rows with at most as many columns as rows, rotated: a rotation changes no measure.

    Raises:
        InputError: they are too wide.
    """
    if is_too_wide(len(rows), rows.width, memory_bytes):
        found = f"a feature has {rows.width:,} values for an image; expected at most {MOST_COLUMNS:,}"
        raise InputError(found, hint="pool the layer")
    if not _is_rotated(len(rows), rows.width, memory_bytes):
        return rows
    centred = rows.between(0, len(rows)) - mean_of(rows)
    along_axes: Matrix = np.linalg.qr(centred.T, mode="r")  # type: ignore[assignment]
    return FeatureRows.of(along_axes.T)


def _products(rows: Sequence[FeatureRows], memory_bytes: int) -> tuple[Matrix, Matrix, NDArray[np.float64]]:
    """Return CKA, Procrustes and effective ranks, from the products X^T Y of centred features."""
    features, means = len(rows), [mean_of(each) for each in rows]
    hsic, nuclear, lengths = np.zeros((features, features)), np.eye(features), np.zeros(features)
    effective_rank = np.zeros(features)
    for i, j in combinations_with_replacement(range(features), 2):
        product, hsic[i, j] = _product(rows, means, (i, j), memory_bytes)
        hsic[j, i] = hsic[i, j]
        if i == j:
            singular = np.sqrt(np.linalg.eigvalsh(product).clip(0))
            lengths[i], effective_rank[i] = np.sqrt(np.trace(product)), effective_number(singular)
        else:
            nuclear[i, j] = nuclear[j, i] = np.linalg.svd(product, compute_uv=False).sum()
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.sqrt(np.diag(hsic).clip(0))
        cka, procrustes = hsic / np.outer(scale, scale), nuclear / np.outer(lengths, lengths)
    np.fill_diagonal(procrustes, np.where(lengths > 0, 1.0, np.nan))
    cka, procrustes = (np.where(np.isfinite(matrix), matrix, np.nan) for matrix in (cka, procrustes))
    return cka, procrustes, effective_rank


def _product(
    rows: Sequence[FeatureRows], means: Sequence[NDArray[np.float64]], pair: tuple[int, int], memory_bytes: int
) -> tuple[Matrix, float]:
    """Return the product X^T Y of a pair of features, centred, and their unbiased HSIC times N (N - 3)."""
    count, widths = len(rows[0]), [rows[k].width for k in pair]
    product = np.zeros(widths)
    both = of_x = of_y = 0.0  # sums of |x|^2 |y|^2, |x|^2 and |y|^2
    step = max(1, memory_bytes // (4 * 8 * sum(widths)))
    for start in range(0, count, step):
        x, y = (rows[k].between(start, min(start + step, count)) - means[k] for k in pair)
        of_rows, of_others = (np.einsum("nd,nd->n", block, block) for block in (x, y))
        product += x.T @ y
        both, of_x, of_y = both + float(of_rows @ of_others), of_x + float(of_rows.sum()), of_y + float(of_others.sum())
    # The unbiased estimator of Song et al. 2012, for K = X X^T and L = Y Y^T without their diagonals:
    # tr(K L) = |X^T Y|^2 - both, and the rows of K sum to -|x|^2, since X is centred.
    correction = both * count / (count - 2) - of_x * of_y / ((count - 1) * (count - 2))
    return product, float(np.vdot(product, product)) - correction


def _ranked_distances(rows: FeatureRows) -> NDArray[np.float64]:
    """Return the ranks (N (N - 1) / 2,) of the nearness of all pairs minus their mean; ties share a mean rank."""
    count = len(rows)
    distances = dissimilarities(rows.array())[np.triu_indices(count, 1)]
    distances[np.isnan(distances)] = 1  # a row of equal values is related to none
    ranks = ranks_of(-distances)
    return np.asarray(ranks - ranks.mean())


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the cosine of two vectors, of vectors whose mean is 0 their correlation; NaN if one is zero."""
    scale = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / scale if scale else float("nan")
