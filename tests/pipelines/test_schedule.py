"""When passes run, in nights in which clocks change too; failures; and the schedules written for systemd and cron."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import tzlocal
from cronsim import CronSim

from extract.errors import InputError
from pipelines.sync.config import ScheduleConfig, load_sync_file
from pipelines.sync.schedule import _LOCKED, PassRunner, due_after, run_passes, time_zone
from pipelines.sync.systemd import as_systemd
from tests.pipelines.conftest import until
from tests.pipelines.test_cli import fails, layertap
from tests.pipelines.test_sync import SMALL, write

BERLIN = ZoneInfo("Europe/Berlin")
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SKIPPED = "WARNING the pass was skipped: another process is at work on a data set"
NIGHTLY = {"cron": "30 2 * * *", "timezone": "UTC"}


class Clock:
    """A wall clock that only the test moves."""

    def __init__(self, now: datetime):
        self.now = now.astimezone(UTC)


Move = Callable[[Clock], Iterator[None]]
Simulate = Callable[..., list[datetime]]


def passing(end: datetime, step: timedelta = MINUTE) -> Move:
    """Time passes in small steps."""

    def move(clock: Clock) -> Iterator[None]:
        while clock.now < end.astimezone(UTC):
            clock.now += step
            yield

    return move


def set_to(now: datetime) -> Move:
    """The clock is set, or the machine slept."""

    def move(clock: Clock) -> Iterator[None]:
        clock.now = now.astimezone(UTC)
        yield

    return move


def starts_of(config: Path, begin: datetime, *moves: Move, lasts: timedelta = timedelta(0)) -> list[datetime]:
    """Return when a scheduler starts passes that runs from `begin` until the moves of its clock are done."""
    clock = Clock(begin)
    starts: list[datetime] = []
    moved = chain.from_iterable(move(clock) for move in moves)
    is_over: list[bool] = []

    def run_pass() -> None:
        starts.append(clock.now)
        clock.now += lasts

    def sleep(seconds: float) -> None:
        if next(moved, "over") == "over":
            is_over.append(True)

    run_passes(load_sync_file(config), run_pass, lambda: bool(is_over), lambda: clock.now, sleep)
    return starts


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    def simulate(
        begin: datetime, *moves: Move, last: datetime | None = None, lasts: timedelta = timedelta(0), **schedule: Any
    ) -> list[datetime]:
        """Starts of passes of a data set that had its last pass at `last`; None: it never had one."""
        config = write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "out"), schedule=schedule)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if last is not None:
            add_run(tmp_path / "out", last)
        return starts_of(config, begin, *moves, lasts=lasts)

    return simulate


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the scheduler logs in this test."""
    logger = logging.getLogger("layertap.schedule")
    before = logger.handlers[:], logger.level, logger.propagate
    collected: list[str] = []
    handler = logging.Handler()
    level = {logging.INFO: ""}
    handler.emit = lambda record: collected.append(  # type: ignore[method-assign]
        level.get(record.levelno, f"{record.levelname} ") + record.getMessage()
    )
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


def test_in_a_year_of_sundays_every_night_has_its_pass(simulate: Simulate) -> None:
    """Half past two in Berlin is 1:30 UTC in winter and 0:30 in summer.

    On 29 March clocks go from two to three, which is 1:00 UTC. 4 January 2026 was a Sunday.
    """
    spring, autumn = datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)
    sundays = [datetime(2026, 1, 4, tzinfo=UTC) + 7 * week * DAY for week in range(52)]
    expected = [
        sunday + (HOUR if sunday == spring else 30 * MINUTE if spring < sunday <= autumn else 90 * MINUTE)
        for sunday in sundays
    ]
    begin, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
    year = passing(end, 15 * MINUTE)
    assert simulate(begin, year, last=begin, cron="30 2 * * SUN", timezone="Europe/Berlin") == expected


def test_asleep_over_three_due_times_it_makes_one_pass(simulate: Simulate) -> None:
    for schedule in ({"every": "1h"}, {"cron": "0 * * * *", "timezone": "UTC"}):
        begin = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
        awake = begin + 4 * HOUR + 40 * MINUTE  # three were due
        moves = passing(begin + 70 * MINUTE), set_to(awake), passing(begin + 5 * HOUR + 5 * MINUTE)
        starts = simulate(begin, *moves, last=begin - 20 * SECOND, **schedule)
        assert starts[1:] == [awake, datetime(2026, 6, 1, 17, 0, 30, tzinfo=UTC)]  # and the next one comes at its time
        assert len(starts) == 3


