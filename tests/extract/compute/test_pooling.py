from __future__ import annotations

import numpy as np
import pytest
import torch

from extract.compute.pooling import Layout, pool, recognise, resolve_pooling
from extract.errors import InputError, UnknownNameError

SQUARE, WIDE = (224, 224), (224, 448)


@pytest.mark.parametrize(
    ("shape", "input_px", "kind", "axes"),
    [
        ((1000,), SQUARE, "vector", "C"),
        ((), SQUARE, "vector", ""),
        ((2048, 7, 7), SQUARE, "map", "CHW"),
        ((1280, 1, 1), SQUARE, "map", "CHW"),
        ((7, 7, 768), SQUARE, "map", "HWC"),  # Swin, inside ConvNeXt blocks
        ((64, 112, 224), WIDE, "map", "CHW"),
        ((7, 14, 512), WIDE, "map", "HWC"),
        ((7, 7, 512), WIDE, "unknown", ""),
        ((56, 56, 56), SQUARE, "unknown", ""),  # could be either
        ((3, 4, 5), SQUARE, "unknown", ""),
        ((196, 384), SQUARE, "tokens", "TC"),
        ((197, 384), SQUARE, "tokens", "TC"),
        ((12, 197, 197), SQUARE, "unknown", ""),  # attention, tokens x tokens
        ((8, 48, 48), SQUARE, "unknown", ""),  # attention, channels x channels
        ((12, 64, 64), SQUARE, "unknown", ""),
        ((288, 35, 35), (299, 299), "map", "CHW"),  # Inception, whose borders are not padded
        ((64, 147, 147), (299, 299), "map", "CHW"),
        ((384, 196), SQUARE, "unknown", ""),  # Mixer's token mixing: channels first
        ((198, 384), SQUARE, "unknown", ""),
        ((2, 3, 4, 5), SQUARE, "unknown", ""),
    ],
)
def test_axes_are_recognised_or_unknown(
    shape: tuple[int, ...], input_px: tuple[int, int], kind: str, axes: str
) -> None:
    layout = recognise(shape, input_px, prefix_tokens=1)
    assert (layout.kind, layout.axes) == (kind, axes)


def test_what_the_backbone_says_of_its_patches_decides_between_two_fits() -> None:
    assert recognise((196, 256), SQUARE).kind == "unknown"  # 256 would be patches of 14 pixels
    assert recognise((196, 256), SQUARE, patches=196).axes == "TC"
    assert recognise((256, 196), SQUARE, patches=196).kind == "unknown"


@pytest.mark.parametrize(
    ("pooling", "shape", "expected"),
    [
        ("none", (5, 4, 4), lambda x: x),
        ("flatten", (5, 4, 4), lambda x: x.reshape(3, -1)),
        ("mean_map", (5, 4, 4), lambda x: x.mean((2, 3))),
        ("max_map", (5, 4, 4), lambda x: x.max((2, 3))),
        ("mean_map", (4, 4, 5), lambda x: x.mean((1, 2))),
        ("max_map", (4, 4, 5), lambda x: x.max((1, 2))),
        ("cls_token", (17, 6), lambda x: x[:, 0]),
        ("mean_tokens", (17, 6), lambda x: x[:, 1:].mean(1)),
        ("mean_tokens", (16, 6), lambda x: x.mean(1)),
        ("none", (6,), lambda x: x),
    ],
)
def test_pooling_equals_numpy(pooling: str, shape: tuple[int, ...], expected) -> None:
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    layout = recognise(shape, (64, 64), prefix_tokens=1, class_token=True)
    assert resolve_pooling(pooling, layout, shape) == pooling
    for memory_format in (torch.contiguous_format, *([torch.channels_last] if len(shape) == 3 else [])):
        given = torch.from_numpy(x).to(memory_format=memory_format)
        np.testing.assert_allclose(pool(given, pooling, layout).numpy(), expected(x), rtol=1e-5, atol=1e-6)


def test_half_precision_maps_are_averaged_in_float32() -> None:
    x = torch.full((1, 2, 64, 64), 60000.0, dtype=torch.float16)  # their sum is beyond float16
    pooled = pool(x, "mean_map", Layout("map", "CHW"))
    assert pooled.dtype == torch.float32
    assert (pooled - 60000).abs().max() < 32


@pytest.mark.parametrize(
    ("shape", "class_token", "chosen"),
    [((10,), False, "none"), ((8, 7, 7), False, "mean_map"), ((7, 7, 8), False, "mean_map"),
     ((197, 8), True, "cls_token"), ((197, 8), False, "mean_tokens"), ((196, 8), True, "mean_tokens")],
)  # fmt: skip
def test_auto(shape: tuple[int, ...], class_token: bool, chosen: str) -> None:
    assert resolve_pooling("auto", recognise(shape, SQUARE, 1, class_token=True), shape, class_token) == chosen


@pytest.mark.parametrize(
    ("pooling", "shape", "message"),
    [
        (
            "cls_token",
            (64, 7, 7),
            "cls_token does not fit a map of shape .64, 7, 7. per image; use mean_map or max_map",
        ),
        ("cls_token", (196, 8), "which have no class token; use mean_tokens"),
        ("mean_map", (197, 8), "mean_map does not fit tokens of shape .197, 8. per image; use mean_tokens"),
        ("mean_tokens", (64, 7, 7), "does not fit a map"),
        ("max_map", (1000,), "does not fit a vector of shape .1000. per image; use none"),
        ("mean_map", (56, 56, 56), "channels could be the first axis or the last; use none or flatten"),
        ("auto", (384, 196), "tokens could be the last axis; use none or flatten"),
    ],
)
def test_a_pooling_that_does_not_fit_is_refused(pooling: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_pooling(pooling, recognise(shape, SQUARE, 1, class_token=True), shape)


def test_registers_are_no_class_token() -> None:
    layout = recognise((200, 8), SQUARE, prefix_tokens=4, class_token=False)
    with pytest.raises(InputError, match="which have no class token"):
        resolve_pooling("cls_token", layout, (200, 8))
    x = torch.randn(2, 200, 8)
    assert torch.allclose(pool(x, "mean_tokens", layout), x[:, 4:].mean(1))


def test_an_unknown_pooling_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'mean_mpa' not found; nearest: 'mean_map'"):
        resolve_pooling("mean_mpa", Layout("map", "CHW"), (1, 1, 1))
