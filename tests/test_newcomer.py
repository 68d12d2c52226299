"""A newcomer's changes: each is an entry of one table, and all that shows or checks such entries follows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from extract import FeatureReader, InputError, UnknownNameError, load_backbone, load_text_tower
from extract.backbones.backbone import Entry, LoadedBackbone, LoadRequest, TextTower
from extract.backbones.preprocessing import Preprocessing
from extract.backbones.sources import SOURCES, BackboneSource
from extract.backbones.weights import Weights
from extract.compute.pooling import POOLINGS, Layout, Pooling
from extract.store.export import FORMATS, Format, export
from pipelines.data_sets import command as data_sets
from tests.conftest import make_picture
from tests.pipelines.test_cli import fails, layertap

# A backbone source. What stands here would be `extract/backbones/from_toy.py`, and the record in `toy` its entry of
# `SOURCES` in `extract/backbones/sources.py`.


def load(request: LoadRequest) -> LoadedBackbone:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    preprocessing = Preprocessing(32, (32, 32), "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    weights = Weights(request.weights or "toy weights", "0" * 64)
    return LoadedBackbone(request.spec, f"toy/{request.name}", model, weights, preprocessing, classifier="3")


def names(pattern: str) -> list[str]:
    return ["net", "nets"]


def describe(spec: str, name: str, built: bool) -> Entry:
    return Entry(spec, 8, (32, 32), 1580, "mit", ("toy weights",))


def text_tower(request: LoadRequest) -> TextTower:
    def tokens_of(text: str) -> dict[str, torch.Tensor]:
        return {"length": torch.tensor([[float(len(text))]])}

    return TextTower(request.spec, "toy", "0" * 64, nn.Identity(), tokens_of, lambda model, tokens: tokens["length"])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    source = BackboneSource(
        load, runs_code=True, names=names, describe=describe, load_text_tower=text_tower, note="toys of everyone",
        same_layers_at_random=True, name_is_path=True,
    )  # fmt: skip
    monkeypatch.setitem(SOURCES, "toy", source)


@pytest.mark.usefixtures("toy")
def test_a_source_is_listed_and_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as few:
        for name in SOURCES.keys() - {"toy", "timm"}:  # some import their libraries to tell their names
            few.setitem(SOURCES, name, replace(SOURCES[name], names=lambda pattern: []))
        assert "toy              2 models  toys of everyone" in layertap("backbones").stdout.splitlines()
    listed = [entry["spec"] for entry in json.loads(layertap("backbones", "toy/*", "--json").stdout)]
    assert listed == ["toy/net", "toy/nets"]
    assert "toy/net " in layertap("backbones", "t*/net").stdout
    assert "did you mean toy/net?" in fails("layers", "toys/net")
    with pytest.raises(InputError, match="models of open_clip/ and hf/ and toy/ have"):
        load_text_tower("timm/test_resnet")


@pytest.mark.usefixtures("toy")
def test_a_source_gives_layers_features_and_texts_and_its_code_runs_only_if_the_user_names_it(
    folder: Path, tmp_path: Path
) -> None:
    assert layertap("layers", "toy/net").exit_code == 0
    assert load_backbone("toy/net", device="cpu").features([make_picture(1)])["embedding"].shape == (1, 8)
    assert load_text_tower("toy/net", device="cpu").features("a bee").tolist() == [[5.0]]
    out = tmp_path / "out"
    assert layertap("embed", folder, "-b", "toy/net", "-o", out, "--workers", 0, "--device", "cpu").exit_code == 0
    assert "name the backbone: --backbone toy/net" in fails("verify", out, "--sample", 2)
    assert layertap("verify", out, "--sample", 2, "-b", "toy/net").exit_code == 0


def test_layers_are_listed_with_random_weights_only_where_a_source_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []

    def noted(request: LoadRequest) -> LoadedBackbone:
        asked_for.append(request.weights)
        return load(request)

    for permits in (True, False):
        monkeypatch.setitem(SOURCES, "toy", BackboneSource(noted, runs_code=False, same_layers_at_random=permits))
        assert layertap("layers", "toy/net").exit_code == 0
    assert asked_for == ["random", None]


def test_whether_a_source_runs_code_has_no_default() -> None:
    with pytest.raises(TypeError, match="runs_code"):
        BackboneSource(load)  # type: ignore[call-arg]
    assert [name for name, source in SOURCES.items() if source.runs_code] == ["hub", "python"]


# A pooling: an entry of `POOLINGS` in `extract/compute/pooling.py`.

NET = ["-b", "timm/test_resnet", "--weights", "random", "--workers", 0, "--device", "cpu"]


def deviation(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    return x.std([1 + axis for axis, letter in enumerate(layout.axes) if letter in "HW"])


def test_a_pooling_is_computed_stored_and_named_in_errors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POOLINGS, "spread", Pooling(deviation, "map"))
    out = tmp_path / "out"
    result = layertap("embed", folder, "-o", out, *NET, "-l", "conv1:spread", "-l", "conv1:none")
    assert result.exit_code == 0, result.output
    with FeatureReader(out) as reader:
        maps, features = reader["conv1:none"], reader["conv1:spread"]
        assert np.allclose(features[:], maps[:].std((2, 3), ddof=1), rtol=1e-4, atol=1e-6)
        assert (maps.attributes["axes"], features.attributes["axes"]) == ("CHW", "C")
    said = fails("embed", folder, "-o", tmp_path / "other", *NET, "-l", "embedding:spread")
    assert "spread does not fit a vector" in said
    said = fails("embed", folder, "-o", tmp_path / "other", *NET, "-l", "conv1:spraed")
    assert f"neither a pooling (auto, {', '.join(POOLINGS)}) nor" in said
    assert list(POOLINGS)[-1] == "spread"
    said = fails("embed", folder, "-o", tmp_path / "other", *NET, "-l", "conv1:mean_tokens")
    assert "use mean_map, max_map, " in said
    assert " or spread" in said


def test_a_pooling_of_all_layouts_may_keep_their_axes_and_another_have_numbers_in_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POOLINGS, "half", Pooling(lambda x, layout: x / 2, None, result=lambda layout: layout))
    backbone, layers = load_backbone("timm/test_resnet", weights="random", device="cpu"), ["half", "none", "mean_map"]
    layers = [f"conv1:{pooling}" for pooling in (*layers, "half:half:mean_map")]
    half, none, mean, quarter = backbone.features([make_picture(1)], layers=layers).values()
    assert np.array_equal(half * 2, none)
    assert np.allclose(quarter * 4, mean, rtol=1e-6)

    def rank(numbers: tuple[str | None, ...], layout: Layout, shape: tuple[int, ...]) -> tuple[str, dict[str, int]]:
        if int(numbers[0] or 0) >= shape[1] * shape[2]:
            raise InputError(f"rank{numbers[0]} does not fit {shape[1] * shape[2]} positions")
        return f"rank{numbers[0]}", {"rank": int(numbers[0] or 0)}

    def ranked(x: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
        return x.flatten(2).sort(2, descending=True).values[:, :, rank]

    monkeypatch.setitem(POOLINGS, "rankR", Pooling(ranked, "map", form=r"rank(\d+)", arguments=rank))
    features = backbone.features([make_picture(1)], layers=["layer4:rank0", "layer4:rank1:srp4", "layer4:max_map"])
    assert list(features) == ["layer4:rank0", "layer4:rank1:srp4", "layer4:max_map"]
    assert np.array_equal(features["layer4:rank0"], features["layer4:max_map"])
    with pytest.raises(InputError, match="rank4096 does not fit"):
        backbone.features([make_picture(1)], layers=["layer4:rank4096"])


def run_main(before: str, *runs: Sequence[str]) -> str:
    """What commands print in a process in which something was added before `pipelines.cli` was imported."""
    call = f"for words in {runs}:\n    main(words, 'layertap', standalone_mode=False)"
    code = f"{before}\nfrom pipelines.cli import main\n{call}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_names_a_new_pooling_and_does_not_wait_for_torch() -> None:
    added = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from extract.compute.pooling import POOLINGS\n"
        "POOLINGS['spread'] = POOLINGS['max_map']"
    )
    words = run_main(added, ["embed", "--help"]).split()
    assert words[words.index("Poolings:") + 1 :][: len(POOLINGS) + 2] == ["auto", *POOLINGS, "spread."]
    assert words[-1] == "False"


# An export format: a function and an entry of `FORMATS` in `extract/store/export.py`.


def to_text(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: Callable[[int], None]) -> None:
    np.savetxt(path, reader[names[0]][:])
    on_rows(len(reader))


def to_texts(reader: FeatureReader, path: Path, names: Sequence[str], on_rows: Callable[[int], None]) -> None:
    path.mkdir()
    for name in names:
        to_text(reader, path / f"{name}.txt", [name], on_rows)


def test_a_format_is_a_choice_with_a_place_and_its_files_are_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert layertap("embed", folder, "-o", out, *NET).exit_code == 0
    refused = layertap("export", out, "--to", "jpg").stderr
    assert "'jpg' is not one of 'h5', 'npy', 'parquet', 'mat', 'hf', 'rdm'\n" in refused
    monkeypatch.setitem(FORMATS, "txt", Format(to_text))
    monkeypatch.setitem(FORMATS, "texts", Format(to_texts, is_folder=True))
    monkeypatch.setattr(data_sets.export.params[1].type, "choices", tuple(FORMATS))
    assert "--to [h5|npy|parquet|mat|hf|rdm|txt|texts]" in layertap("export", "--help").stdout
    for to in ("txt", "texts"):
        assert layertap("export", out, "--to", to).exit_code == 0
    assert "'parquet', 'mat', 'hf', 'rdm', 'txt', 'texts'\n" in layertap("export", out, "--to", "jpg").stderr
    with FeatureReader(out) as reader:
        for written in (tmp_path / "out.txt", tmp_path / "out-texts" / "embedding.txt"):
            assert np.allclose(np.loadtxt(written), reader["embedding"][:])
        with pytest.raises(UnknownNameError, match="format 'text' not found; nearest: 'txt', 'texts'|'texts', 'txt'"):
            export(reader, tmp_path / "more", "text")


# A command: a decorated function in the `command.py` of its room.


@pytest.mark.parametrize(
    "room",
    ["sync"] + [pytest.param(room, marks=pytest.mark.slow) for room in ("data_sets", "embed", "network", "probe")],
)
def test_a_command_in_the_module_of_its_room_is_registered(room: str) -> None:
    added = f"""
