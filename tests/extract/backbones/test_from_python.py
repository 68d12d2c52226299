from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from extract import FeatureReader, InputError, UnknownNameError, load_backbone
from tests.conftest import make_picture
from tests.pipelines.test_cli import fails, layertap

CODE = """
import torch
from torch import nn
from torchvision import transforms

from neighbour import WIDTH


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 5, 2, 2)
        self.fc = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))


def transform(picture):
    resized = picture.resize((32, 32))
    return transforms.functional.to_tensor(resized) * 2 - 1


def small():
    return Net(), transform


def any_size():
    return Net(), transforms.functional.to_tensor
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "neighbour.py").write_text("WIDTH = 8\n")
    (tmp_path / "code" / "net.py").write_text(CODE)
    return tmp_path / "code" / "net.py"


def test_a_model_of_ones_own_runs_with_its_own_transform(file: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = layertap("embed", folder, "-o", out, "-b", f"python/{file}:small", "-l", "conv", "-l", "fc",
                      "--workers", 2, "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "input     that of net.py:small of code with sha256 " in result.stderr
    backbone = load_backbone(f"python/{file}:small", device="cpu")
    transform = backbone.preprocessing.library_transform
    assert transform is not None
    with FeatureReader(out) as reader, torch.no_grad():
        from PIL import Image

        for row in (0, 5, 11):
            x = transform(Image.open(folder / reader.paths[row]).convert("RGB"))[None]
            activation = backbone.model.conv(x)
            assert np.allclose(reader["conv"][row], activation.mean((2, 3))[0], rtol=1e-4, atol=1e-6)
            assert np.allclose(reader["fc"][row], backbone.model(x)[0], rtol=1e-4, atol=1e-6)
    named = ["-b", f"python/{file}:small"]
    assert layertap("verify", out, "--sample", 12, "--device", "cpu", *named).exit_code == 0


def test_weights_from_a_file_go_into_the_model(file: Path, tmp_path: Path) -> None:
    state = {
        name: torch.full_like(value, 0.5)
        for name, value in load_backbone(f"python/{file}:small").model.state_dict().items()
    }
    save_file(state, tmp_path / "w.safetensors")
    backbone = load_backbone(f"python/{file}:small", weights=str(tmp_path / "w.safetensors"), device="cpu")
    assert all(bool((value == 0.5).all()) for value in backbone.model.state_dict().values())
    assert backbone.weights.source == "w.safetensors"


def test_the_fingerprint_follows_code_and_weights(file: Path, folder: Path, tmp_path: Path) -> None:
    arguments = ["embed", folder, "-o", tmp_path / "out", "-b", f"python/{file}:small", "-l", "fc", "--workers", 0]
    assert layertap(*arguments).exit_code == 0
    assert "is complete" in layertap(*arguments).stdout  # the same code, the same random numbers
    assert "weights_sha256" in fails(*arguments, "--seed", 1)
    file.write_text(CODE.replace("* 2 - 1", "* 2 - 1.1"))
    changed = fails(*arguments)
    file.write_text(CODE)
    (file.parent / "neighbour.py").write_text("WIDTH = 4 + 4\n")
    for error in (changed, fails(*arguments)):
        assert "architecture: stored python/net.py:small of code with sha256" in error
        assert "weights_sha256" not in error


RANDOM = """
import random
import numpy as np
import torch
from torch import nn
from torchvision import transforms
from torchvision.transforms import v2

RESIZED = [transforms.Resize((32, 32)), transforms.ToTensor()]
generator, numpy_generator = torch.Generator(), np.random.default_rng(0)
calls = [0]


def seeded(picture):
    torch.manual_seed(picture.width)
    return transforms.Compose([transforms.RandomCrop(24), *RESIZED])(picture)


def count(x):
    calls[0] += 1
    return x + calls[0]


TRANSFORMS = {
    "crop": transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()]),
    "rarely_flipped": v2.Compose([v2.RandomVerticalFlip(p=1e-6), *RESIZED]),
    "of_numpy": lambda picture: transforms.Compose(RESIZED)(picture) + float(np.random.rand() < 1e-6),
    "of_python": lambda picture: transforms.Compose(RESIZED)(picture) + float(random.random() < 1e-6),
    "of_a_generator": lambda picture: transforms.Compose(RESIZED)(picture) + torch.rand(1, generator=generator),
    "of_a_numpy_generator": lambda picture: transforms.Compose(RESIZED)(picture) + float(numpy_generator.random()),
    "of_calls": lambda picture: count(transforms.Compose(RESIZED)(picture)),
    "sure": transforms.Compose([transforms.CenterCrop(40), *RESIZED]),
    "crop_of_all": transforms.Compose([transforms.Resize((32, 32)), transforms.RandomCrop(32), transforms.ToTensor()]),
    "seeded": seeded,
    "with_nan": lambda picture: transforms.Compose(RESIZED)(picture) * float("nan"),
}


def _factory(name):
    def make():
        return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()), TRANSFORMS[name]
    return make


