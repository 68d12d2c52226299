"""When passes run, in nights in which clocks change too; hooks; and the schedules written for systemd and cron."""

from __future__ import annotations

import json
import logging
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import tzlocal
from cronsim import CronSim

from extract.errors import InputError
from extract.system.folder_lock import locked
from pipelines.sync.config import ScheduleConfig, load_sync_file
from pipelines.sync.due_times import due_after, time_zone
from pipelines.sync.pass_process import PassProcess, PassResult
from pipelines.sync.schedule import _LOCKED, Scheduler
from pipelines.sync.schedule_log import open_log
from pipelines.sync.systemd import as_systemd
from tests.pipelines.test_cli import fails, layertap
from tests.pipelines.test_sync import SMALL, write

BERLIN = ZoneInfo("Europe/Berlin")
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
NIGHTLY = {"cron": "30 2 * * *", "timezone": "UTC"}


class SimulatedPass:
    """A pass that ends when the simulated clock has gone on for some time."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.end = simulation.elapsed + simulation.pass_lasts.total_seconds()
        self.code = simulation.code

    def wait(self, seconds: float) -> None:
        raise AssertionError("a simulation does not wait")

    def result(self) -> PassResult | None:
        return PassResult(self.code, "[]") if self.simulation.elapsed >= self.end else None

    def terminate(self) -> None:
        self.code = 143


class Simulation:
    """A scheduler with a clock that only the test moves; the passes take no time unless `pass_lasts` says so."""

    def __init__(self, config: Path, now: datetime):
        self.now, self.elapsed = now.astimezone(UTC), 0.0
        self.pass_lasts, self.code = timedelta(0), 0
        self.starts: list[datetime] = []
        self.scheduler = Scheduler(config, self._start_pass, lambda: self.now, lambda: self.elapsed)
        self.scheduler.start()

    def _start_pass(self) -> SimulatedPass:
        self.starts.append(self.now)
        return SimulatedPass(self)

    def look(self) -> None:
        self.scheduler.step()
        self.scheduler.step()  # ends a pass that takes no time

    def set_clock(self, now: datetime) -> None:
        """The wall clock is set, or the machine slept: no time passes on the other clock."""
        self.now = now.astimezone(UTC)
        self.look()

    def run_until(self, end: datetime, step: timedelta = MINUTE) -> None:
        """Let time pass in small steps."""
        while self.now < end.astimezone(UTC):
            self.now += step
            self.elapsed += step.total_seconds()
            self.look()


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Simulation]:
    def start(begin: datetime, last: datetime | None = None, **schedule: Any) -> Simulation:
        """A scheduler started at `begin`, whose data set had its last pass at `last`; None: it never had one."""
        config = write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "out"), schedule=schedule)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if last is not None:
            add_run(tmp_path / "out", last)
        return Simulation(config, begin)

    return start


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the scheduler logs in this test."""
    logger = logging.getLogger("layertap.schedule")
    before = logger.handlers[:], logger.level, logger.propagate
    collected: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: collected.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield collected
    logger.handlers[:], logger.level, logger.propagate = before


def add_run(folder: Path, started: datetime) -> None:
    folder.mkdir(exist_ok=True)
    run = {"event": "synced", "started": started.isoformat(), "seconds": 1}
    (folder / "runs.jsonl").write_text(json.dumps(run) + "\n")


def berlin(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=BERLIN, fold=fold)  # type: ignore[misc, arg-type]


def gaps(times: list[datetime]) -> set[timedelta]:
    return {later - earlier for earlier, later in pairwise(times)}


# when passes run


# Sundays of 2026, by hand from a calendar.
SUNDAYS = {
    1: [4, 11, 18, 25], 2: [1, 8, 15, 22], 3: [1, 8, 15, 22, 29], 4: [5, 12, 19, 26], 5: [3, 10, 17, 24, 31],
    6: [7, 14, 21, 28], 7: [5, 12, 19, 26], 8: [2, 9, 16, 23, 30], 9: [6, 13, 20, 27], 10: [4, 11, 18, 25],
    11: [1, 8, 15, 22, 29], 12: [6, 13, 20, 27],
}  # fmt: skip


def test_in_a_year_of_sundays_every_night_has_its_pass(simulate: Callable[..., Simulation]) -> None:
    """Half past two in Berlin is 1:30 UTC in winter and 0:30 in summer.

    On 29 March clocks go from two to three, which is 1:00 UTC.
    """
    expected = []
    for month, days in SUNDAYS.items():
        for day in days:
            hour, minute = (0, 30) if (3, 29) < (month, day) <= (10, 25) else (1, 30)
            if (month, day) == (3, 29):
                hour, minute = 1, 0
            expected.append(datetime(2026, month, day, hour, minute, tzinfo=UTC))
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    simulation = simulate(begin, last=begin, cron="30 2 * * SUN", timezone="Europe/Berlin")
    simulation.run_until(datetime(2027, 1, 1, tzinfo=UTC), 15 * MINUTE)
    assert simulation.starts == expected
    assert len(expected) == 52


