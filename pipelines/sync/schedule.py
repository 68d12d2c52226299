"""Run passes at fixed times, for years: `layertap schedule CONFIG`.

Each pass is a process of its own, `layertap sync CONFIG --json`. Its memory goes back to the system, and a crash ends
one pass only. One loop in the main thread does everything else. It looks at the clock at least twice a second, so a
clock that was set, or a machine that slept, needs no special timer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from extract.errors import InputError, LayertapError
from extract.system.atomic_files import write_json
from pipelines.sync.config import ScheduleConfig, SyncFile, load_sync_file
from pipelines.sync.due_times import describe_schedule, due_after, time_zone
from pipelines.sync.hooks import call_hooks
from pipelines.sync.pass_process import PassProcess, PassResult, RunningPass
from pipelines.sync.schedule_log import open_log
from pipelines.sync.status import read_runs
from pipelines.terminal.text_output import LAYERTAP

__all__ = ["Scheduler"]

_LOOK_S = 0.5  # longest wait between two looks at the clock and the signals
_HEARTBEAT_S = 30
_LOCKED = 4  # exit code of a pass whose data set another process has locked
_HANGS_S = 24 * 3600
_SET_BACK = timedelta(seconds=60)  # smaller corrections of the clock are ignored

log = logging.getLogger("layertap.schedule")


class Scheduler:
    """Starts passes when they are due, one at a time, until it is stopped.

    Args:
        path: the config file; it is read again at SIGHUP.
        start_pass: starts a pass; None: as a process.
        now: the wall clock, which may be set; None: the machine's clock.
        elapsed: seconds of a clock that is never set; None: the machine's clock.

    Attributes:
        next_due: when the next pass is due, in UTC; None: never.
        running: the pass in progress, or None.
    """

    def __init__(
        self,
        path: Path,
        start_pass: Callable[[], RunningPass] | None = None,
        now: Callable[[], datetime] | None = None,
        elapsed: Callable[[], float] | None = None,
    ):
        self.path = path
        self.next_due: datetime | None = None
        self.running: RunningPass | None = None
        self._start_pass = start_pass or (lambda: PassProcess([*LAYERTAP, "sync", str(path), "--json"]))
        self._now = now or (lambda: datetime.now(UTC))
        self._elapsed = elapsed or time.monotonic
        self._file = _load_scheduled(path)
        self._last_due = self._last_look = self._now()  # intervals are counted from _last_due
        self._starts_at: float | None = None  # when a pass that is due starts: jitter; on the clock `elapsed`
        self._started_at = self._beat_at = self._elapsed()
        self._locked_since: float | None = None  # when passes began to find a data set locked; on the clock `elapsed`
        self._hang_reported = False
        self._hook_calls: list[threading.Thread] = []
        self._stopping = False
        self._signals: set[int] = set()  # received and not yet handled
        self._noted: dict[Path, dict[str, Any]] = {}  # what each schedule.json says

    @property
    def config(self) -> ScheduleConfig:
        """The schedule in the config file when it was last read."""
        assert self._file.schedule is not None
        return self._file.schedule

    @property
    def stopped(self) -> bool:
        """Whether the scheduler was stopped, and the last pass and its hooks have ended."""
        return self._stopping and self.running is None and not self._hooks_running()

    def run_until_stopped(self) -> int:
        """Run passes until SIGTERM or Ctrl-C; then let the running pass finish its batch, and return 0."""
        open_log(self.config)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self.start()
            while not self.stopped:
                self._wait()
                self.step()
            self._remove_notes()
            log.info("stopped")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return 0

    def start(self) -> None:
        """Compute when the first pass is due: at once, if one was due while no scheduler ran."""
        now = self._now()
        last = self._last_started(now)
        self._last_due = last or now
        missed = None if last is None else due_after(self.config, last, last)
        overdue = last is None or (missed is not None and missed <= now)
        if overdue and self.config.catch_up:
            self.next_due = now
            log.info("started: %s; a pass is overdue and starts now", describe_schedule(self.config))
        else:
            self.next_due = due_after(self.config, now, self._last_due)
            log.info("started: %s; first pass %s", describe_schedule(self.config), _local_time(self.next_due))
        self._beat()

    def stop(self) -> None:
        """Start no more passes; the running pass finishes its batch."""
        self._stopping = True
        self._starts_at = None
        if self.running is not None:
            log.info("stopping: the pass finishes its batch")
            self.running.terminate()

    def reload(self) -> None:
        """Read the config file again; after an error, the scheduler continues with the config that it has."""
        try:
            file = _load_scheduled(self.path)
            assert file.schedule is not None
            open_log(file.schedule)
        except LayertapError as error:
            log.error("the config is not reloaded; the previous config stays in use: %s", error)
            return
        self._remove_notes()
        self._file = file
        now = self._now()
        self._last_due = self._last_started(now) or now
        self.next_due = due_after(self.config, now, self._last_due)
        self._note_next()
        log.info("config read again: %s; next pass %s", describe_schedule(self.config), _local_time(self.next_due))

    def step(self) -> None:
        """Do everything that is due now, without waiting."""
        if self._signals & {signal.SIGTERM, signal.SIGINT} and not self._stopping:
            self.stop()
        now = self._now()
        if now < self._last_look - _SET_BACK:
            self._on_clock_set_back(now)
        self._last_look = now
        if self.running is not None and (result := self.running.result()) is not None:
            self.running = None
            self._report(result)
        if self.next_due is not None and self.next_due <= now and not self._stopping:
            self._on_due(self.next_due, now)
        if self._starts_at is not None and self._starts_at <= self._elapsed():
            self._starts_at = None
            self._start()
        # After the check for a due pass: a new schedule starts with its next due time.
        if signal.SIGHUP in self._signals and not self._stopping:
            self._signals.discard(signal.SIGHUP)
            self.reload()
        if self._elapsed() - self._beat_at >= _HEARTBEAT_S:
            self._beat()

    def _wait(self) -> None:
        """Wait until a pass is due, the running pass prints something, or it is time to look at the signals."""
        seconds = _LOOK_S
        if self.next_due is not None and not self._stopping:
            seconds = min(seconds, max(0.0, (self.next_due - self._now()).total_seconds()))
        if self.running is not None:
            self.running.wait(seconds)
        else:
            time.sleep(seconds)

    def _on_due(self, due: datetime, now: datetime) -> None:
        """Plan the pass that is due, or skip it. All due times since the last look count as a single pass."""
        self._last_due = due
        self.next_due = due_after(self.config, now, due)
        if self.running is not None or self._hooks_running():
            self._skip()
        elif self._starts_at is not None:
            log.warning("a pass is due and is skipped: the previous pass has not started yet, because of `jitter`")
        else:
            self._starts_at = self._elapsed() + random.uniform(0, self.config.jitter)
        self._note_next()

    def _skip(self) -> None:
        """Log that a due pass is skipped; after 24 hours the running pass counts as hanging, and hooks are called."""
        seconds = self._elapsed() - self._started_at
        self._warn(
            f"a pass is due and is skipped: the previous pass has been running for {_duration(seconds)}", seconds
        )

    def _warn(self, message: str, seconds: float) -> None:
        """Log why passes are skipped; call the hooks, once, if that has been so for 24 hours."""
        log.warning("%s", message)
        if seconds >= _HANGS_S and not self._hang_reported:
            self._hang_reported = True
            self._call_hooks(1, [{"error": message}])

    def _start(self) -> None:
        log.info("pass started")
        self._started_at = self._elapsed()
        try:
            self.running = self._start_pass()
        except OSError as error:  # no memory, no process table entry, too many open files
            self._report(PassResult(1, json.dumps([{"error": f"the pass cannot be started: {error}"}])))

    def _report(self, result: PassResult) -> None:
        """Log how a pass ended, and call the hooks."""
        data_sets = _parse_output(result.output)
        for data_set in data_sets:
            log.info("%s", _describe(data_set), extra={"result": data_set})
        if self._stopping and result.code:  # it was asked to end
            return
        if result.code == _LOCKED:
            self._on_locked()
            return
        self._locked_since, self._hang_reported = None, False
        if result.code == 0:
            log.info("pass finished")
        elif result.code < 0:
            log.error("the pass was killed by signal %d", -result.code)
        else:
            log.error("the pass failed with exit code %d", result.code)
        self._call_hooks(result.code, data_sets)
        self._note_next()

    def _on_locked(self) -> None:
        """Treat a pass that found a data set locked as skipped, such as beside a pass that a killed scheduler left."""
        if self._locked_since is None:
            self._locked_since = self._started_at
        seconds = self._elapsed() - self._locked_since
        since = f", for {_duration(seconds)} now" if seconds >= 60 else ""
        self._warn(f"the pass was skipped: another process is at work on a data set{since}", seconds)
        self._note_next()

    def _call_hooks(self, code: int, data_sets: list[Any]) -> None:
        """Call the hooks in a thread: each may take a minute, and the heartbeat must continue."""
        hooks = self.config.on_failure if code else self.config.on_success
        if not hooks:
            return
        content = {"config": str(self.path), "host": socket.gethostname(), "exit_code": code, "data_sets": data_sets}
        thread = threading.Thread(target=call_hooks, args=(hooks, json.dumps(content), code), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory, or too many threads
            log.error("the hooks cannot be called: %s", error)
            return
        self._hook_calls.append(thread)

    def _hooks_running(self) -> bool:
        self._hook_calls = [thread for thread in self._hook_calls if thread.is_alive()]
        return bool(self._hook_calls)

    def _on_clock_set_back(self, now: datetime) -> None:
        """Compute the next due time again if it is later than the next two due times: it is from a wrong clock.

        After a small correction it stays. Otherwise a pass that has just run would run again.
        """
        first = due_after(self.config, now, self._last_due)
        second = None if first is None else due_after(self.config, first, self._last_due)
        if second is not None and self.next_due is not None and self.next_due > second:
            self.next_due = first
            log.warning("the clock was set back; the next pass is now due %s", _local_time(first))
            self._note_next()

    def _beat(self) -> None:
        """Show a watchdog that the scheduler is alive."""
        self._beat_at = self._elapsed()
        if self.config.heartbeat is not None:
            try:
                self.config.heartbeat.touch()
            except OSError as error:
                log.error("the heartbeat %s cannot be touched: %s", self.config.heartbeat, error.strerror)
        self._note_next()

    def _last_started(self, now: datetime) -> datetime | None:
        """Return the earliest of the data sets' last start times; None if a data set has had no pass."""
        starts = []
        for data_set in self._file.data_sets:
            try:
                start = datetime.fromisoformat(read_runs(data_set.folder)[-1]["started"])
                if start > now:  # the clock was wrong then
                    return None
                starts.append(start)
            except (LayertapError, LookupError, ValueError, TypeError):
                return None
        return min(starts)

    def _note_next(self) -> None:
        """Write the next due time for `layertap status`."""
        if self.next_due is None or self._stopping:
            return
        next_due = self.next_due.astimezone(time_zone(self.config)).isoformat(timespec="seconds")
        note = {"next": next_due, "pid": os.getpid(), "host": socket.gethostname(), "config": str(self.path)}
        for data_set in self._file.data_sets:
            path = data_set.folder / "schedule.json"
            with contextlib.suppress(OSError, LayertapError):  # passes report a full disk
                is_published = (data_set.folder / "dataset.json").exists()
                if is_published and (not path.exists() or self._noted.get(path) != note):
                    write_json(path, note)
                    self._noted[path] = note

    def _remove_notes(self) -> None:
        for data_set in self._file.data_sets:
            with contextlib.suppress(OSError):
                (data_set.folder / "schedule.json").unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(number)


