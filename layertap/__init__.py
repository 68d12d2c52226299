"""layertap: compute features of images with any backbone, and store them on disk.

The public names of the library:

    from layertap import FeatureReader, Taps, edits, extract_features, load_backbone
    from layertap.probe import linear_probe

The library is the package `extract`, the commands are the package `pipelines`. This package re-exports the
objects of `extract`, and `compare` of `pipelines`, under the name of the project, and raises an error if another module
hides one of the two packages. Users have packages of these names, too, and the working directory comes first.

Installing the folders as `layertap` and `layertap.pipelines` failed: mypy does not find them in an editable
installation, and in a checkout `extract` and `layertap` become two copies of every class.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extract import *  # noqa: F403
    from pipelines.compare.function import compare


def _check_not_hidden(package: str) -> None:
    """Check that `import package` finds the package of this installation.

    Raises:
        ImportError: another module of that name comes first on `sys.path`; often a script in the working directory.
    """
    own = Path(__file__).resolve().parents[1] / package / "__init__.py"
    spec = importlib.util.find_spec(package)
    origin = spec.origin if spec is not None and spec.origin is not None else "no such package"
    if Path(origin).resolve() != own:
        raise ImportError(
            f"layertap needs its package {package!r} in {own.parent}, but Python finds {origin}. Rename that module, "
            "or run where its folder is not on sys.path (the folder of the script, or an entry of PYTHONPATH)",
            name=package,
            path=origin,
        )


_check_not_hidden("extract")
_library = importlib.import_module("extract")

__all__ = [*_library.__all__, "compare"]


def __getattr__(name: str) -> Any:
    if name in _library.__all__:
        return getattr(_library, name)
    if name == "compare":
        _check_not_hidden("pipelines")
        return importlib.import_module("pipelines.compare.function").compare
    raise AttributeError(f"module 'layertap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def main() -> None:
    """Run the command line."""
    try:
        _check_not_hidden("pipelines")
    except ImportError as error:
        sys.exit(f"error: {error}")
    # Imports of PyTorch and timm leave 400,000 objects. To look through all of them for garbage, six times on the way,
    # takes a fifth of the time of the imports. Young garbage is collected as usual.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)
    try:
        importlib.import_module("pipelines.cli").main()
    finally:
        # Else Python looks through all objects for garbage when it exits, and frees them one by one: with the threshold
        # above, 1 s of CPU time of a command of 3 s. Exit handlers and the exit code stay, unlike with `os._exit`.
        gc.freeze()
