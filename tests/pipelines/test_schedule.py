"""When passes are, in nights in which clocks change too; who is told; and what others' schedulers are given."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import apscheduler.schedulers.base
import pytest
from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler
from cronsim import CronSim

import pipelines.sync.schedule
from pipelines.sync.config import load_sync_file
from pipelines.sync.schedule import JOBS, Scheduler
from pipelines.sync.systemd import as_systemd
from tests.pipelines.test_cli import fails, layertap
from tests.pipelines.test_sync import SMALL, write

BERLIN = ZoneInfo("Europe/Berlin")


class Clock(datetime):
    """The clock of the scheduler, which the test sets."""

    at: datetime

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return cls.at.astimezone(tz)


class Still(BackgroundScheduler):
    """A scheduler without a thread: it looks at its clock when it is told to."""

    def start(self, *args: Any, **options: Any) -> None:
        BaseScheduler.start(self, *args, **options)

    def shutdown(self, *args: Any, **options: Any) -> None:
        BaseScheduler.shutdown(self, *args, **options)

    def wakeup(self) -> None:
        pass


class Ticking:
    """A scheduler whose passes are noted, and a clock that is put forward step by step."""

    def __init__(self, config: Path, begin: datetime):
        Clock.at = begin
        self.passes: list[datetime] = []
        self.scheduler = Scheduler(config, self._pass)
        executors = {"default": DebugExecutor(), "heartbeat": DebugExecutor()}
        self.scheduler.scheduler = Still(timezone=UTC, executors=executors, job_defaults=JOBS)
        self.scheduler.start()

    def _pass(self) -> tuple[int, str]:
        self.passes.append(Clock.at)
        return 0, "[]"

    def set(self, at: datetime) -> None:
        """The clock shows this time now, and the scheduler looks at it."""
        Clock.at = at
        self.scheduler._beat()
        self.scheduler.scheduler._process_jobs()

    def tick(self, until: datetime, step: timedelta = timedelta(minutes=1)) -> None:
        while Clock.at.astimezone(UTC) < until.astimezone(UTC):
            self.set(Clock.at.astimezone(UTC) + step)


@pytest.fixture
def ticking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(apscheduler.schedulers.base, "datetime", Clock)
    monkeypatch.setattr(pipelines.sync.schedule, "datetime", Clock)
    started: list[Ticking] = []

    def start(begin: datetime, last: datetime | None = None, **schedule: Any) -> Ticking:
        config = write(tmp_path / "s.yaml", images="x", out=str(tmp_path / "out"), schedule=schedule)
        (tmp_path / "out").mkdir(exist_ok=True)
        if last is not None:
            run = {"event": "synced", "started": last.isoformat(), "seconds": 1}
            (tmp_path / "out/runs.jsonl").write_text(json.dumps(run) + "\n")
        started.append(Ticking(config, begin))
        return started[-1]

    yield start
    for one in started:
        one.scheduler.scheduler.shutdown(wait=False)


def berlin(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=BERLIN, fold=fold)  # type: ignore[misc, arg-type]


def test_asleep_over_three_ticks_it_makes_one_pass(ticking: Callable[..., Ticking]) -> None:
    for schedule in ({"every": "1h"}, {"cron": "0 * * * *", "timezone": "UTC"}):
        begin = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
        one = ticking(begin, last=begin - timedelta(seconds=20), **schedule)
        one.tick(begin + timedelta(minutes=70))
        assert len(one.passes) == 1
        one.set(begin + timedelta(hours=4, minutes=40))  # three were due
        assert len(one.passes) == 2
        one.tick(begin + timedelta(hours=5, minutes=5))
        assert len(one.passes) == 3  # and the next one comes at its time


@pytest.mark.parametrize(("month", "day", "hours"), [(3, 29, 23), (10, 25, 25)])
def test_nights_in_which_clocks_change_skip_and_double_nothing(
    ticking: Callable[..., Ticking], month: int, day: int, hours: int
) -> None:
    begin, end = berlin(2026, month, day, 0, 0, 30) - timedelta(days=1), berlin(2026, month, day, 23, 59)
    for minute in ("0 2", "30 2", "59 1", "0 3"):
        one = ticking(begin, last=begin, cron=f"{minute} * * *", timezone="Europe/Berlin")
        one.tick(end, timedelta(minutes=5))
        assert Counter(at.astimezone(BERLIN).day for at in one.passes) == {day - 1: 1, day: 1}, minute
    one = ticking(begin, last=begin, cron="*/20 * * * *", timezone="Europe/Berlin")
    one.tick(end, timedelta(minutes=5))
    assert len([at for at in one.passes if at.astimezone(BERLIN).day == day]) in (hours * 3, hours * 3 - 1)
    gaps = {b - a for a, b in zip(one.passes, one.passes[1:], strict=False)}
    assert gaps == {timedelta(minutes=20)}
    one = ticking(begin, last=begin, every="6h")
    one.tick(end, timedelta(minutes=5))
    assert {b - a for a, b in zip(one.passes, one.passes[1:], strict=False)} == {timedelta(hours=6)}


def test_a_clock_that_is_set_skips_and_doubles_nothing(ticking: Callable[..., Ticking]) -> None:
    begin = datetime(2026, 6, 1, 1, 0, tzinfo=UTC)
    one = ticking(begin, last=begin, cron="30 2 * * *", timezone="UTC")
    one.set(datetime(2026, 6, 1, 4, 0, tzinfo=UTC))  # forward, over its time
    assert len(one.passes) == 1
    one.set(datetime(2026, 6, 1, 1, 30, tzinfo=UTC))  # back, before it
    one.tick(datetime(2026, 6, 1, 12, 0, tzinfo=UTC), timedelta(minutes=5))
    assert len(one.passes) == 1
    one.tick(datetime(2026, 6, 2, 12, 0, tzinfo=UTC), timedelta(minutes=5))
    assert len(one.passes) == 2
    one.set(datetime(2030, 1, 1, 12, 0, tzinfo=UTC))  # a wrong clock, which is put right
    assert len(one.passes) == 3
    one.set(datetime(2026, 6, 3, 1, 0, tzinfo=UTC))
    one.tick(datetime(2026, 6, 3, 12, 0, tzinfo=UTC), timedelta(minutes=5))
    assert len(one.passes) == 4


def test_a_pass_that_was_due_while_nothing_ran_begins_at_once(ticking: Callable[..., Ticking]) -> None:
    now = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)
    soon = now + timedelta(minutes=1)
    night = {"cron": "30 2 * * *", "timezone": "UTC"}
    for last, catch_up, schedule, passes in (
        (now - timedelta(days=2), True, night, 1),
        (now - timedelta(days=2), False, night, 0),
        (now - timedelta(hours=9), True, night, 0),
        (now - timedelta(hours=9), True, {"every": "6h"}, 1),
        (now - timedelta(hours=5), True, {"every": "6h"}, 0),
        (now + timedelta(days=900), True, night, 1),  # of a clock that was wrong
    ):
        one = ticking(now, last=last, catch_up=catch_up, **schedule)
        one.tick(soon)
        assert len(one.passes) == passes, (last, schedule)
    assert len(ticking(now, last=now - timedelta(hours=5), every="6h").passes) == 0
    one.tick(now + timedelta(hours=1, minutes=1))
    shutil.rmtree(Path(one.scheduler._file.data_sets[0].folder))
    one = ticking(now, every="6h")  # never had one
    one.tick(soon)
    assert len(one.passes) == 1


# the process


def run_schedule(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipelines.cli", "schedule", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out, log = tmp_path / "out", tmp_path / "log"
    schedule = {
        "every": "1s", "log": str(log), "log_json": True, "heartbeat": str(tmp_path / "alive"),
        "on_success": [f"cat > {tmp_path}/hook.json; exit $LAYERTAP_EXIT_CODE", f"http://127.0.0.1:{server.server_port}"],
        "on_failure": f"touch {tmp_path}/failed",
    }  # fmt: skip
    config = write(tmp_path / "s.yaml", images=str(folder), out=str(out), schedule=schedule, **SMALL)
    process = run_schedule(config)
    try:
        _until(lambda: len(told) >= 2)
        assert told[0]["data_sets"][0]["added"] == 12
        assert told[0]["exit_code"] == 0
        assert json.loads((tmp_path / "hook.json").read_text())["config"] == str(config)
        assert (tmp_path / "alive").exists()
        _until(lambda: (out / "schedule.json").exists())
        noted = json.loads(layertap("status", out, "--json").stdout)["next"]
        assert (noted["pid"], noted["alive"]) == (process.pid, True)
        assert "by the scheduler of process" in layertap("status", out).stdout
        assert not (tmp_path / "failed").exists()
        # a config that is wrong is not taken over, and one that is right is
        write(config, images=str(folder), schedule={"every": "never"})
        process.send_signal(signal.SIGHUP)
        _until(lambda: "the config is not taken over" in log.read_text())
        write(config, images=str(tmp_path / "gone"), out=str(out), schedule={**schedule, "every": "2s"}, **SMALL)
        process.send_signal(signal.SIGHUP)
        _until(lambda: (tmp_path / "failed").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        server.shutdown()
    assert not (out / "schedule.json").exists()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["level"] for line in lines} - {"warning"} == {"info", "error"}
    assert lines[-1]["message"] == "stopped"
    assert next(line["result"]["added"] for line in lines if "added" in line.get("result", {})) == 12


@pytest.mark.slow
def test_a_process_that_slept_makes_one_pass(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = write(tmp_path / "s.yaml", images=str(folder), out=str(out), schedule={"every": "3s"}, **SMALL)
    process = run_schedule(config)

    def runs() -> int:
        return len((out / "runs.jsonl").read_text().splitlines()) if (out / "runs.jsonl").exists() else 0

    try:
        _until(lambda: runs() >= 2)  # the second is quick
        count = runs()
        process.send_signal(signal.SIGSTOP)
        time.sleep(10)  # three are due
        assert runs() == count
        process.send_signal(signal.SIGCONT)
        _until(lambda: runs() == count + 1)
        time.sleep(1)
        assert runs() == count + 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def _until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_schedule_needs_one(tmp_path: Path) -> None:
    config = write(tmp_path / "s.yaml", images="x")
    assert "schedule: none given" in fails("schedule", config)
    assert "schedule: none given" in fails("schedule", config, "--print", "cron")


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
    assert "cron cannot run something every 420 s" in fails("schedule", config, "--print", "cron")
    config = write(tmp_path / "s.yaml", images="x", schedule={"cron": "0 0 L * *"})
    assert "systemd has no words for the days" in fails("schedule", config, "--print", "systemd")
