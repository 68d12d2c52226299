"""What projections change, against the definitions in NumPy."""

from __future__ import annotations

import numpy as np
import torch
from scipy.spatial.distance import pdist

from extract.compute.backbone import load_backbone
from extract.compute.distortion import Distortion, distortion_of_grams, measured_distortion
from extract.compute.feature_choice import choose_features
from tests.conftest import TINY_INPUT


def linear_cka(x: np.ndarray, y: np.ndarray) -> float:
    """By features, as in Kornblith et al. (2019), equation 5."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def by_definition(x: np.ndarray, y: np.ndarray) -> list[float]:
    distances = np.abs(pdist(y) / pdist(x) - 1)
    cosines = np.abs(pdist(y, "cosine") - pdist(x, "cosine"))
    return [*np.percentile(distances, (50, 95)), *np.percentile(cosines, (50, 95)), linear_cka(x, y)]


def numbers(distortion: Distortion | None) -> list[float]:
    assert distortion is not None
    d = distortion
    return [d.distance_median, d.distance_p95, d.cosine_median, d.cosine_p95, d.cka]


def grams(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.stack([x @ x.T, y @ y.T])


def test_the_numbers_are_those_of_the_definitions() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(2, 1, (20, 50))
    y = x @ generator.normal(size=(50, 12)) / np.sqrt(12)
    measured = distortion_of_grams([grams(x, y)])
    assert measured is not None
    assert measured.pairs == 190
    np.testing.assert_allclose(numbers(measured), by_definition(x, y), rtol=1e-9)


def test_a_rotation_changes_nothing_and_a_scale_distances_alone() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(1, 1, (15, 8))
    rotated = x @ np.linalg.qr(generator.normal(size=(8, 8)))[0]
    np.testing.assert_allclose(numbers(distortion_of_grams([grams(x, rotated)])), [0, 0, 0, 0, 1], atol=1e-12)
    np.testing.assert_allclose(numbers(distortion_of_grams([grams(x, 3 * x)])), [2, 2, 0, 0, 1], atol=1e-12)


def test_pairs_are_those_of_each_batch() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(9, 5)), generator.normal(size=(9, 3))
    measured = distortion_of_grams([grams(x[:4], y[:4]), grams(x[4:], y[4:])])
    assert measured is not None
    assert measured.pairs == 6 + 10
    changes = [np.abs(pdist(y[part]) / pdist(x[part]) - 1) for part in (slice(4), slice(4, 9))]
    assert np.isclose(measured.distance_p95, np.percentile(np.concatenate(changes), 95))


def test_copies_of_an_image_are_no_pair() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6))
    x[3] = x[0]
    measured = distortion_of_grams([grams(x, 2 * x)])
    assert measured is not None
    assert measured.pairs == 5
    assert distortion_of_grams([grams(x[:1].repeat(3, 0), x[:1].repeat(3, 0))]) is None
    assert distortion_of_grams([]) is None
    assert distortion_of_grams([np.zeros((2, 3, 3))]) is None


def test_a_backbone_is_measured_as_its_features_say() -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    layers = ["layer1:none", "layer1:srp100", "layer1:grid4:none", "layer1:grid4:srp9s1", "layer4:mean_map"]
    choice = choose_features(backbone, layers)
    generator = torch.Generator().manual_seed(0)
    size = (11, *backbone.preprocessing.crop_px, 3)
    pictures = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    values = {name: rows.reshape(11, -1).astype(np.float64) for name, rows in backbone.features(
        [picture.numpy() for picture in pictures], layers).items()}  # fmt: skip
    assert backbone.preprocessing.crop_px == tuple(pictures.shape[1:3])  # so that nothing is resized
    measured = measured_distortion(backbone, choice, [pictures, pictures[:1]])
    assert list(measured) == ["layer1:srp100", "layer1:grid4:srp9s1"]
    for name, whole in (("layer1:srp100", "layer1:none"), ("layer1:grid4:srp9s1", "layer1:grid4")):
        assert measured[name].pairs == 55
        np.testing.assert_allclose(numbers(measured[name]), by_definition(values[whole], values[name]), rtol=1e-3)
    assert measured_distortion(backbone, choose_features(backbone, ["layer4"]), [pictures]) == {}
