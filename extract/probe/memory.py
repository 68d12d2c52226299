"""How much memory there is to work in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["free_bytes"]


def free_bytes() -> int:
    """What this process may still take: of the machine, and of the control group that a container or scheduler set."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found = [int(lines["MemAvailable"].split()[0]) * 1024]  # also what the file cache gives back
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].strip("/")
        for folder in (Path("/sys/fs/cgroup") / group, Path("/sys/fs/cgroup")):
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                found.append(max(0, int(text) - int((folder / "memory.current").read_text())))
    return min(found)
