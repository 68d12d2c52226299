"""Optional libraries, imported where they are used."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from extract.errors import LayertapError

__all__ = ["library", "pip_install"]

_PROJECT = "layertap"
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def library(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: the name to import.
        extra: the extra of this project that installs the library.
        purpose: what needs the library, for the error.

    Raises:
        LayertapError: the library is not installed; the error gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise LayertapError(f"{purpose} needs {package}: {pip_install(extra)}") from error


@functools.cache
def pip_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra of this project.

    The command names the libraries, not `layertap[extra]`. It works for a wheel, a checkout and an editable
    installation, whether or not a package index has the project.
    """
    import shlex

    requirements = _requirements_in_checkout(extra) or _requirements_in_metadata(extra)
    if not requirements:  # the folders were copied without pyproject.toml and metadata
        return f"see the extra {extra!r} in layertap's pyproject.toml"
    return "pip install " + " ".join(map(shlex.quote, requirements))


def _requirements_in_checkout(extra: str) -> list[str]:
    import tomllib

    if not _PYPROJECT.is_file():
        return []
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    return list(project["optional-dependencies"][extra]) if project.get("name") == _PROJECT else []


def _requirements_in_metadata(extra: str) -> list[str]:
    from importlib import metadata  # 15 ms, which every command would pay

    try:
        declared = metadata.requires(_PROJECT) or []
    except metadata.PackageNotFoundError:
        return []
    marker = f'extra == "{extra}"'
    of_extra = [line for line in declared if marker in line.replace("-", "_")]
    return [line.partition(";")[0].strip() for line in of_extra]
