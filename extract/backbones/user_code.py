"""Import Python code of users and hubs, separate from all other code. `loading.permitted` decides when it may run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from extract.errors import InputError, first_line, unknown_name

__all__ = ["code_sha256", "function_from", "importing_from"]


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[set[Path]]:
    """Context manager: let code in a folder import its neighbours, not modules of the same names from other folders.

    On exit, the folder's modules are removed from `sys.modules`, and their files are added to the yielded set. Objects
    that use these modules keep them alive.
    """
    files: set[Path] = set()
    hidden = {name: module for name, module in list(sys.modules.items()) if _hides_module(name, module, folder)}
    for name in hidden:
        del sys.modules[name]
    loaded_before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield files
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - loaded_before:
            if name.partition(".")[0] not in loaded_before and _is_in_folder(sys.modules[name], folder):
                files.add(Path(str(sys.modules.pop(name).__file__)).resolve())
        sys.modules.update(hidden)


def function_from(path: Path, name: str, kind: str = "function") -> Callable[..., Any]:
    """Run a Python file and return one of its functions; any callable is accepted.

    Args:
        path: the file.
        name: name of the function.
        kind: kind of function, named in errors.

    Raises:
        InputError: the file cannot be read or imported.
        UnknownNameError: the file has no such function.
    """
    try:
        path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    module_name = f"layertap_python_file_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # so that its classes can be pickled for worker processes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    functions = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    if name not in functions:
        raise unknown_name(kind, name, functions, str(path))
    function: Callable[..., Any] = functions[name]
    return function


def code_sha256(folder: Path, files: Iterable[Path]) -> str:
    """Return the sha256 over files of a folder, sorted by path: relative path, a zero byte, content, a zero byte."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _hides_module(name: str, module: ModuleType, folder: Path) -> bool:
    """Return whether a loaded module hides a module of the folder, and is part of neither the folder nor a library."""
    top = name.partition(".")[0]
    if not ((folder / f"{top}.py").exists() or (folder / top / "__init__.py").exists()):
        return False
    file = getattr(module, "__file__", None)
    return file is not None and not any(
        Path(file).is_relative_to(parent) for parent in (sys.prefix, sys.base_prefix, folder)
    )


def _is_in_folder(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)
