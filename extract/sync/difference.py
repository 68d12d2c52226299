"""Compare a scanned folder with the data set: which files are to be computed, and which have stored features.

A file is examined only if it is new, may have changed, or is due for a retry. It is hashed only if a stored image has
the same size, so a first pass reads each file once.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from extract.errors import InputError
from extract.row_status import Status
from extract.sync.manifest import Candidate, FeatureRow, Manifest, PlannedFile
from extract.sync.scan import NO_FILE, ScannedFile
from extract.system.atomic_files import open_regular

__all__ = ["Difference", "Guards", "Resolved", "StoppedError", "difference", "hashes_of", "time_before"]

_S = 1_000_000_000  # nanoseconds
# A file system may record times in steps of 2 s (FAT); a file that changes twice within a step looks unchanged. git
# treats its index in the same way.
_STEP_NS = 2 * _S
_NO_HASH = bytes(16)
_UNREAD_S = 3600.0  # a file that could not be read is retried after this time, or sooner if retry_after_s is shorter


MOVED = b"moved"  # in place of the hash of a file that has changed since it was scanned
_THREADS = 8  # they spend their time waiting for the disk or the server
_AHEAD = 1024  # files that are passed to the threads at once


@dataclass(frozen=True)
class Guards:
    """Limits on when a file is processed, and on how many files may be gone.

    Attributes:
        settle_s: a file that changed less than this many seconds ago may still be being written; it is left for a later
            pass.
        max_vanish: if a larger share of the files is gone, the pass raises `VanishedError` and keeps their rows.
        retry_after_s: a failed image is retried after this many seconds, even if its file has not changed.
        keep_gone_s: features that no file needs are kept for this many seconds, in case the file comes back.
    """

    settle_s: float = 5.0
    max_vanish: float = 0.2
    retry_after_s: float = 7 * 86400.0
    keep_gone_s: float = 30 * 86400.0


class StoppedError(Exception):
    """The pass was asked to stop."""


class Resolved(NamedTuple):
    """A file and the stored row that holds its features."""

    file: ScannedFile
    settled: bool
    feature: int
    hash: bytes


@dataclass(frozen=True)
class Difference:
    """Difference between a scanned folder and the data set.

    Attributes:
        resolved: examined files whose features are stored.
        todo: files to compute.
        waiting: number of files that may still be being written.
        moved: files that have changed since the scan.
        gone: paths in the data set that no longer exist.
        stored: path -> its row in the data set, for the examined files.
        added, changed, renamed: numbers of files in `resolved`.
        retried: number of files in `todo` whose rows had failed.
        vanished: number of files of the data set that no longer exist and were not renamed, or are dangling links now.
    """

    resolved: list[Resolved]
    todo: list[PlannedFile]
    waiting: int
    moved: list[ScannedFile]
    gone: list[bytes]
    stored: dict[bytes, FeatureRow]
    added: int
    changed: int
    renamed: int
    retried: int
    vanished: int


def difference(
    root: str, manifest: Manifest, guards: Guards, scanned_ns: int, ended_ns: int,
    stop: Callable[[], bool] = lambda: False,
) -> Difference:  # fmt: skip
    """Compare the scan in the manifest with the rows in the manifest.

    Args:
        root: the folder.
        manifest: manifest that holds a scan of the folder.
        guards: how long a file must be unchanged, and when a failed file is retried.
        scanned_ns: when the scan began.
        ended_ns: when it ended.
        stop: called for each hashed file; True stops the pass.

    Raises:
        StoppedError: `stop` returned True.
    """
    retry_before_ns = time_before(scanned_ns, guards.retry_after_s)
    unread_before_ns = max(retry_before_ns, time_before(scanned_ns, _UNREAD_S))
    files_to_examine = list(manifest.files_to_examine(retry_before_ns, unread_before_ns))
    readable = _without_unreadable(root, files_to_examine, unread_before_ns)
    settle_ns = int(guards.settle_s * _S)
    recent = range(scanned_ns - settle_ns + 1, ended_ns + settle_ns) if settle_ns else range(0)
    candidates: list[Candidate] = []
    waiting: list[Candidate] = []
    for candidate in readable:
        (waiting if _may_be_being_written(candidate, recent) else candidates).append(candidate)
    stored = {candidate.file.path: candidate.recorded for candidate in candidates if candidate.recorded is not None}
    resolved, todo, moved = _match_by_hash(root, manifest, candidates, scanned_ns, retry_before_ns, stop)
    gone = manifest.gone()
    gone_hashes = Counter(content for _, content in gone)
    added = changed = renamed = 0
    for entry in resolved:
        old = stored.get(entry.file.path)
        if old is None and gone_hashes[entry.hash] > 0 and entry.hash != _NO_HASH:
            gone_hashes[entry.hash] -= 1
            renamed += 1
        elif old is None:
            added += 1
        elif old.hash != entry.hash:
            changed += 1
    # A dangling link whose target was an image counts as a vanished file.
    dangling = sum(
        candidate.file.size == NO_FILE and candidate.recorded is not None and candidate.recorded.status == Status.OK
        for candidate in candidates
    )
    return Difference(
        resolved, todo, len(waiting), moved, [path for path, _ in gone], stored, added, changed, renamed,
        retried=sum((old := stored.get(planned.file.path)) is not None and old.status != Status.OK for planned in todo),
        vanished=len(gone) - renamed + dangling,
    )  # fmt: skip


def _without_unreadable(root: str, candidates: list[Candidate], unread_before_ns: int) -> list[Candidate]:
    """Drop files with a recent I/O error that still cannot be read, so that no model is loaded for them."""
    unread = [
        candidate.file
        for candidate in candidates
        if candidate.unchanged and candidate.recorded is not None and candidate.recorded.status == Status.IO_ERROR
        and candidate.recorded.tried_ns >= unread_before_ns
    ]  # fmt: skip
    still_unreadable = {file for file, content in zip(unread, hashes_of(root, unread), strict=True) if content is None}
    return [candidate for candidate in candidates if candidate.file not in still_unreadable]


def _may_be_being_written(candidate: Candidate, recent: range) -> bool:
    """Return whether a file has changed at a recent time, and so may still be being written.

    A modification time that is further in the future than clocks of servers differ was set by a program; then the
    change time counts. If that lies there, too, a clock is wrong: the file is read, and again when it changes.
    """
    file = candidate.file
    changed_ns = file.mtime_ns if file.mtime_ns < recent.stop else file.ctime_ns
    return changed_ns in recent and not candidate.unchanged and file.size != NO_FILE


def _match_by_hash(
    root: str, manifest: Manifest, candidates: list[Candidate], scanned_ns: int, retry_before_ns: int,
    stop: Callable[[], bool],
) -> tuple[list[Resolved], list[PlannedFile], list[ScannedFile]]:  # fmt: skip
    """Split candidates into files whose features are stored, files to compute, and files changed since the scan.

    A file can equal a stored image only if their sizes are equal; no other file is hashed.
    """
    resolved: list[Resolved] = []
    todo: list[PlannedFile] = []
    moved: list[ScannedFile] = []
    to_hash: list[ScannedFile] = []
    for file, _, _ in candidates:
        if file.size >= 0 and manifest.has_size(file.size):
            to_hash.append(file)
        else:
            todo.append(PlannedFile(file, _is_settled(file, scanned_ns)))
    for file, content in zip(to_hash, hashes_of(root, to_hash), strict=True):
        if stop():
            raise StoppedError
        settled = _is_settled(file, scanned_ns)
        stored = manifest.find_by_hash(content) if content is not None else None  # none is stored under MOVED
        if content is MOVED:
            moved.append(file)
        elif stored is not None and (stored.status == Status.OK or stored.tried_ns >= retry_before_ns):
            resolved.append(Resolved(file, settled, stored.id, stored.hash))
        else:
            todo.append(PlannedFile(file, settled))
    return resolved, sorted(todo), moved


def _is_settled(file: ScannedFile, scanned_ns: int) -> bool:
    """Return whether a later change of a file must alter its times, because they are older than a time step.

    A modification time in the future was set by a program and is ignored; the change time (ctime) cannot be set.
    """
    latest = max((time_ns for time_ns in (file.mtime_ns, file.ctime_ns) if time_ns <= scanned_ns), default=scanned_ns)
    return file.ctime_ns <= scanned_ns and latest < scanned_ns - _STEP_NS


def time_before(now_ns: int, seconds: float) -> int:
    """Return the time that is `seconds` before `now_ns`, in nanoseconds."""
    return now_ns - int(seconds * _S)


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
