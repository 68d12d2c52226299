"""Passes at fixed times, for years: `layertap schedule CONFIG`.

Each pass is a process of its own, `layertap sync CONFIG --json`: what it needs of memory goes back to the system, and
what ends it, ends only it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import logging.handlers
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import FrameType
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.events import EVENT_JOB_MAX_INSTANCES
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger
from cronsim import CronSim
from tzlocal import get_localzone

from extract.errors import InputError, LayertapError, first_line
from extract.system.atomic_files import write_json
from pipelines.sync.config import LAYERTAP, ScheduleConfig, SyncFile, load_sync_file
from pipelines.sync.status import read_runs

__all__ = ["CronTrigger", "Scheduler", "trigger_of"]

# However many passes were due, one is made up for, and however late it is.
JOBS = {"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
_HEARTBEAT_S = 30
_HANGS_HOURS = 24
_LOOK_S = 0.5  # between looks whether a signal has come
_LOG_BYTES, _LOGS = 10_000_000, 5
_HOOK_S = 60
_MOMENT = timedelta(microseconds=1)
_CLOCK_S = 60  # by which a clock may be corrected without anybody noticing

log = logging.getLogger("layertap.schedule")


class CronTrigger(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """The times of a cron line, as Debian's cron has them.

    In the night in which clocks go forward, what falls into the hour that there is not runs at its end. In the night in
    which they go back, what is due at a fixed time runs once; what is due every so many minutes goes on.
    """

    def __init__(self, line: str, timezone: tzinfo):
        self.line, self.timezone = line, timezone

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The first time after the last one."""
        after = (previous_fire_time or now).astimezone(self.timezone)
        found: datetime | None = next(CronSim(self.line, after), None)
        return found

    def __str__(self) -> str:
        return f"cron {self.line!r}, {self.timezone}"


def trigger_of(config: ScheduleConfig, last: datetime) -> BaseTrigger:
    """When passes are due.

    Args:
        config: says it.
        last: when the last one began; those that come every so many seconds are counted from there.
    """
    if config.cron is not None:
        return CronTrigger(config.cron, ZoneInfo(config.timezone) if config.timezone else get_localzone())
    return IntervalTrigger(seconds=config.every, start_date=last, timezone=UTC)


