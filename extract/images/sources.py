"""Where the bytes of images come from: files here or behind a URL, members of archives, rows of arrays.

A source is sent to the worker processes. It answers for a row with the bytes of its image, and says how these bytes
become a picture.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.errors import InputError, LayertapError, first_line
from extract.images.decoding import decode
from extract.system.urls import file_system, is_url

__all__ = [
    "UNKNOWN",
    "BrokenListError",
    "Chosen",
    "Files",
    "PackedNames",
    "Source",
    "UnreachableError",
    "integers",
    "read_remote",
]

UNKNOWN = -1  # in place of a time of modification

_ATTEMPTS = 3  # at reading something from a network
_WAIT_S = 0.5  # before the second; twice that before the third


class BrokenListError(InputError):
    """Which image a row is cannot be told any more: that ends a run, and makes no failed row."""


class Source(Protocol):
    """The bytes of images, by row."""

    def read(self, row: int) -> tuple[bytes, int]:
        """The bytes of an image, and when they were last changed, in nanoseconds; `UNKNOWN` where nobody says.

        Raises:
            FileNotFoundError: there is no such image any more.
            BrokenListError: nobody knows which image it is.
            OSError, ValueError: it cannot be read; the message says why.
        """

    def decode(self, data: bytes, max_pixels: int, at_least_px: int = 0) -> Image.Image:
        """An upright RGB picture of these bytes; errors as of `extract.images.decode`."""

    def check_there(self) -> None:
        """See that the images as a whole are still there, after some could not be read.

        Raises:
            LayertapError: they are not, as after a disk was unmounted.
        """


class PackedNames(Sequence[str]):
    """Names as one block of bytes, which worker processes share without copying; takes what `os.fsencode` does."""

    def __init__(self, names: Sequence[str]):
        encoded = [os.fsencode(name) for name in names]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: Any) -> Any:
        start = self._ends[row - 1] if row else 0
        return os.fsdecode(self._bytes[start : self._ends[row]].tobytes())


class Files:
    """Files, each by its own name: relative to a folder or a URL, or, if `anywhere`, a whole path or URL.

    Args:
        base: the folder, or the URL of one.
        names: of the files, with `/`; a list is packed, another sequence is asked as it is.
        anywhere: whether names may be URLs.
    """

    def __init__(self, base: str, names: Sequence[str], *, anywhere: bool = False):
        self._base, self._anywhere = base, anywhere
        self._is_remote = is_url(base)
        self._names = PackedNames(names) if isinstance(names, list) else names

    def read(self, row: int) -> tuple[bytes, int]:
        """As of `Source`."""
        name = self._names[row]
        if self._anywhere and is_url(name):
            return read_remote(name), UNKNOWN
        if self._is_remote:
            return read_remote(self._base, inside=name), UNKNOWN
        # A pipe must not be waited for.
        descriptor = os.open(os.path.join(self._base, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # noqa: PTH118
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(), status.st_mtime_ns
        finally:
            os.close(descriptor)

    def decode(self, data: bytes, max_pixels: int, at_least_px: int = 0) -> Image.Image:
        """As of `Source`."""
        return decode(data, max_pixels, at_least_px)

    def check_there(self) -> None:
        """As of `Source`: an empty folder is what stays where a disk was unmounted."""
        if self._is_remote:
            fs, path = file_system(self._base)
            there = _told(self._base, lambda: bool(fs.exists(path)))
        else:
            try:
                there = any(True for _ in os.scandir(self._base))
            except (OSError, ValueError):  # a name with a null character
                there = False
        if not there:
            raise LayertapError(
                f"{self._base} has vanished, or is empty now (an unmounted disk?). What was stored is safe; "
                "run again when it is back"
            )


class Chosen:
    """Some rows of another source."""

    def __init__(self, source: Source, rows: Sequence[int]):
        self._source, self._rows = source, integers(rows)

    def read(self, row: int) -> tuple[bytes, int]:
        """As of `Source`."""
        return self._source.read(int(self._rows[row]))

    def decode(self, data: bytes, max_pixels: int, at_least_px: int = 0) -> Image.Image:
        """As of `Source`."""
        return self._source.decode(data, max_pixels, at_least_px)

    def check_there(self) -> None:
        """As of `Source`."""
        self._source.check_there()


class UnreachableError(OSError):
    """A network or server failed, which says nothing of the file."""


def read_remote(url: str, start: int | None = None, end: int | None = None, inside: str = "") -> bytes:
    """The bytes behind a URL, or a range of them; tried again if the network fails.

    Args:
        url: of the file, or of its folder.
        start: first byte.
        end: byte behind the last.
        inside: name in the folder.

    Raises:
        FileNotFoundError: there is nothing.
        UnreachableError: nobody answers, or with an error of the server's own.
        OSError: it cannot be read.
    """
    # The file system is asked for each time: fsspec keeps one for each process, and knows when it was forked.
    try:
        fs, path = file_system(url)
    except LayertapError as error:
        raise OSError(str(error)) from error
    path = f"{path.rstrip('/')}/{inside}" if inside else path
    for attempt in range(_ATTEMPTS):
        try:
            return bytes(fs.cat_file(path, start=start, end=end))
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            status = getattr(error, "status", 0)  # of HTTP
            if 400 <= status < 500 and status not in (408, 425, 429):
                raise OSError(f"HTTP {status}: {getattr(error, 'message', '') or first_line(error)}") from error
            if attempt == _ATTEMPTS - 1:
                why = f"{type(error).__name__}: {first_line(error)}, {_ATTEMPTS} times"
                raise UnreachableError(f"cannot be fetched: {why}") from error
            time.sleep(_WAIT_S * 2**attempt)
    raise AssertionError


def _told(url: str, ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except Exception as error:
        raise LayertapError(
            f"{url} does not answer: {first_line(error)}. What was stored is safe; run again when it does"
        ) from error


def integers(values: Sequence[int]) -> NDArray[np.int64]:
    """As an array, which worker processes share without copying."""
    return np.array(values, np.int64)