def test_asleep_over_three_due_times_it_makes_one_pass(simulate: Callable[..., Simulation]) -> None:
    for schedule in ({"every": "1h"}, {"cron": "0 * * * *", "timezone": "UTC"}):
        begin = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
        simulation = simulate(begin, last=begin - 20 * SECOND, **schedule)
        simulation.run_until(begin + 70 * MINUTE)
        assert len(simulation.starts) == 1
        simulation.set_clock(begin + 4 * HOUR + 40 * MINUTE)  # three were due
        assert len(simulation.starts) == 2
        simulation.run_until(begin + 5 * HOUR + 5 * MINUTE)
        assert len(simulation.starts) == 3  # and the next one comes at its time
        assert simulation.starts[2] == datetime(2026, 6, 1, 17, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(("month", "day", "hours"), [(3, 29, 23), (10, 25, 25)])
def test_nights_in_which_clocks_change_skip_and_double_nothing(
    simulate: Callable[..., Simulation], month: int, day: int, hours: int
) -> None:
    begin, end = berlin(2026, month, day, 0, 0, 30) - DAY, berlin(2026, month, day, 23, 59)
    for time_of_day in ("0 2", "30 2", "59 1", "0 3"):
        simulation = simulate(begin, last=begin, cron=f"{time_of_day} * * *", timezone="Europe/Berlin")
        simulation.run_until(end, 5 * MINUTE)
        days = Counter(start.astimezone(BERLIN).day for start in simulation.starts)
        assert days == {day - 1: 1, day: 1}, time_of_day
    simulation = simulate(begin, last=begin, cron="*/20 * * * *", timezone="Europe/Berlin")
    simulation.run_until(end, 5 * MINUTE)
    that_day = [start for start in simulation.starts if start.astimezone(BERLIN).day == day]
    assert len(that_day) in (hours * 3, hours * 3 - 1)
    assert gaps(simulation.starts) == {20 * MINUTE}
    simulation = simulate(begin, last=begin, every="6h")
    simulation.run_until(end, 5 * MINUTE)
    assert gaps(simulation.starts) == {6 * HOUR}


def test_started_in_the_repeated_hour_it_does_not_repeat_the_pass_of_the_first(
    simulate: Callable[..., Simulation],
) -> None:
    last = berlin(2026, 10, 25, 2, 30)
    begin = berlin(2026, 10, 25, 2, 10, fold=1)
    assert begin.astimezone(UTC) - last.astimezone(UTC) == 40 * MINUTE
    simulation = simulate(begin, last=last, cron="30 2 * * *", timezone="Europe/Berlin")
    simulation.run_until(berlin(2026, 10, 26, 12), 10 * MINUTE)
    assert simulation.starts == [datetime(2026, 10, 26, 1, 30, tzinfo=UTC)]


def test_a_clock_that_is_set_skips_and_doubles_nothing(simulate: Callable[..., Simulation]) -> None:
    begin = datetime(2026, 6, 1, 1, 0, tzinfo=UTC)
    simulation = simulate(begin, last=begin, **NIGHTLY)
    simulation.set_clock(datetime(2026, 6, 1, 4, 0, tzinfo=UTC))  # forward, over its time
    assert len(simulation.starts) == 1
    simulation.set_clock(datetime(2026, 6, 1, 1, 30, tzinfo=UTC))  # back, before it
    simulation.run_until(datetime(2026, 6, 1, 12, 0, tzinfo=UTC), 5 * MINUTE)
    assert len(simulation.starts) == 1
    simulation.run_until(datetime(2026, 6, 2, 12, 0, tzinfo=UTC), 5 * MINUTE)
    assert len(simulation.starts) == 2
    simulation.set_clock(datetime(2030, 1, 1, 12, 0, tzinfo=UTC))  # a wrong clock, which is put right
    assert len(simulation.starts) == 3
    simulation.set_clock(datetime(2026, 6, 3, 1, 0, tzinfo=UTC))
    simulation.run_until(datetime(2026, 6, 3, 12, 0, tzinfo=UTC), 5 * MINUTE)
    assert len(simulation.starts) == 4


def test_started_by_a_wrong_clock_intervals_begin_again_when_it_is_put_right(
    simulate: Callable[..., Simulation], messages: list[str]
) -> None:
    wrong, right = datetime(2030, 1, 1, 12, 0, tzinfo=UTC), datetime(2026, 6, 1, 12, 0, 10, tzinfo=UTC)
    simulation = simulate(wrong, last=wrong - 90 * MINUTE, every="1h")
    simulation.look()
    assert simulation.starts == [wrong]
    simulation.set_clock(right)
    simulation.run_until(right + 3 * HOUR, 10 * SECOND)
    assert simulation.starts[1:] == [datetime(2026, 6, 1, hour, 0, tzinfo=UTC) for hour in (13, 14, 15)]
    assert [message for message in messages if "the clock was set back" in message]


def test_a_pass_that_was_due_while_nothing_ran_begins_at_once(simulate: Callable[..., Simulation]) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    for last, catch_up, schedule, passes in (
        (now - 2 * DAY, True, NIGHTLY, 1),
        (now - 2 * DAY, False, NIGHTLY, 0),
        (now - 9 * HOUR, True, NIGHTLY, 0),
        (now - 9 * HOUR, True, {"every": "6h"}, 1),
        (now - 9 * HOUR, False, {"every": "6h"}, 0),
        (now - 5 * HOUR, True, {"every": "6h"}, 0),
        (now + 900 * DAY, True, NIGHTLY, 1),  # of a clock that was wrong
        (None, True, {"every": "6h"}, 1),  # never had one
        (None, False, {"every": "6h"}, 0),
    ):
        simulation = simulate(now, last=last, catch_up=catch_up, **schedule)
        simulation.run_until(now + MINUTE)
        assert len(simulation.starts) == passes, (last, schedule)


def test_intervals_are_counted_from_the_last_start(simulate: Callable[..., Simulation]) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    for last, catch_up, hours in (
        (now - 5 * HOUR, True, [1, 7, 13, 19]),  # an hour is left
        (now - 9 * HOUR, True, [0, 6, 12, 18]),  # overdue: from now on
        (now - 9 * HOUR, False, [3, 9, 15, 21]),  # the one that was missed is not made up for
        (None, False, [6, 12, 18]),
    ):
        simulation = simulate(now, last=last, catch_up=catch_up, every="6h")
        simulation.look()
        simulation.run_until(now + 23 * HOUR)
        assert simulation.starts == [now + hour * HOUR for hour in hours]


def test_the_data_set_whose_last_pass_is_longest_ago_decides_what_is_overdue(tmp_path: Path) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    data_sets = [{"images": "x", "out": str(tmp_path / name)} for name in ("a", "b")]
    config = write(tmp_path / "s.yaml", data_sets=data_sets, schedule={"every": "6h"})
    add_run(tmp_path / "a", now - HOUR)
    for last, passes in ((now - 5 * HOUR, 0), (now - 7 * HOUR, 1)):
        add_run(tmp_path / "b", last)
        simulation = Simulation(config, now)
        simulation.look()
        assert len(simulation.starts) == passes


def test_jitter_delays_each_pass_by_chance_and_not_the_due_times(simulate: Callable[..., Simulation]) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    simulation = simulate(begin, last=begin, every="1h", jitter="10m")
    simulation.run_until(begin + 100 * HOUR + 30 * MINUTE, 30 * SECOND)
    assert len(simulation.starts) == 100
    delays = [start - begin - (number + 1) * HOUR for number, start in enumerate(simulation.starts)]
    assert timedelta(0) <= min(delays) < 3 * MINUTE  # missed by chance once in 10^15 runs
    assert 7 * MINUTE < max(delays) <= 10 * MINUTE + 30 * SECOND


def test_a_pass_that_waits_for_its_jitter_when_it_is_stopped_does_not_start(
    simulate: Callable[..., Simulation],
) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    random.seed(0)  # a delay of 101 minutes
    simulation = simulate(begin, last=begin, every="1h", jitter="2h")
    simulation.run_until(begin + 61 * MINUTE)
    simulation.scheduler.stop()
    assert simulation.scheduler.stopped
    simulation.run_until(begin + 5 * DAY, HOUR)
    assert simulation.starts == []


# long passes, failures, hooks


def test_passes_that_are_due_during_a_long_one_are_skipped(
    simulate: Callable[..., Simulation], messages: list[str]
) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    simulation = simulate(begin, last=begin, every="1h")
    simulation.pass_lasts = 150 * MINUTE  # from 1:00 to 3:30
    simulation.run_until(begin + 4 * HOUR + MINUTE)
    assert simulation.starts == [begin + HOUR, begin + 4 * HOUR]
    skipped = [message for message in messages if "skipped" in message]
    assert [message.partition("running for ")[2] for message in skipped] == ["1.0 h", "2.0 h"]


def test_a_pass_that_runs_for_a_day_is_reported_as_a_failure_once(
    simulate: Callable[..., Simulation], tmp_path: Path
) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    hooks = {"on_failure": f"cat >> {tmp_path}/failed", "on_success": f"touch {tmp_path}/succeeded"}
    simulation = simulate(begin, last=begin, every="1h", **hooks)
    simulation.pass_lasts = 30 * HOUR  # from 1:00 to 7:00 of the next day
    simulation.run_until(begin + 24 * HOUR + 30 * MINUTE)
    assert not (tmp_path / "failed").exists()
    simulation.run_until(begin + 25 * HOUR)
    until(lambda: not simulation.scheduler._hooks_running())
    simulation.run_until(begin + 30 * HOUR + 30 * MINUTE)
    until(lambda: not simulation.scheduler._hooks_running())
    content = json.loads((tmp_path / "failed").read_text())  # two would not be JSON
    assert content["exit_code"] == 1
    assert "running for 24.0 h" in content["data_sets"][0]["error"]
    assert simulation.starts == [begin + HOUR]
    assert not (tmp_path / "succeeded").exists()
    simulation.run_until(begin + 31 * HOUR)
    until(lambda: (tmp_path / "succeeded").exists())
    until(lambda: not simulation.scheduler._hooks_running())  # their messages belong to this test


def test_a_data_set_that_another_process_has_locked_is_an_alarm_after_a_day_only(
    simulate: Callable[..., Simulation], tmp_path: Path, messages: list[str]
) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    hooks = {"on_failure": f"cat >> {tmp_path}/failed", "on_success": f"touch {tmp_path}/succeeded"}
    simulation = simulate(begin, last=begin, every="1h", **hooks)
    simulation.code = 4
    simulation.run_until(begin + 24 * HOUR + 30 * MINUTE)
    skipped = [message for message in messages if "another process is at work" in message]
    assert len(skipped) == len(simulation.starts) == 24
    assert skipped[0].endswith("data set")
    assert skipped[-1].endswith("for 23.0 h now")
    assert not any("failed" in message for message in messages)
    assert not (tmp_path / "failed").exists()
    simulation.run_until(begin + 28 * HOUR + 30 * MINUTE)
    until(lambda: not simulation.scheduler._hooks_running())
    content = json.loads((tmp_path / "failed").read_text())  # two would not be JSON
    assert "another process is at work on a data set, for 24.0 h now" in content["data_sets"][0]["error"]
    assert not (tmp_path / "succeeded").exists()
    simulation.code = 0
    simulation.run_until(begin + 29 * HOUR + 30 * MINUTE)
    until(lambda: (tmp_path / "succeeded").exists())
    simulation.code = 4  # counted anew
    simulation.run_until(begin + 52 * HOUR)
    json.loads((tmp_path / "failed").read_text())


def test_a_scheduler_beside_a_pass_of_a_killed_one_raises_no_alarm(tmp_path: Path) -> None:
    """A real pass that finds the lock held ends with the exit code that the scheduler knows."""
    folder = tmp_path / "photos"
    folder.mkdir()
    config = write(tmp_path / "s.yaml", images=str(folder), out=str(tmp_path / "out"), **SMALL)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.sqlite").touch()
    with locked(tmp_path / "out"):
        assert layertap("sync", config).exit_code == _LOCKED


def test_a_pass_is_over_when_its_hooks_are(
    simulate: Callable[..., Simulation], tmp_path: Path, messages: list[str]
) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    simulation = simulate(begin, last=begin, every="1h", on_success=f"cat {pipe}")
    simulation.run_until(begin + 2 * HOUR)
    assert simulation.starts == [begin + HOUR]
    assert len([message for message in messages if "skipped" in message]) == 1
    simulation.scheduler.stop()
    assert not simulation.scheduler.stopped
    pipe.write_text("the hook ends")
    until(lambda: simulation.scheduler.stopped)


def test_a_pass_that_cannot_be_started_is_a_failure_and_the_next_one_comes(tmp_path: Path, messages: list[str]) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    now, attempts = begin, 0

    def no_memory() -> SimulatedPass:
        nonlocal attempts
        attempts += 1
        raise OSError("Cannot allocate memory")

    schedule = {"every": "1h", "on_failure": f"cat > {tmp_path}/failed"}
    config = write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "out"), schedule=schedule)
    scheduler = Scheduler(config, no_memory, lambda: now)
    scheduler.start()
    for hours in range(3):
        now = begin + hours * HOUR
        scheduler.step()
        until(lambda: not scheduler._hooks_running())
    assert attempts == 3
    told = json.loads((tmp_path / "failed").read_text())
    assert told["data_sets"] == [{"error": "the pass cannot be started: Cannot allocate memory"}]
    assert told["exit_code"] == 1
    assert messages.count("the pass failed with exit code 1") == 3


