"""The images with the token nearest to a query, against cosines of all tokens."""

from __future__ import annotations

import numpy as np
import pytest

from extract.analysis import nearest_patches as module
from extract.analysis.nearest_patches import nearest_patches, patch_similarity
from extract.errors import InputError
from tests.extract.analysis.dense.test_segmentation import CHANNELS, GRID, IMAGES, token_array

PER_IMAGE = GRID[0] * GRID[1]


@pytest.fixture
def values() -> np.ndarray:
    values = np.random.default_rng(0).normal(size=(IMAGES, PER_IMAGE, CHANNELS)).astype(np.float32)
    values[7, 3] = values[2, 5] * 4  # the same direction
    values[4] = np.nan
    values[5, 0] = np.inf
    values[6, 1] = 0
    return values


@pytest.mark.parametrize("block_bytes", [1, 8 * PER_IMAGE * CHANNELS * 4, 1 << 30])
def test_images_come_in_the_order_of_their_best_cosine(
    values: np.ndarray, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    query = values[2, 5]
    with np.errstate(invalid="ignore", divide="ignore"):
        wide = values.astype(np.float64)
        cosines = wide @ query.astype(np.float64) / np.linalg.norm(wide, axis=2) / np.linalg.norm(query.astype(float))
    cosines[6, 1] = 0
    cosines[~np.isfinite(values).all(2)] = -2
    best = np.round(cosines.max(1), 12)
    expected = [image for image in np.lexsort((np.arange(IMAGES), -best)) if best[image] > -2]
    found = nearest_patches(token_array(values), query, IMAGES + 5)
    assert found.images.tolist() == expected
    assert expected[:2] == [2, 7]
    assert found.cosines == pytest.approx(best[expected], abs=1e-11)
    assert found.cells.tolist() == cosines.argmax(1)[expected].tolist()
    assert nearest_patches(token_array(values), query, 3).images.tolist() == expected[:3]
    others = nearest_patches(token_array(values), query, 3, without=2)
    assert others.images.tolist() == [image for image in expected if image != 2][:3]


def test_a_zero_query_is_equally_near_to_all() -> None:
    values = np.ones((3, PER_IMAGE, CHANNELS), np.float32)
    assert patch_similarity(values[0], np.zeros(CHANNELS)).tolist() == [0] * PER_IMAGE


@pytest.mark.parametrize(
    ("query", "k", "why"),
    [(np.zeros(CHANNELS), 0, "k is 0"), (np.zeros(3), 1, "expected"), (np.full(CHANNELS, np.nan), 1, "NaN")],
)
def test_bad_queries_are_refused(values: np.ndarray, query: np.ndarray, k: int, why: str) -> None:
    with pytest.raises(InputError, match=why):
        nearest_patches(token_array(values), query, k)
