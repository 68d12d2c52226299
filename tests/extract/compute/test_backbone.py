from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_tensor

from extract import Backbone, InputError, UnknownNameError, extract_features
from tests.conftest import make_picture
from tests.extract.compute.small_network import small_network

LAYERS = ["layer1", "layer2:none", "embedding"]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_network()


def test_the_numbers_are_those_that_embed_stores(backbone: Backbone, folder: Path, tmp_path: Path) -> None:
    with extract_features(
        folder, out=tmp_path / "out", backbone=backbone, layers=LAYERS, batch_size=5, workers=0, progress=False
    ) as reader:
        pictures = [Image.open(folder / path) for path in reader.paths]
        found = backbone.features(pictures, LAYERS, batch_size=5)
        assert list(found) == reader.layers
        for name, values in found.items():
            assert values.dtype == np.float32
            assert np.array_equal(values, reader[name][:])


def test_a_picture_is_the_same_in_every_form(backbone: Backbone) -> None:
    pictures = [make_picture(i, 64, 48) for i in range(3)]
    expected = backbone.features(pictures, "layer1")["layer1"]
    assert expected.shape == (3, backbone.features(pictures[0], "layer1")["layer1"].shape[1])
    arrays = [np.asarray(picture) for picture in pictures]
    tensors = [pil_to_tensor(picture) for picture in pictures]
    floats = [to_tensor(picture) for picture in pictures]
    for given in (arrays, np.stack(arrays), tensors, torch.stack(tensors), floats, iter(pictures)):
        assert np.array_equal(backbone.features(given, "layer1")["layer1"], expected)
    grey = make_picture(5).convert("L")
    expected = backbone.features(grey, "layer1")["layer1"]
    for given in (np.asarray(grey), pil_to_tensor(grey), pil_to_tensor(grey)[0], grey.convert("RGB")):
        assert np.array_equal(backbone.features(given, "layer1")["layer1"], expected)


def test_orientation_and_transparency_are_as_of_files(backbone: Backbone, tmp_path: Path) -> None:
    picture = make_picture(1, 60, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right
    picture.save(tmp_path / "a.png", exif=exif)
    clear = picture.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(picture.size))
    clear.save(tmp_path / "b.png")
    with extract_features(tmp_path, out=tmp_path / "out", backbone=backbone, layers="layer1", workers=0,
                          progress=False) as reader:  # fmt: skip
        found = backbone.features([Image.open(tmp_path / path) for path in reader.paths], "layer1")
        assert np.array_equal(found["layer1"], reader["layer1"][:])


def test_no_pictures_give_no_rows(backbone: Backbone) -> None:
    found = backbone.features([], LAYERS)
    assert {name: len(values) for name, values in found.items()} == {"layer1": 0, "layer2": 0, "embedding": 0}


def test_what_is_no_picture_and_no_layer_is_refused(backbone: Backbone, tmp_path: Path) -> None:
    make_picture(0, 200, 200).save(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:2000])
    refused: list[tuple[Any, str]] = [
        (np.zeros((8, 8, 3)), r"picture 0 is an array of float64; .*; pictures = .pictures \* 255..round"),
        (np.zeros((8, 8, 5), "u1"), r"picture 0 is an array of shape \(8, 8, 5\)"),
        (np.zeros((0, 8, 3), "u1"), r"picture 0 is an array of shape \(0, 8, 3\)"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), r"picture 0 is a tensor of shape \(8, 8, 3\); expected \(3, H, W\)"),
        (torch.randn(3, 8, 8), "picture 0 is a tensor of torch.float32 that is not an 8-bit picture"),
        (torch.full((3, 8, 8), 0.3333), "picture 0 is a tensor of torch.float32 that is not an 8-bit picture"),
        ([make_picture(0), "cat.jpg"], "picture 1 is a str; expected a PIL picture"),
        (Image.fromarray(np.zeros((8, 8), "float32")), "picture 0: 32-bit pixels have no known range"),
        ([Image.open(tmp_path / name) for name in ("a.jpg", "b.jpg")], "picture 1: .*truncated"),
    ]
    for given, message in refused:
        with pytest.raises(InputError, match=message):
            backbone.features(given, "layer1")
    with pytest.raises(UnknownNameError, match="'layer9' not found"):
        backbone.features([make_picture(0)], "layer9")
    with pytest.raises(InputError, match="batch_size is 0"):
        backbone.features([make_picture(0)], "layer1", batch_size=0)


def test_a_module_of_ones_own_is_refused_with_the_way_to_pass_it(folder: Path, tmp_path: Path) -> None:
    for given in (torch.nn.Flatten(), (torch.nn.Flatten(), None)):
        with pytest.raises(InputError, match="expected a spec, or what load_backbone returns; .*python/FILE.py"):
            extract_features(folder, out=tmp_path / "out", backbone=given)  # type: ignore[arg-type]


def test_the_model_is_left_as_it_was(backbone: Backbone) -> None:
    backbone.model.train()
    backbone.features([make_picture(0)], "layer1")
    assert all(module.training for module in backbone.model.modules())
    assert not any(module._forward_hooks for module in backbone.model.modules())
    backbone.model.eval()
