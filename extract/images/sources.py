"""Sources of image bytes: local files and files behind a URL.

A source is sent to the worker processes. It reads the bytes of a row's image and decodes these bytes to a picture. It
knows nothing of workers or order, so the same pictures give the same rows, hashes and features from all sources.
`extract.images.archives` and `extract.images.arrays` have the sources for members of archives and rows of arrays.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash
from PIL import Image

from extract import defaults
from extract.errors import InputError, LayertapError, first_line
from extract.images.decoding import AS_DEFAULT, DecodeOptions, decode
from extract.system.urls import file_system, http_status, is_http, is_url, reference, server_answer

if TYPE_CHECKING:
    from extract.images.part_names import Part

__all__ = [
    "UNKNOWN", "BrokenListError", "Chosen", "Files", "ImageSource", "OnDisk", "PackedNames", "TooLargeError",
    "UnreachableError", "Whole", "check_file_size", "read_remote", "suffix_of",
]  # fmt: skip

UNKNOWN = -1  # in place of a modification time

_BLOCK_BYTES = 1 << 22
_ATTEMPTS = 3  # for each remote read
_WAIT_S = 0.5  # before the second attempt; doubled before the third


class BrokenListError(InputError):
    """The image of a row can no longer be determined; this ends the run and marks no row as failed."""


class Whole(NamedTuple):
    """A picture, and the box of it that a row is.

    Attributes:
        picture: the whole picture.
        box: (left, upper, right, lower) in pixels of it; None: all of it.
        note: what the user should know of the box.
    """

    picture: Image.Image
    box: tuple[int, int, int, int] | None = None
    note: str = ""


class ImageSource(Protocol):
    """The bytes of images, by row. What a class does not define itself is that of encoded local images."""

    def read(self, row: int) -> tuple[bytes, int]:
        """Return the bytes of an image and its modification time in nanoseconds, or `UNKNOWN`.

        Raises:
            FileNotFoundError: the image no longer exists.
            BrokenListError: the image of this row cannot be determined.
            OSError, ValueError: the image cannot be read; the message states the reason.
        """

    def picture(self, row: int, data: bytes, options: DecodeOptions = AS_DEFAULT) -> Image.Image:
        """Return the RGB picture of a row from the bytes that `read` returned; see `extract.images.decoding.decode`."""
        return decode(data, options)

    def whole(self, row: int, data: bytes, options: DecodeOptions) -> Whole:
        """Return the whole picture that a row is of."""
        return Whole(self.picture(row, data, options))

    def content_hash(self, row: int, data: bytes) -> bytes:
        """Return the xxh3-128 of what a row is computed from: of the bytes of its file, and which part of it."""
        return data.digest() if isinstance(data, OnDisk) else xxhash.xxh3_128_digest(data)

    def local_path(self, row: int) -> str | None:
        """Return the path of a row's file; None if it is not a file of the local disk."""
        return None

    def part(self, row: int) -> Part | None:
        """Return what part of its file a row is; None for a whole file."""
        return None

    def file(self, row: int) -> str | None:
        """Return the file that a row is a part of, decoded once for consecutive rows; None for a whole file."""
        return None

    def check_there(self) -> None:
        """Check that the images as a whole still exist, after some could not be read.

        Raises:
            LayertapError: they do not exist, for example because a disk was unmounted.
        """
        return


class PackedNames(Sequence[str]):
    """Names in one block of bytes, which worker processes share without copying; encoded by `os.fsencode`."""

    def __init__(self, names: Sequence[str]):
        encoded = [os.fsencode(name) for name in names]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: Any) -> Any:
        start = self._ends[row - 1] if row else 0
        return os.fsdecode(self._bytes[start : self._ends[row]].tobytes())


