"""Looking changes nothing: models compute the same bits with open `Taps`, or a request is refused by name."""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from extract import LayertapError
from tests.extract.taps.programs import EDITS, REQUESTS, Tally, try_all

# Requests that are tried in every fourth program of the quick test, others in every sixth; where they begin differs.
OFTEN = ("keep_output", "keep_input", "keep_grad", "keep_grad_input", "same_output", "same_input", "same_grad_input")
QUICK = 60
MANY = int(os.environ.get("LAYERTAP_FUZZ", "60"))  # other programs than the quick test's; 1000 take four minutes


# Outputs and inputs can always be kept. What passes copies on may be refused in programs that write into everything.
MOST_REFUSED = {"keep_output": 0.0, "keep_input": 0.0}

pytestmark = pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")


def judge(tally: Tally, shrunk: int) -> None:
    print(f"{tally.request}: {dict(tally.outcomes)}, refused: {dict(tally.reasons)}")
    assert tally.refused <= MOST_REFUSED.get(str(tally.request), 2 / 3)
    if tally.failed:
        pytest.fail(tally.text(shrunk), pytrace=False)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_changes_nothing_leaves_random_programs_as_they_are(name: str) -> None:
    step = 4 if name in OFTEN else 6
    judge(try_all(REQUESTS[name], range([*REQUESTS].index(name) % step, QUICK, step)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_changes_nothing_leaves_many_random_programs_as_they_are(name: str) -> None:
    judge(try_all(REQUESTS[name], range(QUICK, QUICK + MANY)), 10)


def test_a_change_is_noticed_and_the_program_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EDITS, "same", lambda h: 2 * h)
    tally = try_all(REQUESTS["same_output"], range(8))
    assert len(tally.failed) > 5
    _, small, _, _ = next(tally.smallest(2))
    assert len(small.bodies[-1].statements) <= 1, small.listing


def test_a_refusal_that_names_no_layer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(h: Tensor) -> Tensor:
        raise LayertapError("no")

    monkeypatch.setitem(EDITS, "same", refuse)
    assert try_all(REQUESTS["same_output"], range(8)).outcomes.keys() == {"different"}
