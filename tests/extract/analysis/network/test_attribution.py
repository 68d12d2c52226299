"""Grad-CAM, attention rollout and colours of tokens, against what is written out here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from extract import Backbone, load_backbone
from extract.analysis.network.attribution import (
    activations_of,
    attentions,
    grad_cam,
    map_of,
    principal_colours,
    rollout,
)
from extract.errors import InputError
from tests.conftest import TINY_INPUT, make_picture


@pytest.fixture
def tiny() -> Backbone:
    return load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)


@pytest.fixture(scope="module")
def vit() -> Backbone:
    return load_backbone("timm/test_vit", weights="random", seed=3, device="cpu")


def inputs_of(backbone: Backbone, count: int = 2) -> Tensor:
    prepared = [backbone.preprocessing.cpu_transform(make_picture(seed, 300, 260)) for seed in range(count)]
    return backbone.preprocessing.to_input(torch.stack(prepared))


def written_out_cam(model: nn.Module, layer: nn.Module, inputs: Tensor, classes: list[int]) -> np.ndarray:
    """Equations 1 and 2 of Selvaraju et al., image by image, with loops over channels."""
    maps = []
    for image, number in zip(inputs, classes, strict=True):
        kept: list[Tensor] = []
        handle = layer.register_forward_hook(lambda m, a, out, kept=kept: kept.append(out))
        score = model(image[None].clone().requires_grad_())[0, number]
        handle.remove()
        kept[0].retain_grad()
        score.backward()
        activation, gradient = kept[0].detach()[0].double(), kept[0].grad[0].double()  # type: ignore[index]  # (C, h, w)
        cam = torch.zeros(activation.shape[1:], dtype=torch.float64)
        for channel in range(len(activation)):
            alpha = gradient[channel].mean()
            cam += alpha * activation[channel]
        maps.append(cam.clamp(min=0).numpy())
    model.zero_grad()
    return np.stack(maps)


def test_grad_cam_is_that_of_the_paper(tiny: Backbone) -> None:
    inputs, layer = inputs_of(tiny), tiny.model.get_submodule("layer3")
    cam, classes = grad_cam(tiny, inputs, "layer3")
    with torch.no_grad():
        assert classes.tolist() == tiny.model(inputs).argmax(1).tolist()
    expected = written_out_cam(tiny.model, layer, inputs, classes.tolist())
    assert cam.shape == expected.shape
    np.testing.assert_allclose(cam, expected, atol=1e-4 * expected.max())
    other, _ = grad_cam(tiny, inputs, "layer3", [10, 700])
    np.testing.assert_allclose(other, written_out_cam(tiny.model, layer, inputs, [10, 700]), atol=1e-5)
    assert all(parameter.grad is None for parameter in tiny.model.parameters())
    # A model is as good as its backbone.
    for value, of_backbone in zip(grad_cam(tiny.model, inputs, "layer3"), (cam, classes), strict=True):
        np.testing.assert_array_equal(value, of_backbone)
    kept = activations_of(tiny.model, inputs, ["layer2", "layer3"])
    assert torch.equal(kept["layer3"], activations_of(tiny, inputs, "layer3")["layer3"])


def test_grad_cam_of_a_transformer_is_over_its_patches(vit: Backbone) -> None:
    cam, _ = grad_cam(vit, inputs_of(vit), "blocks.5.norm1")
    assert cam.shape == (2, 10, 10)
    assert cam.max() > 0
    with pytest.raises(InputError, match="class token"):
        grad_cam(vit, inputs_of(vit), "norm")


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trained", ["", "fc"])
def test_grad_cam_of_a_frozen_backbone_does_not_depend_on_the_mode_around(
    tiny: Backbone, around: Callable[[], AbstractContextManager[None]], trained: str
) -> None:
    inputs = inputs_of(tiny)
    expected = written_out_cam(tiny.model, tiny.model.get_submodule("layer3"), inputs, [3, 7])
    for name, parameter in tiny.model.named_parameters():
        parameter.requires_grad_(bool(trained) and name.startswith(trained))
    with around():
        cam, _ = grad_cam(tiny, inputs, "layer3", [3, 7])
        of_inputs_made_here, _ = grad_cam(tiny, inputs.clone(), "layer3", [3, 7])
    np.testing.assert_allclose(cam, expected, atol=1e-5 * expected.max())
    np.testing.assert_array_equal(of_inputs_made_here, cam)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", ["layer3", ""])
def test_grad_cam_names_the_layer_and_the_model_whose_forward_computes_no_gradients(
    tiny: Backbone, mode: Callable[[], Any], layer: str
) -> None:
    module = tiny.model.get_submodule(layer)
    module.forward = mode()(module.forward)  # type: ignore[method-assign]
    with pytest.raises(InputError) as error:
        grad_cam(tiny, inputs_of(tiny), "layer3")
    text = "no gradient reaches layer 'layer3' of timm/test_resnet; name a layer on which the scores depend"
    if mode is torch.inference_mode and layer:  # later layers have to save what it computes
        text = (
            "no gradient can be computed: a tensor that takes part was made in torch.inference_mode(); load the model"
        )
    assert str(error.value).startswith(text)


def test_grad_cam_of_a_backbone_that_was_loaded_in_inference_mode_says_so() -> None:
    with torch.inference_mode():
        loaded = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
        with pytest.raises(InputError, match=r"made in torch\.inference_mode\(\); load the model"):
            grad_cam(loaded, inputs_of(loaded), "layer3")


def test_attention_and_rollout_are_those_written_out(vit: Backbone) -> None:
    inputs = inputs_of(vit)
    weights = attentions(vit, inputs)
    expected: list[Tensor] = []

    def by_hand(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        batch, tokens, width = x.shape
        heads = module.num_heads
        q, k, _ = module.qkv(x).reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        expected.append((q @ k.transpose(-2, -1) / (width // heads) ** 0.5).softmax(-1))

    handles = [block.attn.register_forward_pre_hook(by_hand) for block in vit.model.blocks]
    with torch.no_grad():
        vit.model(inputs)
    for handle in handles:
        handle.remove()
    assert len(weights) == len(expected) == 6
    for actual, expected_weights in zip(weights, expected, strict=True):
        np.testing.assert_allclose(actual, expected_weights, atol=1e-5)
    rolled = [np.eye(101) for _ in range(2)]
    for expected_weights in expected:  # Abnar and Zuidema: A = 0.5 W + 0.5 I, and A of the layer times what came before
        for i in range(2):
            a = 0.5 * expected_weights[i].double().mean(0).numpy() + 0.5 * np.eye(101)
            rolled[i] = (a / a.sum(1, keepdims=True)) @ rolled[i]
    result = rollout(weights)
    np.testing.assert_allclose(result, np.stack(rolled), atol=1e-5)
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-5)


def test_what_has_no_attention_or_windows_of_it_says_so(tiny: Backbone) -> None:
    with pytest.raises(InputError, match="no attention"):
        attentions(tiny, inputs_of(tiny, 1))
    with pytest.raises(InputError, match="49x49, 98x98"):
        rollout([torch.full((1, 2, 49, 49), 1 / 49), torch.full((1, 2, 98, 98), 1 / 98)])


def test_colours_are_the_main_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 6, 5, 9, generator=generator) * torch.tensor([9.0, 5, 3, 1, 1, 1, 1, 1, 1]) + 50
    colours = principal_colours(maps)
    flat = maps.reshape(-1, 9).double().numpy()
    _, _, right = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    for channel in range(3):
        direction = right[channel] * np.sign(right[channel][np.abs(right[channel]).argmax()])
        values = (flat - flat.mean(0)) @ direction
        low, high = np.percentile(values, [1, 99])
        expected = np.clip((values - low) / (high - low), 0, 1)
        np.testing.assert_allclose(colours[..., channel].ravel(), expected, atol=1e-4)
    assert principal_colours(maps[..., :2]).shape == (2, 6, 5, 3)
    assert np.isfinite(principal_colours(torch.ones(1, 2, 2, 4))).all()


def test_tokens_become_the_grid_they_are_of() -> None:
    tokens = torch.arange(2 * (1 + 8) * 3).reshape(2, 9, 3).float()
    grid = map_of(tokens, "TC", 1, (224, 448))
    assert grid.shape == (2, 2, 4, 3)
    assert torch.equal(grid[0, 1, 0], tokens[0, 1 + 4])
    with pytest.raises(InputError, match="do not form a grid"):
        map_of(tokens[:, :8], "TC", 1, (224, 224))


class Own(nn.Module):
    """A network as students write it: no padding, a stride that no library has, one grey channel."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


