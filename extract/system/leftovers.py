"""Temporary names for output that is not complete, and the removal of those that killed processes have left.

A file is written as `NAME.MACHINE-RANDOM.new`, a folder as `.NAME.MACHINE-RANDOM.new`, both beside NAME. A process that
is killed leaves them. The next process that writes to NAME removes them. To tell a leftover from the temporary file of
a living process:

- The process that writes holds a lock (flock) on the file, or on the file `lock` in the folder. The kernel releases it
  when the process ends, however it ends. A process id would not do: ids are used again, and two containers, or two
  machines that share a file system, can use the same id at the same time.
- MACHINE names the running kernel. Some network file systems give locks that only their own machine sees. A leftover of
  another kernel is therefore removed only if, in addition, nothing in it has changed for a day.
- Where the file system has no locks, nothing is removed.
- RANDOM is unique, so a name is never used twice, and nobody can place a link there beforehand.

Only regular files and folders of this user that have exactly such a name are removed. If a file was removed although
its process was alive (suspended for more than a day), that process fails when it renames the file; no data is mixed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["TOKEN", "is_temporary", "remove_leftovers", "temporary_file", "temporary_folder"]

TOKEN = r"[0-9a-f]{12}-[0-9a-f]{8}"  # MACHINE-RANDOM, as a regular expression
_UNCHANGED_S = 24 * 3600.0
_NAME_BYTES = 255  # longest file name of nearly all file systems
_ADDED_BYTES = len(".0123456789ab-01234567.new") + 1

# Temporary files and folders of this process. They are not tried: on NFS, a flock is a POSIX lock, which does not
# exclude its own process, and is released when any descriptor of the file is closed.
_OWN: set[str] = set()


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Context manager: create a file with a temporary name beside `path`; yield it, open for writing, and its name.

    If the file still has the temporary name at the end, it is deleted. Rename it inside: afterwards the lock is gone.

    Raises:
        OSError: the file cannot be created.
    """
    while True:
        temporary = path.with_name(f"{_base(path.name)}.{_token()}.new")
        with _own(temporary), temporary.open("xb") as file:
            if not _claimed(file.fileno()):
                continue  # another process took it for a leftover before it was locked
            try:
                yield file, temporary
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            return


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Context manager: create a folder under a temporary name beside `path`, yield it, and delete it at the end.

    Leftovers of killed processes that wrote to `path` are removed first. The folder contains a file `lock`, and can be
    used by this user only.

    Raises:
        OSError: the folder cannot be created.
    """
    remove_leftovers(path)
    while True:
        folder = path.with_name(f".{_base(path.name)}.{_token()}.new")
        with _own(folder):
            folder.mkdir(mode=0o700)
            try:
                with contextlib.ExitStack() as at_the_end:
                    try:
                        lock = at_the_end.enter_context((folder / "lock").open("a+b"))
                    except FileNotFoundError:
                        continue  # another process took it for a leftover before it was locked
                    if not _claimed(lock.fileno()):
                        continue
                    yield folder
                    return
            finally:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _own(temporary: Path) -> Iterator[None]:
    _OWN.add(temporary.name)
    try:
        yield
    finally:
        _OWN.discard(temporary.name)


def is_temporary(path: Path) -> bool:
    """Return whether a path has a temporary name of this or an earlier version (`NAME.PID.new`) of layertap."""
    return re.search(rf".\.(\d+|{TOKEN})\.new\Z", path.name, re.ASCII) is not None


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes that wrote to `path` have left beside it; errors are ignored."""
    name = re.compile(rf"\.?{re.escape(_base(path.name))}\.{TOKEN}\.new")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.endswith(".new") and name.fullmatch(entry.name) and entry.name not in _OWN:
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
    # In a folder without `lock`, its process was killed before it created the lock, or another one while it removed the
    # folder. NFS locks only files that are open for writing.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if is_folder else 0)
    descriptor = os.open(path / "lock" if is_folder else path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if f".{_machine()}-" not in path.name and time.time() - _last_change(path) < _UNCHANGED_S:
            return
        if is_folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _claimed(descriptor: int) -> bool:
    """Lock a file that this process has just created; return False if another process locked or removed it first.

    Where the file system has no locks, return True: no process can lock it, so none removes it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return os.fstat(descriptor).st_nlink > 0


def _last_change(path: Path) -> float:
    """Return the last modification time of a file, or of the files in a folder; `lock` does not count."""
    inside = [file.lstat().st_mtime for file in path.rglob("*") if file != path / "lock"] if path.is_dir() else []
    return max([path.lstat().st_mtime, *inside])


def _base(name: str) -> str:
    """Return a file name, shortened if a temporary name with it would be too long."""
    encoded = os.fsencode(name)
    if len(encoded) <= _NAME_BYTES - _ADDED_BYTES:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return f"{encoded[:150].decode('utf-8', 'ignore')}~{digest}"


def _token() -> str:
    return f"{_machine()}-{secrets.token_hex(4)}"


def _machine() -> str:
    """Return 12 hex digits that name the running kernel; processes with the same digits see each other's locks."""
    try:
        # Not the host name: every container has its own, although containers share the kernel and its locks.
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not Linux
        kernel = socket.gethostname()
    return hashlib.sha256(kernel.encode()).hexdigest()[:12]
