"""Workers that are processes: killed, failing, orphaned; and how shards are given to them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from extract.errors import InputError, LayertapError
from pipelines.embed.cluster.processes import Child, Done, Event, Joined, Left, Message, Rows
from pipelines.embed.cluster.shard_loop import ShardLoop
from tests.pipelines.cluster.made_up import MadeUp

NO_FACTS: dict[str, Any] = {}


def run(
    made_up: MadeUp, count: int, workers: int = 2, receipt: dict[str, Any] | None = NO_FACTS
) -> tuple[ShardLoop, list[Event]]:
    events: list[Event] = []
    loop = ShardLoop(
        lambda: [partial(Child, made_up)] * workers,
        lambda: range(count),
        lambda worker, event: events.append(event),
        lambda: dict.fromkeys(made(made_up.out), receipt),
    )
    loop.run()
    return loop, events


def made(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("shard-")) for path in out.iterdir())


class Simulated:
    """Workers, each of which builds its list at once; some shards end their worker, perhaps before they are begun."""

    def __init__(self, size: int, ends: dict[int, int], are_begun: bool = True):
        self.size, self.ends, self.are_begun = size, Counter(ends), are_begun
        self.given: list[list[int]] = []
        self.built: list[int] = []

    def __call__(self) -> list[Callable[[], SimulatedWorker]]:
        return [lambda: SimulatedWorker(self)] * self.size


class SimulatedWorker:
    def __init__(self, engine: Simulated):
        self._engine = engine
        self._lists: SimpleQueue[list[int] | None] = SimpleQueue()

    def submit(self, shards: Sequence[int]) -> None:
        self._lists.put(list(shards))
        if shards:
            self._engine.given.append(list(shards))

    def kill(self) -> None:
        self._lists.put(None)

    def events(self) -> Iterator[Event]:
        yield Joined("host", "cpu")
        while shards := self._lists.get():
            for shard in shards:
                ends = self._engine.ends[shard] > 0
                if self._engine.are_begun or not ends:
                    yield Rows(shard, 0, True)
                if ends:
                    self._engine.ends[shard] -= 1
                    yield Left("killed")
                    return
                self._engine.built.append(shard)
                yield Done(shard, {})
        yield Left("")


@pytest.mark.parametrize("are_begun", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_each_shard_is_published_once_or_has_failed_three_times_whatever_ends_the_workers(
    seed: int, are_begun: bool
) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 400)
    ends = {chance.randrange(count): chance.randint(1, 4) for _ in range(chance.randint(0, 9))}  # ten end the run
    engine: Any = Simulated(chance.randint(1, 9), ends, are_begun)
    loop = ShardLoop(engine, lambda: range(count))
    loop.run()
    failed = {shard for shard, times in ends.items() if times >= 3}
    assert sorted(engine.built) == sorted(set(range(count)) - failed)
    assert loop.done == loop.own == len(engine.built)
    assert loop.failed == dict.fromkeys(failed, ["killed"] * 3)
    assert loop.attempts == sum(min(times, 3) for times in ends.values())


def test_lists_become_shorter_so_that_all_workers_end_together() -> None:
    engine: Any = Simulated(4, {})
    ShardLoop(engine, lambda: range(160)).run()
    lengths = list(map(len, engine.given))
    assert lengths[0] == 10  # a quarter of the share of a worker
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-16:] == [1] * 16
    assert [shard for shards in engine.given for shard in shards] == list(range(160))


def test_when_ten_shards_fail_one_after_another_the_run_ends() -> None:
    engine: Any = Simulated(1, dict.fromkeys(range(50, 100), 3))  # with more, one may be held up meanwhile
    with pytest.raises(LayertapError, match=r"10 shards failed, and none was built .*The last error: killed"):
        ShardLoop(engine, lambda: range(100)).run()
    assert engine.built == list(range(50))


def test_each_shard_is_made_by_one_of_the_workers(tmp_path: Path) -> None:
    loop, events = run(MadeUp(tmp_path, 0.01), 30)
    assert (loop.done, loop.own, loop.attempts) == (30, 30, 0)
    assert made(tmp_path) == list(range(30))
    joined = [event for event in events if isinstance(event, Joined)]
    assert [event.about for event in joined] == ["a made-up device"] * len(joined)
    assert Message("ready") in events


def test_of_two_writers_each_counts_the_shards_that_it_was_the_first_to_publish(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        loops = list(pool.map(lambda _: run(MadeUp(tmp_path, 0.05), 20, workers=1, receipt=None)[0], range(2)))
    assert made(tmp_path) == list(range(20))
    assert [loop.done for loop in loops] == [20, 20]
    assert sum(loop.own for loop in loops) == 20


def test_shards_that_are_published_when_the_run_is_stopped_are_counted(tmp_path: Path) -> None:
    """Each shard is reported when the next is built, and what takes part in that does not stop."""
    loop = ShardLoop(lambda: [partial(Child, MadeUp(tmp_path, does={1: "cannot stop"}))], lambda: range(12))
    loop.run(lambda: [worker.current for worker in loop._workers.values()] == [1])
    assert made(tmp_path) == [0, 1]
    assert (loop.done, loop.own, loop.attempts) == (2, 2, 0)


def test_a_shard_that_its_worker_published_before_it_died_is_counted(tmp_path: Path) -> None:
    loop, events = run(MadeUp(tmp_path, does={4: "dies after publishing"}), 8, workers=1)
    assert made(tmp_path) == list(range(8))
    assert (loop.done, loop.own, loop.attempts) == (8, 8, 0)
    assert sum(isinstance(event, Left) for event in events) == 1


def test_a_shard_that_a_lost_worker_published_late_is_counted(tmp_path: Path) -> None:
    """The process of a node that the cluster has given up lives on for a moment."""
    (tmp_path / "shard-2").touch()
    loop, _ = run(MadeUp(tmp_path), 4, workers=1)
    assert (loop.done, loop.own) == (4, 4)
    loop, _ = run(MadeUp(tmp_path), 4, workers=1, receipt=None)
    assert (loop.done, loop.own) == (4, 0)


@pytest.mark.slow
def test_a_shard_that_fails_and_one_that_kills_are_named_and_the_others_made(tmp_path: Path) -> None:
    loop, events = run(MadeUp(tmp_path, does={4: "fails", 9: "kills"}), 20)
    assert made(tmp_path) == sorted(set(range(20)) - {4, 9})
    assert loop.failed == {4: ["ValueError: a bad shard"] * 3, 9: ["its process was killed by SIGKILL"] * 3}
    assert sum(isinstance(event, Left) for event in events) == 6


@pytest.mark.slow
def test_a_shard_does_not_answer_for_an_image_of_the_next_that_kills_its_worker(tmp_path: Path) -> None:
    loop, _ = run(MadeUp(tmp_path, does={9: "kills ahead"}), 40, workers=1)
    assert list(loop.failed) == [9]
    assert made(tmp_path) == sorted(set(range(40)) - {9})


@pytest.mark.slow
def test_workers_that_are_killed_at_random_are_replaced(tmp_path: Path) -> None:
    chance = random.Random(0)
    killed = []

    def kill() -> None:
        while len(killed) < 4:
            time.sleep(chance.uniform(0.1, 0.4))
            if joined := list(loop._workers.values()):
                worker = chance.choice(joined)
                if worker.held is not None:
                    os.kill(worker.process._process.pid or 0, signal.SIGKILL)  # type: ignore[union-attr]
                    killed.append(1)

    loop = ShardLoop(
        lambda: [partial(Child, MadeUp(tmp_path, 0.05))] * 2,
        lambda: range(60),
        receipts=lambda: {shard: {} for shard in made(tmp_path)},
    )
    killer = threading.Thread(target=kill)
    killer.start()
    loop.run()
    killer.join()
    assert len(loop.failed) <= 1  # three of the kills may hit the same shard
    assert made(tmp_path) == sorted(set(range(60)) - set(loop.failed))
    assert loop.done == loop.own == 60 - len(loop.failed)
    assert loop.attempts <= 4


def test_an_error_of_the_configuration_ends_all_workers_with_one_message(tmp_path: Path) -> None:
    events: list[Event] = []
    children = [partial(Child, MadeUp(tmp_path, does={0: "refuses"}))] * 2
    loop = ShardLoop(lambda: children, lambda: range(3), lambda worker, event: events.append(event))
    with pytest.raises(InputError, match="^layer 'x' not found$"):
        loop.run()
    assert events == []


class Dies(MadeUp):
    """Does not even start."""

    def __call__(self, say: Any) -> Any:
        os._exit(7)


def test_workers_that_die_before_they_are_ready_end_the_run(tmp_path: Path) -> None:
    expected = pytest.raises(LayertapError, match="no worker can be started: its process exited with code 7")
    with expected:
        ShardLoop(lambda: [partial(Child, Dies(tmp_path))], lambda: range(3)).run()


class Unreadable(MadeUp):
    """Sends what cannot be read at the other end."""

    def __call__(self, say: Any) -> Any:
        say(self)
        return super().__call__(say)

    def __reduce__(self) -> Any:
        return (type(self), (self.out,)) if multiprocessing.parent_process() is None else (int, ("no number",))


def test_a_message_that_cannot_be_read_ends_its_worker_with_this_reason(tmp_path: Path) -> None:
    child = Child(Unreadable(tmp_path))
    assert list(child.events()) == [
        Left("its message cannot be read: ValueError: invalid literal for int() with base 10: 'no number'")
    ]
    child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("does", ["", "hangs"])
def test_workers_end_when_the_first_process_is_killed(does: str, tmp_path: Path) -> None:
    code = f"""
from functools import partial
from pathlib import Path
from pipelines.embed.cluster.processes import Child
from pipelines.embed.cluster.shard_loop import ShardLoop
from tests.pipelines.cluster.made_up import MadeUp
if __name__ == "__main__":
    does = dict.fromkeys(range(6, 10_000), {does!r})
    loop = ShardLoop(lambda: [partial(Child, MadeUp(Path({str(tmp_path)!r}), 0.05, does))] * 2, lambda: range(10_000))
    def stop():
        global told
        if len(loop._workers) == 2 and not told:
            told = print(*(worker.process._process.pid for worker in loop._workers.values()), flush=True) or True
    told = False
    loop.run(stop)
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
        assert time.monotonic() < end, "a worker outlives the first process"
        time.sleep(0.05)