def test_a_stopped_scheduler_waits_for_its_pass_and_calls_no_hook_for_it(
    simulate: Callable[..., Simulation], tmp_path: Path
) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    heartbeat = tmp_path / "alive"
    simulation = simulate(begin, every="1h", on_failure=f"touch {tmp_path}/failed", heartbeat=str(heartbeat))
    simulation.pass_lasts = 2 * HOUR
    simulation.run_until(begin + 10 * MINUTE)
    simulation.scheduler._on_signal(signal.SIGTERM, None)
    heartbeat.unlink()
    simulation.run_until(begin + 119 * MINUTE)
    assert not simulation.scheduler.stopped
    assert heartbeat.exists()  # a watchdog must not kill it while it waits
    simulation.run_until(begin + 2 * HOUR + MINUTE)
    assert simulation.scheduler.stopped
    assert len(simulation.starts) == 1
    assert not (tmp_path / "failed").exists()


def test_the_heartbeat_is_touched_every_30_seconds(simulate: Callable[..., Simulation], tmp_path: Path) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    heartbeat = tmp_path / "alive"
    simulation = simulate(begin, last=begin, every="1h", heartbeat=str(heartbeat))
    touched = []
    heartbeat.unlink()
    for _ in range(300):
        simulation.run_until(simulation.now + SECOND, SECOND)
        if heartbeat.exists():
            touched.append((simulation.now - begin).total_seconds())
            heartbeat.unlink()
    assert touched == [30.0 * number for number in range(1, 11)]


