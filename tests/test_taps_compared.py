"""The comparison of `Taps` with other libraries: `Taps` is right, and the page has its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.taps_compared import Attempt, Task, WithTaps, attempts, cell, tasks

PAGE = (Path(__file__).parents[1] / "docs" / "taps-compared.md").read_text(encoding="utf-8")
# The record refuses a live tensor that a later layer has changed.
KEPT_LIVE_BEFORE_AN_IN_PLACE_LAYER = "6b of a loss on `layer1.0.bn1`"


@pytest.fixture(scope="module")
def with_taps() -> list[tuple[Task, list[Attempt]]]:
    return [(task, attempts(WithTaps, task)) for task in tasks()]


def test_taps_give_the_answers_of_plain_torch_code(with_taps: list[tuple[Task, list[Attempt]]]) -> None:
    assert len(with_taps) == 10
    for task, results in with_taps:
        outcomes = {result.variant: result.outcome for result in results}
        if task.title == KEPT_LIVE_BEFORE_AN_IN_PLACE_LAYER:
            assert outcomes == {"": "error", "copy": "right"}
        else:
            assert set(outcomes.values()) == {"right"}, (task.title, results)


def test_the_page_has_the_number_of_lines_of_taps(with_taps: list[tuple[Task, list[Attempt]]]) -> None:
    in_table = dict(re.findall(r"^\| (\d.*?) \| (\d+(?: \*)?) \|", PAGE, re.MULTILINE))
    assert in_table == {task.title: cell(results) for task, results in with_taps}
