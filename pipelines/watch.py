"""Passes as soon as something changes: `layertap watch CONFIG`."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from extract.errors import first_line
from extract.images.images import is_litter
from extract.libraries import library
from extract.sync.passes import Report
from pipelines.held_signals import signals_held
from pipelines.sync import Synced, Telling, sync_all
from pipelines.sync_config import SyncConfig

__all__ = ["tells_of_changes", "watch"]

_FULL_PASS_S = 3600.0  # a folder may have changed without telling
_POLL_MS = 2000
_NOTHING_MS = 1000  # after which we look whether something is due
_GONE_S = 5.0  # after which a folder that cannot be watched is tried again
# File systems whose servers, or other users, change files without this machine's kernel knowing.
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


def watch(configs: Sequence[SyncConfig], on_synced: Callable[[Synced], None]) -> int:
    """Bring data sets into step now, and whenever something below their folders changes.

    The backbone stays in memory. Returns the signal that ended it.

    Args:
        configs: of the data sets.
        on_synced: called after each pass that did something, or failed.

    Raises:
        LayertapError: the library that watches folders is not installed.
    """
    watchfiles: Any = library("watchfiles", "watch", "layertap watch")
    for config in configs:
        if not tells_of_changes(Path(config.root)):
            click.echo(f"{config.images} is on a file system that does not tell of changes; it is polled", err=True)
    tellings = {id(config): Telling() for config in configs}
    due = dict.fromkeys(map(id, configs), 0.0)
    resting = dict.fromkeys(map(id, configs), 0.0)
    stop = threading.Event()
    with signals_held() as received:
        changed = _Changes(watchfiles, configs, stop)
        try:
            while not received:
                now = time.monotonic()
                for config in configs:
                    # Where passes take long, they take no more than half of the time.
                    if received or resting[id(config)] > now:
                        continue
                    if changed.take(config) or due[id(config)] <= now:
                        began = time.monotonic()
                        wait = _pass_of(config, tellings[id(config)], on_synced, received)
                        due[id(config)] = time.monotonic() + wait
                        resting[id(config)] = time.monotonic() + (time.monotonic() - began)
                changed.wait(_NOTHING_MS / 1000)
        finally:
            stop.set()
            changed.join()
    return received[0]


def _pass_of(config: SyncConfig, telling: Telling, on_synced: Callable[[Synced], None], received: list[int]) -> float:
    """A pass of one data set; returns within how many seconds the next one is due in any case."""
    (one,), number = sync_all([config], telling=telling)
    if number:
        received.append(number)
    report = one.report
    if report is None or one.exit_code or report.notes or report.stopped or _has_news(report):
        on_synced(one)
    if report is not None and report.waiting:
        return max(0.5, config.settle)
    return _FULL_PASS_S if report is not None else min(_FULL_PASS_S, 60.0)


def _has_news(report: Report) -> bool:
    return bool(report.added or report.changed or report.renamed or report.deleted)


class _Changes:
    """Notes below which folders something has changed, in threads of its own."""

    def __init__(self, watchfiles: Any, configs: Sequence[SyncConfig], stop: threading.Event):
        self._watchfiles, self._stop = watchfiles, stop
        self._guard, self._news = threading.Lock(), threading.Event()
        self._changed: set[int] = set()
        self._threads = [threading.Thread(target=self._watch, args=(config,), daemon=True) for config in configs]
        for thread in self._threads:
            thread.start()

    def take(self, config: SyncConfig) -> bool:
        """Whether something has changed below its folder since this was asked last."""
        with self._guard:
            found = id(config) in self._changed
            self._changed.discard(id(config))
            return found

    def wait(self, seconds: float) -> None:
        """Until something changes, or that time is over."""
        self._news.wait(seconds)
        self._news.clear()

    def join(self) -> None:
        """Wait for the threads, which end when they are told to stop."""
        for thread in self._threads:
            thread.join(_NOTHING_MS / 1000 * 3)

    def _watch(self, config: SyncConfig) -> None:
        polled = not tells_of_changes(Path(config.root))
        while not self._stop.is_set():
            try:
                for _ in self._watchfiles.watch(
                    config.root,
                    watch_filter=lambda change, path: not is_litter(path.rpartition("/")[2]),
                    stop_event=self._stop,
                    force_polling=polled,
                    poll_delay_ms=_POLL_MS,
                    raise_interrupt=False,
                    ignore_permission_denied=True,
                ):
                    with self._guard:
                        self._changed.add(id(config))
                    self._news.set()
            except FileNotFoundError:  # the passes say so
                self._stop.wait(_GONE_S)
            except (OSError, RuntimeError) as error:  # no more watches
                if not polled:
                    click.echo(f"{config.images} cannot be watched ({first_line(error)}); it is polled", err=True)
                polled = True
                self._stop.wait(_GONE_S)


def tells_of_changes(root: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the kernel knows of all changes below a folder: not where other machines make them."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return True
    best, kind = "", ""
    with contextlib.suppress(OSError, RuntimeError):
        root = root.resolve()
    for line in lines:
        fields, _, behind = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields.split()[4])
        if root.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, behind.split()[0]
    return not kind.startswith(_SILENT)