@pytest.mark.parametrize(("channels", "size"), [(1, (28, 28)), (3, (32, 48)), (4, (30, 30))])
def test_grad_cam_of_an_own_module_is_that_of_the_paper(channels: int, size: tuple[int, int]) -> None:
    model = Own(channels)
    inputs = torch.rand(3, channels, *size, generator=torch.Generator().manual_seed(2))
    cam, classes = grad_cam(model, inputs, "body.4")
    assert classes.tolist() == model.eval()(inputs).argmax(1).tolist()
    expected = written_out_cam(model, model.body[4], inputs, classes.tolist())
    np.testing.assert_allclose(cam, expected, atol=1e-5 * expected.max())
    alone, _ = grad_cam(model, inputs[:1], "body.4", [int(classes[0])])
    np.testing.assert_allclose(alone, cam[:1], atol=1e-5 * expected.max())


def test_several_layers_give_a_map_each_from_one_forward() -> None:
    model, inputs = Own(), torch.rand(2, 1, 28, 28)
    cams, classes = grad_cam(model, inputs, ["body.1", "body.4"], [0, 3])
    assert list(cams) == ["body.1", "body.4"]
    assert classes.tolist() == [0, 3]
    for name, cam in cams.items():
        np.testing.assert_array_equal(cam, grad_cam(model, inputs, name, [0, 3])[0])
    assert list(grad_cam(model, inputs, "body.[14]")[0]) == ["body.1", "body.4"]
    assert list(grad_cam(model, inputs, ["body.4"])[0]) == ["body.4"]


