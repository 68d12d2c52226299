"""Lock a folder for one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from extract.errors import LayertapError, LockedError
from extract.system.atomic_files import check_own_folders, open_unfollowed

__all__ = ["holder", "kept", "locked"]

_HELD: set[tuple[int, Path]] = set()  # (pid, folder) of held locks; a forked process inherits the set, not the locks
_HELD_GUARD = threading.Lock()


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
            hint="wait until that process ends, or choose another output folder",
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
