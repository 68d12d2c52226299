"""Workers that are processes: killed, hanging, orphaned."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from extract.errors import InputError, LayertapError
from pipelines.embed.cluster import processes
from pipelines.embed.cluster.dispatch import DispatchResult, Event, Joined, Left, Message, dispatch
from pipelines.embed.cluster.processes import Processes, Slot
from tests.pipelines.cluster.made_up import MadeUp


def run(made_up: MadeUp, count: int, workers: int = 2) -> tuple[DispatchResult, list[Event]]:
    events: list[Event] = []
    with Processes([Slot(made_up)] * workers) as engine:
        return dispatch(range(count), engine, on_event=events.append), events


def made(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("shard-")) for path in out.iterdir())


def test_each_shard_is_made_by_one_of_the_workers(tmp_path: Path) -> None:
    found, events = run(MadeUp(tmp_path, 0.01), 30)
    assert found == DispatchResult(done=30, own=30)
    assert made(tmp_path) == list(range(30))
    joined = [event for event in events if isinstance(event, Joined)]
    assert [event.about for event in joined] == ["a made-up device"] * len(joined)
    assert Message(0, "ready") in events


def test_of_two_writers_each_counts_the_shards_that_it_was_the_first_to_publish(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: run(MadeUp(tmp_path, 0.05), 20, workers=1)[0], range(2)))
    assert made(tmp_path) == list(range(20))
    assert [result.done for result in found] == [20, 20]
    assert sum(result.own for result in found) == 20


def test_a_shard_that_fails_and_one_that_kills_are_given_up_and_the_others_made(tmp_path: Path) -> None:
    found, events = run(MadeUp(tmp_path, does={4: "fails", 9: "kills"}), 20)
    assert made(tmp_path) == sorted(set(range(20)) - {4, 9})
    assert set(found.failed) == {4, 9}
    assert [reason.partition(": ")[2] for reason in found.failed[4]] == ["ValueError: a bad shard"] * 3
    assert {reason.partition(": ")[2] for reason in found.failed[9]} == {"its process was killed by SIGKILL"}
    assert sum(isinstance(event, Left) for event in events) == 3


@pytest.mark.slow
def test_workers_that_are_killed_at_random_are_replaced(tmp_path: Path) -> None:
    chance = random.Random(0)
    killed = []

    def kill() -> None:
        while len(killed) < 4:
            time.sleep(chance.uniform(0.1, 0.4))
            if alive := [one for one in engine._processes.values() if one.shards]:
                os.kill(chance.choice(alive)._process.pid or 0, signal.SIGKILL)
                killed.append(1)

    with Processes([Slot(MadeUp(tmp_path, 0.05))] * 2) as engine:
        killer = threading.Thread(target=kill)
        killer.start()
        found = dispatch(range(60), engine)
        killer.join()
    assert len(found.failed) <= 1  # three of the kills may hit the same shard
    assert made(tmp_path) == sorted(set(range(60)) - set(found.failed))
    assert found.attempts <= 4


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_SILENT_S", 1.0)
    monkeypatch.setattr(processes, "_END_S", 1.0)
    found, _ = run(MadeUp(tmp_path, does={1: "hangs"}), 4, workers=1)
    assert made(tmp_path) == [0, 2, 3]
    assert list(found.failed) == [1]
    assert "sent no events for" in found.failed[1][0]


def test_what_keeps_workers_from_starting_is_said(tmp_path: Path) -> None:
    with Processes([Slot(MadeUp(tmp_path, does={0: "refuses"}))] * 2) as engine:
        left: list[Event] = []
        while not left:
            left = [event for event in engine.events(1.0) if isinstance(event, Left)]
        assert isinstance(left[0], Left)
        assert isinstance(left[0].error, InputError)
        with pytest.raises(LayertapError, match="no worker can be started: layer 'x' not found"):
            dispatch(range(3), engine)


@pytest.mark.slow
@pytest.mark.parametrize("does", ["", "hangs"])
def test_workers_end_when_the_first_process_is_killed(does: str, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from pipelines.embed.cluster import processes
from pipelines.embed.cluster.dispatch import dispatch
from pipelines.embed.cluster.processes import Processes, Slot
from tests.pipelines.cluster.made_up import MadeUp
class Impatient(MadeUp):
    def __call__(self, say):
        processes._END_S = processes._CLOSE_S = 0.5
        return super().__call__(say)
if __name__ == "__main__":
    does = dict.fromkeys(range(6, 10_000), {does!r})
    with Processes([Slot(Impatient(Path({str(tmp_path)!r}), 0.05, does))] * 2) as engine:
        print(*(one._process.pid for one in engine._processes.values()), flush=True)
        dispatch(range(10_000), engine)
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
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "a worker goes on though nobody hears it"
        time.sleep(0.05)
