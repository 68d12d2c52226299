"""Hashes of files that may be images whose features are stored already."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import xxhash

from extract.sync.scan import Seen

__all__ = ["MOVED", "Moved", "hashes_of"]

_THREADS = 8  # they wait for the disk, or the server
_BLOCK_BYTES = 1 << 20
_AHEAD = 1024  # files that are handed to the threads at once


class Moved:
    """In place of a hash: the file is being written just now."""


MOVED: Final = Moved()


def hashes_of(root: str, files: Sequence[Seen]) -> Iterator[bytes | Moved | None]:
    """The xxh3-128 of each file's bytes; `MOVED` if it changes just now, None if it cannot be read."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(files), _AHEAD):
            yield from threads.map(lambda seen: _hash_of(root, seen), files[start : start + _AHEAD])


def _hash_of(root: str, seen: Seen) -> bytes | Moved | None:
    digest = xxhash.xxh3_128()
    try:
        descriptor = os.open(os.path.join(os.fsencode(root), seen.path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # noqa: PTH118
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        while block := os.read(descriptor, _BLOCK_BYTES):
            digest.update(block)
        now = os.fstat(descriptor)  # after the last byte: what was changed before it shows here
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != seen[1:]:
        return MOVED
    return digest.digest()
