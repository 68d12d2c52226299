"""Files in the user's cache folder: `$XDG_CACHE_HOME/layertap`, or `~/.cache/layertap`.

Whatever is stored there can be computed again. The folder may be deleted at any time, and a file that is missing,
damaged or not writable is never an error.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from extract.errors import InputError
from extract.system.atomic_files import open_regular
from extract.system.leftovers import remove_leftovers, temporary_file

__all__ = ["cache_file", "keep_newest", "read_cached", "write_cached"]


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


def read_cached(name: str) -> bytes | None:
    """Return the content of a file; None if there is none, or it cannot be read, or it belongs to another user.

    The content is not checked. The time of the file is set to now, so that `keep_newest` removes files that are not
    used.
    """
    try:
        path = cache_file(name)
        with os.fdopen(open_regular(path), "rb") as file:
            # Another user can write here only if the folder is shared. The content may be parsed by libraries that do
            # not expect an attack.
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            content = file.read()
    except (OSError, InputError):  # InputError: not a regular file
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def write_cached(name: str, content: bytes) -> bool:
    """Store content under a name, atomically; return False if it cannot be written.

    There is no fsync, which takes longer than computing some files again: after a power failure, a file may be damaged.
    """
    try:
        path = cache_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(path) as (file, temporary):
            remove_leftovers(path)
            file.write(content)
            file.flush()
            temporary.rename(path)
    except OSError:
        return False
    return True


def keep_newest(folder: str, most_bytes: int) -> None:
    """Delete the files of a folder that were not used for the longest time, until the others have `most_bytes`."""
    with contextlib.suppress(OSError):
        entries = []
        for path in cache_file(folder).iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = 0
        for _, size, path in sorted(entries, reverse=True):
            total += size
            if total > most_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()
