"""Masks predicted from tokens, against PyTorch and the definitions by sets of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from extract.analysis import dense
from extract.analysis import nearest_patches as module
from extract.analysis.dense import SEGMENTATION, predicted_mask, segmentation_probe, upsampled
from extract.analysis.nearest_patches import nearest_patches, patch_similarity
from extract.errors import InputError, LayertapError
from extract.store.tokens.token_array import TokenArray
from extract.store.tokens.token_layout import TokenLayout

GRID, CHANNELS, CROP = (4, 6), 8, (32, 48)
IMAGES, TRAIN, TEST = 30, range(24), range(24, 30)


class Rows:
    """Rows of a feature in memory."""

    def __init__(self, values: np.ndarray):
        self.values, self.dtype = values, values.dtype
        self.row_bytes = values[0].nbytes

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.values[rows]


def token_array(values: np.ndarray, grid: tuple[int, int] = GRID, resize: Any = CROP) -> TokenArray:
    rows: Any = Rows(values)
    layout = TokenLayout(grid, (), values.shape[2], channels_first=False)
    return TokenArray(rows, layout, np.arange(len(values)), {"resize_px": resize, "crop_px": CROP})


@pytest.fixture(scope="module")
def samples() -> tuple[TokenArray, list[np.ndarray]]:
    """Tokens that tell the class of their cell, with noise, and masks in the size of the crop, whole cells each."""
    generator = np.random.default_rng(0)
    classes = generator.integers(0, 3, (IMAGES, *GRID))
    values = generator.normal(0, 0.5, (IMAGES, *GRID, CHANNELS))
    values[..., :3] += np.eye(3)[classes]
    masks = [mask.repeat(8, 0).repeat(8, 1) for mask in classes]
    for mask in masks:
        mask[:2] = -1
    return token_array(values.reshape(IMAGES, -1, CHANNELS).astype(np.float32)), masks


@pytest.fixture(autouse=True)
def several_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_BAND_VALUES", 500)


@pytest.mark.parametrize("scale", [1, 2])
def test_a_picture_of_the_shape_of_the_crop_is_upsampled_as_by_pytorch(samples: Any, scale: int) -> None:
    values = torch.randn(3, *GRID)
    expected = interpolate(values[None], size=(32 * scale, 48 * scale), mode="bilinear", align_corners=False)[0]
    for of_class, of_pixels in zip(values, expected, strict=True):
        found = upsampled(samples[0], of_class, (48 * scale, 32 * scale))
        np.testing.assert_allclose(found, of_pixels, atol=1e-5, rtol=1e-5)
    assert (predicted_mask(samples[0], values, (48 * scale, 32 * scale)) == expected.argmax(0).numpy()).all()


@pytest.mark.parametrize("band_values", [1, 500, 1 << 24])
def test_pixels_outside_the_crop_have_no_values(monkeypatch: pytest.MonkeyPatch, band_values: int) -> None:
    monkeypatch.setattr(dense, "_BAND_VALUES", band_values)
    tokens = token_array(np.zeros((1, 24, CHANNELS), np.float32), resize=(64, 64))
    values = torch.randn(3, *GRID, generator=torch.Generator().manual_seed(0))  # no two classes are equal at a pixel
    expected = np.full((3, 64, 64), np.nan, np.float32)
    expected[:, 16:48, 8:56] = interpolate(values[None], size=CROP, mode="bilinear", align_corners=False)[0].numpy()
    for of_class, of_pixels in zip(values, expected, strict=True):
        np.testing.assert_allclose(upsampled(tokens, of_class, (64, 64)), of_pixels, atol=1e-5, rtol=1e-5)
    mask = np.full((64, 64), -1)
    mask[16:48, 8:56] = expected[:, 16:48, 8:56].argmax(0)
    assert (predicted_mask(tokens, values, (64, 64)) == mask).all()


@pytest.mark.parametrize("protocol", SEGMENTATION)
def test_metrics_are_those_of_sets_of_pixels(samples: Any, protocol: str) -> None:
    tokens, masks = samples
    result = segmentation_probe(tokens, masks, TRAIN, TEST, protocol=protocol, classes="abc")
    assert result.metrics["pixel_accuracy"].value > 0.6
    assert (result.n_train, result.n_test, result.task) == (24, 6, "segmentation")
    if result.model is None:
        return
    predicted = []
    for image in TEST:
        scores = torch.from_numpy(result.model.scores(tokens[image * 24 : image * 24 + 24])).T.reshape(1, -1, *GRID)
        predicted.append(interpolate(scores, size=CROP, mode="bilinear", align_corners=False)[0].argmax(0).numpy())
    guess, truth = np.stack(predicted), np.stack([masks[image] for image in TEST])
    labelled = truth >= 0
    both = [((guess == k) & (truth == k)).sum() for k in range(3)]
    either = [(((guess == k) | (truth == k)) & labelled).sum() for k in range(3)]
    np.testing.assert_allclose(result.per_class["iou"], np.divide(both, either))
    assert result.metrics["mIoU"].value == pytest.approx(np.mean(np.divide(both, either)))
    assert result.metrics["pixel_accuracy"].value == pytest.approx((guess == truth)[labelled].mean())
    recalls = [(guess == k)[truth == k].mean() for k in range(3)]
    assert result.metrics["mean_accuracy"].value == pytest.approx(np.mean(recalls))
    assert result.metrics["mIoU"].low <= result.metrics["mIoU"].value <= result.metrics["mIoU"].high
    assert "only 6 images" in result.metrics["mIoU"].method
    by_image = [(g == t)[t >= 0].mean() for g, t in zip(guess, truth, strict=True)]
    np.testing.assert_allclose(result.per_image["pixel_accuracy"], by_image)
    assert result.confusion is not None
    assert result.confusion.sum() == labelled.sum()
    assert result.confusion[0, 1] == ((truth == 0) & (guess == 1)).sum()


def test_labels_outside_the_crop_do_not_count() -> None:
    values = np.random.default_rng(0).normal(size=(6, 24, CHANNELS)).astype(np.float32)
    tokens = token_array(values, resize=(64, 64))
    masks = [np.full((64, 64), 2) for _ in range(6)]
    for mask in masks:
        mask[16:48, 8:32], mask[16:48, 32:56] = 0, 1
    result = segmentation_probe(tokens, masks, range(4), [4, 5])
    assert result.per_class["n"].tolist() == [2 * 32 * 24, 2 * 32 * 24, 0]


@pytest.mark.parametrize("protocol", SEGMENTATION)
def test_a_class_without_training_tokens_counts_as_wrong(samples: Any, protocol: str) -> None:
    tokens, masks = samples
    renamed = [np.where(mask == 2, 1, mask) if image in TRAIN else mask for image, mask in enumerate(masks)]
    result = segmentation_probe(tokens, renamed, TRAIN, TEST, classes=["sky", "road", "tree"], protocol=protocol)
    assert result.per_class["iou"][2] == 0
    assert any("the training images do not show the class tree" in note for note in result.notes)


def test_several_features_are_concatenated(samples: Any) -> None:
    tokens, masks = samples
    weak = token_array(np.random.default_rng(1).normal(size=(IMAGES, 24, 5)).astype(np.float32))
    result = segmentation_probe([weak, tokens], masks, TRAIN, TEST)
    assert result.model is not None
    assert result.model.n_features_in_ == 5 + CHANNELS
    assert result.metrics["pixel_accuracy"].value > 0.6


@pytest.mark.parametrize("protocol", SEGMENTATION)
def test_two_classes_and_little_memory_give_the_same_as_much(samples: Any, protocol: str) -> None:
    tokens, masks = samples
    how: dict[str, Any] = {"protocol": protocol, "classes": ["no", "yes"]}
    merged = [np.minimum(mask, 1) for mask in masks]
    much, little = (
        segmentation_probe(tokens, merged, TRAIN, TEST, memory_bytes=memory, **how) for memory in (1 << 30, 1 << 14)
    )
    assert much.metrics["pixel_accuracy"].value > 0.7
    assert little.metrics["mIoU"].value == pytest.approx(much.metrics["mIoU"].value, abs=0.02)


def test_many_tokens_are_sampled(samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_MOST_TOKENS", 200)
    result = segmentation_probe(*samples, TRAIN, TEST)
    assert result.notes[1] == "200 of them are drawn, with seed 0"
    assert result.metrics["pixel_accuracy"].value > 0.6


def test_many_classes_have_no_table_of_confusion_and_predicted_masks_are_passed_on(samples: Any) -> None:
    tokens, masks = samples
    predicted: dict[int, np.ndarray] = {}
    result = segmentation_probe(tokens, masks, TRAIN, TEST, classes=[str(i) for i in range(1001)])
    few = segmentation_probe(tokens, masks, TRAIN, TEST, on_prediction=predicted.__setitem__)
    assert result.confusion is None
    assert result.metrics == few.metrics
    assert list(predicted) == list(TEST)  # masks are passed on in the order of the images
    right = [(predicted[i] == masks[i])[masks[i] >= 0].mean() for i in TEST]
    np.testing.assert_allclose(right, few.per_image["pixel_accuracy"])


@pytest.mark.parametrize("protocol", SEGMENTATION)
@pytest.mark.parametrize("memory_bytes", [1 << 30, 1 << 14])
def test_tokens_with_nan_are_refused(samples: Any, protocol: str, memory_bytes: int) -> None:
    values = np.array(samples[0][:]).reshape(IMAGES, -1, CHANNELS)
    values[3, 20] = np.nan
    with pytest.raises(InputError, match="NaN or infinity"):
        segmentation_probe(token_array(values), samples[1], TRAIN, TEST, protocol=protocol, memory_bytes=memory_bytes)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"test": [3]}, "image 3 is in both train and test"),
    ({"test": [30]}, "test has the image 30; expected 0 to 29"),
    ({"test": []}, "24 training images and 0 test images"),
    ({"train": [0]}, "a single training image"),
    ({"classes": ["a", "b"]}, "has the label 2; expected labels below 2"),
    ({"masks": [np.zeros((32, 48, 3), np.uint8)] * 30}, r"\(32, 48, 3\); expected integers \(H, W\)"),
    ({"masks": [np.zeros((32, 48), np.uint8)] * 30}, "classes among the tokens of 22 training images: 1;"),
    ({"masks": [np.zeros((32, 48), np.uint8)] * 7}, "no mask of image 7"),
    ({"masks": [np.full((32, 48), 26_001, np.uint16)] * 30}, "the label 26,001; expected classes from 0 to 999"),
    ({"iterations": 5}, "no protocol is trained in iterations"),
    ({"protocol": "segmentation-kn"}, "segmentation-knn"),
])  # fmt: skip
def test_wrong_arguments_are_refused(samples: Any, arguments: dict[str, Any], message: str) -> None:
    how: dict[str, Any] = {"masks": samples[1], "train": TRAIN, "test": TEST} | arguments
    with pytest.raises(LayertapError, match=message):
        segmentation_probe(samples[0], **how)


def test_features_of_other_grids_are_refused(samples: Any) -> None:
    other = token_array(np.zeros((IMAGES, 6, 2), np.float32), (2, 3))
    with pytest.raises(InputError, match="4 x 6 tokens and 2 x 3 tokens"):
        segmentation_probe([samples[0], other], samples[1], TRAIN, TEST)


# The images with the token nearest to a query, against cosines of all tokens


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


def test_a_zero_query_is_equally_near_to_all_and_bad_ones_are_refused(values: np.ndarray) -> None:
    assert patch_similarity(np.ones((PER_IMAGE, CHANNELS), np.float32), np.zeros(CHANNELS)).tolist() == [0] * PER_IMAGE
    for query, k, why in (
        (np.zeros(CHANNELS), 0, "k is 0"), (np.zeros(3), 1, "expected"), (np.full(CHANNELS, np.nan), 1, "NaN"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            nearest_patches(token_array(values), query, k)
