"""Functions without a module, and attention."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract import InputError, LayertapError, Taps, UnknownNameError
from tests.extract.taps.networks import Net, linear


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h += 1
        h = F.relu(h + h)
        return self.fc(torch.flatten(F.relu_(h - 3), 1))


def test_functions_are_kept_by_readable_names() -> None:
    model, x = Functions().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad(), Taps(model, ["/*"]) as taps:
        taps(x)
        conv = model.conv(x)
    record = taps.record
    assert list(record) == ["/add#0", "/add#1", "/relu#0", "/sub", "/relu#1", "/flatten"]
    relu = (2 * (conv + 1)).clamp(min=0)
    expected = [conv + 1, 2 * (conv + 1), relu, relu - 3, (relu - 3).clamp(min=0)]
    for name, value in zip(record, expected, strict=False):
        assert torch.allclose(record[name], value), name
    assert torch.equal(record["/flatten"], record["/relu#1"].flatten(1))


def test_functions_are_kept_inside_the_layer_that_calls_them() -> None:
    inner = Net(lambda self, x: self.linear(x) + x, linear=linear())
    model, x = Net(lambda self, x: self.inner(x).flatten(), inner=nn.Sequential(inner)), torch.randn(3, 4)
    with torch.no_grad(), Taps(model, ["inner.0/add", "/flatten", "inner.?.linear"]) as taps:
        output = taps(x)
    record = taps.record
    assert torch.allclose(record["inner.0/add"], record["inner.0.linear"] + x)
    assert torch.equal(record["/flatten"], output)
    with Taps(model, "inner/add") as taps:
        taps(x)
        with pytest.raises(UnknownNameError, match="no function 'add' was called in the forward of layer 'inner'"):
            taps.record["inner/add"]


def test_gradients_of_functions() -> None:
    model, x = Functions(), torch.randn(2, 3, 8, 8)
    with Taps(model).keep("/sub", "grad") as taps:
        taps(x).sum().backward()
    h = (F.relu(2 * (model.conv(x) + 1)) - 3).detach()
    expected = torch.where(h > 0, model.fc.weight.sum(0).view(4, 6, 6), 0.0)
    assert torch.allclose(taps.record["/sub@grad"], expected)


def test_inputs_of_functions_are_refused_and_a_layer_without_attention_says_so() -> None:
    with pytest.raises(InputError, match="only outputs and gradients of a function without a module are available"):
        Taps(Functions()).keep("/relu", "input")
    with Taps(nn.Sequential(nn.Linear(2, 2))).keep("0", "attention") as taps:
        taps(torch.ones(1, 2))
        with pytest.raises(UnknownNameError, match="computed no attention that layertap recognises"):
            taps.record["0@attention"]


def test_our_own_work_is_not_seen_as_the_models() -> None:
    model = Functions().eval()
    with torch.no_grad(), Taps(model, ["*/*", "conv", "fc"], reduce=lambda h: h.abs().mean()) as taps:
        taps(torch.randn(1, 3, 8, 8))
    assert list(taps.record) == ["conv/conv2d", "conv", "fc/linear", "fc"]


# Attention, against the explicit softmax


def vit_weights(attention: Any, x: Tensor) -> Tensor:
    """timm's attention, written out: softmax(q k^T / sqrt(d))."""
    q, k, _ = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (attention.q_norm(q) @ attention.k_norm(k).transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_of_timm_vision_transformers(fused: bool) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", img_size=64).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    layer, x = f"blocks.{len(model.blocks) - 1}.attn", torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        plain = model(x)
        with Taps(model).keep(["blocks.0.attn", layer], "attention").keep(layer, "input") as taps:
            output = taps(x)
        weights = taps.record[f"{layer}@attention"]
        expected = vit_weights(model.get_submodule(layer), taps.record[f"{layer}@input"])
    assert torch.equal(output, plain)
    assert weights.shape == (2, 2, 17, 17)
    assert (weights - expected).abs().max() < 1e-5
    assert "blocks.0.attn@attention" in taps.record


def test_attention_of_torchvision_vision_transformers() -> None:
    from torchvision import models

    model = models.VisionTransformer(32, 8, 2, 4, 48, 96).eval()
    x = torch.randn(2, 3, 32, 32)
    layer = "encoder.layers.encoder_layer_1.self_attention"
    with torch.no_grad():
        plain = model(x)
        with Taps(model).keep(layer, "attention").keep(layer, "input") as taps:
            output = taps(x)
        attention, tokens = model.get_submodule(layer), taps.record[f"{layer}:0@input"]
        q, k, _ = (tokens @ attention.in_proj_weight.T + attention.in_proj_bias).unflatten(-1, (3, 4, 12)).unbind(2)
        expected = torch.einsum("bthd,bshd->bhts", q, k).div(math.sqrt(12)).softmax(-1)
    assert torch.allclose(output, plain, atol=1e-5)
    assert taps.record[f"{layer}@attention"].shape == (2, 4, 17, 17)
    assert (taps.record[f"{layer}@attention"] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_of_hugging_face_vision_transformers(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8,
        attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.ViTModel(config).eval()
    x = torch.randn(2, 3, 32, 32)
    eager = transformers.ViTModel(transformers.ViTConfig(**{**config.to_dict(), "attn_implementation": "eager"})).eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    layer = next(name for name, _ in model.named_modules() if name.endswith(("1.attention.attention", "1.attention")))
    with torch.no_grad():
        expected = eager(x, output_attentions=True).attentions[1]
        with Taps(model).keep(layer, "attention") as taps:
            taps(x)
    assert (taps.record[layer] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["bool mask", "float mask", "causal", "scale", "grouped"])
def test_attention_with_masks_scales_and_groups(case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, generator=generator) for _ in range(3))
    mask = torch.randn(5, 5, generator=generator)
    options: Any = {
        "bool mask": {"attn_mask": mask > -1}, "float mask": {"attn_mask": mask}, "causal": {"is_causal": True},
        "scale": {"scale": 0.7}, "grouped": {"enable_gqa": True},
    }[case]  # fmt: skip
    if case == "grouped":
        k, v = k[:, :2], v[:, :2]

    attention = Net(lambda self, x: F.scaled_dot_product_attention(q, k, v, **options))
    with torch.no_grad(), Taps(nn.Sequential(attention)).keep("0", "attention") as taps:
        output = taps(torch.zeros(1))
    weights = taps.record["0@attention"]
    values = v.repeat_interleave(2, 1) if case == "grouped" else v
    assert torch.allclose(weights @ values, output, atol=1e-5)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 5))


