"""Python code of users and of hubs: imported by itself, so that no other code of the same name takes its place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["importing_from"]


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Let code in a folder import its neighbours: those, and not what another folder has under the same names.

    Its modules are forgotten afterwards; what was made of them keeps them alive.
    """
    hidden = {name: module for name, module in list(sys.modules.items()) if _is_in_the_way(name, module, folder)}
    for name in hidden:
        del sys.modules[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] not in before and _lies_in(sys.modules[name], folder):
                del sys.modules[name]
        sys.modules.update(hidden)


def _is_in_the_way(name: str, module: ModuleType, folder: Path) -> bool:
    """Whether a module that is loaded has the name of one in the folder, and is of the user's, not of a library."""
    top = name.partition(".")[0]
    if not ((folder / f"{top}.py").exists() or (folder / top / "__init__.py").exists()):
        return False
    file = getattr(module, "__file__", None)
    return file is not None and not any(
        Path(file).is_relative_to(place) for place in (sys.prefix, sys.base_prefix, folder)
    )


def _lies_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)
