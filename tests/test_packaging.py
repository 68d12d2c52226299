"""What is installed is whole, and needs nothing that it does not say; `.ci/run` tries the wheel itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution

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


def modules_of(name: str) -> set[str]:
    """Modules that an installed distribution has; none if it is not installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return set()
    listed = found.read_text("top_level.txt")
    return set(listed.split()) if listed else {file.parts[0].removesuffix(".py") for file in found.files or ()}


def test_every_library_that_is_imported_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *(x for name in extras if name != "test" for x in extras[name])]
    declared = {re.split(r"[\[<>=~! ]", text)[0].lower().replace("_", "-") for text in needed}
    tops = {name: {other.partition(".")[0] for other in imported(name)} for name in FILES}
    others = set().union(*tops.values()) - {*TOPS, "__future__"} - sys.stdlib_module_names
    by_name = {name for name in others if name.lower().replace("_", "-") in declared}
    given = by_name.union(*(modules_of(name) for name in declared if name.replace("-", "_") not in by_name))
    assert {name: found & others - given for name, found in tops.items() if found & others - given} == {}
