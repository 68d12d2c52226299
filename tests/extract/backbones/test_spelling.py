"""What is suggested for a spec that names no source, or no name."""

from __future__ import annotations

import re

import pytest
import timm
from torchvision import models

from extract import load_backbone
from extract.backbones.sources import match_specs, unknown_spec
from extract.errors import LayertapError, UnknownNameError


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet50", "backbone 'resnet50' not found; did you mean torchvision/resnet50 or timm/resnet50?"),
        ("torchvision/resnet5", "nearest: 'torchvision/resnet50'"),
        ("torchvision/fasterrcnn_resnet50_fpn", "not found"),
        ("timm/vit_smal_patch16_224", "nearest: 'timm/vit_small_patch16_224'"),
        ("bundled/efficientnet", "nearest: 'bundled/efficientnet_lite0'"),
        ("efficientnet_lite0", "did you mean bundled/efficientnet_lite0 or timm/efficientnet_lite0?"),
        ("resnet50.a1_in1k", "did you mean timm/resnet50.a1_in1k?"),
        ("ResNet50", "did you mean torchvision/resnet50 or timm/resnet50"),
        ("tmm/resnet50", "did you mean torchvision/resnet50 or timm/resnet50?"),
        ("net.py:make", "your own function is python/net.py:make"),
        ("timm", "has no name; expected timm/NAME (a tag may follow"),
        ("python/", "has no name; expected python/NAME (python/FILE.py:FACTORY, your own function"),
        ("  ", "not found; a spec is SOURCE/NAME, such as bundled/efficientnet_lite0"),
        ("/", "not found; a spec is SOURCE/NAME"),
        ("owner/net", "a model of the Hugging Face hub is hf/owner/net"),
    ],
)
def test_a_spec_without_a_source_or_name_says_what_to_type(spec: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(message)) as raised:
        load_backbone(spec)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 260


def test_unknown_weights_list_the_nearest() -> None:
    for spec, weights, message in (
        ("torchvision/resnet50", "IMAGENET1K_V3", "weights 'IMAGENET1K_V3' not found in torchvision/resnet50; nearest"),
        ("timm/resnet50", "a1_in2k", "nearest: 'a1_in1k'"),
    ):
        with pytest.raises(UnknownNameError, match=message):
            load_backbone(spec, weights=weights, device="cpu")


def test_the_list_of_backbones_says_what_to_type_too() -> None:
    with pytest.raises(UnknownNameError, match="did you mean torchvision/resnet50 or timm/resnet50"):
        match_specs("resnet50")
    with pytest.raises(UnknownNameError, match="source 'tim' not found; nearest: 'timm'"):
        match_specs("tim")


def test_each_suggested_spec_exists() -> None:
    known = {
        "bundled": {"efficientnet_lite0"}, "torchvision": set(models.list_models(module=models)),
        "timm": {*timm.list_models(), *timm.list_pretrained()},
    }  # fmt: skip
    for wrong in ("resnet5", "vit_small", "mobilenet_v2", "swin_t", "efficientnet-b0", "VGG16", "regnety_032.tv2_in1k"):
        suggested = re.findall(r"(\w+)/([\w.-]+)", str(unknown_spec(wrong)).partition("did you mean")[2])
        assert suggested, wrong
        for source, name in suggested:
            assert name in known[source], (wrong, source, name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mean": (123, 117, 104)}, "divide them by 255: 0.4824,0.4588,0.4078"),
        ({"std": (58, 57.0, 57)}, "std .* above 0 to 1, .* divide them by 255: 0.2275,0.2235,0.2235"),
        ({"mean": (-0.1, 0.5, 0.5)}, "mean .*: expected three numbers from 0 to 1"),
        ({"std": (0.2, 0.2, 0)}, "std .*: expected three numbers above 0 to 1"),
        ({"mean": (0.5, 0.5)}, "three numbers"),
        ({"mean": 0.5}, "three numbers"),
        ({"mean": (float("nan"),) * 3}, "three numbers"),
        ({"std": (500, 500, 500)}, "three numbers above 0 to 1, since pixels are scaled to 0..1$"),
        ({"interpolation": "cubic"}, "nearest: 'bicubic'"),
        ({"crop": 0}, "expected 1 to 8,192 pixels"),
        ({"size": 100_000}, "expected 1 to 8,192 pixels"),
    ],
)
def test_means_of_pixels_from_0_to_255_are_refused_before_anything_is_loaded(
    given: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given.keys() <= {"mean", "std"}:
        monkeypatch.setattr("extract.backbones.loading._request", None)
    with pytest.raises(LayertapError, match=message):
        load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=given)


def test_published_means_are_accepted() -> None:
    for values in ((0.485, 0.456, 0.406), (0, 0, 0), (1, 1, 1), (1 / 255,) * 3):
        std = values if min(values) else (1, 1, 1)
        given = {"mean": values, "std": std, "size": 64, "crop": 64}
        backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=given)
        assert backbone.preprocessing.mean == values
        assert backbone.preprocessing.std == std


def test_a_device_message_is_one_line_without_the_backends_of_pytorch() -> None:
    for device, problem in (
        ("cuda:99", "cannot be used"), ("gpu", "is unknown"), ("meta", "cannot be used"), ("mps", ""), ("xla", ""),
        ("", ""), ("cuda:x", ""), ("cpu:0:1", ""),
    ):  # fmt: skip
        with pytest.raises(LayertapError, match=f"device '{device}' {problem}") as raised:
            load_backbone("timm/test_resnet", weights="random", device=device)
        message = str(raised.value)
        assert "\n" not in message
        assert len(message) < 160, message
        assert not re.search("privateuseone|aten::|Facebook|backend", message)
