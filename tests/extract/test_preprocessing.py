from __future__ import annotations

import pytest
import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from torchvision import models

from extract.preprocessing import from_timm, from_torchvision
from tests.conftest import make_picture

SIZES = [(500, 375), (100, 333), (224, 224), (31, 20)]


def prepared(preprocessing, picture):
    return preprocessing.to_input(preprocessing.prepare(picture).unsqueeze(0))[0]


@pytest.mark.parametrize(
    "name",
    ["tf_efficientnet_lite0", "resnet18.a1_in1k", "vit_tiny_patch16_224", "convnext_atto", "test_resnet.r160_in1k"],
)
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


def test_a_picture_too_thin_to_resize_is_refused_before_the_memory_is_taken() -> None:
    preprocessing = from_torchvision(models.ResNet18_Weights.DEFAULT.transforms())
    with pytest.raises(ValueError, match="20000x1 pixels: too thin"):
        preprocessing.prepare(make_picture(1, 20000, 1))
    assert preprocessing.prepare(make_picture(1, 2000, 10)).shape == (224, 224, 3)
