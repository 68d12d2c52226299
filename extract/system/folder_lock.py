"""One writer at a time to a folder."""

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

from extract.errors import LayertapError, LockedError
from extract.system.atomic_files import check_own_folders, open_unfollowed

__all__ = ["locked"]

_HELD: set[tuple[int, Path]] = set()  # folders that a process holds; a forked one inherits this set, not the locks
_HELD_GUARD = threading.Lock()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold a folder for writing; it is made if need be, and removed again if nothing was put into it.

    A POSIX lock: it ends with this process, however that ends, and is not passed on to worker processes.

    Raises:
        LockedError: another process, or another thread of this one, holds it; who and since when is said.
        InputError: the lock, or a folder in it, is a link to elsewhere.
        LayertapError: the folder cannot be written to.
    """
    try:
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        check_own_folders(out)
        name = (os.getpid(), out.resolve())
        with _HELD_GUARD:  # a POSIX lock does not keep threads of one process apart
            if name in _HELD:
                raise LockedError(f"{out} is locked by another thread of this process")
            _HELD.add(name)
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    try:
        with _lock_file(out, is_new):
            yield
    finally:
        _HELD.discard(name)


@contextlib.contextmanager
def _lock_file(out: Path, is_new: bool) -> Iterator[None]:
    try:
        file = os.fdopen(open_unfollowed(out / ".lock", os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8")
    except OSError as error:
        raise LayertapError(f"cannot write to {out}: {error.strerror}") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise LayertapError(f"{out} cannot be locked: {error.strerror}") from error
            file.seek(0)
            raise LockedError(f"{out} is locked by {file.read().strip() or 'another process'}") from error
        # Not by opening it once more: to close it then would give the lock away.
        if not os.path.exists(out / ".lock") or not os.path.samestat(os.fstat(file.fileno()), os.stat(out / ".lock")):  # noqa: PTH110, PTH116
            raise LockedError(f"{out} was removed by the process that had it locked")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _note(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()} since {now}\n")
        try:
            yield
        finally:
            _note(file.fileno(), "")
            with contextlib.suppress(OSError):
                if is_new and [one.name for one in out.iterdir()] == [".lock"]:
                    (out / ".lock").unlink()  # whoever waits for it is told, see above
                    out.rmdir()


def _note(descriptor: int, text: str) -> None:
    """Say who holds the lock; on a full disk, nobody does.

    A lock with several names may be a file elsewhere, or that of a backup by `cp -al`. It is held, but not written to.
    It is not replaced by a copy either: another process may hold it.
    """
    if os.fstat(descriptor).st_nlink > 1:
        return
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, text.encode())
