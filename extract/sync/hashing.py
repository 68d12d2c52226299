"""Hash files that may be identical to images with stored features."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from extract.errors import InputError
from extract.sync.scan import ScannedFile
from extract.system.atomic_files import open_regular

__all__ = ["MOVED", "hashes_of"]

MOVED = b"moved"  # in place of the hash of a file that has changed since it was scanned
_THREADS = 8  # they spend their time waiting for the disk or the server
_AHEAD = 1024  # files that are passed to the threads at once


def hashes_of(root: str, files: Sequence[ScannedFile]) -> Iterator[bytes | None]:
    """Yield the xxh3-128 of each file's bytes; `MOVED` if it has changed since the scan, None if it cannot be read."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(files), _AHEAD):
            yield from threads.map(lambda file: _hash_of(root, file), files[start : start + _AHEAD])


def _hash_of(root: str, file: ScannedFile) -> bytes | None:
    try:
        with os.fdopen(open_regular(Path(root, os.fsdecode(file.path))), "rb", buffering=0) as opened:
            digest = hashlib.file_digest(opened, xxhash.xxh3_128)
            file_stat = os.fstat(opened.fileno())  # after the last byte, so that it shows every change before that
    except (InputError, OSError):
        return None
    changed = (file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns) != file[1:]
    return MOVED if changed else digest.digest()
