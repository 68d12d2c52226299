from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from extract import load_backbone
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError, UnknownNameError
from extract.taps.batch_axis import BatchAxis, Trial
from extract.taps.layer_names import named_layers
from tests.conftest import TINY_INPUT
from tests.extract.compute.small_network import small_network
from tests.extract.taps.batch_axes import find_batch_axis


@pytest.fixture(scope="module")
def resnet() -> Backbone:
    return load_backbone("torchvision/resnet18", weights="random", device="cpu", preprocessing=TINY_INPUT)


def chosen(backbone: Backbone, *layers: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f.name: (f.pooling, f.shape) for f in choose_features(backbone, layers).features}


def test_the_embedding_is_the_input_of_the_classifier(resnet: Backbone) -> None:
    feature = choose_features(resnet, ["embedding"]).features[0]
    assert (feature.name, str(feature.site), feature.shape) == ("embedding", "fc:0@input", (512,))


def test_names_globs_and_poolings(resnet: Backbone) -> None:
    assert chosen(resnet, "layer?", "layer4:max_map", "fc", "conv1:none", "embedding", "avgpool:flatten") == {
        "layer1": ("mean_map", (64,)),
        "layer2": ("mean_map", (128,)),
        "layer3": ("mean_map", (256,)),
        "layer4:mean_map": ("mean_map", (512,)),
        "layer4:max_map": ("max_map", (512,)),
        "fc": ("none", (1000,)),
        "conv1": ("none", (64, 32, 32)),
        "embedding": ("none", (512,)),
        "avgpool": ("flatten", (512,)),
    }


def test_a_layer_that_runs_twice_gives_two_features_or_the_one_named(resnet: Backbone) -> None:
    assert list(chosen(resnet, "layer1.0.relu")) == ["layer1.0.relu#0", "layer1.0.relu#1"]
    assert list(chosen(resnet, "layer1.0.relu#1:max_map")) == ["layer1.0.relu#1"]


def test_the_same_feature_asked_for_twice_is_one(resnet: Backbone) -> None:
    assert list(chosen(resnet, "layer4", "layer4:mean_map", "layer?", "fc", "embedding", "embedding")) == [
        "layer4", "layer1", "layer2", "layer3", "fc", "embedding",
    ]  # fmt: skip


def test_tokens_are_pooled_as_the_model_pools_them() -> None:
    vit = load_backbone("timm/vit_tiny_patch16_224", weights="random", device="cpu")
    assert chosen(vit, "blocks.0", "patch_embed", "embedding") == {
        "blocks.0": ("cls_token", (192,)), "patch_embed": ("mean_tokens", (192,)), "embedding": ("none", (192,)),
    }  # fmt: skip
    with pytest.raises(InputError, match="'patch_embed' of .*cls_token does not fit tokens.*no class token"):
        choose_features(vit, ["patch_embed:cls_token"])


def test_poolings_follow_each_other_and_projections_have_seeds_in_their_names(resnet: Backbone) -> None:
    assert chosen(resnet, "layer1:grid4:srp64", "layer1:srp64", "layer1:srp64s0", "layer1:srp64s3", "layer2:gem",
                  "layer3:grid2", "embedding:srp16") == {
        "layer1:grid4:srp64": ("grid4:srp64", (64,)),
        "layer1:srp64": ("srp64", (64,)),
        "layer1:srp64s3": ("srp64s3", (64,)),
        "layer2": ("gem3", (128,)),
        "layer3": ("grid2", (256, 2, 2)),
        "embedding": ("srp16", (16,)),
    }  # fmt: skip
    with pytest.raises(InputError, match="layer 'layer1' of .*: after srp64, grid4 does not fit a vector"):
        choose_features(resnet, ["layer1:srp64:grid4"])


