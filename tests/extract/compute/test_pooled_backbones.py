"""Poolings on a backbone of each library, against NumPy; that engines agree is in `test_backends.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from extract.compute.agreement import FULL_PRECISION
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.backends import open_forward
from extract.compute.feature_choice import choose_features
from extract.compute.sparse_projection import SparseProjection
from extract.system.torch_state import evaluating
from tests.extract.compute.small_network import pictures_for
from tests.extract.compute.test_sparse_projection import matrix_of


def computed(backbone: Backbone, layers: list[str]) -> dict[str, np.ndarray]:
    with evaluating(backbone.model):
        choice = choose_features(backbone, layers)
    with open_forward(backbone, choice, "float32") as forward:
        return {name: values.astype(np.float64) for name, values in forward(pictures_for(backbone, 3)).items()}


def projected(values: np.ndarray, outputs: int, seed: int) -> np.ndarray:
    rows = values.reshape(len(values), -1)
    return rows @ matrix_of(SparseProjection(rows.shape[1], outputs, seed)).T


def halves(maps: np.ndarray) -> np.ndarray:
    """Means of the four quarters of maps (B, H, W, C) with even sides."""
    count, height, width, channels = maps.shape
    return maps.reshape(count, 2, height // 2, 2, width // 2, channels).mean((2, 4))


def check(values: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, rows in expected.items():
        assert values[name].shape == rows.shape, name
        assert np.abs(values[name] - rows).max() <= FULL_PRECISION * np.abs(rows).max(), name


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "layer"), [
    ("bundled/efficientnet_lite0", "blocks.2"), ("torchvision/resnet18", "layer3"),
    ("timm/swin_tiny_patch4_window7_224", "layers.1"), ("torchvision/swin_t", "features.3"),
])  # fmt: skip
def test_maps_of_each_library(spec: str, layer: str) -> None:
    backbone = load_backbone(spec, weights=None if spec.startswith("bundled") else "random", device="cpu")
    poolings = ["none", "grid2", "std_map", "meanstd", "gem", "srp200s1", "grid2:srp30"]
    values = computed(backbone, [f"{layer}:{pooling}" for pooling in poolings])
    whole = values[f"{layer}:none"]
    last = "swin" in spec
    maps = whole if last else whole.transpose(0, 2, 3, 1)
    grid = halves(maps) if last else halves(maps).transpose(0, 3, 1, 2)
    check(values, {
        f"{layer}:grid2": grid, f"{layer}:std_map": maps.std((1, 2)),
        f"{layer}:meanstd": np.concatenate([maps.mean((1, 2)), maps.std((1, 2))], 1),
        f"{layer}:gem3": (np.maximum(maps, 1e-6) ** 3).mean((1, 2)) ** (1 / 3),
        f"{layer}:srp200s1": projected(whole, 200, 1), f"{layer}:grid2:srp30": projected(grid, 30, 0),
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["hf", "timm/vit_tiny_patch16_224", "timm/deit_tiny_distilled_patch16_224"])
def test_tokens_of_each_library(spec: str, tmp_path: Path) -> None:
    layer, special = "blocks.1", 2 if "distilled" in spec else 1
    if spec == "hf":  # with four registers
        config = transformers.Dinov2WithRegistersConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=64, patch_size=16
        )
        transformers.Dinov2WithRegistersModel(config).save_pretrained(tmp_path)
        size = {"height": 64, "width": 64}
        transformers.ViTImageProcessor(size=size).save_pretrained(tmp_path)
        spec, layer, special = f"hf/{tmp_path}", "encoder.layer.1", 5
    backbone = load_backbone(spec, weights=None if spec.startswith("hf") else "random", device="cpu")
    poolings = ["none", "grid2", "cls+mean", "last_token", "meanstd", "srp99", "grid2:max_map"]
    values = computed(backbone, [f"{layer}:{pooling}" for pooling in poolings])
    whole = values[f"{layer}:none"]
    patches = whole[:, special:]
    side = round(patches.shape[1] ** 0.5)
    grid = halves(patches.reshape(len(patches), side, side, -1))
    check(values, {
        f"{layer}:grid2": grid, f"{layer}:last_token": whole[:, -1], f"{layer}:srp99": projected(whole, 99, 0),
        f"{layer}:cls+mean": np.concatenate([whole[:, 0], patches.mean(1)], 1),
        f"{layer}:meanstd": np.concatenate([patches.mean(1), patches.std(1)], 1),
        f"{layer}:grid2:max_map": grid.max((1, 2)),
    })  # fmt: skip
