"""Memory available to this process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["free_bytes"]

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # control groups version 1 report "unlimited" as a number near 2^63


def free_bytes() -> int:
    """Return the bytes that this process may still allocate.

    The result is the minimum over the machine and the control groups set by a container or scheduler. Reclaimable file
    cache counts as free.
    """
    candidates = [_machine_bytes()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds == "":
                candidates += _group_bytes(_GROUPS, name, "memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                candidates += _group_bytes(
                    _GROUPS / "memory", name, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )
    return max(0, min(candidates))


def _machine_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # not Linux


def _group_bytes(root: Path, name: str, limit: str, usage: str, cache: str) -> list[int]:
    """Return the free bytes of each limited group among this control group and its ancestors."""
    free = []
    # In a container, the group's own folder may be the root.
    folders = [root / part for part in (Path(name.strip("/")), *Path(name.strip("/")).parents)]
    for folder in dict.fromkeys([*folders, root]):
        with contextlib.suppress(OSError, ValueError):
            limit_bytes = int((folder / limit).read_text())  # ValueError for "max": the group has no limit
            if limit_bytes < _UNLIMITED:
                lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
                reclaimable = int(dict(line for line in lines if len(line) == 2).get(cache, 0))
                free.append(limit_bytes - int((folder / usage).read_text()) + reclaimable)
    return free