@pytest.mark.parametrize(("month", "day", "hours"), [(3, 29, 23), (10, 25, 25)])
def test_nights_in_which_clocks_change_skip_and_double_nothing(
    simulate: Simulate, month: int, day: int, hours: int
) -> None:
    begin = berlin(2026, month, day, 0, 0, 30) - DAY
    two_days = passing(berlin(2026, month, day, 23, 59), 5 * MINUTE)
    for time_of_day in ("0 2", "30 2", "59 1", "0 3"):
        starts = simulate(begin, two_days, last=begin, cron=f"{time_of_day} * * *", timezone="Europe/Berlin")
        days = Counter(start.astimezone(BERLIN).day for start in starts)
        assert days == {day - 1: 1, day: 1}, time_of_day
    starts = simulate(begin, two_days, last=begin, cron="*/20 * * * *", timezone="Europe/Berlin")
    that_day = [start for start in starts if start.astimezone(BERLIN).day == day]
    assert len(that_day) in (hours * 3, hours * 3 - 1)
    assert gaps(starts) == {20 * MINUTE}
    assert gaps(simulate(begin, two_days, last=begin, every="6h")) == {6 * HOUR}


def test_started_in_the_repeated_hour_it_does_not_repeat_the_pass_of_the_first(simulate: Simulate) -> None:
    last = berlin(2026, 10, 25, 2, 30)
    begin = berlin(2026, 10, 25, 2, 10, fold=1)
    assert begin.astimezone(UTC) - last.astimezone(UTC) == 40 * MINUTE
    a_day = passing(berlin(2026, 10, 26, 12), 10 * MINUTE)
    starts = simulate(begin, a_day, last=last, cron="30 2 * * *", timezone="Europe/Berlin")
    assert starts == [datetime(2026, 10, 26, 1, 30, tzinfo=UTC)]


def test_a_clock_that_is_set_skips_nothing(simulate: Simulate) -> None:
    """A clock that is set back may repeat a pass, which then finds nothing to do."""
    begin = datetime(2026, 6, 1, 1, 0, tzinfo=UTC)
    forward, wrong = datetime(2026, 6, 1, 4, 0, tzinfo=UTC), datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
    starts = simulate(
        begin,
        set_to(forward),  # over its time
        set_to(datetime(2026, 6, 1, 1, 30, tzinfo=UTC)),  # back, before it
        passing(datetime(2026, 6, 2, 12, 0, tzinfo=UTC), 5 * MINUTE),
        set_to(wrong),
        set_to(datetime(2026, 6, 3, 1, 0, tzinfo=UTC)),
        passing(datetime(2026, 6, 3, 12, 0, tzinfo=UTC), 5 * MINUTE),
        last=begin,
        **NIGHTLY,
    )
    nights = [datetime(2026, 6, day, 2, 30, tzinfo=UTC) for day in (1, 2, 3)]
    assert starts == [forward, nights[0], nights[1], wrong, nights[2]]


def test_started_by_a_wrong_clock_intervals_begin_again_when_it_is_put_right(
    simulate: Simulate, messages: list[str]
) -> None:
    wrong, right = datetime(2030, 1, 1, 12, 0, tzinfo=UTC), datetime(2026, 6, 1, 12, 0, 10, tzinfo=UTC)
    moves = set_to(right), passing(right + 3 * HOUR, 10 * SECOND)
    starts = simulate(wrong, *moves, last=wrong - 90 * MINUTE, every="1h")
    assert starts == [wrong, *(datetime(2026, 6, 1, hour, 0, tzinfo=UTC) for hour in (13, 14, 15))]
    assert [message for message in messages if "the clock was set back" in message]


def test_a_pass_that_was_due_while_nothing_ran_begins_at_once(simulate: Simulate) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    for last, catch_up, schedule, passes in (
        (now - 2 * DAY, True, NIGHTLY, 1),
        (now - 2 * DAY, False, NIGHTLY, 0),
        (now - 9 * HOUR, True, NIGHTLY, 0),
        (now + 900 * DAY, True, NIGHTLY, 1),  # of a clock that was wrong
        (now.replace(tzinfo=None) - 9 * HOUR, True, {"every": "6h"}, 1),  # written by another program
        (None, True, {"every": "6h"}, 1),  # never had one
    ):
        starts = simulate(now, passing(now + MINUTE), last=last, catch_up=catch_up, **schedule)
        assert len(starts) == passes, (last, schedule)


