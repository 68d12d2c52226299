"""Write small files atomically, and treat the files of a data set or plan as untrusted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from extract.errors import InputError
from extract.system.leftovers import remove_leftovers, temporary_file
from extract.system.operating_system import allocate, count_open_files, flush_to_disk

__all__ = [
    "allow_more_files",
    "append_line",
    "atomic_write",
    "bytes_below",
    "check_own_folders",
    "check_regular",
    "claim",
    "discard",
    "link_target",
    "make_own",
    "open_own",
    "open_regular",
    "open_unfollowed",
    "own_folder",
    "reserve_space",
    "sync_folder",
    "write_json",
    "write_whole",
]


def write_json(path: Path, content: Any, *, tidy: bool = True) -> None:
    """Write a small JSON file atomically; `tidy` as in `atomic_write`."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode(), tidy=tidy)


def write_whole(path: Path, content: bytes, *, tidy: bool = True) -> None:
    """Write a small file atomically, replacing an existing one; `tidy` as in `atomic_write`."""
    with atomic_write(path, tidy=tidy) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_write(path: Path, *, tidy: bool = True) -> Iterator[BinaryIO]:
    """Context manager: yield a file under a temporary name, and rename it to `path` when it is complete.

    An existing file is replaced. A symbolic link is replaced too, and its target stays unchanged; see `link_target`.

    Args:
        path: path of the file.
        tidy: whether to remove what killed processes that wrote this file have left; see `extract.system.leftovers`.
            This lists the folder. False: for one of many files of a folder that is tidied when a run starts.

    Raises:
        InputError: the path is a device, a pipe or a folder.
    """
    if os.path.lexists(path) and not (path.is_file() or path.is_symlink()):
        raise InputError(f"{path} is not a regular file", hint="choose another output file")
    with temporary_file(path) as (file, temporary):
        if tidy:
            remove_leftovers(path)
        yield file
        file.flush()
        flush_to_disk(file.fileno())
        temporary.rename(path)
    sync_folder(path.parent)


def link_target(path: Path) -> Path:
    """Return the target of a symbolic link, else the path; for output files named by the user, not in data sets."""
    return path.resolve() if path.is_symlink() else path


def open_own(path: Path, flags: int) -> int:
    """Open a file of a data set for changes in place, and return its descriptor.

    A data set may come from an untrusted source. A symbolic or hard link in it would redirect the change to a file
    elsewhere. A symbolic link is refused. A file with several hard links, as `cp -al` makes, is first replaced by a
    copy.

    Args:
        path: path of the file. Its folders are not checked; see `check_own_folders`.
        flags: as in `os.open`.

    Raises:
        InputError: the path is a symbolic link, or not a regular file.
        OSError: as in `os.open`; or the copy cannot be written.
    """
    make_own(path)
    return open_unfollowed(path, flags)


def open_unfollowed(path: Path, flags: int) -> int:
    """Open a regular file, but not a symbolic link, and return its descriptor; errors as in `open_own`.

    The file may have other hard links: lock or read it, but do not change it.
    """
    check_regular(path)
    # O_NONBLOCK: do not wait for a pipe that has replaced the file.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        check_regular(path)
        raise InputError(f"{path} is not a regular file; nothing was written")
    return descriptor


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file of a data set; errors as in `open_own`."""
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
        file.write(line + "\n")


def make_own(path: Path) -> None:
    """Replace a file that has several hard links by a copy, so that changing it changes no other file.

    A missing file is ignored. Errors as in `open_own`.
    """
    check_regular(path)
    if path.exists() and path.lstat().st_nlink > 1:
        with path.open("rb") as original, atomic_write(path) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)


def check_regular(path: Path) -> None:
    """Check that a file of a data set is regular or missing; raise InputError for links and other kinds."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        problem = f"is a link to {path.readlink()}" if stat.S_ISLNK(mode) else "is not a regular file"
        raise InputError(
            f"{path} {problem}; nothing was written", hint="replace it with a copy of the file, or remove it"
        )


def own_folder(path: Path) -> Path:
    """Create a folder of a data set if it does not exist, and return its path.

    Raises:
        InputError: the folder is a symbolic link.
        OSError: the folder cannot be created.
    """
    path.mkdir(parents=True, exist_ok=True)
    _check_own_folder(path)
    return path


def check_own_folders(out: Path) -> None:
    """Check, before a change, that no folder in a data set or its passes is a symbolic link; `out` may be a link.

    Raises:
        InputError: a folder is a symbolic link.
        OSError: a folder cannot be read.
    """
    for folder in (out, out / "passes", *(out / "passes").glob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink() and entry.is_dir():
                    _check_own_folder(Path(entry.path))


def _check_own_folder(path: Path) -> None:
    if path.is_symlink():
        raise InputError(
            f"{path} is a link to {path.readlink()}; nothing was written, because a data set must hold its own files",
            hint=f"move the target here, or move all of {path.parent} there and link to it",
        )


def discard(path: Path) -> None:
    """Delete a temporary file, ignoring errors."""
    with contextlib.suppress(OSError):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that renames and links in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, for reading, and return its descriptor; a pipe is not waited for.

    Raises:
        InputError: the path is something else, or has a null character.
        OSError: as in `os.open`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise InputError(f"{path}: the name contains a null character") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file")
    return descriptor


def reserve_space(path: Path, size: int) -> None:
    """Check for free disk space: allocate a file of `size` bytes at `path`, and delete it.

    A full disk is found before the work, not at its end.

    Raises:
        OSError: the space cannot be allocated.
    """
    discard(path)
    with path.open("xb") as file:
        try:
            allocate(file.fileno(), size)
        finally:
            discard(path)


def claim(path: Path, name: Path) -> None:
    """Move a file or folder to a name that must not exist; if the process is killed meanwhile, a file has both names.

    Raises:
        FileExistsError: the name exists.
    """
    if path.is_dir():
        if os.path.lexists(name):
            raise FileExistsError(name)
        path.rename(name)
        return
    try:
        os.link(path, name)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without hard links (exFAT, some network ones): only the data set's lock prevents a race.
        if os.path.lexists(name):
            raise FileExistsError(name) from error
        path.rename(name)
    else:
        sync_folder(name.parent)  # so that a power failure cannot remove both names
        path.unlink()


def bytes_below(folder: Path) -> int:
    """Return the total size of the files in a folder tree; files deleted meanwhile do not count."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118
    return total


def allow_more_files(count: int) -> None:
    """Raise this process's limit on open files if `count` more would exceed it; each memory map keeps one open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count_open_files() + count + 64
    if soft != resource.RLIM_INFINITY and needed > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == -1 else min(needed, hard), hard))
