"""Tokens of data sets, against the libraries' own intermediate results, and against their places in the picture."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageOps

from extract import FeatureReader, InputError, extract_features, load_backbone
from extract.compute.agreement import FULL_PRECISION
from extract.compute.backbone import Backbone
from extract.compute.pooling import Layout

Intermediate = Callable[[Any, torch.Tensor], torch.Tensor]  # (B, T, C) or (B, C, H, W)


def of_timm(index: int) -> Intermediate:
    def compute(model: Any, images: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = model.forward_intermediates(images, [index], intermediates_only=True)
        return found[0]

    return compute


def of_hf(model: Any, images: torch.Tensor) -> torch.Tensor:
    network = next(model.children())
    hidden: torch.Tensor = network(images, output_hidden_states=True).hidden_states[2]
    return hidden[:, 5:]


CASES = [
    pytest.param("timm/test_vit", "blocks.1", of_timm(1), ("class",), id="vit"),
    pytest.param("hf", "encoder.layer.1", of_hf, ("class", *["other"] * 4), id="dinov2 with registers"),
    pytest.param("timm/test_convnext", "stages.2", of_timm(2), (), id="convnext", marks=pytest.mark.slow),
    pytest.param("timm/test_resnet", "layer2", of_timm(2), (), id="resnet", marks=pytest.mark.slow),
    pytest.param(
        "timm/swin_tiny_patch4_window7_224", "layers.1", of_timm(1), (), id="swin", marks=pytest.mark.slow
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "layer", "intermediate", "prefix"), CASES)
def test_stored_tokens_are_the_intermediates_of_the_library(
    spec: str, layer: str, intermediate: Intermediate, prefix: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    weights: str | None = "random"
    if spec == "hf":
        config = transformers.Dinov2WithRegistersConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=64, patch_size=16
        )
        transformers.Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "model")
        transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "model")
        spec, weights = f"hf/{tmp_path / 'model'}", None
    backbone = load_backbone(spec, weights=weights, device="cpu")
    out = tmp_path / "out"
    extract_features(folder, out=out, backbone=backbone, layers=[f"{layer}:tokens"], workers=0, progress=False)
    with FeatureReader(out) as reader:
        tokens, pictures = reader.tokens(layer), [folder / path for path in reader.paths]
        expected = library_tokens(backbone, intermediate, pictures)
        assert tokens.prefix == prefix
        assert (len(pictures), tokens.per_image, tokens.shape[1]) == expected.shape
        difference = np.abs(tokens[:].reshape(expected.shape) - expected).max()
    assert difference <= FULL_PRECISION * np.abs(expected).max()


def library_tokens(backbone: Backbone, intermediate: Intermediate, pictures: list[Path]) -> np.ndarray:
    """Tokens of pictures by the library, (B, T, C)."""
    upright = [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in pictures]
    images = torch.stack([backbone.preprocessing.cpu_transform(picture) for picture in upright])
    with torch.no_grad():
        values = intermediate(backbone.model, backbone.preprocessing.to_input(images))
    return (values.flatten(2).transpose(1, 2) if values.ndim == 4 else values).numpy()


PATCHES = """
import torch
from torchvision import transforms
def load():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 1, 16, 16, bias=False))
    torch.nn.init.constant_(model[0].weight, 1 / (3 * 16 * 16))
    return model, transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
