"""What is different between a folder as it was seen and the data set: what is to be computed, and what is known.

Only a file whose times or size have changed is looked at; only one that is as large as an image that is stored is read
for its hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from extract.row_status import Status
from extract.sync.hashing import MOVED, hashes_of
from extract.sync.manifest import Candidate, Feature, Manifest, Planned
from extract.sync.safety_limits import Guards
from extract.sync.scan import NO_FILE, Seen

__all__ = ["Difference", "Resolved", "StoppedError", "before", "difference"]

_S = 1_000_000_000  # nanoseconds
# A file system may count time in steps of 2 s (FAT), within which a file can change twice and look the same.
_STEP_NS = 2 * _S
_NO_HASH = bytes(16)
_UNREAD_S = 3600.0  # after which a file that could not be read is tried again, if not sooner


class StoppedError(Exception):
    """The pass was asked to stop."""


class Resolved(NamedTuple):
    """A file, and the stored row that has its features."""

    seen: Seen
    settled: bool
    feature: int
    hash: bytes


@dataclass(frozen=True)
class Difference:
    """What a pass has to do.

    Attributes:
        resolved: new and changed files whose features are stored.
        todo: files to be computed.
        waiting: files that are being written, and since when they look as they do.
        moved: files that changed while they were read.
        gone: paths that are no more.
        stored: path -> the row that the data set has for it, of the files that were looked at.
        added, changed, renamed: of `resolved`.
        tried_again: files of `todo` whose rows had failed.
        vanished: files of the data set that are no more, or links that lead nowhere now.
    """

    resolved: list[Resolved]
    todo: list[Planned]
    waiting: list[tuple[Seen, int]]
    moved: list[Seen]
    gone: list[bytes]
    stored: dict[bytes, Feature]
    added: int
    changed: int
    renamed: int
    tried_again: int
    vanished: int


def difference(
    root: str, manifest: Manifest, guards: Guards, scanned_ns: int, stop: Callable[[], bool] = lambda: False
) -> Difference:
    """Compare what the manifest has seen with what it has stored.

    Args:
        root: the folder.
        manifest: that has seen it.
        guards: how long a file must be left alone, and when a failed one is tried again.
        scanned_ns: when it was seen.
        stop: asked before each file that is read.

    Raises:
        StoppedError: `stop` said so.
    """
    retry_before_ns = before(scanned_ns, guards.retry_after_s)
    unread_before_ns = max(retry_before_ns, before(scanned_ns, _UNREAD_S))
    to_look_at = list(manifest.to_look_at(retry_before_ns, unread_before_ns))
    candidates, waiting = _settled(manifest, _readable(root, to_look_at, unread_before_ns), guards, scanned_ns)
    stored = {one.seen.path: one.before for one in candidates if one.before is not None}
    resolved, todo, moved = _known(root, manifest, candidates, scanned_ns, retry_before_ns, stop)
    gone = manifest.gone()
    gone_hashes = Counter(content for _, content in gone)
    added = changed = renamed = 0
    for one in resolved:
        old = stored.get(one.seen.path)
        if old is None and gone_hashes[one.hash] > 0 and one.hash != _NO_HASH:
            gone_hashes[one.hash] -= 1
            renamed += 1
        elif old is None:
            added += 1
        elif old.hash != one.hash:
            changed += 1
    # A link that led to an image and leads nowhere is as good as gone.
    nowhere = sum(
        one.seen.size == NO_FILE and one.before is not None and one.before.status == Status.OK for one in candidates
    )
    return Difference(
        resolved, todo, waiting, moved, [path for path, _ in gone], stored, added, changed, renamed,
        tried_again=sum((old := stored.get(one.seen.path)) is not None and old.status != Status.OK for one in todo),
        vanished=len(gone) - renamed + nowhere,
    )  # fmt: skip


def _readable(root: str, candidates: list[Candidate], unread_before_ns: int) -> list[Candidate]:
    """Those without files that had an I/O error a short while ago and still have it, for which no model is loaded."""
    unread = [
        one.seen
        for one in candidates
        if one.same and one.before is not None and one.before.status == Status.IO_ERROR
        and one.before.tried_ns >= unread_before_ns
    ]  # fmt: skip
    still = {seen for seen, content in zip(unread, hashes_of(root, unread), strict=True) if content is None}
    return [one for one in candidates if one.seen not in still]


def _settled(
    manifest: Manifest, candidates: list[Candidate], guards: Guards, scanned_ns: int
) -> tuple[list[Candidate], list[tuple[Seen, int]]]:
    """Those that can be looked at now; and those that must wait, with since when they look as they do."""
    settle_ns = int(guards.settle_s * _S)
    if not settle_ns:
        return candidates, []
    known_waiting, ready, waiting = manifest.waiting(), [], []
    for one in candidates:
        seen = one.seen
        if scanned_ns - seen.mtime_ns >= settle_ns or one.same or seen.size == NO_FILE:
            ready.append(one)
            continue
        # Of a time in the future, nothing is learnt but by waiting.
        known, since_ns = known_waiting.get(seen.path, (None, scanned_ns))
        if known == seen and scanned_ns - since_ns >= settle_ns:
            ready.append(one)
        else:
            waiting.append((seen, since_ns if known == seen else scanned_ns))
    return ready, waiting


def _known(
    root: str, manifest: Manifest, candidates: list[Candidate], scanned_ns: int, retry_before_ns: int,
    stop: Callable[[], bool],
) -> tuple[list[Resolved], list[Planned], list[Seen]]:  # fmt: skip
    """Of these files, those whose features are stored; those to be computed; and those that change just now.

    Only a file that is as large as an image that is stored can be that image; no other is read for its hash.
    """
    resolved: list[Resolved] = []
    todo: list[Planned] = []
    moved: list[Seen] = []
    to_hash: list[Seen] = []
    for seen, _, _ in candidates:
        if seen.size >= 0 and manifest.knows_size(seen.size):
            to_hash.append(seen)
        else:
            todo.append(Planned(seen, _is_settled(seen, scanned_ns)))
    for seen, content in zip(to_hash, hashes_of(root, to_hash), strict=True):
        if stop():
            raise StoppedError
        settled = _is_settled(seen, scanned_ns)
        found = manifest.with_hash(content) if isinstance(content, bytes) else None
        if content is MOVED:
            moved.append(seen)
        elif found is not None and (found.status == Status.OK or found.tried_ns >= retry_before_ns):
            resolved.append(Resolved(seen, settled, found.id, found.hash))
        else:
            todo.append(Planned(seen, settled))
    return resolved, sorted(todo), moved


def _is_settled(seen: Seen, scanned_ns: int) -> bool:
    """Whether a later change of a file must show in its times: they are older than the steps in which time is counted.

    A time of modification in the future was set by a program, and tells nothing; that of the change cannot be set.
    """
    latest = max((at for at in (seen.mtime_ns, seen.ctime_ns) if at <= scanned_ns), default=scanned_ns)
    return seen.ctime_ns <= scanned_ns and latest < scanned_ns - _STEP_NS


def before(now_ns: int, seconds: float) -> int:
    """The time so many seconds earlier."""
    return now_ns - int(seconds * _S)
