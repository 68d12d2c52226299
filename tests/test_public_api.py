"""The public names and their signatures: a change of the API is a change of `public_api.txt` (see CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import extract

MODULES = (
    "extract", "extract.ablation", "extract.attribution", "extract.edits", "extract.probe", "extract.search",
    "extract.sklearn", "layertap",
)  # fmt: skip

# `python -m tests.test_public_api` writes it. `...` stands for defaults that are functions or depend on the machine.
TABLE = Path(__file__).with_name("public_api.txt")


class Plain(str):
    """Text that is its own repr, for annotations without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def signature(name: str, function: Any) -> str:
    """Name and signature."""
    found = inspect.signature(function)
    parameters = [parameter.replace(**plain(parameter)) for parameter in found.parameters.values()]
    returned = found.return_annotation
    if isinstance(returned, str):
        returned = Plain(returned)
    if inspect.isclass(function):
        returned = inspect.Signature.empty
    return f"{name}{found.replace(parameters=parameters, return_annotation=returned)}"


def plain(parameter: inspect.Parameter) -> dict[str, Any]:
    """What of a parameter is written in another way."""
    changes: dict[str, Any] = {}
    if isinstance(parameter.annotation, str):
        changes["annotation"] = Plain(parameter.annotation)
    default = parameter.default
    depends = parameter.name == "workers" or repr(default).startswith("<")
    if default is not inspect.Parameter.empty and depends:
        changes["default"] = Plain("...")
    return changes


def class_entries(name: str, cls: type) -> Iterator[str]:
    """Constructor, methods and properties; inherited ones too, but those of other libraries."""
    yield f"class {signature(name, cls)}"
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("extract.")]
    for key, value in sorted({key: value for base in ours for key, value in vars(base).items()}.items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not key.startswith("_") and inspect.isfunction(function):
            yield signature(f"{name}.{key}", function)
        elif not key.startswith("_") and isinstance(value, property):
            assert value.fget is not None
            yield f"{name}.{key}: {inspect.signature(value.fget).return_annotation}"


def entries(module: str) -> Iterator[str]:
    """The entries of the table for a module."""
    names = importlib.import_module(module).__all__
    for key in sorted(set(names) - set(extract.__all__) if module == "layertap" else names):
        name, value = f"{module}.{key}", getattr(importlib.import_module(module), key)
        if inspect.isclass(value) and issubclass(value, Exception):
            yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        elif inspect.isclass(value) and issubclass(value, enum.Enum):
            yield f"class {name}: " + " ".join(value.__members__)
        elif inspect.isclass(value):
            yield from class_entries(name, value)
        elif inspect.isfunction(value):
            yield signature(name, value)
        else:
            yield f"{name} = {' '.join(value) if isinstance(value, dict) else value}"


def module_of(entry: str) -> str:
    """The module of an entry of the table."""
    name = entry.removeprefix("class ")
    return max((module for module in MODULES if name.startswith(f"{module}.")), key=len)


@pytest.mark.parametrize("module", MODULES)
def test_public_names_and_signatures_are_those_of_the_table(module: str) -> None:
    table = TABLE.read_text(encoding="utf-8").splitlines()
    assert [entry for entry in table if module_of(entry) == module] == list(entries(module))


def test_the_table_covers_the_package_and_all_its_aliases() -> None:
    modules = {path.stem for path in Path(extract.__path__[0]).glob("*.py")}
    aliases = modules - {"__init__", "credentials", "errors", "defaults", "row_status"}
    assert set(MODULES) == {"extract", "layertap", *(f"extract.{alias}" for alias in aliases)}


def test_errors_can_be_imported_from_a_module_of_their_own() -> None:
    errors = importlib.import_module("layertap.errors")
    assert {name: getattr(errors, name) for name in errors.__all__} == {
        name: getattr(extract, name) for name in extract.__all__ if name.endswith("Error")
    }


def test_the_lists_of_names_in_the_package_agree() -> None:
    tree = ast.parse(Path(extract.__path__[0], "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    for_type_checkers = {alias.name: node.module for node in imports for alias in node.names}
    assert for_type_checkers == extract._HOMES
    assert sorted(for_type_checkers) == extract.__all__


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_have_docstrings(module: str) -> None:
    values = {name: getattr(importlib.import_module(module), name) for name in importlib.import_module(module).__all__}
    described = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert [name for name, value in described.items() if not value.__doc__] == []


@pytest.mark.slow
def test_type_checkers_know_the_arguments_that_are_made_from_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPYPATH", str(Path(__file__).parents[1]))
    lines = {
        'extract_features("photos", out="out", precision="bfloat16", batch_size=8)': "",
        'extract_features(images="photos", out="out", keep="caption")': "",
        'extract_features("photos", out="out", precision="float8")': "[arg-type]",
        'extract_features("photos", out="out", batch_size="8")': "[arg-type]",
        'extract_features("photos", out="out", bath_size=8)': "[call-arg]",
        'extract_features("photos")': "[call-arg]",
        'compare("photos", ["a"], decode="fast")': "",
        'compare("photos", decode="quick")': "[arg-type]",
        'reader: int = extract_features("photos", out="out")': "[assignment]",
    }
    imports = "from extract import extract_features\nfrom layertap import compare\n"
    (tmp_path / "user.py").write_text(imports + "\n".join(lines))
    # Without the settings of this project, and so without the plugin of pydantic, as a user has it.
    how = ["--strict", "--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    # A process of its own: it leaves five million objects, and each garbage collection of later tests would visit them.
    command = [sys.executable, "-m", "mypy", *how, "--ignore-missing-imports", str(tmp_path / "user.py")]
    said = subprocess.run(command, capture_output=True, text=True)
    refused = {
        int(number): code for number, code in re.findall(r"user\.py:(\d+): error: .*(\[[\w-]+\])$", said.stdout, re.M)
    }
    assert refused == {number: code for number, code in enumerate(lines.values(), 3) if code}, said


if __name__ == "__main__":
    TABLE.write_text("".join(f"{entry}\n" for module in MODULES for entry in entries(module)), encoding="utf-8")
