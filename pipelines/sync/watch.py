"""Run a pass whenever something changes: `layertap sync CONFIG --watch`.

The kernel reports changes (inotify), except on network file systems and beyond its limit of watches. The library scans
such a folder every few seconds instead, and the reason is printed. The backbone stays in memory: a picture is in the
data set 0.6 s after its last change, whereas a process for each pass needs 7 s to load the libraries.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
    with signals_held() as received:
        followed = [_Followed(watchfiles, config, _CHECK_MS // len(configs)) for config in configs]
        while not received:
            for data_set in followed:
                data_set.look()
                if not received and data_set.is_due():
                    data_set.run_pass(on_synced, received)
    return received[0]


class _Followed:
    """A data set, and whether something below its folder has changed.

    Args:
        watchfiles: the library. Its own threads collect changes, also while a pass runs.
        config: configuration of the data set.
        look_ms: for how long a look waits for changes.

    Attributes:
        has_changed: whether something has changed since the last pass began.
    """

    def __init__(self, watchfiles: Any, config: SyncConfig, look_ms: int):
        self._watchfiles, self._config, self._look_ms = watchfiles, config, max(1, look_ms)
        self._reporter = PassReporter()
        self._due = self._rests_until = 0.0
        self._changes: Iterator[set[tuple[Any, str]]] | None = None
        self._root: tuple[int, int] | None = None
        self.has_changed = False
        self._polls = not reports_changes(Path(config.root))
        if self._polls:
            self._print_polling("its file system does not report changes")

    def look(self) -> None:
        """Wait for changes for a moment."""
        try:
            if self._changes is None:
                self._changes, self._root = self._watched(), _identity(self._config.root)
                next(self._changes)
                self.has_changed = True  # a change before all folders were watched was not reported
            elif any(not is_litter(path.rpartition("/")[2]) for _, path in next(self._changes)):
                self.has_changed = True
            if _identity(self._config.root) != self._root:  # a disk was unmounted, or the folder was replaced
                self._changes, self.has_changed = None, True
        except (OSError, RuntimeError) as error:
            self._changes = None
            if self._polls or isinstance(error, FileNotFoundError):  # the passes report it
                time.sleep(self._look_ms / 1000)
                return
            reason = first_line(error).partition(" (Error {")[0]  # watchfiles appends a representation
            remedy = " (to watch the folder, raise fs.inotify.max_user_watches)" if "limit" in reason else ""
            self._print_polling(f"{reason}{remedy}")
            self._polls = True

    def is_due(self) -> bool:
        """Return whether a pass should run now, because something has changed or the last pass is long ago."""
        now = time.monotonic()
        return now >= self._rests_until and (self.has_changed or now >= self._due)

    def run_pass(self, on_synced: Callable[[SyncResult], None], received: list[int]) -> None:
        """Run a pass; add a signal that arrives to `received`."""
        began, self.has_changed = time.monotonic(), False
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

    def _print_polling(self, why: str) -> None:
        where = f"{self._config.images} cannot be watched"
        print_line(f"{where}: {why}. The folder is scanned every few seconds", err=True)

    def _watched(self) -> Any:
        """Return an iterator over the changes since it was asked last, as sets of (kind, path)."""
        return self._watchfiles.watch(
            self._config.root,
            # A filter of the library would wait for more changes when it has dropped all.
            watch_filter=None,
            force_polling=self._polls,
            poll_delay_ms=_SCAN_MS,
            rust_timeout=self._look_ms,
            yield_on_timeout=True,
            # A tree with a folder that cannot be read is scanned. Ignoring the error would end the watch of the tree at
            # that folder, and would also hide the error at the limit of watches.
            ignore_permission_denied=self._polls,
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
