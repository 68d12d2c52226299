"""Looking changes nothing: models compute the same bits with open `Taps`, or a request is refused by name."""

from __future__ import annotations

import os

import pytest

from tests.extract.taps.programs import REQUESTS, Tally, try_all

MANY = int(os.environ.get("LAYERTAP_FUZZ", "1000"))


def judge(tally: Tally, shrunk: int) -> None:
    print(f"{tally.request}: {dict(tally.outcomes)}, refused: {dict(tally.reasons)}")
    assert tally.outcomes["equal"]
    if tally.failed:
        pytest.fail(tally.text(shrunk), pytrace=False)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_changes_nothing_leaves_random_programs_as_they_are(name: str) -> None:
    judge(try_all(REQUESTS[name], range([*REQUESTS].index(name) % 5, 60, 5)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_changes_nothing_leaves_many_random_programs_as_they_are(name: str) -> None:
    judge(try_all(REQUESTS[name], range(MANY)), 10)
