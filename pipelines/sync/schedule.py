"""Run passes at fixed times, for years: `layertap sync CONFIG --schedule`.

Each pass is a process of its own, `layertap sync CONFIG --json`. Its memory goes back to the system, a crash ends one
pass only, and each pass reads CONFIG again. Log files, random delays and watchdogs are left to the system; the guide
shows how.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import FrameType
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim
from tzlocal import get_localzone  # distributions keep the zone's name in five files, which may contradict each other

from extract.errors import InputError, LayertapError, first_line
from pipelines.sync.config import ScheduleConfig, SyncFile, load_sync_file
from pipelines.sync.status import describe_run, local_time, read_runs
from pipelines.terminal.text_output import LAYERTAP, printable

__all__ = ["PassRunner", "due_after", "run_passes", "run_until_stopped", "time_zone"]

_LOOK_S = 0.5  # between two looks at the clock
_LOCKED = 4  # exit code of a pass whose data set another process has locked
_COMMAND_S = 60  # time limit of a command of `on_failure`
_SET_BACK = timedelta(seconds=60)  # smaller corrections of the clock are ignored

log = logging.getLogger("layertap.schedule")


def run_until_stopped(path: Path) -> None:
    """Run the passes of a config file until SIGTERM or Ctrl-C; then the running pass finishes its batch."""
    file = load_sync_file(path)
    time_zone(file.required_schedule)  # raises for an unknown zone now, not at the first due time
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")  # on stderr
    runner = PassRunner(file)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, runner.stop)
    run_passes(file, runner.run, lambda: runner.stopped)
    log.info("stopped")


def run_passes(
    file: SyncFile,
    run_pass: Callable[[], object],
    stopped: Callable[[], bool],
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run a pass whenever one is due, until `stopped`.

    Due times that pass during a pass, or while the machine sleeps, count as a single one. The loop looks at the clock
    twice a second, so that a clock that was set, and a machine that slept, need no timers. (APScheduler reads cron
    lines in another way, and had to be corrected where clocks are wrong.)

    Args:
        file: a config file with `schedule`.
        run_pass: runs a pass to its end.
        stopped: whether to return.
        now: the wall clock.
        sleep: waits for some seconds.
    """
    schedule, looked = file.required_schedule, now()
    started = _last_start(file, looked)
    last = started or looked  # intervals are counted from here
    due = due_after(schedule, last, last)
    overdue = started is None or (due is not None and due <= looked)
    if overdue:
        due = looked if schedule.catch_up else due_after(schedule, looked, last)
    log.info("started; first pass %s", local_time(due))
    while not stopped():
        if now() < looked - _SET_BACK:  # otherwise the scheduler would wait until the time of a wrong clock
            due = due_after(schedule, now(), last)
            log.warning("the clock was set back; next pass %s", local_time(due))
        looked = now()
        if due is None or looked < due:
            sleep(_LOOK_S)
            continue
        run_pass()
        last = due
        due = due_after(schedule, now(), last)
        log.info("next pass %s", local_time(due))


def _last_start(file: SyncFile, now: datetime) -> datetime | None:
    """Return the earliest of the data sets' last start times; None if a data set has had no pass."""
    starts = []
    for data_set in file.data_sets:
        try:
            starts.append(datetime.fromisoformat(read_runs(data_set.folder)[-1]["started"]).astimezone(UTC))
        except (LayertapError, IndexError):  # a folder that cannot be read now is reported by the pass
            return None
    return min(starts) if max(starts) <= now else None  # otherwise the clock was wrong then


