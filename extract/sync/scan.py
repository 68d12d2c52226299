"""What image files there are below a folder, without opening any of them."""

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
from extract.images.folders import entries_below

__all__ = ["Scan", "Seen"]

NO_FILE = -1  # as the size of a link that leads nowhere
_GONE = (FileNotFoundError, NotADirectoryError)


class Seen(NamedTuple):
    """A file, and what changes when it is written to.

    Attributes:
        path: relative to the folder, as bytes.
        size: in bytes; `NO_FILE` of a link that leads nowhere.
        mtime_ns: when its content was changed, as it says itself.
        ctime_ns: when anything of it was changed, which no program can set.
    """

    path: bytes
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass
class Scan:
    """The files that end as images do.

    Attributes:
        root: the folder.
        unreadable: what below it cannot be read -> why; what lies there is not known, and not gone.
        nowhere: links that lead nowhere and may have led to a folder.
    """

    root: str
    unreadable: dict[str, str] = field(default_factory=dict)
    nowhere: list[str] = field(default_factory=list)

    def files(self) -> Iterator[Seen]:
        """All of them, in no order.

        Raises:
            LayertapError: the folder itself is not there, or cannot be read.
        """
        for relative, entry in entries_below(self.root, self._on_unreadable):
            image = os.path.splitext(relative)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122  a Path each is slow
            if not image and not _is_link(entry):
                continue
            try:
                found = entry.stat()
            except OSError as error:
                if not isinstance(error, _GONE) and error.errno != errno.ELOOP:
                    self.unreadable[relative] = error.strerror or str(error)
                elif not image:
                    self.nowhere.append(relative)
                elif _is_link(entry):  # to nowhere, or to itself
                    with contextlib.suppress(FileNotFoundError):  # it went just now
                        found = entry.stat(follow_symlinks=False)
                        yield Seen(os.fsencode(relative), NO_FILE, found.st_mtime_ns, found.st_ctime_ns)
                continue
            if not image:
                continue
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            yield Seen(os.fsencode(relative), size, found.st_mtime_ns, found.st_ctime_ns)

    def _on_unreadable(self, folder: str, error: OSError) -> None:
        if not folder:
            raise LayertapError(f"{self.root}: the folder cannot be read: {error.strerror}") from error
        if not isinstance(error, _GONE):  # else it went while we were looking
            self.unreadable[folder] = error.strerror or str(error)


def _is_link(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_symlink()
    except OSError:
        return False
