"""Shards of buckets, kept on the local disk and opened there.

    ~/.cache/layertap/shards/      or $XDG_CACHE_HOME/layertap/shards
      3f0c....h5                   a whole shard, which matched the sha256 of its receipt when it was downloaded
      3f0c....rows                 the same file without its features: a hole is in their place
      3f0c....h5.lock              locked by the process that downloads the file without .lock

A reader needs paths, labels and status of all shards, but perhaps the features of none. Therefore a shard is downloaded
twice: when a reader is opened, without the features, which takes a few requests; when features are read, whole.

A file has its name only when it is complete and on the disk. The least recently opened files are removed first; a shard
that is open stays readable. Other users cannot write to the folder: a file in it is trusted as any other shard is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError, system_errors_as
from extract.store.format.layout import ROW_DATA, read_layout
from extract.store.format.shard import Shard
from extract.store.places import objects
from extract.system.atomic_files import discard, flush_to_disk, is_temporary, remove_leftovers, temporary_file

__all__ = ["CACHE_BYTES", "RemoteFile", "ShardCache", "cache_folder"]

CACHE_BYTES = 10_000_000_000
_OTHER_FOLDER = "set XDG_CACHE_HOME to another folder"
_HEAD_BYTES = 1 << 20  # read first: the user block, and usually the structure of the file
_NAME = re.compile(r"[0-9a-f]{40}\.(h5|rows)(\.lock)?", re.ASCII)


@dataclass(frozen=True)
class RemoteFile:
    """A finished shard in a bucket.

    Attributes:
        url: URL of the object.
        receipt: content of its receipt.
    """

    url: str
    receipt: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return int(self.receipt["size"])

    @cached_property
    def key(self) -> str:
        """File name in the cache. It depends on the URL, because rows alone are not compared with the sha256."""
        return hashlib.sha256(f"{self.url}\0{self.size}\0{self.receipt['sha256']}".encode()).hexdigest()[:40]


def cache_folder() -> Path:
    """Return the folder of the cache; it may be deleted at any time.

    Raises:
        LayertapError: the home folder is unknown and `XDG_CACHE_HOME` is not set.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG Base Directory Specification ignores relative paths.
    root = given if given.is_absolute() else Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111
    if not root.is_absolute():
        raise LayertapError("no home folder for the cache of remote files", hint="set XDG_CACHE_HOME")
    return root / "layertap" / "shards"


class ShardCache:
    """Open shards of buckets through the cache. Instances can be shared by threads, forked and pickled.

    Args:
        cache_bytes: maximum size of the files in the folder, including those of other processes.

    Raises:
        LayertapError: there is no folder for the cache, this user cannot write to it, or other users can.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES):
        self.cache_bytes, self.folder = int(cache_bytes), cache_folder()
        with system_errors_as(f"{self.folder}, for copies of shards of buckets, cannot be used", _OTHER_FOLDER):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "other users can write to it")
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(errno.EROFS, "it is read-only")

    def __reduce__(self) -> tuple[object, ...]:
        return ShardCache, (self.cache_bytes,)

    def open(self, file: RemoteFile, *, with_features: bool) -> Shard:
        """Open a shard, after downloading it if it is not in the cache.

        Args:
            file: the shard.
            with_features: whether features will be read.

        Raises:
            InputError: the object is not a shard, or is damaged.
            LayertapError: the object is gone or does not match its receipt, the store does not answer, or there is no
                disk space.
        """
        what = f"{file.url} ({file.size / 1e6:,.1f} MB) cannot be copied to {self.folder}"
        with system_errors_as(what, f"free disk space, or {_OTHER_FOLDER}"):
            return self._open(file, with_features)

    def _open(self, file: RemoteFile, with_features: bool) -> Shard:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole, rows = self.folder / f"{file.key}.h5", self.folder / f"{file.key}.rows"
        path = whole if with_features or whole.is_file() else rows
        with self._locked(path.with_name(f"{path.name}.lock")):
            # It may be missing, removed at this moment, or damaged.
            with contextlib.suppress(FileNotFoundError, InputError):
                os.utime(path)
                return Shard(path, file.url, with_features=path == whole)
            remove_leftovers(path)
            with temporary_file(path) as (raw, temporary):
                try:
                    shard = _download(file, temporary) if path == whole else _download_rows(file, temporary)
                except FileNotFoundError:
                    if not temporary.exists():  # the user empties the cache
                        raise
                    raise LayertapError(
                        f"{file.url} was removed after it was opened", hint="open the data set again"
                    ) from None
                flush_to_disk(raw.fileno())  # a power failure must not leave a file of zeros under this name
                temporary.rename(path)
                shard.path = path
        self._remove_least_recent()
        return shard

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Context manager: lock a file, so that it is downloaded once if several processes or threads need it."""
        with path.open("ab") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: it may be downloaded twice
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # closing is not enough: a forked process has the file, too
                    fcntl.flock(lock, fcntl.LOCK_UN)

    def _remove_least_recent(self) -> None:
        """Remove the files that were opened least recently, until the others are within the bound."""
        files, unfinished = [], 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _NAME.fullmatch(entry.name):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime_ns, status.st_blocks * 512, Path(entry.path)))
                    elif is_temporary(Path(entry.path)):  # of a download that runs, or was killed
                        remove_leftovers(self.folder / ".".join(entry.name.split(".")[:2]))
                        unfinished += entry.stat(follow_symlinks=False).st_blocks * 512
        total = unfinished + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.cache_bytes:
                break
            discard(path)
            total -= size


def _download(file: RemoteFile, path: Path) -> Shard:
    """Download a whole shard to the empty file `path`, and open it."""
    objects.download(file.url, [(0, file.size)], path)
    with path.open("rb") as copy:
        if hashlib.file_digest(copy, "sha256").hexdigest() != file.receipt["sha256"]:
            raise LayertapError(
                f"{file.url} does not match its receipt; it was changed after it was published",
                hint="restore the original object, or remove both and run the command that created the data set again",
            )
    return Shard(path, file.url)


def _download_rows(file: RemoteFile, path: Path) -> Shard:
    """Download everything but the features to the empty file `path`, and open it."""
    head = min(_HEAD_BYTES, file.size)
    objects.download(file.url, [(0, head)], path)
    os.truncate(path, file.size)
    with path.open("rb") as raw:
        fixed, *_ = read_layout(raw, file.url)
    objects.download(file.url, [(max(start, head), stop) for start, stop in fixed if stop > head], path)
    shard = Shard(path, file.url, with_features=False)
    columns = [(shard.offsets[f"/{name}"], shard.column(name).nbytes) for name, *_ in ROW_DATA]
    objects.download(file.url, [(start, start + size) for start, size in columns if start + size > head], path)
    return shard
