"""The user's cache folder: `$XDG_CACHE_HOME/layertap`, or `~/.cache/layertap`.

Whatever is stored there can be computed again. The folder may be deleted at any time, and a file that is missing,
damaged or not writable is never an error.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_file"]


def cache_file(name: str) -> Path:
    """Return the path of a file in the cache folder; nothing is created.

    Args:
        name: name of the file, or `FOLDER/NAME`.

    Raises:
        OSError: this user has no home folder.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG Base Directory Specification ignores relative paths.
    root = given if given.is_absolute() else Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111
    if not root.is_absolute():
        raise FileNotFoundError("this user has no home folder")
    return root / "layertap" / name