def test_windows_and_tokens_in_another_order_have_no_grid(net: Backbone) -> None:
    with pytest.raises(InputError, match="grid2 does not fit an activation of shape .4, 4, 14, 14. per image"):
        choose_features(net, ["windows:grid2"])

    class Hiera(nn.Module):
        """As timm's: tokens in the order of its later windows."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.plain = nn.Identity(), nn.Conv2d(3, 4, 16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.tokens(self.plain(x).flatten(2).transpose(1, 2))[:, 0]

    hiera = replace(net, model=Hiera().eval())
    with pytest.raises(InputError, match="grid2 does not fit 196 patch tokens, whose grid is not known"):
        choose_features(hiera, ["tokens:grid2"])
    assert chosen(hiera, "tokens") == {"tokens": ("mean_tokens", (4,))}


@pytest.mark.parametrize(("spec", "layer", "axes"), [
    ("timm/test_convnext", "stages.1.blocks.0.mlp", "HWC"), ("timm/test_convnext", "stages.1", "CHW"),
])  # fmt: skip
def test_channels_last_maps_are_recognised(spec: str, layer: str, axes: str) -> None:
    backbone = load_backbone(spec, weights="random", device="cpu")
    feature = choose_features(backbone, [layer]).features[0]
    assert (feature.layout.axes, feature.pooling) == (axes, "mean_map")


class Net(nn.Module):
    """Layers whose rows are not the images, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("windows", "strided", "time_first", "mixes", "shuffles", "swaps", "scalar", "whole", "never",
                     "infinite", "ragged", "moved", "mask"):  # fmt: skip
            self.add_module(name, nn.Identity())
        self.plain, self.lstm = nn.Conv2d(3, 4, 3, stride=8), nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.plain(x)  # (B, 4, 28, 28)
        self.windows(h.reshape(-1, 4, 14, 14))  # 4 rows an image, one image after the other
        self.strided(h.reshape(-1, 4, 4, 14, 14).transpose(0, 1).flatten(0, 1))  # every first row, then every second
        self.infinite(torch.cat([h.flip(0).mean((2, 3)), torch.full_like(h[:, :1, 0, 0], -torch.inf)], 1))
        self.ragged(torch.zeros(len(x) + 4, 4))
        self.time_first(h.flatten(2).permute(2, 0, 1))  # (T, B, C)
        self.mixes(h - h.mean(0, keepdim=True))
        self.shuffles(h.flip(0))
        self.swaps(torch.cat([h[1:2], h[:1], h[2:]]))
        self.scalar(h.mean())
        self.whole(h.argmax(1))
        self.moved(h.argmax(1).flip(0))
        self.mask(h > 0)
        self.lstm(h.flatten(2).transpose(1, 2))
        return h.mean((2, 3))


@pytest.fixture(scope="module")
def net() -> Backbone:
    torch.manual_seed(0)
    return replace(small_network(resize_px=224, crop_px=(224, 224)), spec="net", model=Net().eval(), classifier=None)


def test_layers_whose_rows_are_not_the_images_are_refused(net: Backbone) -> None:
    mixed = ("strided", "mixes", "shuffles", "swaps", "moved", "infinite")
    for layer, message in (
        *((name, f"'{name}' of net: its output for a picture differs in a batch from the picture") for name in mixed),
        ("scalar", r"is \(\) for 3 images"),
        ("mask", "torch.bool; features must be floating point or whole numbers"),
        ("whole:mean_map", r"mean_map does not fit whole numbers \(torch.int64\)"),
        ("whole:flatten:srp8", r"srp8 does not fit whole numbers"),
        ("never", "'never' of net never runs"),
        ("lstm:1.0", "auto does not fit an activation of shape .1, 5. per image"),
        ("ragged", r"is \(7, 4\) for 3 images and \(5, 4\) for 1: its rows are not the images"),
        ("embedding", "no single classifier"),
        ("windows:cls_token", "cls_token does not fit an activation of shape .4, 4, 14, 14. per image"),
    ):
        with pytest.raises(InputError, match=message):
            choose_features(net, [layer])


def test_windows_and_sequence_first_tensors_are_put_in_order(net: Backbone) -> None:
    windows, tokens, state = choose_features(net, ["windows:none", "time_first", "lstm:1.0:flatten"]).features
    assert (windows.rows, windows.shape) == (BatchAxis(0, 4), (4, 4, 14, 14))
    assert (tokens.rows, tokens.pooling, tokens.shape) == (BatchAxis(1, 1), "mean_tokens", (4,))
    assert (state.rows, state.shape) == (BatchAxis(1, 1), (5,))
    images = torch.randn(5, 3, 224, 224)
    with torch.no_grad():
        h = net.model.plain(images)
    assert torch.equal(windows.rows.by_image(h.reshape(-1, 4, 14, 14)), h.reshape(5, 4, 4, 14, 14))
    assert torch.equal(tokens.rows.by_image(h.flatten(2).permute(2, 0, 1)), h.flatten(2).permute(0, 2, 1))


