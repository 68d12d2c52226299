"""The house: no module lies loose, none is too long; taps need torch alone.

Which room may import which, and that none imports in a circle, is in pyproject.toml, for `lint-imports`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trace_path import cold_paths, path_of_one_image

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("extract", "layertap", "pipelines")
    for path in sorted((ROOT / package).rglob("*.py"))
}
LOOSE = {
    "extract": {
        "__init__", "credentials", "errors", "defaults", "row_status",
        "ablation", "attribution", "edits", "probe", "search", "sklearn",
    },
    "layertap": {"__init__", "__main__", "ablation", "attribution", "edits", "errors", "probe", "search", "sklearn"},
    "pipelines": {"__init__", "cli", "demo"},
}  # fmt: skip
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 800, 80


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements below a node; imports and functions are never below an expression."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


def imported(name: str) -> Iterator[str]:
    """Modules that a module names in imports: at its top, in functions, and for type checkers."""
    for node in statements(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in FILES else str(node.module)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Its lines without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return lines - (docstring.end_lineno - docstring.lineno + 1)


@pytest.mark.parametrize("package", LOOSE)
def test_no_module_lies_loose(package: str) -> None:
    assert {path.stem for path in (ROOT / package).glob("*.py")} == LOOSE[package]


@pytest.mark.parametrize("alias", ["ablation", "attribution", "edits", "probe", "search", "sklearn"])
def test_an_alias_hands_on_all_public_names_of_its_modules(alias: str) -> None:
    handed_on = importlib.import_module(f"extract.{alias}")
    homes = [importlib.import_module(name) for name in imported(f"extract.{alias}")]
    values = {name: getattr(home, name) for home in homes for name in home.__all__}
    assert set(handed_on.__all__) == set(values)
    assert {name: getattr(handed_on, name) for name in handed_on.__all__} == values


def test_each_package_is_installed() -> None:
    folders = {path.parent for path in FILES.values()}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_modules_and_functions_are_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}
    nodes = [(name, node) for name in FILES for node in statements(tree_of(name))]
    functions = [(name, node) for name, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f"{name}:{node.name}" for name, node in functions if lines_of(node) > MOST_LINES_OF_A_FUNCTION] == []


def test_taps_import_torch_alone() -> None:
    modules = {name for name in FILES if name == "extract.taps" or name.startswith("extract.taps.")}
    modules |= {"extract.errors", "extract.credentials"}
    found = {other for name in modules for other in imported(name)}
    foreign = {other for other in found if other.partition(".")[0] not in sys.stdlib_module_names}
    assert {other.partition(".")[0] for other in foreign} == {"torch", "extract"}
    assert {other for other in foreign if other.startswith("extract")} <= modules
    # When a room is imported, the package is, too: beside lazy imports, and those for type checkers, it needs nothing.
    package = [node for node in tree_of("extract").body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in package if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in package if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


TAPS_ALONE = """
import sys

BLOCKED = sys.argv[1].split(",")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        package, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        if package == "pipelines" or (package == "extract" and room not in ("", "taps", "errors", "credentials")):
            raise AssertionError(f"{name} was imported")
        if package in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import torch
from extract.taps import Taps
from extract.taps.edits import scale

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
with Taps(model, ["1"]).edit("0", scale(2.0)).keep("2", "grad") as taps:
    taps(torch.ones(3, 2)).sum().backward()
print(tuple(taps.record["1"].shape), sorted(name for name in sys.modules if name.startswith("extract")))
"""


@pytest.mark.slow
def test_one_image_passes_at_most_ten_files_with_22_changes_from_one_to_another() -> None:
    files, changes = path_of_one_image()
    assert len(files) <= 10, sorted(files)
    assert len(changes) <= 22, sorted(changes)
    # Something was traced: the ends of the path, and the hook between them.
    assert {f"extract/{name}.py" for name in ("images/loading", "taps/capture", "store/format/writer")} <= files


@pytest.mark.slow
def test_a_run_resolves_each_thing_once_in_few_files_before_its_first_image() -> None:
    loaded, by_spec, by_command = cold_paths().values()
    for path, most in ((loaded, 28), (by_spec, 33), (by_command, 41)):
        assert len(path.files_before) <= most, sorted(path.files_before)
    assert loaded.calls.total() <= 1_650  # each setting is checked by five
    assert len(loaded.files) <= 44, sorted(loaded.files)
    for path in (loaded, by_spec, by_command):
        for file, function in (
            ("extract/images/listing.py", "list_images"),
            ("extract/extraction/plan.py", "existing_at"),
            ("extract/extraction/plan.py", "resolve"),
            ("extract/compute/feature_choice.py", "choose_features"),
            ("extract/images/image_list.py", "labels_hash"),
        ):
            assert path.calls[file, function] == 1, (file, function)
    # By the choice of features, to match patterns with names, and by the `Taps` of its trial.
    assert loaded.calls["extract/taps/layer_names.py", "named_layers"] == 2


@pytest.mark.slow
def test_taps_run_where_there_is_no_other_room_and_no_other_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}  # type: ignore[index]
    others = sorted({"numpy", "PIL", "yaml", "sklearn", *names} - {"torch", "fsspec"})  # torch itself needs fsspec
    command = [sys.executable, "-W", "ignore", "-c", TAPS_ALONE, ",".join(others)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    shape, _, loaded = run.stdout.partition(" [")
    assert shape == "(3, 2)"
    rooms = {name.strip("' ]\n").split(".")[1] for name in loaded.split(",") if "." in name}
    assert rooms == {"taps", "errors", "credentials"}