import click
from pipelines.{room} import command

@click.command()
def greet() -> None:
    \"\"\"Say hello.\"\"\"
    click.echo("hello")

command.greet = greet"""
    hello, *shown = run_main(added, ["greet"], ["--help"]).splitlines()
    assert hello == "hello"
    assert "  greet  Say hello." in shown


# A setting: a field and its line of the docstring in `extract/extraction/settings.py`, and the place of its use.

SHOWN = """
import inspect
from docs import hooks
from extract import extract_features
from pipelines.cli import main
from pipelines.embed.config import EmbedConfig
from pipelines.sync.config import SyncConfig
from pipelines.terminal.config import checked

print(next(line for line in hooks.configuration() if "`brightness`" in line))
print(next(line for line in hooks.command_line() if "--brightness" in line))
print(next(line for line in extract_features.__doc__.splitlines() if "brightness" in line))
print(inspect.signature(extract_features).parameters["brightness"])
for refuse in (
    lambda: extract_features("pictures", out="out", brightness=9),
    lambda: checked(EmbedConfig, {"images": "pictures", "brightness": 9}, "run.yaml"),
    lambda: checked(SyncConfig, {"images": "pictures", "brightness": 0}, "sync.yaml"),
):
    try:
        refuse()
    except ValueError as error:
        print(error, flush=True)
