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
from typing import Any

import pytest

from extract.errors import InputError, LayertapError
from pipelines.embed.cluster import driver
from pipelines.embed.cluster.driver import ShardLoop
from pipelines.embed.cluster.processes import Done, Event, Failed, Message, Processes, Rows, Worker
from tests.pipelines.cluster.made_up import MadeUp


def run(made_up: MadeUp, count: int, workers: int = 2) -> tuple[ShardLoop, list[Event]]:
    events: list[Event] = []
    with Processes([made_up] * workers) as engine:
        loop = ShardLoop(engine, events.append)
        assert loop.join()
        loop.build(range(count))
    return loop, events


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
def test_each_shard_is_published_once_or_has_failed_three_times_whatever_ends_the_workers(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 400)
    fails = {chance.randrange(count): chance.randint(1, 4) for _ in range(chance.randint(0, 9))}  # ten end the run
    engine: Any = Simulated(fails)
    loop = ShardLoop(engine)
    loop.build(range(count))
    failed = {shard for shard, times in fails.items() if times >= 3}
    assert sorted(engine.built) == sorted(set(range(count)) - failed)
    assert loop.done == len(engine.built)
    assert loop.failed == dict.fromkeys(failed, ["killed"] * 3)
    assert loop.attempts == sum(min(times, 3) for times in fails.values())


def test_when_ten_shards_fail_one_after_another_the_run_ends() -> None:
    engine: Any = Simulated(dict.fromkeys(range(50, 100), 3))  # with more, one may be held up meanwhile
    with pytest.raises(LayertapError, match=r"10 shards failed, and none was built .*The last error: killed"):
        ShardLoop(engine).build(range(100))
    assert engine.built == list(range(50))


def test_each_shard_is_made_once_beside_another_writer_and_a_worker_that_dies(tmp_path: Path) -> None:
    """A shard that another writer published first has no receipt, nor has one whose worker died before it answered."""
    (tmp_path / "shard-2").touch()
    loop, events = run(MadeUp(tmp_path, 0.01, {4: "dies after publishing"}), 12)
    assert made(tmp_path) == list(range(12))
    assert (loop.done, loop.attempts) == (12, 1)
    assert Message(f"a worker on {platform.node()}, a made-up device") in events
    assert Message("ready") in events
    assert [event.shard for event in events if isinstance(event, Failed)] == [4]
    done = [event for event in events if isinstance(event, Done) and event.shard is not None]
    assert sorted(event.shard or 0 for event in done if not event.receipt) == [2, 4]


@pytest.mark.slow
def test_a_shard_that_fails_and_one_that_kills_are_named_and_the_others_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_ATTEMPTS", 2)
    loop, events = run(MadeUp(tmp_path, does={2: "fails", 5: "kills"}), 8)
    assert made(tmp_path) == sorted(set(range(8)) - {2, 5})
    assert loop.failed == {2: ["ValueError: a bad shard"] * 2, 5: ["its process was killed by SIGKILL"] * 2}
    assert sum(isinstance(event, Failed) for event in events) == 4


@pytest.mark.slow
def test_workers_that_are_killed_at_random_are_replaced(tmp_path: Path) -> None:
    chance = random.Random(0)
    killed: list[int] = []

    def kill() -> None:
        while len(killed) < 2:  # with three, all attempts at a shard could be hit
            time.sleep(chance.uniform(0.1, 0.4))
            worker = chance.choice(engine._workers)
            if worker._is_alive and worker._process.pid:
                os.kill(worker._process.pid, signal.SIGKILL)
                killed.append(1)

    with Processes([MadeUp(tmp_path, 0.05)] * 2) as engine:
        loop = ShardLoop(engine)
        assert loop.join()
        killer = threading.Thread(target=kill)
        killer.start()
        loop.build(range(40))
        killer.join()
    assert made(tmp_path) == list(range(40))
    assert (loop.done, loop.failed) == (40, {})
    assert loop.attempts <= 2


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


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Dies, "its process exited with code 7"),
        (Unreadable, "its message cannot be read: ValueError: invalid literal for int"),
    ],
)
def test_workers_that_end_before_they_are_ready_end_the_run(
    kind: type[MadeUp], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_ATTEMPTS", 1)
    with pytest.raises(LayertapError, match=f"no worker can be started: {why}"):
        run(kind(tmp_path), 3, workers=1)


class Warns(MadeUp):
    """Its bucket does not answer."""

    def __call__(self, say: Any) -> Any:
        logging.getLogger("layertap.store").warning("%s does not answer; retrying", "s3://bucket/x")
        return super().__call__(say)


def test_a_worker_sends_what_is_reported_of_its_bucket_and_the_end_of_a_file_does_not_end_it_in_silence(
    tmp_path: Path,
) -> None:
    worker = Worker(Warns(tmp_path, does={1: "meets a cut file"}))
    worker.begin()
    first, *_, last = worker.build(1)
    assert first == Message("s3://bucket/x does not answer; retrying")
    assert last == Failed(1, "EOFError: a cut file")


def test_a_process_that_the_system_cannot_start_is_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, calls = SpawnProcess.start, []

    def sometimes(process: SpawnProcess) -> None:
        calls.append(process)
        if len(calls) in (1, 2, 4):  # at the beginning, at the next attempt, and when the dead one is replaced
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", sometimes)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loop, events = run(MadeUp(tmp_path, does={1: "dies after publishing"}), 4, workers=1)
    assert made(tmp_path) == list(range(4))
    assert (loop.done, loop.failed) == (4, {})
    why = "its process cannot be started: Resource temporarily unavailable"
    assert [event.why for event in events if isinstance(event, Failed)].count(why) == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


@pytest.mark.slow
@pytest.mark.parametrize("does", ["", "hangs"])
def test_workers_end_when_the_first_process_is_killed(does: str, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from pipelines.embed.cluster.processes import Processes
from pipelines.embed.cluster import driver
from pipelines.embed.cluster.driver import ShardLoop
from tests.pipelines.cluster.made_up import MadeUp
if __name__ == "__main__":
    does = dict.fromkeys(range(6, 10_000), {does!r})
    with Processes([MadeUp(Path({str(tmp_path)!r}), 0.05, does)] * 2) as engine:
        print(*(worker._process.pid for worker in engine._workers), flush=True)
        ShardLoop(engine).build(range(10_000))
"""
    script = tmp_path.with_name("script.py")
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
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
