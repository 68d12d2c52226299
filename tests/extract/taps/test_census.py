"""Every layer and every call of many architectures, against twins whose in-place modules were made out-of-place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from extract import Taps
from extract.taps.layer_names import named_layers
from extract.taps.nested import tensors_in
from tests.conftest import out_of_place


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=64, patch_size=8
    )
    return transformers.Dinov2Model(config)


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "torchvision/resnet50": (models.resnet50, 64),
    "torchvision/vgg16_bn": (models.vgg16_bn, 64),
    "torchvision/densenet121": (models.densenet121, 64),
    "torchvision/mobilenet_v2": (models.mobilenet_v2, 64),
    "torchvision/mobilenet_v3_small": (models.mobilenet_v3_small, 64),
    "torchvision/efficientnet_b0": (models.efficientnet_b0, 64),
    "torchvision/convnext_tiny": (models.convnext_tiny, 64),
    "torchvision/swin_t": (models.swin_t, 64),
    "torchvision/vit": (lambda: models.VisionTransformer(64, 16, 3, 3, 48, 96), 64),
    "torchvision/inception_v3": (lambda: models.inception_v3(init_weights=False), 96),
    "torchvision/regnet_y_400mf": (models.regnet_y_400mf, 64),
    "timm/resnet18": (lambda: timm.create_model("resnet18"), 64),
    "timm/tf_efficientnet_lite0": (lambda: timm.create_model("tf_efficientnet_lite0"), 64),
    "timm/mobilenetv3_small_100": (lambda: timm.create_model("mobilenetv3_small_100"), 64),
    "timm/convnext_atto": (lambda: timm.create_model("convnext_atto"), 64),
    "timm/vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=64), 64),
    "timm/swin_tiny": (lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=64), 64),
    "timm/regnety_002": (lambda: timm.create_model("regnety_002"), 64),
    "hf/dinov2": (hugging_face, 64),
}


# In-place ReLU and SiLU, layers that run twice, windows, tokens, maps whose channels come last.
QUICK = (
    "torchvision/mobilenet_v3_small", "torchvision/swin_t", "timm/resnet18", "timm/tf_efficientnet_lite0",
    "timm/convnext_atto", "timm/vit_tiny", "hf/dinov2",
)  # fmt: skip


def by_hooks(model: nn.Module, x: Tensor, take: Callable[[Tensor], Tensor]) -> dict[str, list[list[Tensor]]]:
    """Name -> calls -> tensors, as bare forward hooks see them."""
    found: dict[str, list[list[Tensor]]] = {}
    handles = []
    for name, module in named_layers(model).items():

        def hook(module: nn.Module, args: object, output: object, name: str = name) -> None:
            found.setdefault(name, []).append([take(tensor) for _, tensor in tensors_in(output)])

        handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def wrong_calls(found: dict[str, list[list[Tensor]]], truth: dict[str, list[list[Tensor]]]) -> int:
    assert found.keys() == truth.keys()
    return sum(
        any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for name in truth
        for one, other in zip(found[name], truth[name], strict=True)
    )


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NETS]
)
def test_every_layer_and_call_is_what_an_out_of_place_twin_gives(name: str) -> None:
    torch.manual_seed(0)
    make, size = NETS[name]
    model = make().eval()
    x = torch.randn(2, 3, size, size)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        truth = by_hooks(out_of_place(model), x, lambda tensor: tensor.detach().clone())
        naive = by_hooks(model, x, lambda tensor: tensor.detach().cpu())
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    with torch.no_grad(), Taps(model).keep(list(named_layers(model))) as taps:
        taps(x)
    found: dict[str, list[list[Tensor]]] = {layer: [[] for _ in calls] for layer, calls in truth.items()}
    for site in taps.record.sites.values():
        found[site.layer][site.call].append(taps.record[site])
    calls = sum(map(len, truth.values()))
    print(f"{name}: {calls} calls of {len(truth)} layers; a naive hook gets {wrong_calls(naive, truth)} wrong")
    assert wrong_calls(found, truth) == 0


def test_the_census_has_nets_on_which_naive_hooks_fail() -> None:
    model = models.resnet50().eval()
    x = torch.randn(2, 3, 64, 64)
    truth = by_hooks(out_of_place(model), x, lambda tensor: tensor.detach().clone())
    assert wrong_calls(by_hooks(model, x, lambda tensor: tensor.detach().cpu()), truth) > 40