def test_attention_under_autocast_is_computed_in_float32_and_masked_queries_look_nowhere() -> None:
    q, k = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False

    model = nn.Sequential(Net(lambda self, x: F.scaled_dot_product_attention(q, k, k, attn_mask=mask)))
    with torch.autocast("cpu", torch.bfloat16), Taps(model).keep("0", "attention") as taps:
        taps(q)
    weights = taps.record["0@attention"]
    expected = (q.double() @ k.double().transpose(-2, -1) / math.sqrt(8)).softmax(-1)
    assert weights.dtype == torch.float32
    assert (weights[:, :, [0, 1, 3]] - expected[:, :, [0, 1, 3]]).abs().max() < 1e-5
    assert not weights[:, :, 2].any()


def perceptual_feature(layer: Net, x: Tensor) -> Any:
    """Stops its inner network by the `BaseException` of `Taps(stop=True)`."""
    with Taps(layer.inner, stop=True).keep("1", live=True) as taps:
        taps(x)
        first = taps.record["1"]
        taps(x * 2)
        return first + taps.record["1"]


def catch_an_interrupt(layer: Net, x: Tensor, inside: bool = False) -> Tensor:
    """Calls itself, and catches what leaves the inner call."""
    if inside:
        layer.inner(x)
        raise KeyboardInterrupt
    with contextlib.suppress(KeyboardInterrupt):
        layer(x, inside=True)
    return torch.sigmoid(x)


@pytest.mark.parametrize(("forward", "function"), [(perceptual_feature, "add"), (catch_an_interrupt, "sigmoid")])
def test_functions_are_those_of_their_layer_after_an_exception_that_pytorch_tells_no_hook_of(
    forward: Any, function: str
) -> None:
    layer = Net(forward, inner=nn.Sequential(linear(), nn.ReLU(), linear()))
    model = Net(lambda self, x: self.out(torch.tanh(self.f(x))), f=layer, out=linear(4, 2))
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = model.f(x)
        with Taps(model).keep("/tanh").keep(f"**/{function}").edit("/tanh", lambda h: h * 2) as taps:
            output = taps(x)
        assert list(taps.record) == [f"f/{function}", "/tanh"]
        assert torch.equal(taps.record[f"f/{function}"], expected)
        assert torch.equal(output, model.out(expected.tanh() * 2))


def test_an_edit_of_a_function_that_writes_into_a_given_tensor_is_refused() -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        buffer = torch.empty_like(x * 2)
        torch.mul(x, 3.0, out=buffer)
        return buffer + 1

    model, x = Net(forward), torch.ones(2, 2)
    with torch.no_grad(), Taps(model).keep("/mul").edit("/mul", lambda h: h * 0, call=0) as taps:
        assert torch.equal(taps(x), model(x))
        assert torch.equal(taps.record["/mul#1"], x * 3)
    with (
        torch.no_grad(),
        pytest.raises(LayertapError, match=r"/mul cannot be edited: .* \(out=\)"),
        Taps(model).edit("/mul", lambda h: h * 0) as taps,
    ):
        taps(x)
