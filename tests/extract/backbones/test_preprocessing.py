from __future__ import annotations

import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torchvision import models

from extract.backbones.preprocessing import Preprocessing, from_timm, from_torchvision
from extract.errors import InputError
from extract.images.decoding import DecodeOptions, decode
from tests.conftest import make_picture

SIZES = [(500, 375), (100, 333), (224, 224), (31, 20)]


def prepared(preprocessing, picture):
    return preprocessing.to_input(preprocessing.cpu_transform(picture).unsqueeze(0))[0]


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "vit_tiny_patch16_224", "test_resnet.r160_in1k"])
def test_timm_numbers_equal_timms_own_transform(name: str) -> None:
    model = timm.create_model(name, pretrained=False)
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    preprocessing = from_timm(model)
    assert preprocessing.library_transform is None
    for i, size in enumerate(SIZES):
        assert torch.allclose(prepared(preprocessing, make_picture(i, *size)), transform(make_picture(i, *size)))


@pytest.mark.parametrize(
    "weights",
    [models.ResNet18_Weights.DEFAULT, models.ResNet50_Weights.DEFAULT, models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1,
     models.EfficientNet_B1_Weights.DEFAULT, models.Inception_V3_Weights.DEFAULT],
)  # fmt: skip
def test_torchvision_numbers_equal_torchvisions_own_transform(weights) -> None:
    preprocessing, transform = from_torchvision(weights.transforms()), weights.transforms()
    assert preprocessing.library_transform is None
    for i, size in enumerate(SIZES):
        assert torch.allclose(prepared(preprocessing, make_picture(i, *size)), transform(make_picture(i, *size)))


def test_where_the_numbers_do_not_describe_the_transform_it_is_used_itself() -> None:
    model = timm.create_model("resnet18", pretrained=False)
    model.pretrained_cfg["crop_mode"] = "border"  # pads instead of cutting
    preprocessing = from_timm(model)
    assert preprocessing.library_transform is not None
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    picture = make_picture(1, 500, 300)
    assert torch.equal(prepared(preprocessing, picture), transform(picture))
    assert "CenterCropOrPad" in preprocessing.describe()["library_transform"]


def test_input_is_normalised_per_channel() -> None:
    preprocessing = from_torchvision(models.ResNet18_Weights.DEFAULT.transforms())
    images = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    given = images.clone()
    expected = (images.permute(0, 3, 1, 2) / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    assert torch.allclose(preprocessing.to_input(images), expected)
    assert torch.equal(images, given)


def test_fast_decoding_gives_nearly_the_same_pixels() -> None:
    """Of a photo of four million pixels, decoded at a quarter of its size; and of a small one, resized otherwise."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3)).astype(np.uint8)
    large = Image.fromarray(noise).resize((2304, 1728), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.save(file, "JPEG", quality=95)
    exact = Preprocessing(232, (224, 224), "bilinear", (0.5,) * 3, (0.5,) * 3)
    fast = exact.faster()
    assert (exact.min_decode_px, fast.min_decode_px) == (0, 464)
    shrunk = decode(file.getvalue(), DecodeOptions(min_decode_px=fast.min_decode_px))
    assert shrunk.size == (1152, 864)  # a quarter would be below 464
    for picture in (shrunk, large):
        pixels, expected = fast.cpu_transform(picture), exact.cpu_transform(large)
        assert pixels.shape == expected.shape == (224, 224, 3)
        assert pixels.dtype == torch.uint8
        apart = (pixels.int() - expected.int()).abs()
        assert 0 < apart.float().mean() < 1  # of 255 levels
    assert decode(file.getvalue()).size == large.size
    assert exact.describe() != fast.describe()


def test_a_turned_photo_is_decoded_smaller_and_upright() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (1200, 1000)).save(file, "JPEG", exif=exif)
    assert decode(file.getvalue(), DecodeOptions(min_decode_px=500)).size == (500, 600)
    assert decode(file.getvalue(), DecodeOptions(min_decode_px=501)).size == (1000, 1200)


def test_where_there_is_no_faster_way_it_is_refused() -> None:
    with pytest.raises(InputError, match="fast decoding is not supported for resize 8 lanczos"):
        Preprocessing(8, (8, 8), "lanczos", (0.5,) * 3, (0.5,) * 3).faster()
