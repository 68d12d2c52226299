"""List the image files below a folder without opening them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from extract.errors import LayertapError
from extract.images.decoding import IMAGE_SUFFIXES
from extract.images.listing import entries_below

__all__ = ["NO_FILE", "Scan", "ScannedFile", "has_changed"]

NO_FILE = -1  # size of a dangling link
_GONE = (FileNotFoundError, NotADirectoryError)


class ScannedFile(NamedTuple):
    """A file, and its properties that change when it is written to.

    Attributes:
        path: relative to the folder, as bytes.
        size: in bytes; 0 if it is not a regular file; `NO_FILE` for a dangling link.
        mtime_ns: time of the last change of content; programs can set it.
        ctime_ns: time of the last change of content or metadata; programs cannot set it.
    """

    path: bytes
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass
class Scan:
    """Files below a folder that have the suffix of an image, or one of others.

    Attributes:
        root: the folder.
        suffixes: those of the files.
        unreadable: path below the folder that cannot be read -> reason; files at or below this path are not known to be
            gone.
        dangling: dangling links without such a suffix; their targets may have been folders.
    """

    root: str
    suffixes: frozenset[str] = IMAGE_SUFFIXES
    unreadable: dict[str, str] = field(default_factory=dict)
    dangling: list[str] = field(default_factory=list)

    def files(self) -> Iterator[ScannedFile]:
        """Yield the files, in no guaranteed order.

        Raises:
            LayertapError: the folder itself does not exist or cannot be read.
        """
        for relative, entry in entries_below(self.root, self._on_unreadable):
            image = os.path.splitext(relative)[1].lower() in self.suffixes  # noqa: PTH122  a Path each is slow
            if not image and not _is_link(entry):
                continue
            try:
                file_stat = entry.stat()
            except OSError as error:
                if not isinstance(error, _GONE) and error.errno != errno.ELOOP:
                    self.unreadable[relative] = error.strerror or str(error)
                elif not image:
                    self.dangling.append(relative)
                elif _is_link(entry):  # a dangling link, or a link to itself
                    with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                        file_stat = entry.stat(follow_symlinks=False)
                        yield ScannedFile(os.fsencode(relative), NO_FILE, file_stat.st_mtime_ns, file_stat.st_ctime_ns)
                continue
            if not image:
                continue
            yield _scanned(os.fsencode(relative), file_stat)

    def _on_unreadable(self, folder: str, error: OSError) -> None:
        if not folder:
            hint = "is the disk mounted?" if isinstance(error, _GONE) else ""
            raise LayertapError(f"cannot read folder {self.root}: {error.strerror}", hint=hint) from error
        if not isinstance(error, _GONE):  # else it was deleted during the scan
            self.unreadable[folder] = error.strerror or str(error)


def has_changed(root: str, file: ScannedFile) -> bool:
    """Return whether a file differs from what a scan saw of it."""
    try:
        return _scanned(file.path, os.stat(os.path.join(root, os.fsdecode(file.path)))) != file  # noqa: PTH116, PTH118
    except OSError:  # a dangling link has not changed
        return file.size != NO_FILE


def _scanned(path: bytes, file_stat: os.stat_result) -> ScannedFile:
    size = file_stat.st_size if stat.S_ISREG(file_stat.st_mode) else 0
    return ScannedFile(path, size, file_stat.st_mtime_ns, file_stat.st_ctime_ns)


def _is_link(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_symlink()
    except OSError:
        return False