main(["embed", "--config", "run.yaml", "--brightness", "4"])
"""


# File of `extract/`, what stands there, and what is written for it.
NEW_SETTING = (
    ("extraction/settings.py", "        orientation: exif:", "        brightness: Factor of all pixels.\n{}"),
    (
        "extraction/settings.py", "    orientation: Annotated[Literal",
        "    brightness: Annotated[float, Field(gt=0, lt=8)] = 1.0\n{}",
    ),
    (
        "extraction/plan.py", "preprocessing = replace(backbone.preprocessing, orientation",
        "std = tuple(x / settings.brightness for x in backbone.preprocessing.std)\n"
        "    preprocessing = replace(backbone.preprocessing, std=std, orientation",
    ),
)  # fmt: skip


@pytest.mark.slow
def test_a_setting_is_added_in_two_files(folder: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    for name in ("extract", "pipelines", "layertap", "docs"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.md", "*.ipynb"))
    for name, old, new in NEW_SETTING:
        path = tmp_path / "extract" / name
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new.format(old)))
    config = {"images": str(folder), "backbone": "timm/test_resnet", "weights": "random", "device": "cpu", "workers": 0}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "out": "out", "brightness": 2}))

    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", SHOWN], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[:7] == [
        "| `brightness` | `float` | `1.0` | Factor of all pixels. |",
        "| `--brightness FLOAT` | Factor of all pixels. \\[default: 1.0] |",
        "    brightness: Factor of all pixels.",
        "brightness: float = 1.0",
        "brightness is 9; it must be above 0 and below 8",
        "run.yaml: brightness: expected less than 8; got 9",
        "sync.yaml: brightness: expected more than 0; got 0",
    ]
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.provenance["configuration"]["brightness"] == 4
        std = reader.provenance["depends_on"]["preprocessing"]["std"]
    plain = load_backbone("timm/test_resnet", weights="random", device="cpu").preprocessing.std
    assert np.allclose(std, np.array(plain) / 4)


def test_the_first_hour_reads_six_files_of_at_most_2500_lines_with_the_lines_that_they_have() -> None:
    root = Path(__file__).parents[1]
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", (root / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 6
    for name, stated in rows:
        assert abs(len((root / name).read_text("utf-8").splitlines()) - int(stated)) <= 0.1 * int(stated), name
    assert sum(int(stated) for _, stated in rows) <= 2500
