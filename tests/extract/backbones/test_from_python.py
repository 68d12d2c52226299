from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from extract import FeatureReader, InputError, UnknownNameError, load_backbone
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


def no_transform():
    return Net()


def broken():
    raise RuntimeError("no such luck")


def flat():
    return Net(), lambda picture: torch.zeros(3)


def any_size():
    return Net(), transforms.functional.to_tensor


def bad_transform():
    return Net(), lambda picture: picture.nonsense
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
    error = fails(*arguments)
    assert "architecture: stored python/net.py:small of code with sha256" in error
    assert "weights_sha256" not in error


@pytest.mark.parametrize(
    ("name", "message"),
    [("no_transform", r"net.py:no_transform\(\) returned Net; expected \(model, transform\)"),
     ("broken", r"net.py:broken\(\) failed: RuntimeError: no such luck"),
     ("flat", r"the transform of .*:flat\(\) maps an RGB picture to torch.float32 \(3,\); expected"),
     ("any_size", r"the transform of .*:any_size\(\) returns tensors of several sizes"),
     ("bad_transform", "failed on an RGB picture: AttributeError"),
     ("smal", "factory 'smal' not found in .*net.py; nearest: 'small'")],
)  # fmt: skip
def test_factories_that_do_not_fit_are_told(file: Path, name: str, message: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=message):
        load_backbone(f"python/{file}:{name}", device="cpu")


def test_files_that_cannot_be_used(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no.py: No such file"):
        load_backbone(f"python/{tmp_path}/no.py:small")
    with pytest.raises(InputError, match=r"expected python/FILE.py:FACTORY"):
        load_backbone(f"python/{file}")
    file.write_text("import nonsense_that_is_not_there")
    with pytest.raises(InputError, match="net.py cannot be imported: ModuleNotFoundError"):
        load_backbone(f"python/{file}:small")
    file.write_text(CODE)
    with pytest.raises(InputError, match="--weights random is not supported"):
        load_backbone(f"python/{file}:small", weights="random")
    with pytest.raises(InputError, match="the classifier layer is unknown"):
        load_backbone(f"python/{file}:small", allow_missing_head=True)
