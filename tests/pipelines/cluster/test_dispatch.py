"""Which worker makes which shard, on simulated workers: nothing is lost, nothing is made twice for good."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.errors import LayertapError
from pipelines.embed.cluster.dispatch import Built, DispatchResult, Done, Event, Failed, Joined, Left, dispatch


class Simulated:
    """Workers on hosts, in simulated time; a worker that dies is replaced by another on its host.

    Args:
        hosts: of each worker.
        takes: (shard, host) -> seconds.
        fails: (shard, host) -> why it fails; empty: it does not.
        deaths: (seconds, place of the worker), at which it is killed.
        publishes: seconds that it takes to publish a shard, while the next is made.
    """

    def __init__(
        self,
        hosts: list[str],
        takes: Callable[[int, str], float] = lambda shard, host: 1.0,
        fails: Callable[[int, str], str] = lambda shard, host: "",
        deaths: list[tuple[float, int]] = [],  # noqa: B006
        begun: dict[int, list[int]] | None = None,
        publishes: float = 0.0,
    ):
        self.now, self._takes, self._fails = 0.0, takes, fails
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, int, str]] = []  # when, order, worker, what
        self._order = itertools.count()
        self._places: dict[int, int] = {}  # of the workers that live
        self._hosts, self._begun = hosts, begun or {}
        self.queues: dict[int, list[int]] = {}
        self._making: dict[int, int] = {}
        self._publishes, self._publishing = publishes, set[tuple[int, int]]()
        self.published: dict[int, int] = {}  # shard -> who was first
        self.made: list[tuple[int, str]] = []
        self.most = 0
        self.retired: list[int] = []
        for place in range(len(hosts)):
            self._start(place, 0.0)
        for when, place in deaths:
            self._at(when, -1 - place, "dies")

    def _start(self, place: int, when: float) -> None:
        number = next(self._numbers)
        self._places[number] = place
        self._at(when, number, "joins")

    def _at(self, when: float, worker: int, what: str) -> None:
        heapq.heappush(self._events, (when, next(self._order), worker, what))

    def _begin(self, worker: int) -> None:
        if worker not in self._making and self.queues[worker]:
            shard = self.queues[worker][0]
            self._making[worker] = shard
            self._at(self.now + self._takes(shard, self._hosts[self._places[worker]]), worker, f"ends {shard}")

    def submit(self, worker: int, shard: int) -> None:
        assert worker in self._places
        assert shard not in self.queues[worker]
        self.queues[worker].append(shard)
        self.most = max(self.most, len(self.queues[worker]))
        self._begin(worker)

    def cancel(self, worker: int, shard: int) -> None:
        if (worker, shard) in self._publishing:
            self._publishing.remove((worker, shard))
            return
        self.queues[worker].remove(shard)
        if self._making.get(worker) == shard:
            del self._making[worker]
        self._begin(worker)

    def coming(self) -> bool:
        return any(what == "joins" for _, _, _, what in self._events)

    def retire(self, worker: int) -> None:
        self.retired.append(worker)
        del self._places[worker]

    def events(self, timeout_s: float) -> list[Event]:
        end = self.now + timeout_s
        while self._events and self._events[0][0] <= end:
            self.now, _, worker, what = heapq.heappop(self._events)
            if event := self._event(worker, what):
                return [event]
        self.now = end
        return []

    def _event(self, worker: int, what: str) -> Event | None:
        if what == "dies":
            here = [number for number, place in self._places.items() if place == -1 - worker and number in self.queues]
            if not here:
                return None
            place = self._places.pop(here[0])
            self._making.pop(here[0], None)
            self._start(place, self.now + 0.5)
            return Left(here[0], "killed")
        if worker not in self._places:
            return None
        host = self._hosts[self._places[worker]]
        if what == "joins":
            self.queues[worker] = []
            return Joined(worker, host, started_shards=self._begun.get(worker, ()))
        shard = int(what.split()[1])
        if what.startswith("publishes"):
            if (worker, shard) not in self._publishing:
                return None
            self._publishing.remove((worker, shard))
            return self._published(worker, shard)
        if self._making.get(worker) != shard:
            return None  # it was told not to
        del self._making[worker]
        self.queues[worker].remove(shard)
        self._begin(worker)
        if why := self._fails(shard, host):
            return Failed(worker, shard, why)
        self.made.append((shard, host))
        if self._publishes:
            self._publishing.add((worker, shard))
            self._at(self.now + self._publishes, worker, f"publishes {shard}")
            return Built(worker, shard)
        return self._published(worker, shard)

    def _published(self, worker: int, shard: int) -> Done:
        first = self.published.setdefault(shard, worker) == worker
        return Done(worker, shard, {"shard": shard} if first else None)


def run(count: int, simulated: Simulated, limit_s: float = 1e5) -> DispatchResult:
    def stop() -> bool:
        assert simulated.now < limit_s, "it does not end"
        return False

    return dispatch(range(count), simulated, stop=stop, clock=lambda: simulated.now)


def test_each_shard_is_made_once_and_no_worker_has_more_than_two() -> None:
    simulated = Simulated(["a", "a", "b"])
    found = run(100, simulated)
    assert found == DispatchResult(done=100, own=100)
    assert sorted(shard for shard, _ in simulated.made) == list(range(100))
    assert simulated.most == 2
    assert simulated.now == pytest.approx(34.0)  # 100 shards of a second, by three


def test_a_shard_is_published_while_the_next_is_made() -> None:
    simulated = Simulated(["a", "a", "b"], publishes=0.9)
    assert run(100, simulated) == DispatchResult(done=100, own=100)
    assert sorted(shard for shard, _ in simulated.made) == list(range(100))
    assert simulated.now == pytest.approx(34.9)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_dies_or_fails_now_and_then_each_shard_is_there_in_the_end(data: st.DataObject) -> None:
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    count = data.draw(st.integers(1, 40))
    hosts = [data.draw(st.sampled_from("abc")) for _ in range(data.draw(st.integers(1, 6)))]
    failures = {
        shard: data.draw(st.integers(0, 2)) for shard in data.draw(st.sets(st.integers(0, count - 1), max_size=9))
    }
    # A shard is only given up after three attempts: so not more than two are spoiled, by failing or by a death.
    deaths = [] if failures else [(chance.uniform(0, 30), chance.randrange(len(hosts))) for _ in range(2)]

    def fails(shard: int, host: str) -> str:
        if failures.get(shard, 0):
            failures[shard] -= 1
            return "it happens"
        return ""

    publishes = data.draw(st.sampled_from([0.0, 0.5, 20.0]))
    simulated = Simulated(hosts, lambda shard, host: chance.uniform(0.01, 60), fails, deaths, publishes=publishes)
    of_another_writer = data.draw(st.sets(st.integers(0, count - 1)))
    simulated.published |= dict.fromkeys(of_another_writer, -1)
    found = run(count, simulated)
    assert set(simulated.published) == set(range(count))
    assert (found.done, found.own) == (count, count - len(of_another_writer))
    assert not found.failed


def test_a_shard_that_always_fails_is_given_up_after_three_attempts_and_the_others_are_made() -> None:
    simulated = Simulated(["a", "b"], fails=lambda shard, host: f"bad on {host}" if shard == 7 else "")
    found = run(40, simulated)
    assert found.done == 39
    assert set(simulated.published) == set(range(40)) - {7}
    assert sorted(found.failed) == [7]
    assert len(found.failed[7]) == 3
    assert {"a: bad on a", "b: bad on b"} == set(found.failed[7])


@pytest.mark.parametrize("publishes", [0.0, 0.5])
def test_a_shard_that_kills_its_worker_is_given_up_and_what_waited_behind_it_is_not(publishes: float) -> None:
    class Killing(Simulated):
        def _event(self, worker: int, what: str) -> Event | None:
            if what == "ends 5" and worker in self._places:
                what, worker = "dies", -1 - self._places[worker]
            return super()._event(worker, what)

    simulated = Killing(["a", "b"], publishes=publishes)
    found = run(20, simulated)
    assert sorted(found.failed) == [5]
    assert found.attempts == 3  # what was published just then did not count
    assert set(simulated.published) == set(range(20)) - {5}


def test_a_host_where_everything_fails_is_given_no_more() -> None:
    """As where a disk is full: it fails at once, so it would use up the attempts at all shards."""
    simulated = Simulated(
        ["full", "good"],
        takes=lambda shard, host: 0.01 if host == "full" else 1.0,
        fails=lambda shard, host: "no space left" if host == "full" else "",
    )
    found = run(40, simulated)
    assert (found.done, found.failed) == (40, {})
    assert found.retired == [("full", "no space left")]


def test_where_a_bad_host_is_there_first_its_failures_do_not_count_for_good() -> None:
    """As a node with a full disk that joins before all others."""

    class Late(Simulated):
        def _start(self, place: int, when: float) -> None:
            super()._start(place, when + 5 * place)

    simulated = Late(
        ["full", "good"],
        takes=lambda shard, host: 0.1,
        fails=lambda shard, host: "no space left" if host == "full" else "",
    )
    found = run(9, simulated)
    assert (found.done, found.failed) == (9, {})


def test_where_everything_fails_everywhere_it_ends() -> None:
    with pytest.raises(LayertapError, match=r"10 shards in a row failed.*no GPU"):
        run(1000, Simulated(["a"], fails=lambda shard, host: "no GPU"))


def test_a_shard_that_takes_far_too_long_is_begun_once_more_elsewhere() -> None:
    simulated = Simulated(["slow", "quick"], takes=lambda shard, host: 5000.0 if host == "slow" else 10.0)
    found = run(10, simulated)
    assert found.done == 10
    assert found.restarted == 1
    assert simulated.now < 200


def test_an_attempt_that_was_cancelled_counts_if_it_was_the_first_to_publish() -> None:
    """The worker that lost reports before the one that won."""
    simulated = Simulated(["slow", "quick"], takes=lambda shard, host: 5000.0 if host == "slow" else 10.0)
    published = simulated._published
    won: list[Event] = []

    def lost(worker: int, shard: int) -> Event:
        if shard == 0:
            won.append(Done(0, 0, {"shard": 0}))
            return Done(worker, 0, None)
        return published(worker, shard)

    def events(timeout_s: float) -> list[Event]:
        return [won.pop()] if won else Simulated.events(simulated, timeout_s)

    simulated._published, simulated.events = lost, events  # type: ignore[method-assign, assignment]
    found = run(20, simulated)
    assert (found.done, found.restarted, won) == (20, 1, [])
    assert found.own == 20


def test_what_waits_at_a_busy_worker_is_given_to_one_that_has_nothing() -> None:
    simulated = Simulated(["slow", "quick"], takes=lambda shard, host: 60.0 if host == "slow" else 1.0)
    assert run(6, simulated).done == 6
    assert [host for shard, host in simulated.made].count("slow") <= 1


def test_a_worker_first_makes_what_it_had_begun() -> None:
    simulated = Simulated(["a", "b"], begun={1: [17, 18]})
    assert run(20, simulated).done == 20
    assert [shard for shard, host in simulated.made if host == "b"][:2] == [17, 18]


def test_it_stops_when_asked() -> None:
    simulated = Simulated(["a"])
    found = dispatch(range(100), simulated, stop=lambda: simulated.now > 10, clock=lambda: simulated.now)
    assert found.stopped
    assert 9 <= found.done <= 11


def test_no_shards_are_no_work() -> None:
    assert run(0, Simulated(["a"])) == DispatchResult()
