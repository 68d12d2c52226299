"""Small files written whole or not at all, and read with care: a data set or plan may come from anyone."""

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

from extract.errors import InputError, LayertapError

__all__ = [
    "allow_more_files",
    "append_line",
    "bytes_below",
    "check_own_folders",
    "check_regular",
    "claim",
    "discard",
    "link_target",
    "make_own",
    "open_own",
    "open_unfollowed",
    "own_folder",
    "read_json",
    "sync_folder",
    "take_space",
    "whole_file",
    "write_json",
    "write_whole",
]

_JSON_BYTES = 1 << 26  # far above what a description or a receipt of a million failed rows needs


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError, NotADirectoryError: it is not there.
        InputError: it is no JSON object, or too large to be one of ours.
        LayertapError: it cannot be read.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError(path)
        if path.stat().st_size > _JSON_BYTES:
            raise ValueError(f"it has more than {_JSON_BYTES >> 20} MB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
        return content
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # RecursionError: [[[[...
        raise InputError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file whole or not at all."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all, over one of that name."""
    with whole_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is given its name when it is whole, over one that has it; until then it has another.

    A symbolic link of that name is replaced, and what it leads to stays as it is; see `link_target`.

    Raises:
        InputError: the name is that of a device, a pipe or a folder.
    """
    if os.path.lexists(path) and not (path.is_file() or path.is_symlink()):
        raise InputError(f"{path} is no regular file, and is not written over")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    discard(temporary)  # of a process that had the same number
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        discard(temporary)
    sync_folder(path.parent)


def link_target(path: Path) -> Path:
    """The file that a name leads to, for a file that the user names; in a data set, links are replaced."""
    return path.resolve() if path.is_symlink() else path


def open_own(path: Path, flags: int) -> int:
    """Open a file of a data set to change it in place, and return its descriptor.

    A data set may come from anyone. A symbolic link in it would pass the change on to a file elsewhere. So would a hard
    link; a file with several names, as copies by `cp -al` have, is replaced by a copy of its own first.

    Args:
        path: of the file. Folders in it are not looked at; see `check_own_folders`.
        flags: as in `os.open`.

    Raises:
        InputError: it is a symbolic link, or is not a regular file.
        OSError: as in `os.open`; or the copy cannot be written.
    """
    make_own(path)
    return open_unfollowed(path, flags)


def open_unfollowed(path: Path, flags: int) -> int:
    """Open a regular file and no symbolic link; returns its descriptor, and raises what `open_own` does.

    The file may have other names, so it may be locked and read, but not changed.
    """
    check_regular(path)
    # O_NONBLOCK: a pipe that has taken the place of the file must not be waited for.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        check_regular(path)
        raise InputError(f"{path} is not a regular file; nothing was written")
    return descriptor


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file of a data set; errors as in `open_own`."""
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
        file.write(line + "\n")


def make_own(path: Path) -> None:
    """Replace a file that has several names (hard links) by a copy, so that a change of it changes no other file.

    Nothing happens where there is no file. Errors as in `open_own`.
    """
    check_regular(path)
    if path.exists() and path.lstat().st_nlink > 1:
        with path.open("rb") as shared, whole_file(path) as own:
            shutil.copyfileobj(shared, own, 1 << 20)


def check_regular(path: Path) -> None:
    """See that a file of a data set, if it is there, is a regular file; raises InputError where `open_own` does."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = f"is a link to {path.readlink()}" if stat.S_ISLNK(mode) else "is not a regular file"
        raise InputError(f"{path} {what}; nothing was written. Put a copy of the file in its place, or remove it")


def own_folder(path: Path) -> Path:
    """Make a folder of a data set, if it is not there; returns its name.

    Raises:
        InputError: it is a link to another one.
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    _check_own_folder(path)
    return path


def check_own_folders(out: Path) -> None:
    """See that all folders of a data set lie in it themselves, before anything in it is changed; `out` may be a link.

    Raises:
        InputError: one is a link to a folder elsewhere.
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
            f"{path} is a link to {path.readlink()}, and what is written must stay in the data set; nothing was "
            f"written. Move that folder here, or keep all of {path.parent} there and link that"
        )


def discard(path: Path) -> None:
    """Remove a file that was only needed on the way; where that fails, there is an error already that says why."""
    with contextlib.suppress(OSError):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames and links in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_space(path: Path, size: int) -> None:
    """Take so much disk space under a name, and give it back; an OSError says that it is not there.

    HDF5 ends the process when the disk is full at the moment it closes a file; so it must not come to that.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    discard(path)
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        finally:
            discard(path)


def claim(path: Path, name: Path) -> None:
    """Move a file or folder to a name that must be free; killed in between, a file has both names.

    Raises:
        FileExistsError: it is not.
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
        # A file system without hard links (exFAT, some network ones): the lock of the data set must do.
        if os.path.lexists(name):
            raise FileExistsError(name) from error
        path.rename(name)
    else:
        sync_folder(name.parent)  # so that a power cut does not take both names
        path.unlink()


def bytes_below(folder: Path) -> int:
    """The sizes of all files in a folder, while others may be removing some."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118
    return total


def allow_more_files(count: int) -> None:
    """Raise this process's limit on open files, if so many more would exceed it: each memory map keeps one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:  # not Linux
        used = 256
    needed = used + count + 64
    if soft != resource.RLIM_INFINITY and needed > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == -1 else min(needed, hard), hard))