@pytest.mark.parametrize("change", [
    lambda h: h.flip(0), lambda h: (h + 1e4).flip(0), lambda h: h[[0, 2, 1, 3]], lambda h: torch.cat([h[::2], h[1::2]]),
    lambda h: h + 0.02 * h.mean(0), lambda h: h.bfloat16().flip(0),
])  # fmt: skip
def test_no_mixture_or_order_of_images_passes_for_rows(change) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.changed = nn.Linear(12, 6), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x.flatten(1))
            if len(x) == 4:
                return self.changed(change(h))
            return self.changed(change(h.expand(4, -1))[:1])

    torch.manual_seed(0)
    with pytest.raises(InputError, match="its rows are not the images"):
        find_batch_axis(Net(), torch.randn(4, 3, 2, 2), ["changed"])


@pytest.mark.parametrize("name", [
    "test_convnext", "test_vit", pytest.param("mixer_s32_224", marks=pytest.mark.slow),
    pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.soak),
])  # fmt: skip
def test_the_layers_of_real_networks_are_not_refused(name: str) -> None:
    backbone = load_backbone(f"timm/{name}", weights="random", device="cpu")
    size = backbone.preprocessing.crop_px
    layers = [(layer, "output") for layer in named_layers(backbone.model)]
    trial = Trial(backbone.model, torch.randn(3, 3, *size), layers)
    for site in trial.record.sites.values():
        trial.rows(site)


def test_a_part_of_a_tuple_can_be_named(net: Backbone) -> None:
    assert chosen(net, "lstm:0:mean_tokens") == {"lstm:0": ("mean_tokens", (5,))}
    with pytest.raises(InputError, match=r"'lstm:1.0' .*; or choose among its tensors: lstm:0, lstm:1.0, lstm:1.1$"):
        choose_features(net, ["lstm"])


class Cube(nn.Module):
    """Maps of as many channels as rows and columns, before and after they come last; 784 tokens of 196 channels."""

    def __init__(self, only_one_size: bool) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv2d(3, 28, 8, stride=8), nn.ReLU(), nn.Identity()
        self.tokens, self.only_one_size = nn.Identity(), only_one_size

    def forward(self, x: Tensor) -> Tensor:
        assert not self.only_one_size or x.shape[2:] == (224, 224)
        maps = self.last(self.first(self.conv(x)).movedim(1, 3))
        self.tokens(maps.repeat(1, 1, 1, 7).flatten(1, 2))
        return maps.mean((1, 2))


def test_a_higher_input_tells_channels_from_positions_of_the_same_number(net: Backbone) -> None:
    model, images = Cube(only_one_size=False).eval(), torch.rand(2, 3, 224, 224)
    first, last, tokens = choose_features(replace(net, model=model), ["first", "last", "tokens:mean_tokens"]).features
    assert [feature.layout.axes for feature in (first, last, tokens)] == ["CHW", "HWC", "TC"]
    with torch.no_grad():
        maps, means = model.conv(images).relu(), model(images)
        torch.testing.assert_close(first.poolings(maps), means)
        torch.testing.assert_close(last.poolings(maps.movedim(1, 3)), means)
        values = maps.movedim(1, 3).repeat(1, 1, 1, 7).flatten(1, 2)
        torch.testing.assert_close(tokens.poolings(values), means.repeat(1, 7))
    fixed = replace(net, model=Cube(only_one_size=True).eval())
    with pytest.raises(InputError, match="channels could be the first axis or the last"):
        choose_features(fixed, ["first"])
    with pytest.raises(InputError, match="tokens could be the last axis; use none"):
        choose_features(fixed, ["tokens"])


def test_names_that_do_not_exist_and_no_names_are_refused(net: Backbone) -> None:
    for layer, message in (
        ("lstn", "layer 'lstn' not found in net; nearest: 'lstm'"),
        ("plain:mean_mpa", r"':mean_mpa' after layer 'plain' is neither a pooling \(auto, .* nor .* \(plain\)"),
        ("lstm:2", r"nor one of its tensors \(lstm:0, lstm:1.0, lstm:1.1\)"),
        ("plain#1", "'#1' after layer 'plain'"),
        ("plain:", "layer 'plain:' not found in net; nearest: 'plain'"),
    ):
        with pytest.raises(UnknownNameError, match=message):
            choose_features(net, [layer])
    with pytest.raises(InputError):
        choose_features(net, [])


def test_layers_of_a_glob_that_never_run_are_left_out_and_told(net: Backbone) -> None:
    choice = choose_features(net, ["[np]*"])
    assert [feature.name for feature in choice.features] == ["plain"]
    assert choice.never_run == ["never"]
