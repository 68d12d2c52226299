"""Run a pass whenever something changes: `layertap watch CONFIG`.

The kernel reports changes (inotify), except on network file systems and beyond its limit of watches. Such a folder is
scanned every few seconds instead, and the reason is printed. The backbone stays in memory: a picture is in the data set
0.6 s after its last change, whereas a process for each pass needs 7 s to load the libraries.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from extract.errors import LayertapError, first_line
from extract.images.image_list import is_litter
from extract.sync.passes import Report
from extract.sync.scan import Scan
from extract.system.file_systems import file_system_kind
from extract.system.optional_libraries import library
from pipelines.sync.config import SyncConfig
from pipelines.sync.job import PassReporter, SyncResult, sync_all
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.text_output import print_line

__all__ = ["reports_changes", "watch"]

_FULL_PASS_S = 3600.0  # interval of full passes: changes may go unreported
_SCAN_S = 2.0  # between scans of a folder that cannot be watched; scans take at most a tenth of the time
_CHECK_MS = 1000  # interval of checks whether a pass is due, and whether the folder was replaced
_GONE_S = 5.0  # after which a missing folder is tried again
# File systems whose servers or other clients change files unnoticed by this machine's kernel.
_SILENT = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "fuse",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "virtiofs",
    "vboxsf",
    "prl_fs",
    "beegfs",
)


def watch(configs: Sequence[SyncConfig], on_synced: Callable[[SyncResult], None]) -> int:
    """Synchronise data sets now, and whenever something below their folders changes, until a signal arrives.

    The backbone stays in memory. Return the signal.

    Args:
        configs: configurations of the data sets.
        on_synced: called after each pass that did something, failed, stopped early or has notes.

    Raises:
        LayertapError: the library watchfiles is not installed.
    """
    watchfiles: Any = library("watchfiles", "watch", "layertap watch")
    reporters = {id(config): PassReporter() for config in configs}
    due = dict.fromkeys(map(id, configs), 0.0)
    resting = dict.fromkeys(map(id, configs), 0.0)
    stop = threading.Event()
    with signals_held() as received:
        changed = _Changes(watchfiles, configs, stop)
        try:
            while not received:
                now = time.monotonic()
                for config in configs:
                    # A pass is followed by a rest of the same length: long passes take at most half of the time.
                    if received or resting[id(config)] > now:
                        continue
                    if changed.take(config) or due[id(config)] <= now:
                        began = time.monotonic()
                        wait = _pass_of(config, reporters[id(config)], on_synced, received)
                        due[id(config)] = time.monotonic() + wait
                        resting[id(config)] = time.monotonic() + (time.monotonic() - began)
                changed.wait(_CHECK_MS / 1000)
        finally:
            stop.set()
            changed.join()
    return received[0]


def _pass_of(
    config: SyncConfig, reporter: PassReporter, on_synced: Callable[[SyncResult], None], received: list[int]
) -> float:
    """Run a pass of a data set; return the seconds until the next pass is due even without changes."""
    (result,), number = sync_all([config], reporter=reporter)
    gc.collect()  # the command raises the threshold of full collections, and this process runs for long
    if number:
        received.append(number)
    report = result.report
    if report is None or result.exit_code or report.notes or report.stopped or _has_changes(report):
        on_synced(result)
    if report is not None and report.waiting:
        return max(0.5, config.settle)
    return _FULL_PASS_S if report is not None else min(_FULL_PASS_S, 60.0)


def _has_changes(report: Report) -> bool:
    return bool(report.added or report.changed or report.renamed or report.deleted)


class _Changes:
    """Record below which folders something has changed, in background threads."""

    def __init__(self, watchfiles: Any, configs: Sequence[SyncConfig], stop: threading.Event):
        self._watchfiles, self._stop = watchfiles, stop
        self._changed = {id(config): threading.Event() for config in configs}
        self._any_changed = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(config,), daemon=True) for config in configs]
        for thread in self._threads:
            thread.start()

    def take(self, config: SyncConfig) -> bool:
        """Return whether something has changed below the folder since the last call."""
        has_changed = self._changed[id(config)].is_set()
        if has_changed:  # otherwise, a change that is reported now would be lost
            self._changed[id(config)].clear()
        return has_changed

    def wait(self, seconds: float) -> None:
        """Wait until something changes, at most `seconds`."""
        self._any_changed.wait(seconds)
        self._any_changed.clear()

    def join(self) -> None:
        """Wait for the threads, which end when `stop` is set."""
        for thread in self._threads:
            thread.join(_CHECK_MS / 1000 * 3)

    def _watch(self, config: SyncConfig) -> None:
        why = "its file system does not report changes"
        if reports_changes(Path(config.root)):
            why = self._follow(config)
        if not self._stop.is_set():
            print_line(f"{config.images} cannot be watched: {why}. The folder is scanned every few seconds", err=True)
            self._scan(config)

    def _mark_changed(self, config: SyncConfig) -> None:
        self._changed[id(config)].set()
        self._any_changed.set()

    def _follow(self, config: SyncConfig) -> str:
        """Follow the kernel's reports until `stop` is set; return the reason if that is not possible."""
        while not self._stop.is_set():
            try:
                root, is_first = _identity(config.root), True
                for changes in self._reports(config):
                    if changes or is_first:  # a change before all folders were watched was not reported
                        self._mark_changed(config)
                    is_first = False
                    if _identity(config.root) != root:  # a disk was unmounted, or the folder was replaced
                        self._mark_changed(config)
                        break
            except FileNotFoundError:  # the passes report it
                self._stop.wait(_GONE_S)
            except (OSError, RuntimeError) as error:
                limit = "limit" in str(error)
                return _reason(error) + (" (to watch the folder, raise fs.inotify.max_user_watches)" if limit else "")
        return ""

    def _reports(self, config: SyncConfig) -> Iterator[set[Any]]:
        """Yield the changes of about a second each, as (kind, path)."""
        reports: Iterator[set[Any]] = self._watchfiles.watch(
            config.root,
            watch_filter=lambda change, path: not is_litter(path.rpartition("/")[2]),
            stop_event=self._stop,
            force_polling=False,
            rust_timeout=_CHECK_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
            # A tree with a folder that cannot be read is scanned. Ignoring the error would end the watch of the tree at
            # that folder, and would also hide the error at the limit of watches.
            ignore_permission_denied=False,
        )
        return reports

    def _scan(self, config: SyncConfig) -> None:
        """Scan for changes until `stop` is set."""
        before: int | None = None
        wait = 0.0
        while not self._stop.wait(wait):
            began = time.monotonic()
            try:
                scan = Scan(config.root)
                files = 0
                for seen in scan.files():  # in arbitrary order
                    files ^= hash(seen)
                now: int | None = hash((files, frozenset(scan.unreadable.items()), frozenset(scan.dangling)))
            except LayertapError:  # the folder is missing; the passes report it
                now = None
            if now is None or now != before:
                self._mark_changed(config)
            before = now
            wait = max(_SCAN_S if now is not None else _GONE_S, 9 * (time.monotonic() - began))


def _identity(root: str) -> tuple[int, int] | None:
    """Return device and inode of the folder, None if it does not exist."""
    try:
        status = os.stat(root)  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _reason(error: Exception) -> str:
    """Return the message of an error without the representation that watchfiles appends."""
    return first_line(error).partition(" (Error {")[0]


def reports_changes(root: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether the kernel knows of all changes below a folder; False on network file systems."""
    return not file_system_kind(root, mounts).startswith(_SILENT)
