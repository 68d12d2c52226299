"""Exact search for the images with the token nearest to a query, by cosine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError
from extract.store.tokens.token_array import TokenArray

__all__ = ["NearestPatches", "nearest_patches", "patch_similarity"]

_DECIMALS = 12  # of a cosine: tokens in the same direction tie
_BLOCK_BYTES = 32 << 20  # of tokens in float64


@dataclass(frozen=True)
class NearestPatches:
    """Images with the nearest tokens, nearest first; ties are in the order of the images.

    Attributes:
        images: (K,) int64, numbers in `TokenArray.rows`.
        cosines: (K,) float64, cosine between the query and the nearest token of the image.
        cells: (K,) int64, cell of this token in the grid, counted row by row.
    """

    images: NDArray[np.int64]
    cosines: NDArray[np.float64]
    cells: NDArray[np.int64]


def nearest_patches(
    tokens: TokenArray, query: NDArray[np.floating], k: int, *, without: int | None = None
) -> NearestPatches:
    """Find the k images with a token nearest to the query by cosine. A zero vector has cosine 0 to every vector.

    Args:
        tokens: tokens of a feature; those that are not finite are skipped.
        query: (C,), finite.
        k: number of images.
        without: number of an image to exclude, such as that of the query.

    Raises:
        InputError: k is less than 1, or the query is not finite or not as wide as the tokens.
    """
    if k < 1:
        raise InputError(f"k is {k}; it must be at least 1")
    if np.shape(query) != tokens.shape[1:]:
        raise InputError(f"the query has shape {np.shape(query)}; expected ({tokens.shape[1]},)")
    if not np.isfinite(query).all():
        raise InputError("the query contains NaN or infinity")
    # The best token of each image, not the nearest tokens of all: `nearest` would hold a number for each token.
    count, per_image = len(tokens.rows), tokens.per_image
    cosines, cells = np.full(count, -np.inf), np.zeros(count, np.int64)
    at_once = max(1, _BLOCK_BYTES // (8 * per_image * tokens.shape[1]))
    for start in range(0, count, at_once):
        stop = min(start + at_once, count)
        block = patch_similarity(tokens[start * per_image : stop * per_image], query).reshape(stop - start, per_image)
        block = np.where(np.isnan(block), -np.inf, block)
        cells[start:stop], cosines[start:stop] = block.argmax(1), block.max(1)
    if without is not None:
        cosines[without] = -np.inf
    images = np.argsort(-cosines, kind="stable")[:k]
    images = images[cosines[images] > -np.inf]
    return NearestPatches(images, cosines[images], cells[images])


def patch_similarity(tokens: NDArray[np.floating], query: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the cosine (N,) between tokens (N, C) and a query (C,); NaN for a token that is not finite."""
    values, target = tokens.astype(np.float64), np.asarray(query, np.float64)
    with np.errstate(invalid="ignore"):
        products = values @ target
        lengths = np.sqrt(np.einsum("nc,nc->n", values, values)) * np.sqrt(target @ target)
        cosines = np.divide(products, lengths, out=np.zeros(len(values)), where=lengths != 0)
    return np.asarray(np.where(np.isfinite(lengths), np.round(cosines, _DECIMALS).clip(-1, 1) + 0.0, np.nan))
