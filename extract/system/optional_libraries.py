"""Optional libraries, imported where they are used; versions of libraries and of this project."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from extract.errors import LayertapError

__all__ = ["installed_version", "library", "own_version", "pip_install", "requirements"]

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
        raise LayertapError(f"{purpose} needs {package}", hint=f"to install it: {pip_install(extra)}") from error


@functools.cache
def pip_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra of this project.

    The command names the libraries, not `layertap[extra]`. It works for a wheel, a checkout and an editable
    installation, whether or not a package index has the project.
    """
    import shlex

    needed = requirements(extra)
    if not needed:  # the folders were copied without pyproject.toml and metadata
        return f"see the extra {extra!r} in layertap's pyproject.toml"
    return f"{_installer()} " + " ".join(map(shlex.quote, needed))


def requirements(extra: str = "") -> list[str]:
    """Return the requirements of an extra of this project, such as "ray>=2.41"; of the project itself if it is empty.

    The list is empty if the folders were copied without pyproject.toml and metadata.
    """
    if project := _checkout():
        return list(project["optional-dependencies"][extra] if extra else project["dependencies"])
    from importlib import metadata  # 15 ms, which every command would pay

    try:
        declared = metadata.requires(_PROJECT) or []
    except metadata.PackageNotFoundError:
        return []
    marker = f'extra == "{extra}"'
    of_extra = [line for line in declared if (marker in line.replace("-", "_") if extra else "extra ==" not in line)]
    return [line.partition(";")[0].strip() for line in of_extra]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if there is none."""
    from importlib import metadata  # 15 ms, which every command would pay

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def own_version() -> str:
    """Return the version of this project, installed or not; "unknown" without pyproject.toml and metadata.

    That of the checkout comes first, as another version may be installed.
    """
    return _checkout().get("version") or installed_version(_PROJECT) or "unknown"


def _installer() -> str:
    """Return the command that installs into the environment of this process; `pip` if the shell finds its pip."""
    import shlex
    import shutil
    import sys

    found = shutil.which("pip")
    if found and Path(found).absolute().parent == Path(sys.executable).absolute().parent:
        return "pip install"
    if importlib.util.find_spec("pip") is None:  # environments that uv creates have no pip
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    return f"{shlex.quote(sys.executable)} -m pip install"


def _checkout() -> dict[str, Any]:
    """Return the table `project` of this project's pyproject.toml; empty if the packages do not lie in a checkout."""
    import tomllib

    if not _PYPROJECT.is_file():
        return {}
    project: dict[str, Any] = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == _PROJECT else {}
