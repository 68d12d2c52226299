"""File objects for HDF5, and HDF5 files that are written with checked system calls.

HDF5 does not survive a write that fails: it may end the process with a segmentation fault, when the file is closed or
later (HDF5 2.0: after 4 of 8 injected errors). Here it never sees one. The structure of a file is written in memory,
and copied to the file. Values are written through a Python file object, which remembers the first error and writes
nothing after it. HDF5 is told that every write succeeded, and the error is raised when HDF5 has closed the file.

The structure is not written through the file object, because HDF5 then spreads it over the file: it collects metadata
in blocks for its own drivers only, and a reader of a bucket would send many requests to open the file. HDF5's own
driver for files in memory would hold the whole shard there.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

__all__ = ["Seekable", "hdf5_in_memory", "hdf5_on_disk", "memory_file", "written_ranges"]

_COPIED_BYTES = 1 << 20  # at once


class Seekable(io.RawIOBase):
    """File object with a position. Subclasses implement `readinto`.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int):
        self._size, self._position = size, 0

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = starts[whence] + offset
        return self._position


@contextmanager
def hdf5_in_memory(path: Path, **options: Any) -> Iterator[h5py.File]:
    """Context manager: yield a new HDF5 file in memory, and write it to `path` at the end of the block.

    Parts of the file that HDF5 allocates but does not write take no memory, and no space on the disk.

    Args:
        path: the file, which must not exist.
        options: see `h5py.File`.

    Raises:
        OSError: the file exists, or a write failed.
    """
    with memory_file() as memory:
        # The default driver resolves symbolic links, and /dev/fd/N is a link to a file without a name.
        with h5py.File(f"/dev/fd/{memory.fileno()}", "w", driver="stdio", **options) as file:
            yield file
        with path.open("xb") as raw:
            raw.truncate(os.fstat(memory.fileno()).st_size)
            for start, stop in written_ranges(memory.fileno()):
                raw.seek(start)
                for first in range(start, stop, _COPIED_BYTES):
                    raw.write(os.pread(memory.fileno(), min(_COPIED_BYTES, stop - first), first))


@contextmanager
def hdf5_on_disk(path: Path, mode: str, **options: Any) -> Iterator[h5py.File]:
    """Context manager: yield an HDF5 file, open for writing.

    Args:
        path: the file.
        mode: "x" for a new file, which must not exist; "r+" for a file that exists.
        options: see `h5py.File`.

    Raises:
        OSError: the file exists or does not exist, or a write failed; raised at the end of the block.
    """
    raw = _CheckedFile(path, os.O_CREAT | os.O_EXCL if mode == "x" else 0)
    try:
        with h5py.File(raw, "w" if mode == "x" else mode, **options) as file:
            yield file
    except BaseException as error:
        if raw.error is not None and isinstance(error, Exception):  # `error` may be its consequence
            raise raw.error from error
        raise
    finally:
        raw.close()
    if raw.error is not None:
        raise raw.error


class _CheckedFile(Seekable):
    """File object for HDF5; `error` is the first error of a read or write."""

    def __init__(self, path: Path, flags: int):
        self.error: OSError | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
        super().__init__(os.fstat(self._descriptor).st_size)

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of the system returns for the file; None after an error, and no more calls."""
        if self.error is None:
            try:
                return function(self._descriptor, *arguments)
            except OSError as error:
                self.error = error
        return None

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`; after an error, bytes are zero."""
        space = memoryview(buffer).cast("B")
        wanted, start = len(space), self._position
        space[:] = bytes(wanted)
        while space and (count := self._called(os.preadv, [space], start)):
            space, start = space[count:], start + count
        self._position += wanted
        return wanted

    def write(self, buffer: Any) -> int:
        """See `io.RawIOBase`; after an error, nothing is written."""
        content = memoryview(buffer).cast("B")
        wanted, start = len(content), self._position
        while content and self.error is None:
            count = self._called(os.pwrite, content, start) or 0
            content, start = content[count:], start + count
        self._position += wanted
        self._size = max(self._size, self._position)
        return wanted

    def truncate(self, size: int | None = None) -> int:
        """See `io.RawIOBase`."""
        self._size = self._position if size is None else size
        self._called(os.ftruncate, self._size)
        return self._size

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                self.error = self.error or error
        super().close()


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
