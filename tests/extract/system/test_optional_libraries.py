"""What is said where an optional library is missing."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from extract.errors import LayertapError
from extract.system import optional_libraries
from extract.system.optional_libraries import library, own_version, pip_install
from pipelines.cli import main

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    pip_install.cache_clear()
    own_version.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).parent / name))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a wheel: no pyproject.toml beside the packages."""
    monkeypatch.setattr(optional_libraries, "_PYPROJECT", tmp_path / "pyproject.toml")


def test_the_command_names_what_the_extra_of_the_checkout_consists_of() -> None:
    assert pip_install("http") == "pip install 'fsspec[http]>=2025.5' 'aiohttp>=3.9'"
    for extra, requirements in EXTRAS.items():
        assert pip_install(extra).count(">=") == "".join(requirements).count(">=")


@pytest.mark.usefixtures("elsewhere")
def test_of_a_wheel_the_command_and_the_version_are_those_of_its_metadata_and_of_copied_folders_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = [
        "torch>=2.9",
        'open_clip_torch>=2.30; extra == "open-clip"',  # metadata writes extras with a hyphen
        'fsspec[http]>=2025.5; extra == "http"',
        'aiohttp>=3.9 ; extra == "http"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    monkeypatch.setattr(metadata, "version", lambda name: {"layertap": "7.8"}[name])
    assert own_version() == "7.8"
    for another_project in (False, True):  # whose pyproject.toml is not read
        if another_project:
            (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
            pip_install.cache_clear()
        assert pip_install("open_clip") == "pip install 'open_clip_torch>=2.30'"
        assert pip_install("http") == "pip install 'fsspec[http]>=2025.5' 'aiohttp>=3.9'"

    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert pip_install("ray") == "see the extra 'ray' in layertap's pyproject.toml"


def test_a_pip_that_the_shell_does_not_find_or_that_is_of_another_environment_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found in (None, "/usr/other/bin/pip"):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        pip_install.cache_clear()
        assert pip_install("ray") == f"{sys.executable} -m pip install 'ray>=2.41'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as in an environment that uv has made
    pip_install.cache_clear()
    assert pip_install("ray") == f"uv pip install --python {sys.executable} 'ray>=2.41'"


def test_an_import_that_fails_names_purpose_package_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    with pytest.raises(LayertapError) as caught:
        library("watchfiles", "watch", "layertap sync --watch")
    assert caught.value.message == "layertap sync --watch needs watchfiles"
    assert caught.value.hint == "to install it: pip install 'watchfiles>=1.0'"


def test_every_extra_that_the_code_names_exists() -> None:
    named = set()
    for path in [*(ROOT / "extract").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]:
        code = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)) if "library(" in code or "pip_install(" in code else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            position = {"library": 1, "pip_install": 0}.get(node.func.id)
            if position is not None and isinstance(extra := node.args[position], ast.Constant):
                named.add(extra.value)
    assert len(named) > 10
    assert named <= {*EXTRAS, ""}  # without an extra: what the project itself needs


@pytest.mark.parametrize(
    ("arguments", "purpose", "requirement"),
    [
        (["probe", "none"], "layertap probe needs matplotlib", "matplotlib>="),
        (["draw", "maps", "bundled/efficientnet_lite0", "none"], "layertap draw needs matplotlib", "matplotlib>="),
        (["ablate", "bundled/x", "none", "--pictures", "a.png"], "--pictures needs matplotlib", "matplotlib>="),
        (["inspect", "bundled/x", "none", "--pictures", "a"], "--pictures needs matplotlib", "matplotlib>="),
        (["report", "."], "layertap report with --map tsne needs sklearn", "scikit-learn>="),
        (["demo", "-o", "none"], "layertap demo needs sklearn", "matplotlib>="),
    ],
)
def test_commands_with_figures_ask_for_matplotlib_before_they_begin(
    arguments: list[str], purpose: str, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert purpose in done.output
    assert "pip install " in done.output
    assert requirement in done.output


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a checkout that only PYTHONPATH names: there is no distribution `layertap`."""
    of_libraries = metadata.version

    def version(name: str) -> str:
        if name == "layertap":
            raise metadata.PackageNotFoundError(name)
        return of_libraries(name)

    monkeypatch.setattr(metadata, "version", version)


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.mark.usefixtures("not_installed")
def test_a_checkout_that_is_not_installed_knows_its_version() -> None:
    assert CliRunner().invoke(main, ["--version"], prog_name="layertap").output == f"layertap, version {VERSION}\n"
    assert own_version() == VERSION


@pytest.mark.slow
@pytest.mark.usefixtures("not_installed")
def test_commands_of_a_checkout_that_is_not_installed_store_its_version(tmp_path: Path, folder: Path) -> None:
    version = VERSION
    out = str(tmp_path / "out")
    small = ["-b", "timm/test_resnet", "--weights", "random", "--size", "64", "--crop", "64", "--workers", "0"]
    assert CliRunner().invoke(main, ["embed", str(folder), "-o", out, *small]).exit_code == 0
    described = json.loads(CliRunner().invoke(main, ["show", out, "--json"]).stdout)
    assert described["provenance"]["versions"]["layertap"] == version
    probed = CliRunner().invoke(main, ["probe", out, "--test-fraction", "0.3", "--json"])
    assert json.loads(probed.stdout)["layertap"] == version
    doctor = CliRunner().invoke(main, ["doctor"])
    assert f"layertap {version} (not installed), " in doctor.stdout


@pytest.mark.usefixtures("not_installed", "elsewhere")
def test_the_version_of_copied_folders_is_unknown() -> None:
    assert CliRunner().invoke(main, ["--version"], prog_name="layertap").output == "layertap, version unknown\n"


def test_no_other_module_reads_metadata_of_distributions() -> None:
    """It has none of what is not installed, and then ends in a traceback."""
    reading = [
        path.name
        for package in ("extract", "pipelines", "layertap")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"importlib\.metadata|importlib import metadata", path.read_text(encoding="utf-8"))
    ]
    assert reading == ["optional_libraries.py"]