globals().update({name: _factory(name) for name in TRANSFORMS})
"""


@pytest.fixture(scope="module")
def random_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "net.py"
    path.write_text(RANDOM)
    return path


@pytest.mark.parametrize(
    "name",
    ["crop", "rarely_flipped", "of_numpy", "of_python", "of_a_generator", "of_a_numpy_generator", "of_calls"],
)
def test_a_random_transform_is_refused(random_file: Path, name: str) -> None:
    message = rf"the transform of .*net.py:{name}\(\) .*features would differ from run to run; use the transform"
    with pytest.raises(InputError, match=message):
        load_backbone(f"python/{random_file}:{name}", device="cpu")


@pytest.mark.parametrize("name", ["sure", "crop_of_all", "seeded", "with_nan"])
def test_a_transform_that_gives_the_same_pixels_in_every_run_is_accepted(random_file: Path, name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    backbone = load_backbone(f"python/{random_file}:{name}", device="cpu")
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert before[1:] == after[1:]
    if name != "seeded":  # its own code changes the state
        assert torch.equal(before[0], after[0])
    pixels = [backbone.preprocessing.cpu_transform(make_picture(1)) for _ in range(3)]
    assert torch.allclose(pixels[0], pixels[1], equal_nan=True)
    assert torch.allclose(pixels[0], pixels[2], equal_nan=True)


def test_a_random_transform_of_an_entry_of_torch_hub_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").write_text(RANDOM)
    with pytest.raises(InputError, match="the transform of the entry gives other pixels for the same picture"):
        load_backbone(f"hub/{tmp_path}:crop", device="cpu")


VIT = """
import timm
import torch
from torch import nn
from torchvision import transforms


class ViT(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 22, 8, 8)
        self.prefix = nn.Parameter(torch.randn(1, prefix, 22))
        self.block = nn.TransformerEncoderLayer(22, 2, 32, batch_first=True)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.prefix.expand(len(x), -1, -1), tokens], 1))[:, 0]


def _made(prefix, **attributes):
    model = ViT(prefix)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model, transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])


STATED = {
    "unstated": (1, {}),
    "with_class_token": (1, {"num_prefix_tokens": 1}),
    "reads_class_token": (1, {"num_prefix_tokens": 1, "global_pool": "token"}),
    "with_registers": (5, {"num_prefix_tokens": 5}),
    "only_registers": (4, {"num_prefix_tokens": 4, "has_class_token": False}),
    "wrong": (1, {"num_prefix_tokens": "one"}),
}
globals().update({name: lambda made=made: _made(made[0], **made[1]) for name, made in STATED.items()})


def of_timm():
    model = timm.create_model("test_vit", img_size=64, num_classes=0)
    return model, transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
"""


@pytest.fixture(scope="module")
def vit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit") / "net.py"
    path.write_text(VIT)
    return path


@pytest.mark.parametrize(
    ("name", "layer", "prefix", "class_token", "auto"),
    [("with_class_token", "block", 1, True, "mean_tokens"), ("reads_class_token", "block", 1, True, "cls_token"),
     ("with_registers", "block", 5, True, "mean_tokens"), ("only_registers", "block", 4, False, "mean_tokens"),
     ("of_timm", "blocks.1", 1, True, "cls_token")],
)  # fmt: skip
def test_an_own_vision_transformer_states_its_prefix_tokens(
    vit_file: Path, name: str, layer: str, prefix: int, class_token: bool, auto: str
) -> None:
    backbone = load_backbone(f"python/{vit_file}:{name}", device="cpu")
    pictures = [make_picture(i) for i in range(4)]
    poolings = ["mean_tokens", "none", *(["cls_token"] if class_token else [])]
    features = backbone.features(pictures, [f"{layer}:{pooling}" for pooling in poolings])
    by_auto = backbone.features(pictures, [layer])[layer]
    kept: list[torch.Tensor] = []
    handle = backbone.model.get_submodule(f"_inside.{layer}" if hasattr(backbone.model, "_inside") else layer)
    hook = handle.register_forward_hook(lambda module, inputs, output: kept.append(output))
    transform = backbone.preprocessing.library_transform
    assert transform is not None
    with torch.inference_mode():
        backbone.model(torch.stack([transform(picture) for picture in pictures]))
    hook.remove()
    tokens = kept[0].numpy()
    expected = {"mean_tokens": tokens[:, prefix:].mean(1), "cls_token": tokens[:, 0], "none": tokens}
    for pooling in poolings:
        np.testing.assert_allclose(features[f"{layer}:{pooling}"], expected[pooling], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_auto, expected[auto], rtol=1e-4, atol=1e-5)
    if not class_token:
        with pytest.raises(InputError, match="which have no class token"):
            backbone.features(pictures, [f"{layer}:cls_token"])


def test_prefix_tokens_that_are_not_stated_are_not_guessed(vit_file: Path) -> None:
    backbone = load_backbone(f"python/{vit_file}:unstated", device="cpu")
    hint = "65 is not the number of patches.* set their number as model.num_prefix_tokens"
    with pytest.raises(InputError, match=hint):
        backbone.features([make_picture(0)], ["block"])
    with pytest.raises(InputError, match="num_prefix_tokens of the model of .* is 'one'; expected an integer from 0"):
        load_backbone(f"python/{vit_file}:wrong", device="cpu")


def test_files_and_factories_that_cannot_be_used(file: Path, tmp_path: Path) -> None:
    """Other factories are in `contrived_models.py`."""
    (tmp_path / "bad.py").write_text("import nonsense_that_is_not_there")
    refused: list[tuple[str, dict[str, Any], str]] = [
        (f"{tmp_path}/no.py:small", {}, "no.py: No such file"),
        (f"{file}", {}, "expected python/FILE.py:FACTORY"),
        (f"{tmp_path}/bad.py:small", {}, "bad.py cannot be imported: ModuleNotFoundError"),
        (f"{file}:small", {"weights": "random"}, "--weights random is not supported"),
        (f"{file}:small", {"allow_missing_head": True}, "the classifier layer is unknown"),
        (f"{file}:any_size", {}, r"the transform of .*:any_size\(\) returns tensors of several sizes"),
        (f"{file}:smal", {}, "factory 'smal' not found in .*net.py; nearest: 'small'"),
    ]
    for place, how, message in refused:
        with pytest.raises((InputError, UnknownNameError), match=message):
            load_backbone(f"python/{place}", device="cpu", **how)