class Scheduler:
    """Runs passes when they are due, until it is told to stop.

    Args:
        path: the config file; it is read again at SIGHUP.
        run: runs a pass, and returns its exit code and what it printed; None: in a process of its own.
    """

    def __init__(self, path: Path, run: Callable[[], tuple[int, str]] | None = None):
        self.path = path
        self._file = _scheduled(path)
        self._run = run or self._in_a_process
        self._stopped = threading.Event()
        self._asked: set[int] = set()  # signals; no lock is taken where they are received
        self._child: subprocess.Popen[str] | None = None
        self._child_guard = threading.Lock()
        self._passing = threading.Lock()  # held during a pass, and until its end is told
        self._last_seen = datetime.now(UTC)
        self._began, self._told_of_hanging = time.monotonic(), False
        self._noted: dict[Path, dict[str, Any]] = {}
        self.scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(1)},
            job_defaults=JOBS,
        )

    @property
    def config(self) -> ScheduleConfig:
        """When passes are, as the file says now."""
        assert self._file.schedule is not None
        return self._file.schedule

    def run_until_stopped(self) -> int:
        """Work until SIGTERM or Ctrl-C, and let the batch in flight be finished; returns 0."""
        _log_as(self.config)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self.start()
            beat = time.monotonic()
            while not self._asked & {signal.SIGTERM, signal.SIGINT}:
                time.sleep(_LOOK_S)
                if signal.SIGHUP in self._asked:
                    self._asked.discard(signal.SIGHUP)
                    self._read_again()
                if time.monotonic() - beat >= _HEARTBEAT_S:
                    beat = time.monotonic()
                    self._beat()
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0

    def start(self) -> None:
        """Begin; a pass that was due while nobody ran it begins at once."""
        now = datetime.now(UTC)
        last = self._last_began(now)
        trigger = trigger_of(self.config, last or now)
        due = last is None or trigger.get_next_fire_time(last, last + _MOMENT) <= now
        due = due and self.config.catch_up
        self.scheduler.add_listener(self._on_skipped, EVENT_JOB_MAX_INSTANCES)
        first = now if due else trigger.get_next_fire_time(None, now + _MOMENT)
        self.scheduler.add_job(self._pass, trigger, id="pass", next_run_time=first)
        self.scheduler.start()
        log.info("started: %s, %s", trigger, "a pass is overdue, and begins" if due else f"first pass {_text(first)}")
        self._beat()

    def stop(self) -> None:
        """Begin no pass any more, and wait for the one that runs, which finishes its batch."""
        self._stopped.set()
        with self._child_guard:
            if self._child is not None:
                log.info("stopping: the pass finishes its batch")
                self._child.terminate()
        with self._passing:
            pass
        self.scheduler.shutdown(wait=False)
        self._forget_next(self._file)
        log.info("stopped")

    # What happens

    def _pass(self) -> None:
        with self._passing:
            self._pass_and_tell()

    def _pass_and_tell(self) -> None:
        if self._stopped.wait(random.uniform(0, self.config.jitter)):
            return
        log.info("a pass begins")
        self._began, self._told_of_hanging = time.monotonic(), False
        try:
            code, output = self._run()
        except OSError as error:  # no memory for a process
            code, output = 1, json.dumps([{"error": f"the pass cannot be started: {error}"}])
        self._tell(code, output)
        self._note_next()

    def _in_a_process(self) -> tuple[int, str]:
        command = [*LAYERTAP, "sync", str(self.path), "--json"]
        with self._child_guard:
            if self._stopped.is_set():
                return 0, "[]"
            # In a session of its own, so that Ctrl-C reaches it once, from here.
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                           errors="backslashreplace", start_new_session=True)  # fmt: skip
        child = self._child
        assert child.stdout is not None
        assert child.stderr is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(child.stdout.read() if child.stdout else ""))
        reader.start()
        for line in child.stderr:
            log.info("sync: %s", line.rstrip())
        reader.join()
        code = child.wait()
        with self._child_guard:
            self._child = None
        return code, "".join(said)

    def _tell(self, code: int, output: str) -> None:
        """Log what a pass has done, and tell those who want to know."""
        try:
            found = json.loads(output)
        except ValueError:
            found = []
        for one in found:
            log.info("%s", _in_words(one), extra={"result": one})
        if self._stopped.is_set() and code:
            return
        if code:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            log.error("the pass failed, %s", how)
        else:
            log.info("the pass is done")
        self._call_hooks(code, found)

    def _call_hooks(self, code: int, found: list[Any]) -> None:
        about = {"config": str(self.path), "host": socket.gethostname()}
        told = json.dumps({**about, "exit_code": code, "data_sets": found})
        for hook in self.config.on_failure if code else self.config.on_success:
            _call(hook, told, code)

    def _on_skipped(self, event: Any) -> None:
        """A pass is due, and the one before is still at work: if that goes on for a day, it hangs."""
        hours = (time.monotonic() - self._began) / 3600
        what = f"a pass is due, and left out: the one before has been at work for {hours:.1f} hours"
        log.warning("%s", what)
        if hours >= _HANGS_HOURS and not self._told_of_hanging:
            self._told_of_hanging = True
            threading.Thread(target=self._call_hooks, args=(1, [{"error": what}]), daemon=True).start()

    def _beat(self) -> None:
        """Show that we are alive, and look whether the clock was set."""
        if self.config.heartbeat is not None:
            try:
                self.config.heartbeat.touch()
            except OSError as error:
                log.error("the heartbeat %s cannot be touched: %s", self.config.heartbeat, error.strerror)
        now = datetime.now(UTC)
        if now < self._last_seen - timedelta(seconds=_CLOCK_S):
            self.on_clock_set_back(now)
        self._last_seen = now
        self.scheduler.wakeup()  # its clock stands still while the machine sleeps, and may have been set
        self._note_next()

    def on_clock_set_back(self, now: datetime) -> None:
        """Plan anew, if the next pass would come later than two are due: its time was of a wrong clock.

        After a small correction it stays: planned anew, a pass that has just run would run again.
        """
        job = self.scheduler.get_job("pass")
        if job is None:
            return
        first = job.trigger.get_next_fire_time(None, now)
        second = first and job.trigger.get_next_fire_time(first, now)
        if second and job.next_run_time and job.next_run_time > second:
            job.modify(next_run_time=first)
            log.warning("the clock was set back; the next pass is planned anew: %s", _text(first))

    def _read_again(self) -> None:
        """Take over the config file as it is now, if there is nothing wrong with it."""
        try:
            file = _scheduled(self.path)
            assert file.schedule is not None
            _log_as(file.schedule)
        except LayertapError as error:
            log.error("the config is not taken over: %s", error)
            return
        self._forget_next(self._file)
        self._file = file
        now = datetime.now(UTC)
        trigger = trigger_of(self.config, self._last_began(now) or now)
        self.scheduler.reschedule_job("pass", trigger=trigger)
        self._note_next()
        log.info("read again: %s", trigger)

    def _last_began(self, now: datetime) -> datetime | None:
        """When the last pass of the data set began that has had none for longest; None: one has never had any."""
        began = []
        for one in self._file.data_sets:
            try:
                at = datetime.fromisoformat(read_runs(one.folder)[-1]["started"])
                began.append(at if at <= now else None)  # of a clock that was wrong
            except (LayertapError, LookupError, ValueError, TypeError):
                began.append(None)
        return None if None in began else min(filter(None, began))

    def _note_next(self) -> None:
        """Leave word for `layertap status`."""
        job = None if self._stopped.is_set() else self.scheduler.get_job("pass")
        if job is None or job.next_run_time is None:
            return
        noted = {"next": job.next_run_time.isoformat(timespec="seconds"), "pid": os.getpid(),
                 "host": socket.gethostname(), "config": str(self.path)}  # fmt: skip
        for one in self._file.data_sets:
            path = one.folder / "schedule.json"
            if (one.folder / "dataset.json").exists() and (not path.exists() or self._noted.get(path) != noted):
                with contextlib.suppress(OSError):  # the pass says it, if the disk is full
                    write_json(path, noted)
                    self._noted[path] = noted

    @staticmethod
    def _forget_next(file: SyncFile) -> None:
        for one in file.data_sets:
            with contextlib.suppress(OSError):
                (one.folder / "schedule.json").unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked.add(number)


