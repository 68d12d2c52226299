"""Whether files and folders can be written, before hours are spent on what is to go there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extract.errors import InputError

__all__ = ["PICTURES", "check_file", "check_folder"]

PICTURES = (".png", ".svg", ".pdf")


def check_file(path: Path, endings: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written.

    Args:
        path: of the file; one that is there will be replaced.
        endings: one of which it must have.

    Raises:
        InputError: it has another ending, is a folder, or its folder is not there.
    """
    if endings and path.suffix.lower() not in endings:
        raise InputError(f"{path}: expected a file that ends in {', '.join(endings)}")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: " + ("it is a folder" if path.is_dir() else "no such folder"))


def check_folder(path: Path) -> None:
    """Make a folder, if it is not there.

    Raises:
        InputError: it is a file, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: no folder can be made there: {error.strerror}") from error
