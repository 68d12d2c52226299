"""The file system that a folder is on."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

__all__ = ["file_system_kind"]


def file_system_kind(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of the file system that a folder is on, such as "ext4" or "nfs4"; empty if unknown.

    Args:
        folder: the folder.
        mounts: the kernel's list of mounts (proc(5)).
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return ""
    best, kind = "", ""
    with contextlib.suppress(OSError, RuntimeError):
        folder = folder.resolve()
    for line in lines:
        fields, _, behind = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, behind.split()[0]
    return kind
