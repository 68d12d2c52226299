"""Completion in a shell: what is offered, and that PyTorch is not imported for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from click.shell_completion import ShellComplete

from extract.backbones import catalogue_index
from extract.backbones.sources import SOURCES
from pipelines.cli import main
from pipelines.terminal import completion
from pipelines.terminal.completion import SHELLS, backbone_names
from tests.pipelines.test_cli import layertap


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def offered(*words: str) -> list[str]:
    """What click offers for the last word of a command line."""
    completion = ShellComplete(main, {}, "layertap", "_LAYERTAP_COMPLETE")
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


def test_commands_options_and_values_are_completed() -> None:
    assert offered("em") == ["embed"]
    assert offered("doctor", "--j") == ["--json"]
    assert offered("embed", "photos", "--dtype", "") == ["float32", "float16", "bfloat16", "int8"]
    assert offered("export", "out", "--to", "p") == ["parquet"]
    assert set(offered("")) == set(main.commands)


@pytest.mark.parametrize("command", [["embed", "photos", "-b"], ["layers"], ["doctor", "--backbone"], ["backbones"]])
def test_backbones_are_completed_by_source_and_by_name(command: list[str]) -> None:
    assert offered(*command, "t") == ["torchvision/", "timm/"]
    assert sorted(offered(*command, "torchv")) == sorted(offered(*command, "torchvision/"))  # no space after the source
    names = offered(*command, "torchvision/resnet")
    known = [f"torchvision/{name}" for name in SOURCES["torchvision"].names("resnet*")]
    assert sorted(names) == sorted(spec for spec in known if spec.startswith("torchvision/resnet"))


@pytest.mark.parametrize(
    "source", ["bundled", "torchvision", "timm", pytest.param("open_clip", marks=pytest.mark.slow)]
)
def test_the_names_read_from_files_are_those_of_the_library(source: str, cache: Path) -> None:
    if SOURCES[source].library:
        pytest.importorskip(source)
    assert sorted(backbone_names(source)) == sorted(SOURCES[source].names("*"))


def test_names_are_those_of_the_index_where_there_is_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("layers", "timm/test_resnet.") == []  # the source files have no tags
    for pattern in ("*", "*.*"):
        catalogue_index.backbone_names("timm", pattern)
    monkeypatch.setattr(completion, "_NAMES", dict.fromkeys(completion._NAMES))  # reading files would fail
    assert offered("layers", "timm/test_resnet.") == [f"timm/{name}" for name in timm.list_pretrained("test_resnet.*")]
    assert offered("layers", "timm/resnet18") == [f"timm/{name}" for name in timm.list_models("resnet18*")]


def test_sources_without_names_offer_none() -> None:
    assert [name for source in ("hf", "hub", "python", "nonsense") for name in backbone_names(source)] == []


@pytest.mark.parametrize("argument", [["embed", "pho"], ["show", "out"], ["embed", "photos", "-o", "out"]])
def test_paths_are_left_to_the_shell(argument: list[str]) -> None:
    completion = ShellComplete(main, {}, "layertap", "_LAYERTAP_COMPLETE")
    assert [item.type for item in completion.get_completions(argument[:-1], argument[-1])] == ["file"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_each_shell(shell: str) -> None:
    result = layertap("completion", shell)
    assert result.exit_code == 0
    assert "_LAYERTAP_COMPLETE" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)


def test_completion_imports_neither_torch_nor_timm() -> None:
    code = (
        "import sys\nfrom pipelines.cli import main\n"
        "try: main(prog_name='layertap')\n"
        "finally: print({'torch', 'timm', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    words = {"_LAYERTAP_COMPLETE": "bash_complete", "COMP_WORDS": "layertap embed -b timm/test_re", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True, check=True
    )
    assert "plain,timm/test_resnet" in done.stdout.split()
    assert done.stderr == "set()\n"
