from __future__ import annotations

import numpy as np
import pytest
import torch

from extract.compute.pooling import POOLINGS, Layout, recognise, resolve_pooling, split_poolings
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


def power_mean(x: np.ndarray, power: float, axes: int | tuple[int, ...]) -> np.ndarray:
    return (np.maximum(x.astype(np.float64), 1e-6) ** power).mean(axes) ** (1 / power)


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
        ("std_map", (5, 4, 4), lambda x: x.std((2, 3))),
        ("std_map", (4, 4, 5), lambda x: x.std((1, 2))),
        ("std_map", (5, 1, 1), lambda x: np.zeros((3, 5))),
        ("meanstd", (5, 4, 4), lambda x: np.concatenate([x.mean((2, 3)), x.std((2, 3))], 1)),
        ("meanstd", (4, 4, 5), lambda x: np.concatenate([x.mean((1, 2)), x.std((1, 2))], 1)),
        ("meanstd", (17, 6), lambda x: np.concatenate([x[:, 1:].mean(1), x[:, 1:].std(1)], 1)),
        ("cls+mean", (17, 6), lambda x: np.concatenate([x[:, 0], x[:, 1:].mean(1)], 1)),
        ("last_token", (17, 6), lambda x: x[:, 16]),
        ("last_token", (16, 6), lambda x: x[:, 15]),
        ("gem3", (5, 4, 4), lambda x: power_mean(x, 3, (2, 3))),
        ("gem3", (4, 4, 5), lambda x: power_mean(x, 3, (1, 2))),
        ("gem2.5", (17, 6), lambda x: power_mean(x[:, 1:], 2.5, 1)),
        ("gem100", (5, 4, 4), lambda x: power_mean(x, 100, (2, 3))),  # 10**100 is beyond float32
        ("grid2", (5, 4, 4), lambda x: x.reshape(3, 5, 2, 2, 2, 2).mean((3, 5))),
        ("grid2", (4, 4, 5), lambda x: x.reshape(3, 2, 2, 2, 2, 5).mean((2, 4))),
        ("grid2", (17, 6), lambda x: x[:, 1:].reshape(3, 2, 2, 2, 2, 6).mean((2, 4))),
        ("grid2", (16, 6), lambda x: x.reshape(3, 2, 2, 2, 2, 6).mean((2, 4))),
        ("grid4", (5, 4, 4), lambda x: x),
        ("grid1", (5, 4, 4), lambda x: x.mean((2, 3), keepdims=True)),
        ("grid2:max_map", (17, 6), lambda x: x[:, 1:].reshape(3, 2, 2, 2, 2, 6).mean((2, 4)).max((1, 2))),
        ("grid2:flatten", (4, 4, 5), lambda x: x.reshape(3, 2, 2, 2, 2, 5).mean((2, 4)).reshape(3, 20)),
        ("tokens", (5, 4, 4), lambda x: x.reshape(3, 5, 16).swapaxes(1, 2)),
        ("tokens", (4, 4, 5), lambda x: x.reshape(3, 16, 5)),
        ("tokens", (17, 6), lambda x: x),
        ("grid2:tokens", (5, 4, 4), lambda x: x.reshape(3, 5, 2, 2, 2, 2).mean((3, 5)).reshape(3, 5, 4).swapaxes(1, 2)),
        ("tokens:mean_tokens", (5, 4, 4), lambda x: x.mean((2, 3))),
        ("tokens:grid2", (5, 4, 4), lambda x: x.reshape(3, 5, 2, 2, 2, 2).mean((3, 5)).transpose(0, 2, 3, 1)),
        ("roi", (5, 4, 4), lambda x: x.mean((2, 3))),  # without boxes, of the whole picture
        ("roi", (4, 4, 5), lambda x: x.mean((1, 2))),
        ("roi2", (17, 6), lambda x: x[:, 1:].reshape(3, 2, 2, 2, 2, 6).mean((2, 4)).transpose(0, 3, 1, 2)),
        ("grid4:roi2", (5, 4, 4), lambda x: x.reshape(3, 5, 2, 2, 2, 2).mean((3, 5))),
        ("grid4:grid2", (5, 4, 4), lambda x: x.reshape(3, 5, 2, 2, 2, 2).mean((3, 5))),
    ],
)
def test_pooling_equals_numpy(pooling: str, shape: tuple[int, ...], expected) -> None:
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    layout = recognise(shape, (64, 64), prefix_tokens=1, class_token=True)
    for memory_format in (torch.contiguous_format, *([torch.channels_last] if len(shape) == 3 else [])):
        given = torch.from_numpy(x).to(memory_format=memory_format)
        chain = resolve_pooling(pooling, given, layout)
        assert (chain.name, chain.shape) == (pooling, expected(x).shape[1:])
        np.testing.assert_allclose(chain(given).numpy(), expected(x), rtol=1e-5, atol=1e-6)