# the config file, and schedule.json


def test_the_next_due_time_is_noted_where_a_data_set_is(simulate: Callable[..., Simulation], tmp_path: Path) -> None:
    begin = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
    simulation = simulate(begin, last=begin, cron="30 2 * * *", timezone="Europe/Berlin")
    note = tmp_path / "out" / "schedule.json"
    assert not note.exists()  # nothing is published yet
    (tmp_path / "out" / "dataset.json").touch()
    for day in (2, 3):
        simulation.run_until(datetime(2026, 6, day, 0, 0, tzinfo=UTC))
        content = json.loads(note.read_text())
        assert content["next"] == f"2026-06-0{day}T02:30:00+02:00"
        assert content["pid"] == os.getpid()
        assert content["config"] == str(tmp_path / "s.yaml")
    note.unlink()
    simulation.run_until(simulation.now + MINUTE)
    assert note.exists()
    simulation.scheduler.stop()
    note.unlink()
    simulation.run_until(simulation.now + HOUR)
    assert not note.exists()


def test_a_config_that_is_read_again_has_new_times_and_its_own_note(
    simulate: Callable[..., Simulation], tmp_path: Path
) -> None:
    begin = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
    simulation = simulate(begin, last=begin, **NIGHTLY)
    for name in ("out", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "dataset.json").touch()
    add_run(tmp_path / "other", begin - 30 * MINUTE)
    simulation.run_until(begin + MINUTE)
    assert (tmp_path / "out/schedule.json").exists()
    schedule = {"every": "2h", "log": str(tmp_path / "log")}
    write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "other"), schedule=schedule)
    simulation.scheduler._on_signal(signal.SIGHUP, None)
    simulation.look()
    assert not (tmp_path / "out/schedule.json").exists()
    assert json.loads((tmp_path / "other/schedule.json").read_text())["next"] == "2026-06-01T13:30:00+00:00"
    write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "out"), schedule={"every": "never"})
    simulation.scheduler._on_signal(signal.SIGHUP, None)
    simulation.run_until(begin + 4 * HOUR)
    assert simulation.starts == [begin + 90 * MINUTE, begin + 210 * MINUTE]
    assert "the config is not reloaded" in (tmp_path / "log").read_text()