def _load_scheduled(path: Path) -> SyncFile:
    """Read a config file that must have a schedule."""
    file = load_sync_file(path)
    if file.schedule is None:
        raise InputError(
            f"{path}: the key `schedule` is missing; expected `schedule:` with `cron: 30 2 * * *` or `every: 15m`"
        )
    time_zone(file.schedule)  # raises for an unknown zone now, not at the first due time
    return file


def _duration(seconds: float) -> str:
    """Return a duration as text: 45 s, 12 min, 3.5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _local_time(at: datetime | None) -> str:
    return "never" if at is None else at.astimezone().isoformat(" ", timespec="seconds")


def _parse_output(output: str) -> list[dict[str, Any]]:
    """Return what `sync --json` printed; nothing if the process was killed."""
    try:
        content = json.loads(output)
    except ValueError:
        return []
    return [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []


def _describe(data_set: dict[str, Any]) -> str:
    """Return what a pass did for a data set, as one line."""
    folder = data_set.get("out", "")
    if "error" in data_set:
        return f"{folder}: {data_set['error']}"
    if data_set.get("stopped"):
        return f"{folder}: stopped; what was computed is stored, and the next pass continues"
    names = ("added", "changed", "renamed", "deleted", "failed", "unchanged", "waiting", "computed")
    # The process may be of another version of layertap, if it was upgraded meanwhile.
    counts = ", ".join(f"{data_set[name]} {name}" for name in names if name in data_set)
    return f"{folder}: version {data_set.get('version')}: {counts}"
