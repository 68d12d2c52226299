"""What is installed is whole, and needs nothing that it does not say; `.ci/run` tries the wheel itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions

from tests.test_rooms import FILES, ROOT, imported

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
    needed = [*PROJECT["project"]["dependencies"], *(x for name in extras if name != "test" for x in extras[name])]
    declared = {re.split(r"[\[<>=~! ]", text)[0].lower().replace("_", "-") for text in needed}
    tops = {name: {other.partition(".")[0] for other in imported(name)} for name in FILES}
    others = set().union(*tops.values()) - {*TOPS, "__future__"} - sys.stdlib_module_names
    distributions = packages_distributions()
    undeclared = {
        name
        for name in others
        if not declared & {one.lower().replace("_", "-") for one in distributions.get(name, [name])}
    }
    assert {name: undeclared & found for name, found in tops.items() if undeclared & found} == {}
