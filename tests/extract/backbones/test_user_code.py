"""Faults of a user's own backbone are one line that names the file or the backbone: no traceback, no exit code 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import InputError, extract_features, load_backbone
from tests.extract.backbones import contrived_models
from tests.extract.backbones.contrived_models import EXITS, FAULTS, WORKING
from tests.pipelines.test_cli import fails, layertap

MODELS = Path(contrived_models.__file__)


def spec_of(factory: str) -> str:
    return f"python/{MODELS}:{factory}"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    for i in range(5):
        Image.new("RGB", (40, 36), (50 * i, 100, 250 - 50 * i)).save(place / f"{i}.png")
    return place


# A third of them runs in the default tests: each takes up to a quarter of a second.
@pytest.mark.parametrize(
    "factory", [pytest.param(name, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, name in enumerate(FAULTS)]
)
def test_a_fault_of_an_own_backbone_is_one_line(factory: str, pictures: Path, tmp_path: Path) -> None:
    error = fails("embed", pictures, "-o", tmp_path / "out", "-b", spec_of(factory), "--device", "cpu", "--workers", 0)
    assert error.count("\n") == 1
    assert re.search(FAULTS[factory][1], error), error
    assert not list((tmp_path / "out").rglob("*.h5"))


@pytest.mark.parametrize(
    ("factory", "workers"), [*[(name, 0) for name in EXITS], ("exits_in_the_transform_of_a_picture", 2)]
)
def test_an_own_backbone_cannot_end_the_program(factory: str, workers: int, pictures: Path, tmp_path: Path) -> None:
    arguments: Any = {"out": tmp_path / "out", "backbone": spec_of(factory), "device": "cpu", "workers": workers}
    called = rf"contrived_models.py, line \d+, called {EXITS[factory][1]}; the code of a backbone must not end the"
    with pytest.raises(InputError, match=called):
        extract_features(pictures, **arguments, progress=False)
    assert not list((tmp_path / "out").rglob("*.h5"))


def test_an_exception_of_an_own_backbone_is_one_line(pictures: Path, tmp_path: Path) -> None:
    words = ["embed", pictures, "-o", tmp_path / "out", "-b", spec_of("raises_its_own_in_the_first_batch")]
    result = layertap(*words, "--device", "cpu", "--workers", 0)
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert re.search(r"error: .*OwnError: enough \(.*contrived_models.py, line \d+\)", last), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["embed", "layers", "inspect"])
def test_the_exit_code_of_a_command_says_that_own_code_ended_it(command: str, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import argparse\n\nargparse.ArgumentParser().parse_args(['--help'])\n")
    arguments: dict[str, list[Any]] = {
        "embed": [pictures, "-o", tmp_path / "out", "-b", f"python/{tmp_path / 'net.py'}:net"],
        "layers": [spec_of("exits")],
        "inspect": [spec_of("exits_in_the_first_batch"), pictures, "--device", "cpu"],
    }
    ended = layertap(command, *arguments[command])
    assert ended.exit_code == 2, ended.output
    last, blank, hint = ended.stderr.splitlines()[-3:]
    assert "error: " in last
    assert not blank
    assert hint.startswith("hint: the code of a backbone must not end the program")
    assert ("net.py, line 3, called sys.exit(0)" if command == "embed" else "contrived_models.py, line ") in last
    assert "called sys.exit(" in last


def test_hub_code_cannot_end_the_program(tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").write_text("import sys\n\ndef net():\n    sys.exit(0)\n")
    with pytest.raises(InputError, match=r"hubconf.py, line 4, called sys.exit\(0\)"):
        load_backbone(f"hub/{tmp_path}:net", device="cpu")


def test_an_exit_in_the_forward_of_pictures_in_memory_is_an_error(pictures: Path) -> None:
    backbone = load_backbone(spec_of("exits_in_the_first_batch"), device="cpu")
    with pytest.raises(InputError, match=r"called sys.exit\('done'\)"):
        backbone.features([Image.open(path) for path in sorted(pictures.iterdir())])


@pytest.mark.parametrize("factory", WORKING)
def test_what_only_looks_like_a_fault_works(factory: str, pictures: Path, tmp_path: Path) -> None:
    backbone = load_backbone(spec_of(factory), device="cpu")
    assert not any(module.training for module in backbone.model.modules())
    transform = backbone.preprocessing.library_transform
    assert transform is not None
    workers = 2 if factory == "pixels_with_a_graph" else 0
    with (
        torch.no_grad(),
        extract_features(pictures, out=tmp_path / "out", backbone=backbone, workers=workers, progress=False) as reader,
    ):
        for path, row in zip(reader.paths, reader["embedding"][:], strict=True):
            pixels = transform(Image.open(pictures / path))
            np.testing.assert_allclose(row, backbone.model(pixels[None])[0], rtol=1e-5, atol=1e-6)


def test_an_exception_that_own_code_has_no_part_in_keeps_its_traceback(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extract.extraction.run.check_disk_space", int)  # a fault of layertap, without own code
    with pytest.raises(TypeError, match="int"):
        layertap("embed", pictures, "-o", tmp_path / "out", "-b", spec_of("lazy_but_run_once"), "--device", "cpu")
