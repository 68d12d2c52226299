"""Suggest a path that exists for one that does not."""

from __future__ import annotations

import difflib
import itertools
import os
import shlex
from pathlib import Path

__all__ = ["did_you_mean", "folder_or_list", "folders_with"]

_MOST_NAMES = 10_000  # of a folder that are compared


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """Return "did you mean photos?" if a path that does not exist is similar to one that does, else "".

    Names are compared in the folder of the first part of the path that does not exist. Hidden files are not suggested.

    Args:
        path: path of the local disk.
    """
    given = Path(path)
    missing = next((part for part in (*reversed(given.parents), given) if not _exists(part)), None)
    if missing is None or "\0" in str(path):
        return ""
    try:
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES) if not entry.name.startswith(".")]
    except OSError:
        return ""
    folded = {name.casefold(): name for name in reversed(names)}
    near = difflib.get_close_matches(missing.name.casefold(), folded, n=3, cutoff=0.6)
    rest = given.relative_to(missing)
    candidates = (missing.parent / folded[name] / rest for name in near)
    shown = next((candidate for candidate in candidates if _exists(candidate)), None)
    return f"did you mean {shown}?" if shown is not None else ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no permission; a null character
        return False


def folder_or_list(file: Path) -> str:
    """Return the hint for several files in place of a folder, by one of them, or by their pattern."""
    folder, suffix = shlex.quote(str(file.parent)), shlex.quote(file.suffix) if file.suffix else ""
    return f"name their folder: {folder}; or a list: (echo path; ls {folder}/*{suffix}) > list.csv"


def folders_with(folder: Path, name: str) -> str:
    """Return a hint that names up to three subfolders with a file of this name; empty if there are none."""
    try:
        with os.scandir(folder) as entries:
            inner = sorted(
                entry.path for entry in itertools.islice(entries, _MOST_NAMES) if (Path(entry) / name).is_file()
            )
    except OSError:
        return ""
    shown = ", ".join(inner[:3]) + (", ..." if len(inner) > 3 else "")
    return f"name one of its folders: {shown}" if inner else ""
