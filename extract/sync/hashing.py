"""Hash files that may be identical to images with stored features."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from extract.sync.scan import ScannedFile

__all__ = ["MOVED", "hashes_of"]

MOVED = b"moved"  # in place of the hash of a file that has changed since it was scanned
_THREADS = 8  # they spend their time waiting for the disk or the server
_BLOCK_BYTES = 1 << 20
_AHEAD = 1024  # files that are passed to the threads at once


def hashes_of(root: str, files: Sequence[ScannedFile]) -> Iterator[bytes | None]:
    """Yield the xxh3-128 of each file's bytes; `MOVED` if it has changed since the scan, None if it cannot be read."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(files), _AHEAD):
            yield from threads.map(lambda file: _hash_of(root, file), files[start : start + _AHEAD])


def _hash_of(root: str, file: ScannedFile) -> bytes | None:
    digest = xxhash.xxh3_128()
    try:
        descriptor = os.open(os.path.join(os.fsencode(root), file.path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # noqa: PTH118
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        while block := os.read(descriptor, _BLOCK_BYTES):
            digest.update(block)
        file_stat = os.fstat(descriptor)  # after the last byte, so that it shows every change before that
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if (file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns) != file[1:]:
        return MOVED
    return digest.digest()