def test_half_precision_maps_are_averaged_in_float32() -> None:
    x = torch.full((1, 2, 64, 64), 60000.0, dtype=torch.float16)  # their sum is beyond float16
    for pooling in ("mean_map", "grid2", "gem"):
        pooled = resolve_pooling(pooling, x, Layout("map", "CHW"))(x)
        assert pooled.dtype == torch.float32
        assert (pooled - 60000).abs().max() < 32


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("shape", [(3, 7, 7), (3, 7, 14), (3, 9, 8)])
def test_a_grid_has_the_cells_of_adaptive_average_pooling(shape: tuple[int, ...], size: int) -> None:
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.adaptive_avg_pool2d(x.double(), size)
    for layout, given in ((Layout("map", "CHW"), x), (Layout("map", "HWC"), x.movedim(1, 3))):
        grid = resolve_pooling(f"grid{size}", given, layout)(given)
        assert torch.allclose(grid if layout.axes == "CHW" else grid.movedim(3, 1), expected.float(), atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "input_px", "grid"),
    [(196, SQUARE, (14, 14)), (49, SQUARE, (7, 7)), (392, WIDE, (14, 28)), (256, SQUARE, (16, 16)), (195, SQUARE, None),
     (1369, (518, 518), (37, 37)), (12 * 30, (48, 120), (12, 30)), (24, (96, 100), None)],
)  # fmt: skip
def test_the_grid_of_tokens_follows_from_their_number_and_the_input(
    tokens: int, input_px: tuple[int, int], grid: tuple[int, int] | None
) -> None:
    assert recognise((tokens, 8), input_px, patches=tokens).grid == grid
    assert recognise((tokens + 1, 8), input_px, 1, patches=tokens).grid == grid


def test_tokens_of_a_wide_input_are_folded_by_rows() -> None:
    picture = torch.arange(14.0 * 28).reshape(1, 14, 28, 1)
    x = torch.cat([torch.full((1, 2, 1), 1e6), picture.flatten(1, 2)], 1)  # two special tokens first
    grid = resolve_pooling("grid2", x, recognise((394, 1), WIDE, prefix_tokens=2, patches=392))(x)
    assert torch.allclose(grid[0, :, :, 0], picture[0, :, :, 0].reshape(2, 7, 2, 14).mean((1, 3)))


def test_a_chain_has_the_axes_of_its_last_pooling() -> None:
    x = torch.randn(2, 196, 8)
    layout = recognise((196, 8), SQUARE)
    axes = {
        name: resolve_pooling(name, x, layout).layout.axes
        for name in ("none", "grid2", "grid2:flatten", "grid2:mean_map")
    }
    assert axes == {"none": "TC", "grid2": "HWC", "grid2:flatten": "HWC", "grid2:mean_map": "C"}


def test_equal_chains_have_one_name_with_all_numbers() -> None:
    x, layout = torch.randn(2, 8, 7, 7), Layout("map", "CHW")
    names = {
        "gem": "gem3", "gem3.0": "gem3", "gem2.50": "gem2.5", "none:grid2:none": "grid2", "none:none": "none",
        "auto": "mean_map", "auto:srp4": "mean_map:srp4", "srp4s0": "srp4", "srp4s1": "srp4s1",
        "grid2:auto": "grid2:mean_map",
    }  # fmt: skip
    assert {name: resolve_pooling(name, x, layout).name for name in names} == names


@pytest.mark.parametrize(
    ("text", "expected"),
    [("layer1", ("layer1", "")), ("layer1:grid4:srp512s1", ("layer1", "grid4:srp512s1")), ("lstm:0", ("lstm:0", "")),
     ("lstm:1.0:gem2.5", ("lstm:1.0", "gem2.5")), ("a:b:none", ("a:b", "none")), ("srp4", ("srp4", "")),
     ("x:cls+mean", ("x", "cls+mean")), ("x:grid0", ("x", "grid0")), ("x:grid4a", ("x:grid4a", "")),
     ("x:srp", ("x", "srp")), ("x:srps2", ("x", "srps2")), ("x:auto", ("x", "auto")), ("x:gem[P]", ("x:gem[P]", "")),
     ("x:srp\u0664", ("x:srp\u0664", ""))],
)  # fmt: skip
def test_poolings_are_split_from_the_layer(text: str, expected: tuple[str, str]) -> None:
    assert split_poolings(text) == expected


