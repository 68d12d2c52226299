"""Time several ways to do the same work, in turn, until their order is sure.

Each round times every way once, so a neighbour that takes the CPU for some seconds slows all ways of a round alike. The
ratios within rounds are compared, not the sums. Every other round has the reverse order: a neighbour whose bursts are
as long as a round would otherwise always meet the same way. Bursts only add time, so the shortest times must have the
same order.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

__all__ = ["SAME", "Rounds", "in_rounds", "timed_s"]

SAME = 1.02  # ratio of times that counts as none
_AT_LEAST, _ENOUGH = 3, 5  # rounds; so many if all ways are clearly slower than one, and so many if not
_CLEARLY = 1.5
_AT_MOST_S = 8.0

# 99.5 % quantiles of Student's t distribution with 2, 3, ... degrees of freedom; the last is for all larger ones. The
# interval is looked at after each round, which a smaller one would not bear.
_STUDENT_T = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95)

W = TypeVar("W")


def timed_s(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Rounds(NamedTuple, Generic[W]):
    """Times of ways in rounds.

    Attributes:
        seconds: way -> its time in each round; a way that is surely slower than another is not timed to the end.
        is_sure: whether each way is surely slower than the fastest, or differs by at most 2 %.
    """

    seconds: dict[W, list[float]]
    is_sure: bool

    def time_s(self, way: W) -> float:
        """Return the shortest time of a way.

        For a way that was dropped, it is scaled by the time of the fastest: later rounds may have been on a quieter
        machine.
        """
        own, last = self.seconds[way], max(map(len, self.seconds.values()))
        fastest = min((times for times in self.seconds.values() if len(times) == last), key=min)
        return min(own) * min(fastest) / min(fastest[: len(own)])


def in_rounds(
    ways: Mapping[W, Callable[[], float]], at_most_s: float = _AT_MOST_S, clock: Callable[[], float] = time.perf_counter
) -> Rounds[W]:
    """Run each way once a round, in turn, until their order is sure or the time is over.

    Args:
        ways: way -> function that does the work and returns the seconds it took.
        at_most_s: no round is started after so many seconds, except the first three.
        clock: returns the time in seconds.
    """
    seconds: dict[W, list[float]] = {way: [] for way in ways}
    running, start, rounds, is_sure = list(ways), clock(), 0, not ways
    while not is_sure and (rounds < _AT_LEAST or clock() - start < at_most_s):
        for way in running if rounds % 2 == 0 else reversed(running):
            seconds[way].append(ways[way]())
        rounds += 1
        if rounds < _AT_LEAST:
            continue
        fastest = min(running, key=lambda way: min(seconds[way]))
        is_slower = _is_slower if rounds >= _ENOUGH else _is_clearly_slower
        unsure = [way for way in running if way != fastest and not is_slower(seconds[way], seconds[fastest])]
        same = [way for way in unsure if rounds >= _ENOUGH and _is_same(seconds[way], seconds[fastest])]
        is_sure = len(same) == len(unsure)
        running = [way for way in running if way == fastest or way in unsure]
    return Rounds(seconds, is_sure)


def _is_clearly_slower(times: list[float], others: list[float]) -> bool:
    """Return whether no burst of a neighbour explains the difference: it is large, and in each round."""
    in_each_round = all(a > math.sqrt(_CLEARLY) * b for a, b in zip(times, others, strict=True))
    return in_each_round and min(times) > _CLEARLY * min(others)


def _is_slower(times: list[float], others: list[float]) -> bool:
    return _is_clearly_slower(times, others) or (_interval(times, others)[0] > 1 and min(times) > min(others))


def _is_same(times: list[float], others: list[float]) -> bool:
    low, high = _interval(times, others)
    return low >= 1 / SAME and high <= SAME


def _interval(times: list[float], others: list[float]) -> tuple[float, float]:
    """Return a 99 % interval of the mean ratio of the times in a round."""
    logarithms = [math.log(a / b) for a, b in zip(times, others, strict=True)]
    t = _STUDENT_T[min(len(logarithms) - 2, len(_STUDENT_T)) - 1]
    middle, half = statistics.fmean(logarithms), t * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    return math.exp(middle - half), math.exp(middle + half)