def test_intervals_are_counted_from_the_last_start(simulate: Simulate) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    for last, catch_up, hours in (
        (now - 5 * HOUR, True, [1, 7, 13, 19]),  # an hour is left
        (now - 9 * HOUR, True, [0, 6, 12, 18]),  # overdue: from now on
        (now - 9 * HOUR, False, [3, 9, 15, 21]),  # the one that was missed is not made up for
        (None, False, [6, 12, 18]),
    ):
        starts = simulate(now, passing(now + 23 * HOUR), last=last, catch_up=catch_up, every="6h")
        assert starts == [now + hour * HOUR for hour in hours]


def test_the_data_set_whose_last_pass_is_longest_ago_decides_what_is_overdue(tmp_path: Path) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    data_sets = [{"images": "x", "out": str(tmp_path / name)} for name in ("a", "b")]
    config = write(tmp_path / "s.yaml", data_sets=data_sets, schedule={"every": "6h"})
    add_run(tmp_path / "a", now - HOUR)
    for last, passes in ((now - 5 * HOUR, 0), (now - 7 * HOUR, 1)):
        add_run(tmp_path / "b", last)
        assert len(starts_of(config, now, passing(now + MINUTE))) == passes


def test_passes_that_are_due_during_a_long_one_are_skipped(simulate: Simulate) -> None:
    begin = datetime(2026, 6, 1, 0, 0, tzinfo=UTC)
    long = 150 * MINUTE  # from 1:00 to 3:30
    starts = simulate(begin, passing(begin + 4 * HOUR + MINUTE), last=begin, every="1h", lasts=long)
    assert starts == [begin + HOUR, begin + 4 * HOUR]


# a pass


def runner_of(tmp_path: Path, code: str, **schedule: Any) -> PassRunner:
    """A runner whose passes are a Python program."""
    schedule = {"every": "1h", **schedule}
    file = load_sync_file(write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "out"), schedule=schedule))
    return PassRunner(file, [sys.executable, "-S", "-c", code])


def test_what_a_pass_prints_is_logged_and_given_to_the_commands_of_on_failure(
    tmp_path: Path, messages: list[str]
) -> None:
    done = {"out": "a\x1b[2J", "version": 3, "added": 1200, "computed": 2, "seconds": 0.5}
    printed = [done, {"out": "b", "error": "the disk is gone"}]
    code = f"import os; os.write(1, {json.dumps(printed)!r}.encode()); os._exit(3)"
    secret = f"cat > {tmp_path}/failed; echo $LAYERTAP_EXIT_CODE > {tmp_path}/code; exit 7 # password"
    runner_of(tmp_path, code, on_failure=[secret, f"touch {tmp_path}/second"]).run()
    content = json.loads((tmp_path / "failed").read_text())
    assert abs(datetime.now(UTC) - datetime.fromisoformat(content.pop("time"))) < MINUTE
    assert content == {
        "event": "started", "config": str(tmp_path / "s.yaml"), "host": os.uname().nodename, "exit_code": 3,
        "data_sets": printed,
    }  # fmt: skip
    assert (tmp_path / "code").read_text() == "3\n"
    assert (tmp_path / "second").exists()
    assert messages == [
        "pass started",
        "a\\x1b[2J: version 3: 1,200 added; 2 computed, 0.5 s",
        "ERROR the pass failed with exit code 3",
        "ERROR command 1 of on_failure failed: CalledProcessError",
    ]


