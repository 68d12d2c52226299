"""Local disk cache for blocks of objects in a bucket.

    ~/.cache/layertap/blocks/          or $XDG_CACHE_HOME/layertap/blocks
      bytes                            total size of all blocks; also the lock for writing a block
      3f/3f0c...-000012                block 12 of one object, followed by its checksums

A block is 4 MB of an object. Its file name contains a hash over the object's URL, size and sha256, so blocks of
different objects are never confused. The content is followed by the xxh3-64 of each 64 KB page, seeded with that hash
and the number of block and page. Reads from the disk verify the checksums; a damaged, truncated or misplaced block is
fetched again.

Blocks are written under a temporary name and renamed. The least recently used blocks are removed first. Several
processes may share the cache. A forked process starts its own threads and connections.

The checksums are no secret: they protect from damage only. Therefore blocks of other users are not read, and links are
not followed. A block that cannot be written is used from memory, and the logger `layertap.store` gets one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import xxhash

from extract.errors import InputError, LayertapError
from extract.store.places import objects
from extract.system.atomic_files import discard, open_own, open_regular
from extract.system.leftovers import temporary_file
from extract.system.user_cache import cache_file

__all__ = ["BLOCK_BYTES", "CACHE_BYTES", "BlockCache", "RemoteFile", "cache_folder"]

CACHE_BYTES = 10_000_000_000
BLOCK_BYTES = 4 << 20  # the first byte of an S3 request takes tens of milliseconds, the main cost of smaller blocks
_PAGE_BYTES = 64 << 10  # unit of verification; small, because reading one row verifies only its pages
_AT_ONCE = 8  # concurrent requests
_IN_MEMORY = 2 * _AT_ONCE  # blocks kept in memory: being fetched, or fetched last
_FRESH_S = 1.0  # a block used more recently keeps its modification time
_BLOCK = re.compile(r"[0-9a-f]{40}-\d{6,}(\..*\.new)?", re.ASCII)  # names of blocks, whole and temporary

_log = logging.getLogger("layertap.store")

_ROOM_LOCKS: dict[int, threading.Lock] = {}  # by process id; a POSIX lock does not exclude threads of one process


@dataclass(frozen=True)
class RemoteFile:
    """An object with known content.

    Attributes:
        url: URL of the object.
        size: bytes of the object.
        sha256: sha256 of the content.
    """

    url: str
    size: int
    sha256: str

    @cached_property
    def key(self) -> str:
        """Prefix of the file names of its blocks."""
        return hashlib.sha256(f"{self.url}\0{self.size}\0{self.sha256}".encode()).hexdigest()[:40]

    def block(self, number: int) -> tuple[int, int]:
        """Return the byte range (start, stop) of a block."""
        return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.size)


def cache_folder() -> Path:
    """Return the folder of the cache.

    Raises:
        LayertapError: the home folder is unknown and `XDG_CACHE_HOME` is not set.
    """
    try:
        return cache_file("blocks")
    except OSError as error:
        raise LayertapError("no home folder for the cache of remote files", hint="set XDG_CACHE_HOME") from error


class BlockCache:
    """Read objects through the cache. Instances can be shared by threads, forked and pickled.

    Args:
        cache_bytes: maximum size of all blocks in the folder, including those of other processes.
        folder: folder of the cache; None for `cache_folder()`.

    Raises:
        InputError: `cache_bytes` is less than one block.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES, folder: Path | None = None):
        self.cache_bytes, self.folder = int(cache_bytes), folder or cache_folder()
        if self.cache_bytes < _stored_bytes(BLOCK_BYTES):
            least = _stored_bytes(BLOCK_BYTES)
            raise InputError(f"cache_bytes is {self.cache_bytes:,}; it must be at least {least:,} (one block)")
        self._own_fetches = _Fetches()
        self._noted = False

    def __reduce__(self) -> tuple[object, ...]:
        return BlockCache, (self.cache_bytes, self.folder)

    def read(self, file: RemoteFile, start: int, stop: int, out: memoryview) -> None:
        """Read bytes `start` to `stop` (exclusive) of an object into `out`, which has exactly that length.

        Raises:
            LayertapError: the object is gone or shorter, or the store does not answer.
        """
        if start == stop:
            return
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            begin, end = file.block(number)
            within = slice(max(start, begin) - begin, min(stop, end) - begin)
            target = out[begin + within.start - start : begin + within.stop - start]
            self._read_ahead(file, number, last)
            fetched = self._fetched(file, number)
            if fetched is not None:
                target[:] = memoryview(fetched)[within]
            elif not self._from_disk(file, number, within.start, within.stop, target):
                target[:] = memoryview(self._submit(file, number).result())[within]

    def prefetch(self, file: RemoteFile, numbers: Iterable[int]) -> None:
        """Start fetching blocks that will be read next, unless they are in memory or on the disk."""
        for number in numbers:
            if not self._is_here(file, number):
                self._submit(file, number)

    def close(self) -> None:
        """Cancel pending fetches and drop the blocks in memory; the cache remains usable."""
        self._own_fetches.end()

    # Fetching

    def _fetches(self) -> _Fetches:
        if self._own_fetches.process != os.getpid():  # forked, perhaps while another thread held the lock
            self._own_fetches = _Fetches()
        return self._own_fetches

    def _read_ahead(self, file: RemoteFile, number: int, last: int) -> None:
        """Start fetching the following blocks if this read needs them, or if blocks are read sequentially."""
        fetches = self._fetches()
        previous, fetches.last[file.key] = fetches.last.get(file.key, -2), number
        if previous == number:
            return
        until = number + _AT_ONCE - 1 if previous == number - 1 else min(last, number + _AT_ONCE - 1)
        if until > number:
            self.prefetch(file, range(number, min(until, (file.size - 1) // BLOCK_BYTES) + 1))

    def _is_here(self, file: RemoteFile, number: int) -> bool:
        return (file.key, number) in self._fetches().blocks or self._path(file, number).exists()

    def _fetched(self, file: RemoteFile, number: int) -> bytes | None:
        """Return a block that is in memory or being fetched; None if there is no such block or its fetch had failed."""
        fetches = self._fetches()
        with fetches.lock:
            future = fetches.blocks.get((file.key, number))
        if future is None:
            return None
        had_failed = future.done()
        try:
            return future.result()
        except Exception:
            with fetches.lock:
                if fetches.blocks.get((file.key, number)) is future:
                    del fetches.blocks[file.key, number]
            if not had_failed:  # it took as long as another fetch would
                raise
            return None  # of an earlier read-ahead: the caller fetches the block again, and gets that error

    def _submit(self, file: RemoteFile, number: int) -> Future[bytes]:
        fetches = self._fetches()
        with fetches.lock:
            future = fetches.blocks.get((file.key, number))
            if future is None:
                future = fetches.blocks[file.key, number] = fetches.pool.submit(self._fetch, file, number)
                finished = [key for key, fetch in fetches.blocks.items() if fetch.done()]
                for key in finished[: max(0, len(fetches.blocks) - _IN_MEMORY)]:
                    del fetches.blocks[key]
        return future

    def _fetch(self, file: RemoteFile, number: int) -> bytes:
        try:
            content = objects.read_range(file.url, *file.block(number))
        except FileNotFoundError:
            raise LayertapError(f"{file.url} was removed after it was opened", hint="open the data set again") from None
        self._store(file, number, content)
        return content

    # The disk

    def _path(self, file: RemoteFile, number: int) -> Path:
        return self.folder / file.key[:2] / f"{file.key}-{number:06d}"

    def _store(self, file: RemoteFile, number: int, content: bytes) -> None:
        path = self._path(file, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_symlink():
                raise InputError(f"{path.parent} is a link")
            with self._room_for(_stored_bytes(len(content))), temporary_file(path) as (written, temporary):
                written.write(content)
                written.write(b"".join(_hashes(file, number, content)))
                written.flush()
                temporary.rename(path)
        except FileNotFoundError:
            pass  # another process empties the folder
        except (OSError, InputError) as error:
            if not self._noted:
                self._noted = True
                _log.warning(
                    "%s: blocks of remote files are not kept (%s), and are fetched again when they are needed again; "
                    "free disk space, or set XDG_CACHE_HOME to another folder",
                    self.folder,
                    getattr(error, "strerror", None) or error,
                )

    def _from_disk(self, file: RemoteFile, number: int, start: int, stop: int, out: memoryview) -> bool:
        """Read bytes of a block from the disk into `out`; return False if the block is missing or damaged."""
        begin, end = file.block(number)
        size, first, last = end - begin, start // _PAGE_BYTES, -(-stop // _PAGE_BYTES)
        try:
            descriptor = open_regular(self._path(file, number))
        except (OSError, InputError):  # InputError: not a regular file
            return False
        try:
            file_stat = os.fstat(descriptor)
            if file_stat.st_uid != os.geteuid():
                return False
            content = os.pread(descriptor, min(last * _PAGE_BYTES, size) - first * _PAGE_BYTES, first * _PAGE_BYTES)
            expected = os.pread(descriptor, 8 * (last - first), size + 8 * first)
            if file_stat.st_size != _stored_bytes(size) or b"".join(_hashes(file, number, content, first)) != expected:
                return False
            if time.time() - file_stat.st_mtime > _FRESH_S:
                os.utime(descriptor)  # blocks are removed in order of modification time
        except OSError:  # for example an unreadable sector
            return False
        finally:
            os.close(descriptor)
        out[:] = memoryview(content)[start - first * _PAGE_BYTES : stop - first * _PAGE_BYTES]
        return True

    @contextlib.contextmanager
    def _room_for(self, size: int) -> Iterator[None]:
        """Context manager: lock the cache for writing a block, after removing the least recently used if needed."""
        with _ROOM_LOCKS.setdefault(os.getpid(), threading.Lock()), self._counter() as counter:
            fcntl.lockf(counter, fcntl.LOCK_EX)
            counter.seek(0)
            text = counter.read(32)
            # A process killed before the rename leaves a count that is too high; `_remove_until` counts the files.
            total = int(text) if text.isdigit() else self._remove_until(self.cache_bytes - size)
            if total + size > self.cache_bytes:
                total = self._remove_until(self.cache_bytes - max(size, self.cache_bytes // 16))
            counter.truncate(0)
            counter.seek(0)
            counter.write(b"%d" % (total + size))
            counter.flush()
            yield

    def _counter(self) -> BinaryIO:
        """Open the file of the total size.

        Raises:
            InputError: it is no regular file, or belongs to another user.
            OSError: it cannot be opened.
        """
        path = self.folder / "bytes"
        file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b")
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            file.close()
            raise InputError(f"{path} belongs to another user")
        return file

    def _remove_until(self, max_bytes: int) -> int:
        """Remove the least recently used blocks until at most `most` bytes remain; return the bytes that remain."""
        blocks = []
        for folder in self.folder.iterdir():
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):
                # Behind a link lie other files than blocks.
                for entry in () if folder.is_symlink() else os.scandir(folder):
                    if not _BLOCK.fullmatch(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        file_stat = entry.stat(follow_symlinks=False)
                        is_block = not entry.name.endswith(".new")  # left by a killed process: the lock is held here
                        blocks.append((is_block, file_stat.st_mtime_ns, file_stat.st_size, entry.path))
        total = sum(size for *_, size, _ in blocks)
        for is_block, _, size, path in sorted(blocks):
            if is_block and total <= max_bytes:
                break
            discard(Path(path))
            total -= size
        return total


class _Fetches:
    """Fetches of one process: its threads, and the blocks in memory."""

    def __init__(self) -> None:
        self.process, self.lock = os.getpid(), threading.Lock()
        self.blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self.last: dict[str, int] = {}  # key of an object -> number of the block read last
        self.pool = ThreadPoolExecutor(_AT_ONCE, "layertap-blocks")  # starts threads on demand

    def end(self) -> None:
        """Release the blocks in memory and cancel fetches that have not started."""
        with self.lock:
            blocks, self.blocks = self.blocks, OrderedDict()
        for future in blocks.values():
            future.cancel()


def _stored_bytes(size: int) -> int:
    return size + 8 * -(-size // _PAGE_BYTES)


def _hashes(file: RemoteFile, number: int, content: bytes, first: int = 0) -> list[bytes]:
    """Return the xxh3-64 of each page, as stored; `first` is the number of the first page."""
    seed = (int(file.key[:15], 16) + (number << 8) + first) & ((1 << 64) - 1)
    view = memoryview(content)
    return [
        xxhash.xxh3_64_intdigest(view[start : start + _PAGE_BYTES], seed + i).to_bytes(8, "little")
        for i, start in enumerate(range(0, len(content), _PAGE_BYTES))
    ]