"""
SIZES = [(640, 480), (333, 500), (224, 224), (97, 61), (1000, 230)]


@pytest.mark.parametrize("preprocessing", [
    {"size": 256, "crop": 224}, {"size": (224, 224), "crop": 224}, {"size": (250, 320), "crop": (160, 288)},
    {"size": 300, "crop": (224, 160), "interpolation": "bicubic"},
])  # fmt: skip
@pytest.mark.parametrize("decode", ["exact", pytest.param("fast", marks=pytest.mark.slow)])
def test_a_bright_cell_lights_the_token_of_its_place(
    preprocessing: dict[str, Any], decode: str, tmp_path: Path
) -> None:
    (tmp_path / "patches.py").write_text(PATCHES)
    flat = {"mean": (0, 0, 0), "std": (1, 1, 1), "interpolation": "bilinear"}
    backbone = load_backbone(
        f"python/{tmp_path / 'patches.py'}:load", device="cpu", preprocessing={**flat, **preprocessing}
    )
    crop = preprocessing["crop"]
    height, width = (crop, crop) if isinstance(crop, int) else crop
    grid = height // 16, width // 16
    images, random = tmp_path / "images", np.random.default_rng(0)
    images.mkdir()
    out, black = tmp_path / "out", tmp_path / "black"
    how: dict[str, Any] = {"layers": ["0:tokens"], "decode": decode, "workers": 0, "progress": False}
    Image.new("RGB", (300, 300)).save(images / "a.png")
    extract_features(images, out=black, backbone=backbone, **how)
    with FeatureReader(black) as reader:
        boxes = {size: reader.tokens("0").boxes(size) for size in SIZES}
        assert reader.tokens("0").grid == grid
    (images / "a.png").unlink()
    cells: dict[str, int] = {}
    labels = {}
    for size, orientation in itertools.product(SIZES, (1, 3, 6, 8)):
        name = f"{size[0]}-{orientation}-{len(cells)}.png"
        cells[name] = int(random.integers(grid[0] * grid[1]))
        picture = Image.new("RGB", size)
        left, top, right, bottom = boxes[size][cells[name]].round().astype(int)
        picture.paste((255, 255, 255), (left, top, max(right, left + 1), max(bottom, top + 1)))
        turned = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
        labels[name] = np.asarray(picture.convert("L")) // 255
        stored = picture.transpose(turned[orientation]) if orientation in turned else picture
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored.save(images / name, exif=exif)
    extract_features(images, out=out, backbone=backbone, **how)
    with FeatureReader(out) as reader:
        lights = reader.tokens("0")[:].reshape(len(reader), -1)
        assert {name: int(light.argmax()) for name, light in zip(reader.paths, lights, strict=True)} == cells
        masks = {name: reader.tokens("0").labels(mask, min_share=0.4) for name, mask in labels.items()}
        assert {name: np.flatnonzero(mask == 1).tolist() for name, mask in masks.items()} == {
            name: [cell] for name, cell in cells.items()
        }
        assert lights.max(1).min() > 0.4
        assert np.median(lights.max(1) / lights.sum(1)) > 0.8


@pytest.mark.slow
def test_a_grid_is_known_if_one_of_several_data_sets_records_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone("timm/test_vit", weights="random", device="cpu")
    how: dict[str, Any] = {"backbone": backbone, "layers": "blocks.1:none", "workers": 0, "progress": False}
    extract_features(folder, out=tmp_path / "new", **how)
    monkeypatch.setattr(Layout, "attributes", lambda layout: {"axes": layout.axes})  # as earlier versions
    extract_features(folder, out=tmp_path / "old", **how)
    with FeatureReader(tmp_path / "old") as reader, pytest.raises(InputError, match="not recorded: an earlier version"):
        reader.tokens("blocks.1")
    for order in (["new", "old"], ["old", "new"]):
        with FeatureReader([tmp_path / name for name in order]) as reader:
            assert reader.tokens("blocks.1").shape == (24 * 100, 64)


def test_grids_and_whole_maps_have_tokens_too(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_vit", weights="random", device="cpu")
    layers = ["blocks.1:none", "blocks.1:grid5", "blocks.1:grid5:tokens", "blocks.1:tokens"]
    extract_features(folder, out=tmp_path / "a", backbone=backbone, layers=layers, workers=0, progress=False)
    with FeatureReader(tmp_path / "a") as reader:
        whole = reader.tokens("blocks.1:none")
        assert (whole.grid, whole.prefix, whole.shape[1]) == ((10, 10), ("class",), 64)
        assert np.array_equal(whole[:], reader.tokens("blocks.1:tokens")[:])
        cells = reader.tokens("blocks.1:grid5")
        assert cells.grid == (5, 5)
        assert np.array_equal(cells[:], reader.tokens("blocks.1:grid5:tokens")[:])
        maps = whole[:].reshape(-1, 5, 2, 5, 2, 64).mean((2, 4)).reshape(-1, 64)
        assert np.allclose(cells[:], maps, atol=1e-5)
