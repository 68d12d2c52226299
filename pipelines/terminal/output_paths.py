"""Check that output files and folders can be written before a long job starts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from extract.errors import InputError
from extract.system.atomic_files import link_target

__all__ = ["PICTURES", "check_file", "check_folder"]

PICTURES = (".png", ".svg", ".pdf")


def check_file(path: Path, endings: Sequence[str] = ()) -> None:
    """Check that a file can be written.

    Args:
        path: path of the file; an existing file will be replaced.
        endings: permitted extensions; empty: any.

    Raises:
        InputError: the extension is not permitted, the path is a folder, or its parent folder takes no files.
    """
    if endings and path.suffix.lower() not in endings:
        raise InputError(f"{path}: expected a file that ends in {', '.join(endings)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: " + ("it is a folder" if path.is_dir() else "no such folder"))
    check_folder(link_target(path).parent)


def check_folder(path: Path) -> None:
    """Create a folder if it does not exist, and check that files can be created in it.

    Raises:
        InputError: they cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # permissions do not tell
            pass
    except OSError as error:
        raise InputError(
            f"results cannot be written to {path}: {error.strerror}", hint="name a place in another folder"
        ) from error
