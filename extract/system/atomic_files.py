"""Write files atomically, lock folders, remove what killed processes left, and distrust the files of a data set.

A file is written as `NAME.RANDOM.new`, a folder as `.NAME.RANDOM.new`, both beside NAME. A process that is killed
leaves them. A process that writes to NAME ten minutes later removes them. To tell a leftover from the temporary file of
a living process:

- The process that writes holds a lock (flock) on the file, or on the file `lock` in the folder. The kernel releases it
  when the process ends, however it ends. A process id would not do: ids are used again, and two containers, or two
  machines that share a file system, can use the same id at the same time.
- Where the file system has no locks, nothing is removed.
- What was changed in the last ten minutes stays: its process may be about to lock it. On NFS, where a flock does not
  exclude its own process, this also protects what other threads of this process write, for as long.
- RANDOM is unique, so a name is never used twice, and nobody can place a link there beforehand.

Only regular files and folders of this user that have exactly such a name are removed. Some network file systems give
locks that only their own machine sees: of two machines that write the same file there at once, one fails when it
renames the file; no data is mixed.

Some functions of the operating system differ between Linux and macOS. One test runs the main job without those that
only Linux has. Nothing has been run on macOS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from extract.errors import InputError, LayertapError, LockedError

__all__ = [
    "TOKEN",
    "allocate",
    "append_line",
    "atomic_write",
    "bytes_below",
    "check_own_folders",
    "check_regular",
    "claim",
    "discard",
    "flush_to_disk",
    "holder",
    "is_temporary",
    "kept",
    "link_target",
    "locked",
    "make_own",
    "open_own",
    "open_regular",
    "open_unfollowed",
    "own_folder",
    "remove_leftovers",
    "reserve_space",
    "sync_folder",
    "temporary_file",
    "temporary_folder",
    "write_json",
    "write_whole",
]

TOKEN = r"[0-9a-f]{12}-[0-9a-f]{8}"  # RANDOM, as a regular expression
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
_MAY_BE_UNLOCKED_S = 600

_HELD: set[tuple[int, Path]] = set()  # (pid, folder) of held locks; a forked process inherits the set, not the locks
_HELD_GUARD = threading.Lock()


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Context manager: create a file with a temporary name beside `path`; yield it, open for writing, and its name.

    If the file still has the temporary name at the end, it is deleted. Rename it inside: afterwards the lock is gone.

    Raises:
        OSError: the file cannot be created.
    """
    temporary = path.with_name(f"{_base(path.name)}.{_token()}.new")
    with temporary.open("xb") as file:
        _lock_temporary(file.fileno())
        try:
            yield file, temporary
        finally:
            discard(temporary)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Context manager: create a folder under a temporary name beside `path`, yield it, and delete it at the end.

    Leftovers of killed processes that wrote to `path` are removed first. The folder contains a file `lock`, and can be
    used by this user only.

    Raises:
        OSError: the folder cannot be created.
    """
    remove_leftovers(path)
    folder = path.with_name(f".{_base(path.name)}.{_token()}.new")
    folder.mkdir(mode=0o700)
    try:
        with (folder / "lock").open("a+b") as lock:
            _lock_temporary(lock.fileno())
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock_temporary(descriptor: int) -> None:
    """Lock a file that this process has just created, unless the file system has no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_temporary(path: Path) -> bool:
    """Return whether a path has a temporary name of this or an earlier version (`NAME.PID.new`) of layertap."""
    return re.search(rf".\.(\d+|{TOKEN})\.new\Z", path.name, re.ASCII) is not None


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes that wrote to `path` have left beside it; errors are ignored."""
    name = re.compile(rf"\.?{re.escape(_base(path.name))}\.{TOKEN}\.new")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.endswith(".new") and name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_left(Path(entry.path))


def _remove_if_left(path: Path) -> None:
    """Remove a temporary file or folder if no living process writes it.

    Raises:
        OSError: it cannot be locked or removed; for example, a living process holds its lock.
    """
    status = path.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if not (is_folder or stat.S_ISREG(status.st_mode)) or status.st_uid != os.geteuid():
        return
    if time.time() - status.st_mtime < _MAY_BE_UNLOCKED_S:
        return
    # In a folder without `lock`, its process was killed before it created the lock, or another one while it removed the
    # folder. NFS locks only files that are open for writing.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if is_folder else 0)
    descriptor = os.open(path / "lock" if is_folder else path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _base(name: str) -> str:
    """Return a file name, shortened so that a temporary name with it has at most 255 bytes, as file systems permit."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= 200 else encoded[:200].decode("utf-8", "ignore")