class Files(ImageSource):
    """Files named relative to a folder or URL; if `anywhere`, names may also be absolute paths or URLs.

    Args:
        base: the folder or its URL.
        names: file names, with `/`; a list is packed, any other sequence is used directly. URLs among them have their
            credentials; `Images.paths` has the same names without.
        anywhere: whether names may be URLs.
    """

    def __init__(self, base: str, names: Sequence[str], *, anywhere: bool = False):
        self._base, self._anywhere = base, anywhere
        self._base_is_remote = is_url(base)
        self._names = PackedNames(names) if isinstance(names, list) else names

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        name = self._names[row]
        if self._anywhere and is_url(name):
            return read_remote(name, is_image=True), UNKNOWN
        if self._base_is_remote:
            return read_remote(self._base, inside=reference(self._base, name), is_image=True), UNKNOWN
        # O_NONBLOCK: opening a pipe must not block.
        descriptor = os.open(os.path.join(self._base, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # noqa: PTH118
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a file")
            check_file_size(status.st_size)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(), status.st_mtime_ns
        finally:
            os.close(descriptor)

    def local_path(self, row: int) -> str | None:
        """See `ImageSource`."""
        name = self._names[row]
        is_remote = self._base_is_remote or (self._anywhere and is_url(name))
        return None if is_remote else os.path.join(self._base, name)  # noqa: PTH118

    def check_there(self) -> None:
        """See `ImageSource`."""
        why = "an unmounted disk?"
        try:
            if self._base_is_remote:
                fs, path = file_system(self._base)
                # A web server has answered that an image is missing, and has no page for its folder.
                there = is_http(self._base) or bool(fs.exists(path))
            else:
                with os.scandir(self._base) as entries:
                    there = any(True for _ in entries)  # an unmounted disk leaves an empty folder
        except Exception as error:  # of each protocol's library; ValueError: a name with a null character
            there, why = False, first_line(error) if self._base_is_remote else why
        if not there:
            raise LayertapError(
                f"{self._base} has vanished or is empty ({why}). Stored rows are safe", hint="run again when it is back"
            )


class Chosen(ImageSource):
    """Selected rows of another source."""

    def __init__(self, source: ImageSource, rows: Sequence[int]):
        self._source = source
        self._rows = np.array(rows, np.int64)  # which worker processes share without copying

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        return self._source.read(int(self._rows[row]))

    def picture(self, row: int, data: bytes, options: DecodeOptions = AS_DEFAULT) -> Image.Image:
        """See `ImageSource`."""
        return self._source.picture(int(self._rows[row]), data, options)

    def whole(self, row: int, data: bytes, options: DecodeOptions) -> Whole:
        """See `ImageSource`."""
        return self._source.whole(int(self._rows[row]), data, options)

    def content_hash(self, row: int, data: bytes) -> bytes:
        """See `ImageSource`."""
        return self._source.content_hash(int(self._rows[row]), data)

    def local_path(self, row: int) -> str | None:
        """See `ImageSource`."""
        return self._source.local_path(int(self._rows[row]))

    def part(self, row: int) -> Part | None:
        """See `ImageSource`."""
        return self._source.part(int(self._rows[row]))

    def file(self, row: int) -> str | None:
        """See `ImageSource`."""
        return self._source.file(int(self._rows[row]))

    def check_there(self) -> None:
        """See `ImageSource`."""
        self._source.check_there()


class OnDisk(bytes):
    """In place of the bytes of a file that is not held in memory: a slide, a large TIFF, a video. Its bytes are empty.

    Attributes:
        path: the file.
        size: its bytes.
        mtime_ns: its modification time in nanoseconds.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a regular file.
    """

    path: str
    size: int
    mtime_ns: int

    def __new__(cls, path: str) -> OnDisk:
        """Look at a file, which is not read."""
        status = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file")
        self = super().__new__(cls)
        self.path, self.size, self.mtime_ns = path, status.st_size, status.st_mtime_ns
        return self

    def __len__(self) -> int:
        return self.size

    def check_unchanged(self) -> None:
        """Raise ValueError if the file is no longer what was looked at: its hash would be that of other pixels."""
        status = os.stat(self.path)  # noqa: PTH116
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ValueError("the file changed while it was read; run again with --retry-failed")

    def digest(self) -> bytes:
        """Return the xxh3-128 of the file, which is read in blocks."""
        digest = xxhash.xxh3_128()
        with open(self.path, "rb") as file:  # noqa: PTH123
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.digest()


class UnreachableError(OSError):
    """A network or server failed; the file itself may be readable."""


class TooLargeError(ValueError):
    """An image file has more bytes than are read: each worker holds whole files in memory."""


def check_file_size(n_bytes: int) -> None:
    """Raise TooLargeError if an image file has more than `defaults.MAX_FILE_BYTES`."""
    if n_bytes > defaults.MAX_FILE_BYTES:
        raise TooLargeError(f"{n_bytes:,} bytes; the limit for an image file is {defaults.MAX_FILE_BYTES:,}")


def read_remote(
    url: str, start: int | None = None, end: int | None = None, inside: str = "", *, is_image: bool = False
) -> bytes:
    """Return the bytes behind a URL, or a range of them; retry if the network or the server fails.

    Args:
        url: URL of the file, or of its folder.
        start: first byte.
        end: byte after the last.
        inside: the file in the folder, as `extract.system.urls.reference` returns it.
        is_image: the size is limited; not with a range.

    Raises:
        TooLargeError: an image file has more than `defaults.MAX_FILE_BYTES`.
        FileNotFoundError: the file does not exist.
        UnreachableError: every attempt failed: no answer, a server error, or HTTP 408, 425 or 429.
        OSError: the file cannot be read: any other HTTP 4xx, no permission, or no library for the protocol.
    """
    # Not kept between calls: fsspec caches one file system for each process, and detects forks.
    try:
        fs, path = file_system(url)
    except LayertapError as error:
        raise OSError(str(error)) from error
    path = f"{path.rstrip('/')}/{inside}" if inside else path
    for attempt in range(_ATTEMPTS):
        try:
            return _image_file(fs, path) if is_image else bytes(fs.cat_file(path, start=start, end=end))
        except (FileNotFoundError, PermissionError, TooLargeError):
            raise
        except Exception as error:
            if 400 <= http_status(error) < 500 and http_status(error) not in (408, 425, 429):
                raise OSError(server_answer(error)) from error
            if attempt == _ATTEMPTS - 1:
                raise UnreachableError(f"{server_answer(error)}, {_ATTEMPTS} times") from error
            time.sleep(_WAIT_S * 2**attempt)
    raise AssertionError


def suffix_of(where: str, expected: Collection[str]) -> str:
    """Return the suffix of a path or URL in lower case; of a URL, it may precede the query."""
    suffix = os.path.splitext(where)[1].lower()  # noqa: PTH122
    if is_url(where) and suffix not in expected:
        return os.path.splitext(where.partition("?")[0])[1].lower()  # noqa: PTH122
    return suffix


def _image_file(fs: Any, path: str) -> bytes:
    """Return the content of a remote file; of a file that is too large, no more than the limit is received."""
    if "http" in fs.protocol:
        return _streamed(fs, path)
    size = fs.info(path).get("size") or 0  # the library for S3 would ask for it, too, before it reads a whole file
    check_file_size(size)
    # The size may be that of an earlier listing, so the limit is sent. A server has no range of an empty file.
    data = bytes(fs.cat_file(path, start=0, end=defaults.MAX_FILE_BYTES + 1) if size else fs.cat_file(path))
    check_file_size(len(data))
    return data


def _streamed(fs: Any, path: str) -> bytes:
    """Return the content of a file behind HTTP, with one request; not every server tells the size beforehand."""
    parts, received = [], 0
    with fs.open(path, block_size=0, size=1) as stream:  # fsspec would send a request for a size that is not given
        size = stream.r.headers.get("content-length", "")
        check_file_size(int(size) if size.isdigit() else 0)
        while part := stream.read(defaults.MAX_FILE_BYTES + 1 - received):
            parts.append(part)
            received += len(part)
            check_file_size(received)
    return b"".join(parts)