@pytest.mark.parametrize(
    ("code", "message", "is_failure"),
    [
        ("", "", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ERROR the pass failed with exit code -9", True),
        (f"raise SystemExit({_LOCKED})", SKIPPED, False),
        ("print('[[[' * 9)", "", False),
        ("print(42)", "", False),  # as code of a backbone may, before the pass is killed
        ("print('[42]')", "", False),
        ("raise SystemExit(1)", "ERROR the pass failed with exit code 1", True),
    ],
)
def test_a_failure_calls_the_commands_of_on_failure_and_a_lock_does_not(
    tmp_path: Path, messages: list[str], code: str, message: str, is_failure: bool
) -> None:
    runner_of(tmp_path, code, on_failure=f"touch {tmp_path}/failed").run()
    assert messages == ["pass started", *filter(None, [message])]
    assert (tmp_path / "failed").exists() == is_failure


def test_a_pass_that_cannot_be_started_is_a_failure_and_a_command_of_on_failure_that_hangs_is_killed(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tmp_path, "", on_failure=f"cat > {tmp_path}/failed")
    runner._command = [str(tmp_path / "nothing")]
    runner.run()
    assert json.loads((tmp_path / "failed").read_text())["exit_code"] == 1
    assert messages[-2].startswith("ERROR the pass cannot be started: [Errno 2]")
    monkeypatch.setattr("pipelines.sync.schedule._COMMAND_S", 0.2)
    runner_of(tmp_path, "raise SystemExit(1)", on_failure="exec sleep 60").run()
    assert messages[-1] == "ERROR command 1 of on_failure failed: TimeoutExpired"


def test_a_failure_is_reported_when_it_starts_changes_and_ends(tmp_path: Path) -> None:
    alarms = tmp_path / "alarms"
    program = f"import pathlib; exec(pathlib.Path({str(tmp_path / 'pass.py')!r}).read_text())"

    def events(runner: PassRunner, *texts: str) -> list[str]:
        for text in texts:
            printed = json.dumps([{"out": "a", "error": text} if text else {"out": "a", "version": 1}])
            (tmp_path / "pass.py").write_text(f"print({printed!r}); raise SystemExit({int(bool(text))})")
            runner.run()
        read = [json.loads(line) for line in alarms.read_text().splitlines()] if alarms.exists() else []
        alarms.unlink(missing_ok=True)
        return [f"{alarm['event']} {alarm['exit_code']} {alarm['data_sets'][0].get('error', '')}" for alarm in read]

    runner = runner_of(tmp_path, program, on_failure=f"(cat; echo) >> {alarms}")
    assert events(runner, "", "") == []
    assert events(runner, "12 of 20 are gone", "13 of 20 are gone", "no disk", "no disk", "", "", "no disk") == [
        "started 1 12 of 20 are gone", "changed 1 no disk", "ended 0 ", "started 1 no disk",
    ]  # fmt: skip
    (tmp_path / "pass.py").write_text("raise SystemExit(1)")
    runner = runner_of(tmp_path, program, on_failure=f"echo >> {alarms}; exit 7")
    for _ in range(2):  # a server that could not be reached is told again
        runner.run()
    assert alarms.read_text() == "\n\n"


def test_a_pass_is_over_when_its_workers_are(tmp_path: Path) -> None:
    """They keep the lock of the data set that they have inherited."""
    begin = time.monotonic()
    runner_of(tmp_path, "import subprocess; subprocess.Popen(['sleep', '0.2'])").run()
    assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_running_pass_which_is_no_failure(
    tmp_path: Path, messages: list[str], number: signal.Signals
) -> None:
    code = f"import signal, time; signal.signal(15, lambda *_: exit(143)); open({str(tmp_path / 'runs')!r}, 'w'); "
    runner = runner_of(tmp_path, code + "time.sleep(60)", on_failure=f"touch {tmp_path}/failed")

    def stop() -> None:
        until((tmp_path / "runs").exists)
        os.kill(os.getpid(), number)

    before = signal.signal(number, runner.stop)
    try:
        threading.Thread(target=stop).start()
        runner.run()
    finally:
        signal.signal(number, before)
    assert runner.stopped
    assert messages == ["pass started"]
    assert not (tmp_path / "failed").exists()


# the config file


def test_a_url_to_post_to_is_refused_and_not_repeated(tmp_path: Path) -> None:
    url = "https://hooks.example.org/services/SECRET"
    path = write(tmp_path / "s.yaml", images="x", schedule={"every": "1h", "on_failure": ["true", url]})
    text = fails("schedule", path)
    assert "use the command `curl -d @- URL`" in text
    assert "SECRET" not in text


def test_a_machine_whose_time_zone_has_no_name_needs_one_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> ZoneInfo:
        return ZoneInfo("CET-1CEST,M3.5.0,M10.5.0/3")

    monkeypatch.setattr("pipelines.sync.schedule.get_localzone", unknown)
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


def test_a_cron_line_whose_day_never_comes_is_never_due(simulate: Simulate) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    leap_sunday = ScheduleConfig(cron="0 0 29 2 */7", timezone="UTC")
    assert due_after(leap_sunday, now, now) == datetime(2032, 2, 29, tzinfo=UTC)
    first_and_third_sunday = {"cron": "0 0 */31 * SUN#3", "timezone": "UTC"}
    moves = passing(now + 100 * DAY, HOUR), set_to(now), passing(now + DAY, HOUR)
    assert simulate(now, *moves, last=now, **first_and_third_sunday) == []


# the process


def runs_of(out: Path) -> list[dict[str, Any]]:
    path = out / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_the_process_makes_passes_one_after_it_slept_logs_them_and_stops_in_order(folder: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    schedule = {"every": "2s", "on_failure": f"cat > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/failed"}
    config = write(tmp_path / "s.yaml", images=str(folder), out=str(out), schedule=schedule, **SMALL)
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "layertap", "schedule", str(config)], stderr=file)
    try:
        until(lambda: len(runs_of(out)) >= 2)  # the second is quick
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)  # a pass that has begun ends
        count = len(runs_of(out))
        time.sleep(4.5)  # two are due
        assert len(runs_of(out)) == count
        process.send_signal(signal.SIGCONT)
        until(lambda: len(runs_of(out)) == count + 1)
        time.sleep(0.7)
        assert len(runs_of(out)) == count + 1
        assert not (tmp_path / "failed").exists()
        folder.rename(tmp_path / "unmounted")
        until(lambda: (tmp_path / "failed").exists())
        assert "cannot read folder" in json.loads((tmp_path / "failed").read_text())["data_sets"][0]["error"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    text = log.read_text()
    assert f"{out}: version 1: 12 added" in text
    assert text.splitlines()[-1].endswith(" INFO stopped")


# for other schedulers and monitors


def test_the_check_of_the_guide_fails_if_no_pass_has_ended_for_25_hours(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/sync.md").read_text()
    command = next(line for line in guide.splitlines() if line.startswith("find "))
    runs = tmp_path / "outputs/photos-nightly/runs.jsonl"
    runs.parent.mkdir(parents=True)
    runs.touch()
    for hours, code in ((24.9, 0), (25.1, 1)):
        os.utime(runs, (time.time() - hours * 3600,) * 2)
        assert subprocess.run(command, shell=True, cwd=tmp_path).returncode == code


def test_a_unit_passes_the_checker_of_systemd(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    text = as_systemd(load_sync_file(write(tmp_path / "a 'b\" %c$d.yaml", images="x", schedule=NIGHTLY)))
    unit = tmp_path / Path(text.splitlines()[0]).name
    unit.write_text(text)
    run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not [line for line in run.stderr.splitlines() if str(tmp_path) in line or "layertap" in line]


def test_systemd_runs_the_schedule_as_this_user(tmp_path: Path) -> None:
    config = write(tmp_path / "50% off.yaml", images="x", schedule=NIGHTLY)
    unit = layertap("schedule", config, "--print", "systemd").stdout.splitlines()
    assert f"User={os.geteuid()}" in unit
    assert "RestartPreventExitStatus=2" in unit  # a mistake in the file is not tried again each minute
    # The quoting of systemd is that of a shell, but for %%.
    start = next(line for line in unit if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    assert shlex.split(start.replace("%%", "%"))[-3:] == ["sync", str(config), "--schedule"]


def test_what_cron_runs_is_a_pass(tmp_path: Path) -> None:
    where = {"images": str(tmp_path / "gone"), "out": str(tmp_path / "out")}
    config = write(tmp_path / "50% off.yaml", schedule={"cron": "0 * * * *"}, **where)
    crontab = layertap("schedule", config, "--print", "cron").stdout
    # cron runs what follows five fields, in which it reads \% as %.
    command = crontab.strip().splitlines()[-1].split(" ", 5)[5].replace(r"\%", "%")
    assert command.partition(" && ")[0] == shlex.join(["cd", str(Path.cwd())])
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.count("cannot read folder") == 1


def test_cron_is_given_a_line_that_it_understands(tmp_path: Path) -> None:
    schedule = {"cron": "30 2 * * 1-5", "timezone": "Europe/Berlin"}
    config = write(tmp_path / "50% off.yaml", images="x", schedule=schedule)
    *comments, zone, last = layertap("schedule", config, "--print", "cron").stdout.strip().splitlines()
    assert all(comment.startswith("#") for comment in comments)
    assert zone == "CRON_TZ=Europe/Berlin"
    assert last.startswith("30 2 * * 1-5 cd ")
    assert last.endswith(r"50\% off.yaml'")
    CronSim(" ".join(last.split()[:5]), datetime.now(UTC))


@pytest.mark.parametrize(("name", "schedule", "systems", "why"), [
    ("s.yaml", None, ("systemd", "cron"), "the key `schedule` is missing"),
    ("s.yaml", {"every": "7m"}, ("cron",), "`cron: '*/15 * * * *'`"),
    ("s.yaml", {"cron": "0 * * * *", "on_failure": "x"}, ("cron",), "runs a pass, not the commands of on_failure"),
    ("a\nExecStart=x.yaml", {"cron": "0 * * * *"}, ("systemd", "cron"), "cannot name a file or a folder with a line"),
])  # fmt: skip
def test_what_a_unit_or_a_crontab_cannot_do_is_refused(
    tmp_path: Path, name: str, schedule: dict[str, str] | None, systems: tuple[str, ...], why: str
) -> None:
    config = write(tmp_path / name, images="x", **({"schedule": schedule} if schedule else {}))
    for system in systems:
        assert why in fails("schedule", config, "--print", system)
    if schedule is None:
        assert why in fails("schedule", config)
