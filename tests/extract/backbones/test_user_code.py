"""Faults of a user's own backbone are one line that names the file or the backbone: no traceback, no exit code 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import FeatureReader, InputError, extract_features, load_backbone
from tests.extract.backbones import contrived_models
from tests.pipelines.test_cli import fails, layertap

MODELS = Path(contrived_models.__file__)
NO_VECTOR = "not one vector for each picture"
FAULTS = {
    "lazy": "has no shape yet: lazy layers get theirs from the first batch; run one batch through the model",
    "lazy_statistics": "has no shape yet",
    "on_meta": "conv.bias of the model is torch.strided on meta; expected a dense tensor with values",
    "partly_on_meta": "unused.bias of the model is torch.strided on meta",
    "sparse_weights": "extra of the model is torch.sparse_coo on cpu",
    "extra_state": "_extra_state of the model is dict",
    "state_dict_fails": r"cannot be loaded: RuntimeError: no such luck \(.*contrived_models.py, line ",
    "no_state_dict": "cannot be loaded: AttributeError",
    "keys_of_two_types": "cannot be loaded: TypeError",
    "half": "the model failed on a zero input",
    "eval_returns_none": r"eval\(\) of the model of .*:eval_returns_none\(\) left the model in training mode",
    "eval_fails": r"cannot be loaded: RuntimeError: no such luck \(.*contrived_models.py, line ",
    "train_returns_none": "cannot be loaded: AttributeError|left the model in training mode",
    "train_without_mode": "cannot be loaded: TypeError",
    "names_fail": "cannot be loaded: RuntimeError: no such luck",
    "no_names": "cannot be loaded: TypeError",
    "no_forward": 'missing the required "forward" function',
    "scripted": "returned a scripted or traced model, whose code ignores hooks; return the Python module",
    "traced": "returned a scripted or traced model",
    "exported": "cannot be loaded: NotImplementedError: ",
    "exported_program": r"returned \(ExportedProgram, Compose\); expected \(model, transform\)",
    "output_none": f"its output is NoneType, {NO_VECTOR}",
    "output_text": f"its output is str, {NO_VECTOR}",
    "output_empty_list": f"its output is list, {NO_VECTOR}",
    "output_numpy": f"its output is ndarray, {NO_VECTOR}",
    "output_generator": f"its output is generator, {NO_VECTOR}",
    "output_sparse": "its output is not a dense tensor with values",
    "output_nested": "its output is not a dense tensor with values",
    "output_meta": "its output is not a dense tensor with values",
    "output_integers": "its output is torch.int64, not floating point",
    "output_complex": "its output is torch.complex64, not floating point",
    "output_empty": rf"its output is \(2, 0\), {NO_VECTOR}",
    "output_one_number": rf"its output is \(\), {NO_VECTOR}",
    "output_fails": "the model failed on a zero input .*: RuntimeError: no such luck",
    "fails_at_the_second_forward": r"RuntimeError: no such luck \(.*contrived_models.py, line ",
    "fails_in_the_first_batch": r"RuntimeError: no such luck \(.*contrived_models.py, line ",
    "reads_a_file_in_the_first_batch": r"FileNotFoundError: .*no-such-file' \(.*contrived_models.py, line ",
    "needs_batches": r"RuntimeError: no such luck \(.*contrived_models.py, line ",
    "a_class": r"returned \(the class Net, Compose\); expected \(model, transform\)",
    "a_class_of_a_transform": "failed on an RGB picture: TypeError",
    "needs_an_argument": "missing 1 required positional argument: 'width'",
    "returns_nothing": r"returned NoneType; expected \(model, transform\)",
    "returns_three": r"returned \(Net, Compose, int\); expected",
    "returns_a_list": "returned list; expected",
    "returns_in_the_other_order": r"returned \(Compose, Net\); expected",
    "returns_no_transform": r"returned \(Net, NoneType\); expected",
    "a_coroutine": "returned coroutine; expected",
    "calls_itself": "RecursionError",
    "not_callable": "factory 'not_callable' not found",
    "pixels_numpy": "maps an RGB picture to ndarray",
    "pixels_none": "maps an RGB picture to NoneType",
    "pixels_of_a_picture": "maps an RGB picture to Image",
    "pixels_float64": "maps an RGB picture to torch.float64",
    "pixels_uint8": "maps an RGB picture to torch.uint8",
    "pixels_of_a_batch": r"maps an RGB picture to torch.float32 \(1, 3, 32, 32\)",
    "pixels_grey": r"maps an RGB picture to torch.float32 \(1, 32, 32\)",
    "pixels_empty": "the model failed on a zero input",
    "pixels_meta": "maps an RGB picture to a tensor that is not dense or has no values",
    "pixels_sparse": "maps an RGB picture to a tensor that is not dense or has no values",
    "pixels_in_a_dict": "maps an RGB picture to dict",
    "transform_fails": "failed on an RGB picture: RuntimeError: no such luck",
    "transform_takes_nothing": "failed on an RGB picture: TypeError",
}
EXITS = {
    "exits": r"sys.exit\(0\)", "exits_by_exit": r"sys.exit\(\)", "exits_in_forward": r"sys.exit\(0\)",
    "exits_in_the_first_batch": r"sys.exit\('done'\)", "exits_in_the_transform": r"sys.exit\(0\)",
    "exits_in_the_transform_of_a_picture": r"sys.exit\(3\)",
}  # fmt: skip


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
    assert re.search(FAULTS[factory], error), error
    assert not list((tmp_path / "out").rglob("*.h5"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factory", EXITS)
def test_an_own_backbone_cannot_end_the_program(factory: str, workers: int, pictures: Path, tmp_path: Path) -> None:
    if workers and "transform" not in factory:
        pytest.skip("the same code runs")
    arguments = {"out": tmp_path / "out", "backbone": spec_of(factory), "device": "cpu", "workers": workers}
    called = rf"contrived_models.py, line \d+, called {EXITS[factory]}; the code of a backbone must not end the program"
    with pytest.raises(InputError, match=called):
        extract_features(pictures, **arguments, progress=False)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    "factory",
    [
        "lazy_but_run_once",
        "eval_returns_none_but_works",
        "to_returns_none",
        "conjugated_weights",
        "pixels_with_a_graph",
    ],
)
def test_what_only_looks_like_a_fault_works(factory: str, pictures: Path, tmp_path: Path) -> None:
    backbone = load_backbone(spec_of(factory), device="cpu")
    assert not any(module.training for module in backbone.model.modules())
    transform = backbone.preprocessing.library_transform
    assert transform is not None
    arguments = ["embed", pictures, "-o", tmp_path / "out", "-b", spec_of(factory), "--device", "cpu", "--workers", 2]
    result = layertap(*arguments)
    assert result.exit_code == 0, result.output
    with torch.no_grad(), FeatureReader(tmp_path / "out") as reader:
        for path, row in zip(reader.paths, reader["embedding"][:], strict=True):
            pixels = transform(Image.open(pictures / path))
            np.testing.assert_allclose(row, backbone.model(pixels[None])[0], rtol=1e-5, atol=1e-6)


def test_an_exception_that_own_code_has_no_part_in_keeps_its_traceback(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extract.extraction.run.check_disk_space", int)  # a fault of layertap, without own code
    with pytest.raises(TypeError, match="int"):
        layertap("embed", pictures, "-o", tmp_path / "out", "-b", spec_of("lazy_but_run_once"), "--device", "cpu")