def _scheduled(path: Path) -> SyncFile:
    file = load_sync_file(path)
    if file.schedule is None:
        raise InputError(f"{path}: schedule: none given; expected `schedule:` with `cron: 30 2 * * *` or `every: 15m`")
    return file


def _text(at: datetime | None) -> str:
    return "never" if at is None else at.astimezone().isoformat(" ", timespec="seconds")


def _in_words(one: dict[str, Any]) -> str:
    where = one.get("out", "")
    if "error" in one:
        return f"{where}: {one['error']}"
    names = ("added", "changed", "renamed", "deleted", "failed", "unchanged", "waiting", "computed")
    return f"{where}: version {one['version']}: " + ", ".join(f"{one[name]} {name}" for name in names)


def _call(hook: str, told: str, code: int) -> None:
    """Run a command, which finds what to know in its standard input, or post it to a URL."""
    try:
        if hook.startswith(("http://", "https://")):
            request = urllib.request.Request(hook, told.encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_HOOK_S):
                return
        done = subprocess.run(hook, shell=True, input=told, text=True, capture_output=True, timeout=_HOOK_S,
                              env={**os.environ, "LAYERTAP_EXIT_CODE": str(code)})  # fmt: skip
        if done.returncode:
            log.error("%s: exit code %d: %s", hook, done.returncode, (done.stderr or done.stdout).strip()[-500:])
    except (OSError, ValueError, subprocess.SubprocessError, http.client.HTTPException) as error:
        log.error("%s: %s", hook, first_line(error))


class _AsJson(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(), "message": record.getMessage()}  # fmt: skip
        if hasattr(record, "result"):
            line["result"] = record.result
        return json.dumps(line)


def _log_as(config: ScheduleConfig) -> None:
    """Log to stderr, or to a file that is begun anew when it is large."""
    handler: logging.Handler = logging.StreamHandler()
    if config.log is not None:
        try:
            handler = logging.handlers.RotatingFileHandler(config.log, maxBytes=_LOG_BYTES, backupCount=_LOGS - 1)
        except OSError as error:
            raise LayertapError(f"cannot write the log {config.log}: {error.strerror}") from error
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_AsJson() if config.log_json else text)
    for name, level in (("layertap.schedule", logging.INFO), ("apscheduler", logging.ERROR)):
        logger = logging.getLogger(name)
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
