"""Import torchvision and timm without `torch._dynamo`, the compiler of PyTorch.

Its import takes a second, as long as that of all the rest of PyTorch, and most commands compile nothing. torchvision
and timm import it for two names: the decorator `torch.compiler.disable`, and a function that says whether a device can
be compiled for. While one of them is imported, a module with these two names replaces `torch._dynamo`. Both names
import the real module when they are called.

Only the command line does this: its process has no other thread, which could see the replacement. `import extract`
changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["install"]

_IMPORTERS = {"torchvision", "torchvision.tv_tensors", "timm"}
_DYNAMO, _UTILS = "torch._dynamo", "torch._dynamo.utils"


def install() -> None:
    """Import the modules of `_IMPORTERS` without `torch._dynamo` from now on; without effect if called again."""
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Entry of `sys.meta_path`: finds the modules of `_IMPORTERS` as Python does, and changes how they are executed."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _IMPORTERS or _DYNAMO in sys.modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # of this module alone, so it may be changed
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                try:
                    with _replaced_dynamo():
                        execute(module)
                except (ImportError, AttributeError):  # another version needs more of it
                    execute(module)

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def _replaced_dynamo() -> Iterator[None]:
    from torch._compile import _disable_dynamo  # PyTorch's own decorator that imports `torch._dynamo` when it is called

    if _DYNAMO in sys.modules:
        yield
        return

    def disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        return _disable_dynamo(function, recursive)

    def is_compile_supported(device_type: str) -> Any:
        return importlib.import_module(_UTILS).is_compile_supported(device_type)

    modules = {_DYNAMO: ModuleType(_DYNAMO), _UTILS: ModuleType(_UTILS)}
    vars(modules[_DYNAMO])["disable"] = disable
    vars(modules[_UTILS])["is_compile_supported"] = is_compile_supported
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