def test_grad_cam_refuses_what_has_no_positions_or_no_such_class_or_does_not_fit(tiny: Backbone) -> None:
    inputs, own = inputs_of(tiny), Own()
    wrong: list[tuple[Any, Any, str, Any, str]] = [
        (tiny, inputs, "fc", None, "no positions"),
        (tiny, inputs, "layer3", [1000, 1], "from 0 to 999 for each of 2 images"),
        (tiny, inputs.numpy(), "layer3", None, "of timm/test_resnet are ndarray; expected a tensor"),
        (inputs_of, inputs, "body.4", None, "the model is function; expected a backbone or an nn.Module"),
        (own, torch.rand(1, 28, 28), "body.4", None, r"of shape \(1, 28, 28\); expected a tensor \(B, C, H, W\)"),
        (own, np.zeros((1, 1, 28, 28)), "body.4", None, "are ndarray; expected a tensor"),
        (own, torch.rand(0, 1, 28, 28), "body.4", None, r"of shape \(0, 1, 28, 28\)"),
        (own, torch.zeros(1, 1, 28, 28, dtype=torch.uint8), "body.4", None, "has no gradients; give inputs.float.."),
    ]
    for model, given, layer, classes, why in wrong:
        with pytest.raises(InputError, match=why):
            grad_cam(model, given, layer, classes)


@pytest.mark.parametrize("value", [0.0, 7.0, torch.nan])
def test_layers_are_found_on_inputs_without_contrast(value: float) -> None:
    assert activations_of(Own(), torch.full((1, 1, 28, 28), value), "body.0")["body.0"].shape == (1, 6, 24, 24)


def cam_of_patches(model: nn.Module, layer: str, inputs: Tensor, classes: list[int], grid: tuple[int, int]) -> Tensor:
    """The map of a layer of tokens behind one class token."""
    kept: list[Tensor] = []
    model.get_submodule(layer).register_forward_hook(lambda m, a, out: kept.append(out))
    scores = model.eval()(inputs)
    (gradient,) = torch.autograd.grad(scores[range(len(classes)), classes].sum(), kept[0])
    weights = gradient[:, 1:].mean(1, keepdim=True)
    return (kept[0] * weights).sum(-1)[:, 1:].relu().reshape(-1, *grid).detach()


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(64, 16, 3, 2, 24, 48, num_classes=7)
    nn.init.normal_(vit.heads.head.weight)
    return vit


def timm_vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("test_vit", img_size=64, num_classes=7)


@pytest.mark.parametrize(("build", "block", "usual"), [
    (torchvision_vit, "encoder.layers.encoder_layer_2", "encoder.layers.encoder_layer_2.ln_1"),
    (timm_vit, "blocks.5", "blocks.5.norm1"),
])  # fmt: skip
def test_a_block_whose_patches_nobody_reads_names_the_usual_layer(
    build: Callable[[], Any], block: str, usual: str
) -> None:
    model, inputs = build(), torch.rand(2, 3, 64, 64)
    with pytest.raises(InputError, match=f"name the usual layer of such a network, '{usual}'"):
        grad_cam(model, inputs, block)
    cam, classes = grad_cam(model, inputs, usual)
    expected = cam_of_patches(model, usual, inputs, classes.tolist(), (4, 4))
    np.testing.assert_allclose(cam, expected, atol=1e-5 * float(expected.max()))


class OwnTransformer(nn.Module):
    """A class token and patches of 7 pixels, as nobody publishes; the scores read the mean of the patches."""

    def __init__(self, prefix: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Conv2d(1, 8, 7, 7), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)
        if prefix is not None:
            self.num_prefix_tokens = prefix

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        return self.head(self.block(tokens)[:, 1:].square().mean(1))


def test_an_own_transformer_states_the_tokens_before_its_patches() -> None:
    model, inputs = OwnTransformer(1), torch.rand(2, 1, 28, 14)
    cam, _ = grad_cam(model, inputs, "block", [1, 2])
    np.testing.assert_allclose(cam, cam_of_patches(model, "block", inputs, [1, 2], (4, 2)), atol=1e-6)
    with pytest.raises(InputError, match=r"layer 'block': it has no positions .*; .* as model\.num_prefix_tokens"):
        grad_cam(OwnTransformer(None), inputs, "block")