@pytest.mark.parametrize(
    ("shape", "class_token", "chosen"),
    [((10,), False, "none"), ((8, 7, 7), False, "mean_map"), ((7, 7, 8), False, "mean_map"),
     ((197, 8), True, "cls_token"), ((197, 8), False, "mean_tokens"), ((196, 8), True, "mean_tokens")],
)  # fmt: skip
def test_auto(shape: tuple[int, ...], class_token: bool, chosen: str) -> None:
    layout = recognise(shape, SQUARE, 1, class_token=True)
    assert resolve_pooling("auto", torch.zeros(1, *shape), layout, class_token).name == chosen


@pytest.mark.parametrize(
    ("pooling", "shape", "message"),
    [
        ("cls_token", (64, 7, 7), "does not fit a map of shape .64, 7, 7. per image; "
         r"use mean_map, .*gridG"),
        ("cls_token", (196, 8), "which have no class token; use mean_tokens, last_token, meanstd"),
        ("mean_map", (197, 8), "not fit tokens of shape .197, 8. per image; use cls_token, mean_tokens, last_token"),
        ("mean_tokens", (64, 7, 7), "does not fit a map"),
        ("max_map", (1000,), "does not fit a vector of shape .1000. per image; use none$"),
        ("mean_map", (56, 56, 56), "channels could be the first axis or the last; use none, flatten, srp"),
        ("last_token", (64, 7, 7), "last_token does not fit a map"),
        ("tokens", (64,), "tokens does not fit a vector"),
        ("std_map", (197, 8), "std_map does not fit tokens"),
        ("gem0", (64, 7, 7), "gem0 has the power 0; expected 0.01 to 100"),
        ("grid2", (64,), "grid2 does not fit a vector"),
        ("grid2", (56, 56, 56), "grid2 does not fit an activation"),
        ("grid8", (64, 7, 7), "grid8 does not fit a grid of 7 x 7 positions; use grid1 to grid7"),
        ("grid4:grid5", (64, 7, 7), "after grid4, grid5 does not fit a grid of 4 x 4 positions; use grid1 to grid4"),
        ("mean_map:max_map", (64, 7, 7), "after mean_map, max_map does not fit a vector of shape .64. per image"),
        ("srp100:auto:grid2", (64, 7, 7), "after none, grid2 does not fit a vector of shape .100. per image"),
        ("grid0", (64, 7, 7), "grid0 does not fit a grid of 7 x 7 positions"),
        ("srp0", (64, 7, 7), "srp0 of 3,136 values"),
        ("pca0", (64, 7, 7), "pca0 of 3,136 values"),
        ("srp3137", (64, 7, 7), "srp3137 of 3,136 values: .* use srpK with K up to 3,136, or none"),
        ("mean_map:srp65", (64, 7, 7), "after mean_map, srp65 of 64 values: .*; use srpK with K up to 64"),
        ("srp", (64, 7, 7), "srp alone needs a number of images to choose K; give K, such as srp4096"),
        ("auto", (384, 196), "tokens could be the last axis; use none, flatten, srp"),
    ],
)  # fmt: skip
def test_a_pooling_that_does_not_fit_is_refused(pooling: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_pooling(pooling, torch.zeros(1, *shape), recognise(shape, SQUARE, 1, class_token=True))


def test_a_stated_number_of_prefix_tokens_tells_65_tokens_from_64_values() -> None:
    square = (64, 64)
    layout = recognise((65, 64), square, prefix_tokens=1, class_token=True)
    assert (layout.kind, layout.prefix_tokens, layout.grid) == ("tokens", 1, (8, 8))
    for shape, prefix_tokens in (((65, 64), 0), ((64, 65), 1), ((64, 64), 0), ((64, 64), 1)):
        assert recognise(shape, square, prefix_tokens).reason == "tokens could be the last axis", shape


def test_an_unknown_pooling_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'mean_mpa' not found; nearest: 'mean_map'"):
        resolve_pooling("mean_mpa", torch.zeros(1, 1, 1, 1), Layout("map", "CHW"))


def test_every_pooling_is_computed_in_16_bits_too() -> None:
    """As under autocast: the result is that of the same values in float32, to the precision of 16 bits."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((8, 7, 7), (7, 7, 8), (50, 8)):
        layout = recognise(shape, SQUARE, 1, patches=49, class_token=True)
        x = torch.randn(3, *shape, generator=generator).bfloat16()
        for name in (
            key.replace("[P]", "").replace("gridG", "grid3").replace("roiG", "roi3").replace("[K][sSEED]", "20")
            for key in POOLINGS
        ):
            if name == "pca[w]K":  # computes after a fit only; `test_principal_axes.py` has it in 16 bits
                continue
            try:
                chain = resolve_pooling(name, x, layout)
            except InputError:
                continue
            assert torch.allclose(chain(x).float(), chain(x.float()), rtol=1e-2, atol=1e-3), name
