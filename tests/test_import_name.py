"""The name `layertap`, and modules of users that are called as our packages are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import extract
import layertap

ROOT = Path(__file__).parents[1]
SITE = f"import sys; sys.path.append({str(ROOT)!r}); "  # where an installation lies on the path


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code with `folder` first on the path and nothing of this checkout before it."""
    command = [sys.executable, "-c", SITE + code]
    environment = {"PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_layertap_gives_the_objects_of_extract() -> None:
    for name in extract.__all__:
        assert getattr(layertap, name) is getattr(extract, name)
    assert layertap.__all__ == [*extract.__all__, "compare"]
    for module in (layertap, extract):  # completion in a notebook has these names alone
        assert {name for name in dir(module) if not name.startswith("_")} == set(module.__all__)
    assert layertap.compare is importlib.import_module("pipelines.compare.function").compare
    with pytest.raises(AttributeError, match="'layertap' has no attribute 'tap'"):
        layertap.tap  # noqa: B018


@pytest.mark.parametrize("module", ["ablation", "attribution", "edits", "probe", "search", "sklearn"])
def test_its_modules_give_the_objects_of_those_of_extract(module: str) -> None:
    ours, theirs = (importlib.import_module(f"{package}.{module}") for package in ("layertap", "extract"))
    public = [name for name in vars(ours) if not name.startswith("_")]
    assert sorted(public) == sorted(theirs.__all__)
    assert all(getattr(ours, name) is getattr(theirs, name) for name in public)


def test_importing_layertap_imports_no_torch(tmp_path: Path) -> None:
    shown = run("import layertap; print('torch' in sys.modules, 'numpy' in sys.modules)", tmp_path)
    assert shown.stdout == "False False\n", shown.stderr


@pytest.mark.parametrize("module", ["extract.py", "extract/__init__.py"])
def test_a_module_that_hides_extract_is_reported_with_its_path(tmp_path: Path, module: str) -> None:
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("")
    shown = run("from layertap import Taps", tmp_path)
    assert shown.returncode == 1
    assert "ImportError: layertap needs its package 'extract'" in shown.stderr
    assert str(tmp_path / module) in shown.stderr


def test_a_folder_without_a_module_in_it_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "extract").mkdir()
    (tmp_path / "pipelines").mkdir()
    assert run("from layertap import Status, main", tmp_path).returncode == 0


def test_the_command_reports_a_package_that_hides_pipelines(tmp_path: Path) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("raise SystemExit('run')")
    shown = run("import layertap; layertap.main()", tmp_path)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("error: layertap needs its package 'pipelines'")
    assert str(tmp_path / "pipelines" / "__init__.py") in shown.stderr


def test_commands_that_are_printed_or_started_run_beside_a_package_that_hides_pipelines(tmp_path: Path) -> None:
    """They start a Python that does not look into the working directory."""
    from pipelines.terminal.text_output import LAYERTAP

    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("raise SystemExit('run')")
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
    # A schedule starts the first; the second stands in units that earlier versions printed.
    for command in (LAYERTAP, [sys.executable, "-P", "-m", "pipelines.cli"]):
        shown = subprocess.run([*command, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.endswith(", version 0.1.0\n")


@pytest.mark.parametrize("start", ["import extract", "import layertap", "import layertap; layertap.main()"])
def test_windows_is_refused_in_words(start: str) -> None:
    code = f"import sys; sys.platform = 'win32'; {start}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "layertap does not run on Windows" in process.stderr
    assert "wsl --install" in process.stderr
