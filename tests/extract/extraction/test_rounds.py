"""Ways that are timed in turn, on a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from extract.extraction.rounds import in_rounds


class Machine:
    """A machine whose speed changes over time."""

    def __init__(self, slowdown: Callable[[float], float] = lambda now: 1.0, jitter: float = 0.0, seed: int = 0):
        self.now, self._slowdown, self._jitter, self._random = 0.0, slowdown, jitter, random.Random(seed)
        self.runs: list[float] = []

    def way(self, seconds: float) -> Callable[[], float]:
        def run() -> float:
            taken = seconds * self._slowdown(self.now) * (1 + self._jitter * self._random.random())
            self.now += taken
            self.runs.append(seconds)
            return taken

        return run


def _rounds(machine: Machine, *ways: float, at_most_s: float = 100.0) -> tuple[list[float], bool]:
    rounds = in_rounds({way: machine.way(way) for way in ways}, at_most_s, lambda: machine.now)
    return [rounds.time_s(way) for way in ways], rounds.is_sure


def test_on_a_quiet_machine_clear_orders_take_three_rounds_and_others_five() -> None:
    machine = Machine()
    times, is_sure = _rounds(machine, 1.0, 0.5, 0.2)
    assert (times, is_sure) == (pytest.approx([1.0, 0.5, 0.2]), True)
    assert machine.runs == [1.0, 0.5, 0.2, 0.2, 0.5, 1.0, 1.0, 0.5, 0.2]
    machine = Machine()
    assert _rounds(machine, 0.4, 0.5) == (pytest.approx([0.4, 0.5]), True)
    assert len(machine.runs) == 10


def test_equal_ways_are_not_timed_for_ever() -> None:
    machine = Machine(jitter=0.01)
    times, is_sure = _rounds(machine, 0.500, 0.501)
    assert is_sure
    assert times[1] / times[0] == pytest.approx(1, abs=0.02)
    assert len(machine.runs) < 40


@pytest.mark.parametrize("seed", range(20))
def test_beside_a_noisy_neighbour_the_fastest_is_that_of_a_quiet_machine(seed: int) -> None:
    """A neighbour takes half of the machine, for seconds at a time: one way after the other would be misled."""
    busy = random.Random(seed).sample(range(400), 200)
    machine = Machine(lambda now: 2.0 if int(now) % 400 in busy else 1.0, 0.05, seed)
    times, is_sure = _rounds(machine, 0.6, 0.5, 0.15, 0.3)
    assert is_sure
    assert min(times) == times[2]
    assert 1.7 < times[3] / times[2] < 4.2  # after three rounds, a burst may have met each turn of a clear loser
    assert min(times[:2]) > 1.7 * times[2]


def test_a_way_that_is_surely_slower_is_not_timed_to_the_end() -> None:
    machine = Machine(jitter=0.02)
    _rounds(machine, 5.0, 0.500, 0.507)
    assert machine.runs.count(5.0) == 3 < machine.runs.count(0.500)


def test_when_the_time_is_over_it_says_that_the_order_is_not_sure() -> None:
    unsure = []
    for seed in range(50):
        machine = Machine(jitter=3.0, seed=seed)
        unsure.append(not _rounds(machine, 0.50, 0.51, at_most_s=30.0)[1])
        assert machine.now < 35
    assert sum(unsure) >= 45


def test_a_single_way_has_a_time_and_no_rival() -> None:
    assert _rounds(Machine(), 0.5) == ([0.5], True)