def _token() -> str:
    return f"{secrets.token_hex(6)}-{secrets.token_hex(4)}"


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
        tidy: whether to remove what killed processes that wrote this file have left.
            This lists the folder. False: for one of many files of a folder that is tidied when a run starts.

    Raises:
        InputError: the path is a device, a pipe or a folder.
    """
    if os.path.lexists(path) and not (path.is_file() or path.is_symlink()):
        raise InputError(f"{path} is not a regular file", hint="choose another output file")
    if tidy:
        remove_leftovers(path)
    with temporary_file(path) as (file, temporary):
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


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Context manager: lock a folder for writing. A missing folder is created, and removed at the end if still empty.

    This is a POSIX lock: it ends with this process, even after a crash, and worker processes do not inherit it.

    Raises:
        LockedError: another process or another thread of this one holds the lock; the message names the process and
            since when it holds the lock.
        InputError: the lock file or a folder in `out` is a symbolic link, or the lock is not a regular file.
        LayertapError: the folder cannot be written to or locked.
    """
    try:
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        check_own_folders(out)
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    with _by_one_thread(out), _lock_file(out, is_new):
        yield


@contextlib.contextmanager
def kept(out: Path) -> Iterator[None]:
    """Context manager: keep other processes from locking a folder, without writing to it.

    A folder without a lock file, or without the folder itself, has no writer: nothing is locked. The lock is shared,
    which needs a file that is open for reading only. A writer that meets it cannot name the process that holds it.

    Raises:
        LockedError: see `locked`.
        InputError: the lock file is a symbolic link or not a regular file.
        LayertapError: the lock file cannot be read or locked.
    """
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(_by_one_thread(out))
        try:
            descriptor = open_unfollowed(out / ".lock", os.O_RDONLY)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise LayertapError(f"cannot read {out / '.lock'}: {error.strerror}") from error
        else:
            _lock(at_the_end.enter_context(os.fdopen(descriptor, encoding="utf-8")), fcntl.LOCK_SH, out)
        yield


def holder(out: Path) -> str:
    """Return what holds the lock of a folder, such as "pid 12 on host since ..."; empty if nothing does.

    To find out, the lock is shared for a moment; errors as in `kept`, but for `LockedError`.
    """
    try:
        with kept(out):
            return ""
    except LockedError as error:
        return error.message.removeprefix(f"{out} is locked by ")


@contextlib.contextmanager
def _by_one_thread(out: Path) -> Iterator[None]:
    """Context manager: exclude other threads of this process, which a POSIX lock does not."""
    name = (os.getpid(), out.resolve())
    with _HELD_GUARD:
        if name in _HELD:
            raise LockedError(f"{out} is locked by another thread of this process")
        _HELD.add(name)
    try:
        yield
    finally:
        _HELD.discard(name)


def _lock(file: TextIO, kind: int, out: Path) -> None:
    # Not flock: worker processes would inherit it, and live for some seconds after their parent was killed.
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise LayertapError(f"cannot lock {out}: {error.strerror}") from error
        file.seek(0)
        raise LockedError(
            f"{out} is locked by {file.read().strip() or 'another process'}",
            hint="wait until that process ends",
        ) from error


@contextlib.contextmanager
def _lock_file(out: Path, is_new: bool) -> Iterator[None]:
    try:
        file = os.fdopen(open_unfollowed(out / ".lock", os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8")
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    with file:
        _lock(file, fcntl.LOCK_EX, out)
        # Do not open the lock file a second time to check it: closing that descriptor would release the lock.
        if not os.path.exists(out / ".lock") or not os.path.samestat(os.fstat(file.fileno()), os.stat(out / ".lock")):  # noqa: PTH110, PTH116
            raise LockedError(f"{out} was removed by the process that held its lock", hint="run again")
        since = datetime.now(UTC).isoformat(timespec="seconds")
        _write_holder(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()} since {since}\n")
        try:
            yield
        finally:
            _write_holder(file.fileno(), "")
            with contextlib.suppress(OSError):
                if is_new and [entry.name for entry in out.iterdir()] == [".lock"]:
                    (out / ".lock").unlink()  # a process that has opened it raises LockedError, see above
                    out.rmdir()


def _write_holder(descriptor: int, text: str) -> None:
    """Write the holder into the lock file; on a full disk the file stays empty.

    A lock file with several hard links may be a file elsewhere, or that of a backup by `cp -al`. It is locked, but not
    written to. It is not replaced by a copy either: another process may hold it.
    """
    if os.fstat(descriptor).st_nlink > 1:
        return
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, text.encode())