def due_after(config: ScheduleConfig, now: datetime, last: datetime) -> datetime | None:
    """Return the first due time that is later than `now`, in UTC; None if the cron line has none in the next 50 years.

    Args:
        config: the cron line or the interval.
        now: an aware time.
        last: the time from which intervals are counted. It may be later than `now`. Cron lines ignore it.
    """
    now = now.astimezone(UTC)
    if config.cron is not None:
        # cronsim follows Debian's cron when clocks change. A fixed time in a skipped hour is due at the end of that
        # hour. A fixed time in a repeated hour is due once, in the first of the two hours; if `now` is in the second,
        # cronsim starts with times of the first, which have passed.
        times = (due.astimezone(UTC) for due in CronSim(config.cron, now.astimezone(time_zone(config))))
        return next((due for due in times if due > now), None)
    assert config.every is not None
    interval = max(timedelta(seconds=config.every), timedelta.resolution)
    return last.astimezone(UTC) + interval * ((now - last) // interval + 1)


def time_zone(config: ScheduleConfig) -> tzinfo:
    """Return the time zone in which the cron line is read; UTC for an interval.

    Raises:
        InputError: the config names no time zone, and that of this machine is unknown.
    """
    if config.cron is None:
        return UTC
    if config.timezone:
        return ZoneInfo(config.timezone)
    try:
        return get_localzone()
    except (LookupError, ValueError, OSError) as error:
        raise InputError(
            f"schedule: the time zone of this machine is unknown ({first_line(error)})",
            hint="set it, for example `timezone: Europe/Berlin`",
        ) from error


class PassRunner:
    """Runs passes, and the commands of `on_failure` when a failure starts, changes or ends.

    A failure that lasts is reported once, not each minute; numbers in its message may change. It is reported again if a
    command fails, and by the next scheduler.

    Args:
        file: the config file. Its commands of `on_failure` read from stdin what failed, as JSON, and the exit code from
            LAYERTAP_EXIT_CODE.
        command: a program that prints the JSON of `layertap sync --json`, and its arguments; None: this command.

    Attributes:
        stopped: whether a signal has arrived.
    """

    def __init__(self, file: SyncFile, command: Sequence[str] | None = None):
        self.stopped = False
        self._path = file.path
        self._on_failure = file.required_schedule.on_failure
        self._reported = ""  # the failure that was reported last; empty: it has ended
        self._command = command or (*LAYERTAP, "sync", str(file.path), "--json")
        self._process: subprocess.Popen[bytes] | None = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: no pass starts any more. The first one makes the running pass finish its batch, the second
        one ends it at once.
        """
        self.stopped = True
        if self._process is not None:
            self._process.terminate()

    def run(self) -> None:
        """Run a pass to its end, and call the commands of `on_failure` if they are due."""
        log.info("pass started")
        code, data_sets = self._run_pass()
        for data_set in data_sets:
            if "error" not in data_set:  # the pass itself has printed errors
                folder, version = printable(data_set.get("out", "")), data_set.get("version")
                log.info("%s: version %s: %s", folder, version, describe_run(data_set))
        if code == _LOCKED:
            log.warning("the pass was skipped: another process is at work on a data set")
        elif not self.stopped:
            if code:
                log.error("the pass failed with exit code %d", code)
            failure, before = _failure(code, data_sets), self._reported
            event = "ended" if not failure else "changed" if before else "started"
            if failure != before and self._call_on_failure(event, code, data_sets):
                self._reported = failure

    def _run_pass(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the exit code of a pass, and what it did for each data set."""
        try:
            # In a session of its own: Ctrl-C in a terminal would reach it twice, from there and from here.
            with subprocess.Popen(self._command, stdout=subprocess.PIPE, start_new_session=True) as self._process:
                assert self._process.stdout is not None
                if self.stopped:
                    self._process.terminate()
                output = self._process.stdout.read()  # until its workers have ended, too: they keep the lock
            code = self._process.returncode
        except OSError as error:  # no memory, no process table entry, too many open files
            log.error("the pass cannot be started: %s", error)
            code, output = 1, b""
        self._process = None
        return code, _parse_output(output)

    def _call_on_failure(self, event: str, code: int, data_sets: list[dict[str, Any]]) -> bool:
        """Run the commands of `on_failure`; return whether all succeeded; if not, the next pass runs them again."""
        have_succeeded = True
        content = {
            "event": event,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": str(self._path),
            "host": socket.gethostname(),
            "exit_code": code,
            "data_sets": data_sets,
        }
        text, environment = json.dumps(content).encode(), {**os.environ, "LAYERTAP_EXIT_CODE": str(code)}
        for number, command in enumerate(self._on_failure, 1):
            try:
                subprocess.run(command, shell=True, input=text, timeout=_COMMAND_S, env=environment, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                # The log does not name the command, which may contain a password.
                log.error("command %d of on_failure failed: %s", number, type(error).__name__)
                have_succeeded = False
        return have_succeeded


def _failure(code: int, data_sets: list[dict[str, Any]]) -> str:
    """Return what tells a failure from another one; empty for a pass that did not fail."""
    if not code:
        return ""
    texts = (str(data_set.get("error", "")) for data_set in data_sets)
    parts = [[data_set.get("failed"), data_set.get("unreadable")] for data_set in data_sets]
    return json.dumps([code, parts, [re.sub(r"\d+", "0", text) for text in texts]])


def _parse_output(output: bytes) -> list[dict[str, Any]]:
    """Return what `sync --json` printed; nothing if the process was killed."""
    try:
        content = json.loads(output)
    except ValueError:
        return []
    return [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []


if __name__ == "__main__":  # a unit or a crontab of an earlier version
    sys.exit(f"layertap: print it again: layertap sync {sys.argv[1]} --schedule --print systemd")
