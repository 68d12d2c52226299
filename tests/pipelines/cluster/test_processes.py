"""Workers that are processes: killed, failing, orphaned; and how shards are given to them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import pytest

from extract.errors import InputError, LayertapError
from pipelines.embed.cluster import driver
from pipelines.embed.cluster.driver import build
from pipelines.embed.cluster.processes import Done, Event, Failed, Message, Processes, Rows, Worker
from tests.pipelines.cluster.made_up import MadeUp


def run(made_up: MadeUp, count: int, workers: int = 2) -> list[Event]:
    events: list[Event] = []
    with Processes([made_up] * workers) as engine:
        assert build(engine, [None], events.append)
        assert build(engine, range(count), events.append)
    return events


def failed(events: list[Event]) -> list[tuple[int | None, str]]:
    return [(event.shard, event.why) for event in events if isinstance(event, Failed)]


def made(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("shard-")) for path in out.iterdir())


class Simulated:
    """An engine that builds each shard at once; some shards fail so many times."""

    def __init__(self, fails: dict[int, int]):
        self._fails = Counter(fails)
        self._waiting: list[int] = []
        self.built: list[int] = []

    def submit(self, shard: int) -> None:
        self._waiting.append(shard)

    def events(self, timeout_s: float) -> Iterator[Event]:
        shard = self._waiting.pop(0)
        yield Rows(shard, 0, True)
        if self._fails[shard] > 0:
            self._fails[shard] -= 1
            yield Failed(shard, "killed")
        else:
            self.built.append(shard)
            yield Done(shard, {})


@pytest.mark.parametrize("seed", range(5))
def test_each_shard_is_built_once_whatever_ends_the_workers(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 400)
    fails = {chance.randrange(count): chance.randint(1, 2) for _ in range(chance.randint(0, 5))}
    engine, events = Simulated(fails), list[Event]()
    assert build(cast(Any, engine), range(count), events.append)
    assert sorted(engine.built) == list(range(count))
    assert Counter(shard for shard, _ in failed(events)) == fails


@pytest.mark.parametrize(("fails", "built", "told"), [
    ({7: 3, 19: 4}, 18, "shard 7 failed 3 times and is missing: killed\nshard 19 failed 3 times"),
    (dict.fromkeys(range(13, 20), 3), 13, "shard 13 failed 3 times and is missing: killed\nshard 14 "),
    (dict.fromkeys(range(5, 20), 3), 5, "10 shards failed, and none was built between them. The last error: killed"),
])  # fmt: skip
def test_what_fails_again_and_again_is_named(fails: dict[int, int], built: int, told: str) -> None:
    engine = Simulated(fails)
    with pytest.raises(LayertapError, match=rf"(?s)^{told}.*\bfix the cause"):
        build(cast(Any, engine), range(20), lambda event: None)
    assert len(engine.built) == built


def test_each_shard_is_made_once_beside_another_writer_and_a_worker_that_dies(tmp_path: Path) -> None:
    """A shard that another writer published first has no receipt, nor has one whose worker died before it answered."""
    (tmp_path / "shard-2").touch()
    events = run(MadeUp(tmp_path, 0.01, {4: "dies after publishing"}), 12)
    assert made(tmp_path) == list(range(12))
    assert Message(f"a worker on {platform.node()}, a made-up device") in events
    assert Message("ready") in events
    assert failed(events) == [(4, "its process was killed by SIGKILL")]
    done = [event for event in events if isinstance(event, Done) and event.shard is not None]
    assert sorted(event.shard or 0 for event in done if not event.receipt) == [2, 4]


def test_a_shard_that_kills_its_worker_again_and_again_is_named_when_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_ATTEMPTS", 2)
    told = "^shard 2 failed 2 times and is missing: its process was killed by SIGKILL; fix the cause"
    with pytest.raises(LayertapError, match=told):
        run(MadeUp(tmp_path, does={2: "kills"}), 8)
    assert made(tmp_path) == sorted(set(range(8)) - {2})


@pytest.mark.slow
def test_workers_that_are_killed_at_random_are_replaced(tmp_path: Path) -> None:
    chance = random.Random(0)
    killed: list[int] = []

    def kill() -> None:
        while len(killed) < 2:  # with three, all attempts at a shard could be hit
            time.sleep(chance.uniform(0.1, 0.4))
            process = chance.choice([*engine._idle, *engine._busy])._process
            if process is not None:
                os.kill(process.pid, signal.SIGKILL)
                killed.append(1)

    events: list[Event] = []
    with Processes([MadeUp(tmp_path, 0.05)] * 2) as engine:
        assert build(engine, [None], events.append)
        killer = threading.Thread(target=kill)
        killer.start()
        assert build(engine, range(40), events.append)
        killer.join()
    assert made(tmp_path) == list(range(40))
    assert len(failed(events)) <= 2


def test_an_error_of_the_configuration_ends_all_workers_with_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^layer 'x' not found$"):
        run(MadeUp(tmp_path, does={0: "refuses"}), 3)


class Dies(MadeUp):
    """Does not even start."""

    def __call__(self, say: Any) -> Any:
        os._exit(7)


class Unreadable(MadeUp):
    """Sends what cannot be read at the other end."""

    def __call__(self, say: Any) -> Any:
        say(_NoNumber())
        time.sleep(600)


class _NoNumber:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(("kind", "why"), [
    (Dies, "its process exited with code 7"),
    (Unreadable, "its message cannot be read: ValueError: invalid literal for int"),
])  # fmt: skip
def test_workers_that_end_before_they_are_ready_end_the_run(
    kind: type[MadeUp], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_ATTEMPTS", 1)
    with pytest.raises(LayertapError, match=f"no worker can be started: {why}"):
        run(kind(tmp_path), 3, workers=1)


class Slow(MadeUp):
    """Takes longer to load than another that dies at once takes to die twice."""

    def __call__(self, say: Any) -> Any:
        time.sleep(4)
        return super().__call__(say)


def test_a_device_on_which_no_worker_starts_does_not_end_the_run_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_ATTEMPTS", 2)
    events: list[Event] = []
    with Processes([Dies(tmp_path), Slow(tmp_path)]) as engine:
        assert build(engine, [None], events.append)
    assert failed(events) == [(None, "its process exited with code 7")]


class Warns(MadeUp):
    """Its bucket does not answer."""

    def __call__(self, say: Any) -> Any:
        logging.getLogger("layertap.store").warning("%s does not answer; retrying", "s3://bucket/x")
        return super().__call__(say)


def test_a_worker_sends_what_is_reported_of_its_bucket_and_the_end_of_a_file_does_not_end_it_in_silence(
    tmp_path: Path,
) -> None:
    worker = Worker(Warns(tmp_path, does={1: "meets a cut file"}))
    worker.begin(1)
    events = [worker.event()]
    assert events == [Message("s3://bucket/x does not answer; retrying")]
    while not isinstance(events[-1], Failed):
        events.append(worker.event())
    assert events[-1] == Failed(1, "EOFError: a cut file")


def test_a_process_that_the_system_cannot_start_is_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, calls = SpawnProcess.start, []

    def sometimes(process: SpawnProcess) -> None:
        calls.append(process)
        if len(calls) in (1, 2, 4):  # at the beginning, at the first attempt, and when the dead one is replaced
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", sometimes)
    monkeypatch.setattr(driver, "_TICK_S", 0.1)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    events = run(MadeUp(tmp_path, does={1: "dies after publishing"}), 4, workers=1)
    assert made(tmp_path) == list(range(4))
    why = "its process cannot be started: Resource temporarily unavailable"
    assert [why for _, why in failed(events)].count(why) == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


@pytest.mark.slow
@pytest.mark.parametrize("does", ["", "hangs"])
def test_workers_end_when_the_first_process_is_killed(does: str, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from pipelines.embed.cluster.processes import Processes
from pipelines.embed.cluster import driver
from pipelines.embed.cluster.driver import build
from tests.pipelines.cluster.made_up import MadeUp
if __name__ == "__main__":
    does = dict.fromkeys(range(6, 10_000), {does!r})
    with Processes([MadeUp(Path({str(tmp_path)!r}), 0.05, does)] * 2) as engine:
        build(engine, [None], print)
        print("pids", *(worker._process.pid for worker in engine._idle + engine._busy), flush=True)
        build(engine, range(10_000), lambda event: None)
"""
    script = tmp_path.with_name("script.py")
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith(b"pids"))
        pids = [int(pid) for pid in line.split()[1:]]
        end = time.monotonic() + 60
        while len(made(tmp_path)) < 5:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.kill()
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, "a worker outlives the first process"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
