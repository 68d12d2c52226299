"""What is installed is whole, and needs nothing that it does not say; `.ci/run` tries the wheel itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOPS = ("extract", "layertap", "pipelines")


def test_every_package_goes_into_the_wheel() -> None:
    options = PROJECT["tool"]["setuptools"]["packages"]["find"]
    # In a process of its own: setuptools replaces distutils, and refuses to if a library has imported parts of it.
    code = f"import setuptools; print(*setuptools.find_packages({str(ROOT)!r}, **{options!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(run.stdout.split())
    there = {".".join(path.parent.relative_to(ROOT).parts) for top in TOPS for path in (ROOT / top).rglob("*.py")}
    assert found == there  # a folder without __init__.py would be missing, too


def test_every_file_beside_the_modules_goes_into_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for path in (path for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()):
        if path.suffix in (".py", ".pyc"):
            continue
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(fnmatch(path.name, pattern) for pattern in patterns.get(package, [])), path


def test_every_library_that_is_imported_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [
        *PROJECT["project"]["dependencies"],
        *(one for name, some in extras.items() if name != "test" for one in some),
    ]
    declared = {re.split(r"[\[<>=~! ]", text)[0].lower().replace("_", "-") for text in needed}
    distributions = packages_distributions()
    for path in (path for top in TOPS for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names} - {*TOPS, "__future__"}:
                if name in sys.stdlib_module_names:
                    continue
                owners = {one.lower().replace("_", "-") for one in distributions.get(name, [name])}
                assert owners & declared, (
                    f"{path.relative_to(ROOT)} imports {name}, which pyproject.toml does not declare"
                )
