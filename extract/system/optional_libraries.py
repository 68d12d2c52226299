"""Optional libraries, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from extract.errors import LayertapError

__all__ = ["library"]


def library(module: str, extra: str, what: str) -> Any:
    """A module of an optional library.

    Args:
        module: as it is imported.
        extra: of this project, that installs it.
        what: needs it, for the error.

    Raises:
        LayertapError: it is not installed; the extra is named.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise LayertapError(f"{what} needs {package}: pip install 'layertap[{extra}]'") from error
