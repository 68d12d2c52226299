"""Functions of the operating system that differ between Linux and macOS.

The tests run on Linux. One test runs the main job without the functions that only Linux has. Nothing has been run on
macOS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from typing import Any

__all__ = ["allocate", "count_open_files", "flush_to_disk", "memory_file", "written_ranges"]

_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
_UNKNOWN_OPEN_FILES = 256


def allocate(descriptor: int, size: int) -> None:
    """Give a file its size and its space on the disk; on macOS only its size.

    Raises:
        OSError: the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    elif os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)


def flush_to_disk(descriptor: int) -> None:
    """Flush a file or folder, so that it survives a power failure.

    On macOS, fsync leaves data in the cache of the disk; F_FULLFSYNC writes it (fsync(2)). Some file systems lack it.
    """
    if _FULL_SYNC is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
    os.fsync(descriptor)


def memory_file() -> Any:
    """Return a new file in memory; if the system has no such files (macOS), a temporary file."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("layertap"), "r+b")
    return tempfile.TemporaryFile()


def written_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the written parts of a file; the whole file if the system does not report them."""
    size, start = os.fstat(descriptor).st_size, 0
    while start < size:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
            stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data up to the end
                return
            stop = size
        yield start, stop
        start = stop


def count_open_files() -> int:
    """Return the number of files that this process has open; an estimate if the system does not report it (macOS)."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        return _UNKNOWN_OPEN_FILES
