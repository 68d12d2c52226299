"""Run a pass whenever something changes: `layertap sync CONFIG --watch`.

The kernel reports changes (inotify), except on network file systems and beyond its limit of watches. The library scans
such a folder every few seconds instead, and the reason is printed. The backbone stays in memory: a picture is in the
data set 0.6 s after its last change, whereas a process for each pass needs 7 s to load the libraries.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from extract.errors import first_line
from extract.images.image_list import is_litter
from extract.system.file_systems import file_system_kind
from extract.system.optional_libraries import library
from pipelines.sync.config import SyncConfig
from pipelines.sync.job import PassReporter, SyncResult, sync_all
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.text_output import print_line

__all__ = ["reports_changes", "watch"]

_FULL_PASS_S = 3600.0  # interval of full passes: changes may go unreported
_RETRY_S = 60.0  # after which a pass that failed is repeated
_SCAN_MS = 2000  # between scans of a folder that cannot be watched
_CHECK_MS = 1000  # interval of checks whether a pass is due, and whether the folder was replaced
_GONE_S = 5.0  # after which a missing folder is tried again
# File systems whose servers or other clients change files unnoticed by this machine's kernel.
_SILENT = (
    "nfs", "cifs", "smb", "9p", "fuse", "afs", "ceph", "lustre", "gpfs", "virtiofs", "vboxsf", "prl_fs", "beegfs",
)  # fmt: skip


def watch(configs: Sequence[SyncConfig], on_synced: Callable[[SyncResult], None]) -> int:
    """Synchronise data sets now, and whenever something below their folders changes, until a signal arrives.

    The backbone stays in memory. Return the signal.

    Args:
        configs: configurations of the data sets.
        on_synced: called after each pass that did something, failed, stopped early or has notes.

    Raises:
        LayertapError: the library watchfiles is not installed.
    """
    watchfiles: Any = library("watchfiles", "watch", "layertap sync --watch")
    stop, woken = threading.Event(), threading.Event()
    with signals_held() as received:
        followed = [_Followed(watchfiles, config, stop, woken) for config in configs]
        try:
            while not received:
                for data_set in followed:
                    if not received and data_set.is_due():
                        data_set.run_pass(on_synced, received)
                woken.wait(_CHECK_MS / 1000)
                woken.clear()
        finally:
            stop.set()
            for data_set in followed:
                data_set.thread.join(_CHECK_MS / 1000 * 3)
    return received[0]


class _Followed:
    """A data set, and a thread that records whether something below its folder has changed.

    Args:
        watchfiles: the library.
        config: configuration of the data set.
        stop: ends the thread when it is set.
        woken: set when something has changed.
    """

    def __init__(self, watchfiles: Any, config: SyncConfig, stop: threading.Event, woken: threading.Event):
        self._watchfiles, self._config, self._stop, self._woken = watchfiles, config, stop, woken
        self._changed = threading.Event()
        self._reporter = PassReporter()
        self._due = self._rests_until = 0.0
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def is_due(self) -> bool:
        """Return whether a pass should run now, because something has changed or the last pass is long ago."""
        now = time.monotonic()
        return now >= self._rests_until and (self.take_change() or now >= self._due)

    def take_change(self) -> bool:
        """Return whether something has changed below the folder since the last call."""
        has_changed = self._changed.is_set()
        if has_changed:  # otherwise, a change that is reported now would be lost
            self._changed.clear()
        return has_changed

    def run_pass(self, on_synced: Callable[[SyncResult], None], received: list[int]) -> None:
        """Run a pass; add a signal that arrives to `received`."""
        began = time.monotonic()
        (result,), number = sync_all([self._config], reporter=self._reporter)
        gc.collect()  # the command raises the threshold of full collections, and this process runs for long
        if number:
            received.append(number)
        report = result.report
        quiet = report is not None and not (
            result.exit_code or report.notes or report.stopped
            or report.added or report.changed or report.renamed or report.deleted
        )  # fmt: skip
        if not quiet:
            on_synced(result)
        wait = _RETRY_S if report is None else _FULL_PASS_S
        if report is not None and report.waiting:
            wait = max(0.5, self._config.settle)
        ended = time.monotonic()
        # A pass is followed by a rest of the same length: long passes take at most half of the time.
        self._due, self._rests_until = ended + wait, ended + (ended - began)

    def _watch(self) -> None:
        """Follow the folder until `stop` is set."""
        polls = not reports_changes(Path(self._config.root))
        if polls:
            self._print_polling("its file system does not report changes")
        while not self._stop.is_set():
            try:
                root, is_first = _identity(self._config.root), True
                for changes in self._reports(polls):
                    has_moved = _identity(self._config.root) != root  # a disk was unmounted, or the folder was replaced
                    if changes or is_first or has_moved:  # a change before all folders were watched was not reported
                        self._changed.set()
                        self._woken.set()
                    is_first = False
                    if has_moved:
                        break
            except FileNotFoundError:  # the passes report it
                self._stop.wait(_GONE_S)
            except (OSError, RuntimeError) as error:
                if polls:
                    self._stop.wait(_GONE_S)
                    continue
                reason = first_line(error).partition(" (Error {")[0]  # watchfiles appends a representation
                remedy = " (to watch the folder, raise fs.inotify.max_user_watches)" if "limit" in reason else ""
                self._print_polling(f"{reason}{remedy}")
                polls = True

    def _print_polling(self, why: str) -> None:
        where = f"{self._config.images} cannot be watched"
        print_line(f"{where}: {why}. The folder is scanned every few seconds", err=True)

    def _reports(self, polls: bool) -> Any:
        """Return an iterator over the changes of about a second each, sets of (kind, path)."""
        return self._watchfiles.watch(
            self._config.root,
            watch_filter=lambda change, path: not is_litter(path.rpartition("/")[2]),
            stop_event=self._stop,
            force_polling=polls,
            poll_delay_ms=_SCAN_MS,
            rust_timeout=_CHECK_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
            # A tree with a folder that cannot be read is scanned. Ignoring the error would end the watch of the tree at
            # that folder, and would also hide the error at the limit of watches.
            ignore_permission_denied=polls,
        )


def _identity(root: str) -> tuple[int, int] | None:
    """Return device and inode of the folder, None if it does not exist."""
    try:
        status = os.stat(root)  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


def reports_changes(root: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether the kernel knows of all changes below a folder; False on network file systems."""
    return not file_system_kind(root, mounts).startswith(_SILENT)
