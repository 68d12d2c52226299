"""Compare a scanned folder with the records: which rows are to be computed, and which have stored features.

A file is examined only if it is new, may have changed, or is due for a retry. It is hashed only if a stored image has
the same size, so a first pass reads each file once. Where rows are parts of files, the parts of an examined file are
listed again; the hash of each follows from that of the file.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from extract.errors import InputError
from extract.images.image_list import Images
from extract.images.part_names import file_of, part_hash
from extract.images.part_source import hash_with_other_files
from extract.images.pyramids import open_pyramid
from extract.images.sources import OnDisk, TooLargeError, check_file_size
from extract.row_status import Status
from extract.sync.records import NO_HASH, Records, locate
from extract.sync.scan import NO_FILE, ScannedFile
from extract.system.atomic_files import open_regular

__all__ = ["Candidate", "Difference", "Guards", "Report", "Resolved", "Row", "ScannedFolder", "StoppedError", "compare",
           "difference", "is_settled", "time_before"]  # fmt: skip

_S = 1_000_000_000  # nanoseconds
# A file system may record times in steps of 2 s (FAT); a file that changes twice within a step looks unchanged. git
# treats its index in the same way.
_STEP_NS = 2 * _S
# A file that could not be read is looked at again after this time, or sooner if retry_after_s is shorter.
_UNREAD_S = 60.0

MOVED = b"moved"  # in place of the hash of a file that has changed since it was scanned
_THREADS = 8  # they spend their time waiting for the disk or the server
_AHEAD = 1024  # files that are passed to the threads at once
_COMPARED = 10_000  # files that are compared at once


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


@dataclass
class Report:
    """Result of a pass, in numbers of files; `failed`, `computed` and `rows` count rows.

    Attributes:
        added, changed, renamed, deleted: compared with the previous version. A copy of a stored image counts as added,
            but is not computed. A file that is left out, or has no parts any more, counts as deleted.
        unchanged: files with unchanged content, including files whose times have changed.
        failed: rows of the new version without valid features.
        waiting: files left for the next pass because they may still be being written.
        computed: images that went through the backbone, or would have in a dry run.
        rows: rows of the data set.
        version: number of the published version; 0 if there is none.
        seconds: duration of the pass.
        unreadable: path below the folder that could not be read -> reason; the rows of its files do not change.
        stopped: whether the pass was stopped on request.
        dry_run: whether the report describes what a pass would do.
        notes: messages for the user.
    """

    added: int = 0
    changed: int = 0
    renamed: int = 0
    deleted: int = 0
    unchanged: int = 0
    failed: int = 0
    waiting: int = 0
    computed: int = 0
    rows: int = 0
    version: int = 0
    seconds: float = 0.0
    unreadable: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)


class StoppedError(Exception):
    """The pass was asked to stop."""


class Candidate(NamedTuple):
    """A file to examine.

    Attributes:
        file: the file.
        records: indices of the records of its path: one, or one for each part; none if the path is new.
        unchanged: whether size and times are unchanged.
    """

    file: ScannedFile
    records: list[int]
    unchanged: bool


class Row(NamedTuple):
    """A row: its name, which is the path of a file or names a part of it, and the file."""

    name: bytes
    file: ScannedFile


class Resolved(NamedTuple):
    """A row, and the index of a record with the row that holds its features."""

    row: Row
    record: int


@dataclass(frozen=True)
class ScannedFolder:
    """A scan of a folder, compared with the records.

    Attributes:
        n_files: number of files.
        candidates: files that are new, may have changed, or have failed and are due for a retry.
        gone: (N,) whether each record is that of a file which the scan did not see.
        is_first: (N,) whether each record is the first of a file, of which it may have several.
        scanned_ns, ended_ns: when the scan began and ended.
    """

    n_files: int
    candidates: list[Candidate]
    gone: NDArray[np.bool_]
    is_first: NDArray[np.bool_]
    scanned_ns: int
    ended_ns: int


@dataclass(frozen=True)
class Difference:
    """Difference between a scanned folder and the data set.

    Attributes:
        examined: the examined files.
        resolved: their rows whose features are stored.
        todo: their rows to compute, sorted by name.
        listed: their rows as images.
        renamed: paths of the files that were renamed.
        vanished: number of files of the data set that no longer exist and were not renamed, or are dangling links now.
    """

    examined: list[Candidate]
    resolved: list[Resolved]
    todo: list[Row]
    listed: Images
    renamed: set[bytes]
    vanished: int


def compare(files: Iterable[ScannedFile], records: Records, guards: Guards, now_ns: Callable[[], int]) -> ScannedFolder:
    """Compare the files of a scan with the records.

    Args:
        files: the files, in byte order of their paths; a path may be repeated, because some file systems list a file
            twice while its folder changes.
        records: the records.
        guards: when a failed file is retried.
        now_ns: returns the current time.
    """
    scanned_ns, array = now_ns(), records.array
    order, paths, begins = records.by_file()
    may_rest = (array["settled"] == 1) & ~_is_due(array, guards, scanned_ns)
    may_rest = np.logical_and.reduceat(may_rest[order], begins[:-1])  # (F,)
    candidates, is_seen, n_files = list[Candidate](), np.zeros(len(paths), np.bool_), 0
    distinct = (next(same) for _, same in itertools.groupby(files, key=operator.itemgetter(0)))
    while batch := list(itertools.islice(distinct, _COMPARED)):
        n_files += len(batch)
        scanned_paths, *scanned = map(np.array, zip(*batch, strict=True))
        at, recorded = locate(paths, scanned_paths)
        is_seen[at[recorded]] = True
        first = order[begins[at[recorded]]]
        unchanged = recorded.copy()
        for name, values in zip(("size", "mtime_ns", "ctime_ns"), scanned, strict=True):
            unchanged[recorded] &= array[name][first] == values[recorded]
        rests = unchanged.copy()
        rests[recorded] &= may_rest[at[recorded]]
        for i in np.flatnonzero(~rests).tolist():
            of_file = order[begins[at[i]] : begins[at[i] + 1]].tolist() if recorded[i] else []
            candidates.append(Candidate(batch[i], of_file, bool(unchanged[i])))
    gone, is_first = records.of_files, np.zeros(len(array), np.bool_)
    gone[order[np.repeat(is_seen, np.diff(begins))]] = False
    is_first[order[begins[:-1]]] = True
    return ScannedFolder(n_files, candidates, gone, is_first & records.of_files, scanned_ns, now_ns())


def _is_due(array: NDArray[Any], guards: Guards, scanned_ns: int) -> NDArray[np.bool_]:
    """(N,) whether each record has failed and is due for a retry."""
    unread = (array["hash"] == NO_HASH) & (array["size"] >= 0)
    retry_after_s = np.where(unread, min(guards.retry_after_s, _UNREAD_S), guards.retry_after_s)
    is_due = array["tried_ns"] < scanned_ns - retry_after_s * _S
    return is_due & (array["status"] != Status.OK)  # type: ignore[no-any-return]


def difference(
    root: str,
    records: Records,
    scanned: ScannedFolder,
    guards: Guards,
    report: Report,
    stop: Callable[[], bool],
    rows_of: Callable[[list[ScannedFile]], Images],
) -> Difference:
    """Return what the scanned folder has and the data set has not.

    Args:
        root: the folder.
        records: the records.
        scanned: the folder, compared with the records.
        guards: how long a file must be unchanged, and when a failed file is retried.
        report: receives the number of waiting files.
        stop: called for each hashed file; True stops the pass.
        rows_of: lists the rows of files, sorted by name: the files, or their parts.

    Raises:
        StoppedError: `stop` returned True.
    """
    array, scanned_ns = records.array, scanned.scanned_ns
    retry_before_ns = time_before(scanned_ns, guards.retry_after_s)
    settle_ns = int(guards.settle_s * _S)
    recent = range(scanned_ns - settle_ns + 1, scanned.ended_ns + settle_ns) if settle_ns else range(0)
    readable = _without_unreadable(root, records, scanned.candidates)
    candidates = [candidate for candidate in readable if not _may_be_being_written(candidate, recent)]
    files = {candidate.file.path: candidate.file for candidate in candidates}
    listed = rows_of(list(files.values()))
    rows = [Row(os.fsencode(name), files[os.fsencode(file_of(name))]) for name in listed.paths]
    resolved, todo, moved = _match_by_hash(root, array, rows, retry_before_ns, stop)
    report.waiting = len(readable) - len(candidates) + len(moved)
    candidates = [candidate for candidate in candidates if candidate.file.path not in moved]
    gone = array["hash"][scanned.gone & scanned.is_first]
    gone_hashes, renamed = Counter(gone.tolist()), set[bytes]()
    gone_hashes.pop(NO_HASH.item(), None)
    new = {candidate.file.path for candidate in candidates if not candidate.records}
    for (_, file), record in resolved:
        content = array["hash"][record].item()
        if file.path in new and gone_hashes[content] > 0:  # of parts, that of one tells
            gone_hashes[content] -= 1
            new.remove(file.path)
            renamed.add(file.path)
    # A dangling link whose target was an image counts as a vanished file.
    dangling = sum(
        candidate.file.size == NO_FILE and bool((array["status"][candidate.records] == Status.OK).any())
        for candidate in candidates
    )
    return Difference(candidates, resolved, todo, listed, renamed, len(gone) - len(renamed) + dangling)


def _without_unreadable(root: str, records: Records, candidates: list[Candidate]) -> list[Candidate]:
    """Drop files that could not be read and still cannot: for them no backbone is loaded, and no pass fails."""
    without_hash = set(np.flatnonzero(records.array["hash"] == NO_HASH).tolist())
    unread = [
        candidate.file
        for candidate in candidates
        if candidate.unchanged and candidate.file.size >= 0 and not without_hash.isdisjoint(candidate.records)
    ]
    hashes = _hashes_of(root, unread, is_limited=not records.parts)  # slides and videos may have any size
    unreadable = {file for file, content in zip(unread, hashes, strict=True) if content is None}
    return [candidate for candidate in candidates if candidate.file not in unreadable]


def _may_be_being_written(candidate: Candidate, recent: range) -> bool:
    """Return whether a file has changed at a recent time, and so may still be being written.

    A modification time that is further in the future than clocks of servers differ was set by a program; then the
    change time counts. If that lies there, too, a clock is wrong: the file is read, and again when it changes.
    """
    file = candidate.file
    changed_ns = file.mtime_ns if file.mtime_ns < recent.stop else file.ctime_ns
    return changed_ns in recent and not candidate.unchanged and file.size != NO_FILE


def _match_by_hash(
    root: str, array: NDArray[Any], rows: list[Row], retry_before_ns: int, stop: Callable[[], bool]
) -> tuple[list[Resolved], list[Row], set[bytes]]:
    """Return rows whose features are stored, rows to compute, and the paths of the files changed since the scan.

    A file can equal a stored image only if their sizes are equal; no other file is hashed.
    """
    resolved, todo = list[Resolved](), list[Row]()
    files = list(dict.fromkeys(row.file for row in rows))
    sizes = np.array([file.size for file in files], np.int64)
    by_hash = _records_by_hash(array, sizes, retry_before_ns)
    may_be_stored = (sizes >= 0) & np.isin(sizes, array["size"][list(by_hash.values())])
    to_hash = [file for file, may_be in zip(files, may_be_stored.tolist(), strict=True) if may_be]
    contents: dict[bytes, bytes | None] = {}
    for file, content in zip(to_hash, _hashes_of(root, to_hash), strict=True):
        if stop():
            raise StoppedError
        contents[file.path] = content
    moved = {path for path, content in contents.items() if content is MOVED}
    for row in rows:
        if row.file.path in moved:
            continue
        content, fragment = contents.get(row.file.path), row.name[len(row.file.path) + 1 :]
        record = by_hash.get(part_hash(content, fragment)) if content is not None else None
        if record is not None:
            resolved.append(Resolved(row, record))
        else:
            todo.append(row)
    return resolved, todo, moved


def _records_by_hash(array: NDArray[Any], sizes: NDArray[np.int64], retry_before_ns: int) -> dict[bytes, int]:
    """Return hash -> index of a record with it, of images of these sizes; preferably one that has not failed.

    A record that has failed before `retry_before_ns` is none.
    """
    counts = (array["status"] == Status.OK) | (array["tried_ns"] >= retry_before_ns)
    possible = np.flatnonzero(np.isin(array["size"], sizes) & (array["hash"] != NO_HASH) & counts)
    failed = array["status"][possible] != Status.OK
    preferred = possible[np.lexsort((array["tried_ns"][possible], ~failed))]  # the best last: it replaces the others
    return dict(zip(array["hash"][preferred].tolist(), preferred.tolist(), strict=True))


def is_settled(file: ScannedFile, scanned_ns: int) -> bool:
    """Return whether a later change of a file must alter its times, because they are older than a time step.

    A modification time in the future was set by a program and is ignored; the change time (ctime) cannot be set.
    """
    latest = max((time_ns for time_ns in (file.mtime_ns, file.ctime_ns) if time_ns <= scanned_ns), default=scanned_ns)
    return file.ctime_ns <= scanned_ns and latest < scanned_ns - _STEP_NS


def time_before(now_ns: int, seconds: float) -> int:
    """Return the time that is `seconds` before `now_ns`, in nanoseconds."""
    return now_ns - int(seconds * _S)


def _hashes_of(root: str, files: Sequence[ScannedFile], is_limited: bool = False) -> Iterator[bytes | None]:
    """Yield the xxh3-128 of each file's bytes; `MOVED` if it has changed since the scan, None if it cannot be read."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(files), _AHEAD):
            yield from threads.map(lambda file: _hash_of(root, file, is_limited), files[start : start + _AHEAD])


def _hash_of(root: str, file: ScannedFile, is_limited: bool) -> bytes | None:
    path = os.path.join(root, os.fsdecode(file.path))  # noqa: PTH118
    try:
        check_file_size(file.size if is_limited else 0)
        with os.fdopen(open_regular(Path(path)), "rb", buffering=0) as opened:
            of_bytes = hashlib.file_digest(opened, xxhash.xxh3_128).digest()
            digest = hash_with_other_files(path, of_bytes, lambda: open_pyramid(OnDisk(path)))
            file_stat = os.fstat(opened.fileno())  # after the last byte, so that it shows every change before that
    except (InputError, OSError, TooLargeError, ValueError):
        return None
    changed = (file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns) != file[1:]
    return MOVED if changed else digest