def test_a_pass_that_is_due_when_the_config_is_read_again_is_not_lost(simulate: Callable[..., Simulation]) -> None:
    begin = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
    simulation = simulate(begin, last=begin, every="1h")
    simulation.run_until(begin + 59 * MINUTE)
    simulation.scheduler._on_signal(signal.SIGHUP, None)
    simulation.run_until(begin + 60 * MINUTE)
    assert simulation.starts == [begin + HOUR]


# The log


class KilledError(BaseException):
    """The process is killed here; no line of code after that runs."""


def write_log(config: ScheduleConfig, numbers: range) -> None:
    open_log(config)
    for number in numbers:
        logging.getLogger("layertap.schedule").info("line %d %s", number, "x" * 200)


def lines_of(log: Path) -> list[int]:
    """Numbers of the lines in the log and its rotated files, oldest first."""
    files = sorted(log.parent.glob("log.*"), key=lambda path: -int(path.suffix[1:]))
    text = "".join(path.read_text() for path in [*files, *([log] if log.exists() else [])])
    return [int(line.split("line ")[1].split()[0]) for line in text.splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"
    logger = logging.getLogger("layertap.schedule")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()


def test_the_log_is_rotated_at_its_size_and_its_oldest_lines_are_removed(log: Path) -> None:
    config = ScheduleConfig(every=60, log=log, log_max_bytes="2kB", log_backup_count=3)
    line = len("2026-11-25 01:57:15,123 INFO line 10 ") + 200 + 1
    write_log(config, range(10, 60))
    assert sorted(path.name for path in log.parent.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    assert all(2000 - line < path.stat().st_size <= 2000 for path in log.parent.glob("log.*"))
    kept = 3 * (2000 // line) + log.stat().st_size // line
    assert lines_of(log) == list(range(60 - kept, 60))


@pytest.mark.parametrize("step", range(4))
def test_a_scheduler_that_is_killed_while_it_rotates_its_log_loses_none_of_the_lines_that_are_kept(
    step: int, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ScheduleConfig(every=60, log=log, log_max_bytes="1kB", log_backup_count=3)
    write_log(config, range(10, 26))  # four lines a file: the next one needs a rotation, and the oldest file goes
    assert lines_of(log) == list(range(10, 26))
    steps = iter(range(4))

    def until_killed(name: str) -> Callable[..., None]:
        function = getattr(os, name)

        def change(*paths: str) -> None:
            if next(steps) == step:
                raise KilledError
            function(*paths)

        return change

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        for name in ("rename", "remove"):
            patch.setattr(os, name, until_killed(name))
        write_log(config, range(26, 27))
    before = lines_of(log)
    assert before == list(range(before[0], before[-1] + 1))
    assert before[0] <= 14
    assert before[-1] >= 25
    write_log(config, range(before[-1] + 1, 50))
    after = lines_of(log)
    assert after == list(range(after[0], 50))
    assert len(after) >= 13


@pytest.mark.parametrize(
    ("given", "expected"),
    [("500kB", 500_000), ("10MB", 10_000_000), ("1.5 gb", 1_500_000_000), (4096, 4096), ("0", 0), ("1000b", 1000)],
)
def test_the_size_of_a_log_may_have_a_unit(given: Any, expected: int) -> None:
    assert ScheduleConfig(every=60, log_max_bytes=given).log_max_bytes == expected


@pytest.mark.parametrize(
    ("key", "given", "reason"),
    [
        ("log_max_bytes", "10 boxes", "expected bytes, or a size such as 500kB, 10MB or 1GB"),
        ("log_max_bytes", 999, "expected 1kB to 1000GB, or 0"),
        ("log_max_bytes", -1, "expected 1kB to 1000GB, or 0"),
        ("log_max_bytes", "1001GB", "expected 1kB to 1000GB, or 0"),
        ("log_backup_count", 0, "greater than or equal to 1"),
        ("log_backup_count", 1001, "less than or equal to 1000"),
    ],
)
def test_a_log_without_limits_is_refused(key: str, given: Any, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "o"), schedule={"every": "1h", key: given})
    with pytest.raises(InputError, match=f"s.yaml, schedule: {key}: .*{reason}"):
        load_sync_file(path)


def test_a_log_that_is_never_rotated_is_opened_again_when_the_config_is(log: Path) -> None:
    config = ScheduleConfig(every=60, log=log, log_max_bytes=0)
    write_log(config, range(10, 60))
    log.rename(log.with_name("log.1"))  # as logrotate does, before it sends SIGHUP
    write_log(config, range(60, 110))
    assert lines_of(log) == list(range(10, 110))
    assert len(list(log.parent.iterdir())) == 2


def test_a_machine_whose_time_zone_has_no_name_needs_one_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> ZoneInfo:
        return ZoneInfo("CET-1CEST,M3.5.0,M10.5.0/3")

    monkeypatch.setattr("pipelines.sync.due_times.get_localzone", unknown)
    with pytest.raises(InputError, match="timezone: Europe/Berlin"):
        time_zone(ScheduleConfig(cron="30 2 * * *"))
    assert time_zone(ScheduleConfig(cron="30 2 * * *", timezone="Europe/Berlin")) == BERLIN
    assert time_zone(ScheduleConfig(every=60)) is UTC


def test_without_a_time_zone_cron_lines_are_read_in_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    monkeypatch.setenv("TZ", "Asia/Tokyo")  # nine hours before UTC
    try:
        tzlocal.reload_localzone()
        due = due_after(ScheduleConfig(cron="0 12 * * *"), now, now)
        assert due == now + 3 * HOUR
        assert due.tzinfo is UTC
    finally:
        monkeypatch.undo()
        tzlocal.reload_localzone()


def test_a_cron_line_whose_day_never_comes_is_never_due(simulate: Callable[..., Simulation]) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    leap_sunday = ScheduleConfig(cron="0 0 29 2 */7", timezone="UTC")
    assert due_after(leap_sunday, now, now) == datetime(2032, 2, 29, tzinfo=UTC)
    first_and_third_sunday = {"cron": "0 0 */31 * SUN#3", "timezone": "UTC"}
    simulation = simulate(now, last=now, **first_and_third_sunday)
    simulation.run_until(now + 100 * DAY, HOUR)
    simulation.set_clock(now)
    assert simulation.scheduler.next_due is None
    assert simulation.starts == []


@pytest.mark.parametrize("config", [ScheduleConfig(every=60), ScheduleConfig(cron="0 12 * * *", timezone="UTC")])
def test_a_clock_at_the_end_of_the_year_9999_is_refused(config: ScheduleConfig) -> None:
    now = datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC)
    with pytest.raises(InputError, match="says 9999-12-31T23:59:30.*; set the clock"):
        due_after(config, now, now)


# the process


def finish(process: PassProcess, seconds: float = 20) -> PassResult:
    end = time.monotonic() + seconds
    while (result := process.result()) is None:
        assert time.monotonic() < end
        process.wait(0.2)
    return result


def test_everything_that_a_pass_prints_is_read(messages: list[str]) -> None:
    code = (
        "import os\n"
        "os.write(2, b'first\\nsec')\n"
        "os.write(1, b'x' * 1_000_000)\n"  # more than a pipe holds
        "os.write(2, b'ond \\xff\\r\\nlast')\n"
        "os._exit(3)\n"
    )
    result = finish(PassProcess([sys.executable, "-c", code]))
    assert result == PassResult(3, "x" * 1_000_000)
    assert messages == ["sync: first", r"sync: second \xff", "sync: last"]


def test_a_pass_is_over_when_its_workers_are(tmp_path: Path) -> None:
    """They keep the lock of the data set that they have inherited."""
    begin = time.monotonic()
    assert finish(PassProcess(["sh", "-c", "sleep 0.3 & exit 0"])).code == 0
    assert time.monotonic() - begin >= 0.3


def test_a_pass_is_asked_to_end_by_sigterm() -> None:
    process = PassProcess(["sleep", "60"])
    process.wait(0.05)
    assert process.result() is None
    process.terminate()
    assert finish(process).code == -signal.SIGTERM


def run_schedule(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "layertap", "schedule", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_process_makes_passes_tells_of_them_and_stops_in_order(folder: Path, tmp_path: Path) -> None:
    told: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    out, log = tmp_path / "out", tmp_path / "log"
    schedule = {
        "every": "1s", "log": str(log), "log_json": True, "heartbeat": str(tmp_path / "alive"),
        "on_success": [f"cat > {tmp_path}/hook.json; exit $LAYERTAP_EXIT_CODE", f"http://127.0.0.1:{server.server_port}"],
        "on_failure": f"touch {tmp_path}/failed",
    }  # fmt: skip
    config = write(tmp_path / "s.yaml", images=str(folder), out=str(out), schedule=schedule, **SMALL)
    process = run_schedule(config)
    try:
        until(lambda: len(told) >= 2)
        assert told[0]["data_sets"][0]["added"] == 12
        assert told[0]["exit_code"] == 0
        assert json.loads((tmp_path / "hook.json").read_text())["config"] == str(config)
        assert (tmp_path / "alive").exists()
        until(lambda: (out / "schedule.json").exists())
        noted = json.loads(layertap("status", out, "--json").stdout)["next"]
        assert (noted["pid"], noted["alive"]) == (process.pid, True)
        assert "by the scheduler of process" in layertap("status", out).stdout
        assert not (tmp_path / "failed").exists()
        # a config that is wrong is not taken over, and one that is right is
        write(config, images=str(folder), schedule={"every": "never"})
        process.send_signal(signal.SIGHUP)
        until(lambda: "the config is not reloaded" in log.read_text())
        write(config, images=str(tmp_path / "gone"), out=str(out), schedule={**schedule, "every": "2s"}, **SMALL)
        process.send_signal(signal.SIGHUP)
        until(lambda: (tmp_path / "failed").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        server.shutdown()
    assert not (out / "schedule.json").exists()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["level"] for line in lines} - {"warning"} == {"info", "error"}
    assert lines[-1]["message"] == "stopped"
    assert any("is skipped" in line["message"] for line in lines)  # a pass takes longer than a second
    assert next(line["result"]["added"] for line in lines if "added" in line.get("result", {})) == 12


@pytest.mark.slow
def test_a_process_that_slept_makes_one_pass(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = write(tmp_path / "s.yaml", images=str(folder), out=str(out), schedule={"every": "3s"}, **SMALL)
    process = run_schedule(config)

    def runs() -> int:
        return len((out / "runs.jsonl").read_text().splitlines()) if (out / "runs.jsonl").exists() else 0

    try:
        until(lambda: runs() >= 2)  # the second is quick
        count = runs()
        process.send_signal(signal.SIGSTOP)
        time.sleep(10)  # three are due
        assert runs() == count
        process.send_signal(signal.SIGCONT)
        until(lambda: runs() == count + 1)
        time.sleep(1)
        assert runs() == count + 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_schedule_needs_one(tmp_path: Path) -> None:
    config = write(tmp_path / "s.yaml", images="x")
    assert "the key `schedule` is missing" in fails("schedule", config)
    assert "the key `schedule` is missing" in fails("schedule", config, "--print", "cron")


# for other schedulers

LINES = ["30 2 * * *", "*/15 * * * *", "0 6,18 * * 1-5", "5 4 1,15 * *", "0 0 13 * 5", "0 3 * 1-3 7", "0 22 * * SUN"]
LINES += ["0 2 * * */2", "0 2 */2 * 1"]


@pytest.mark.parametrize("line", LINES)
def test_systemd_is_told_the_times_of_the_cron_line(tmp_path: Path, line: str) -> None:
    schedule = {"cron": line, "timezone": "Europe/Berlin", "jitter": "5m", "on_failure": "x"}
    file = load_sync_file(write(tmp_path / "a b%c.yaml", images="x", schedule=schedule))
    text = as_systemd(file)
    assert "Persistent=true" in text
    assert "RandomizedDelaySec=300s" in text
    assert f"User={pwd.getpwuid(os.geteuid()).pw_name}" in text.splitlines()
    events = [part.removeprefix("OnCalendar=") for part in text.splitlines() if part.startswith("OnCalendar=")]
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    begin = datetime(2026, 11, 21, 12, tzinfo=BERLIN)
    expected = CronSim(line, begin)
    times = set()
    for event in events:
        command = [
            "systemd-analyze",
            "calendar",
            "--iterations=6",
            "--base-time=2026-11-21 11:00:00 UTC",
            event,
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        times |= {one.split(": ", 1)[1] for one in run.stdout.splitlines() if "Next elapse:" in one or "Iter. #" in one}
    stamps = sorted({_stamp(one) for one in times if _stamp(one)})[:6]
    assert stamps == [next(expected).astimezone(UTC) for _ in stamps]
    assert len(stamps) == 6


def _stamp(text: str) -> datetime | None:
    words = text.split()
    if len(words) < 4 or words[3] != "UTC":
        return None
    return datetime.fromisoformat(f"{words[1]}T{words[2]}+00:00")


def test_units_pass_the_checker_of_systemd(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    for schedule in ({"cron": "30 2 * * *"}, {"every": "90s", "jitter": 10}):
        text = as_systemd(load_sync_file(write(tmp_path / "a 'b\" %c$d.yaml", images="x", schedule=schedule)))
        files: dict[str, str] = {}
        for part in text.split("# /etc/systemd/system/")[1:]:
            name, _, content = part.partition("\n")
            files[name] = content
        assert [name.rpartition(".")[2] for name in files] == ["service", "timer"]
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        command = ["systemd-analyze", "verify", *(str(tmp_path / name) for name in files)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert not [line for line in run.stderr.splitlines() if str(tmp_path) in line or "layertap" in line]


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({"cron": "30 2 * * 1-5"}, "30 2 * * 1-5"),
        ({"every": "15m"}, "*/15 * * * *"),
        ({"every": "6h"}, "0 */6 * * *"),
        ({"every": "1h"}, "0 */1 * * *"),
        ({"every": "1d"}, "0 0 * * *"),
    ],
)
def test_cron_is_given_a_line_that_it_understands(tmp_path: Path, schedule: dict[str, Any], line: str) -> None:
    config = write(tmp_path / "50% off.yaml", images="x", schedule={**schedule, "timezone": "Europe/Berlin"})
    *comments, zone, last = layertap("schedule", config, "--print", "cron").stdout.strip().splitlines()
    assert all(comment.startswith("#") for comment in comments)
    assert zone == "CRON_TZ=Europe/Berlin"
    assert last.startswith(f"{line} cd ")
    assert last.endswith(r"50\% off.yaml'")
    CronSim(" ".join(last.split()[:5]), datetime.now(UTC))


def test_times_that_others_cannot_keep_are_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "s.yaml", images="x", schedule={"every": "7m"})
    assert "cron cannot run a pass every 420 s" in fails("schedule", config, "--print", "cron")
    config = write(tmp_path / "s.yaml", images="x", schedule={"cron": "0 0 L * *"})
    assert "systemd cannot express the days" in fails("schedule", config, "--print", "systemd")
