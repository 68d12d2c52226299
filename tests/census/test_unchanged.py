"""Looking at real networks changes nothing in them: the networks of the slow census, on small pictures."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from extract import Taps
from tests.census.test_census import SLOW, network
from tests.census.unchanged import REQUESTS, judge, judge_model

MOST_REFUSED = 0.01  # of layers and requests


@pytest.mark.slow
@pytest.mark.parametrize("key", SLOW if "LAYERTAP_FUZZ" in os.environ else SLOW[::8])
def test_a_request_that_changes_nothing_leaves_networks_as_they_are(key: str) -> None:
    tally = judge(network(key))
    print(f"{key}: {tally.line()}")
    assert not tally.wrong
    assert tally.refused <= MOST_REFUSED * tally.layers, tally.reasons


def test_a_change_is_noticed_and_a_refused_layer_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.randn(2, 4)
    tally = judge_model(model, x)
    assert (tally.layers, tally.refused, tally.wrong) == (3 * 10, 0, [])

    def refusing(taps: Taps, names: list[str]) -> Taps:
        taps.edit([name for name in names if name != "1"], lambda h: 1.5 * h)
        return taps.edit("1", lambda h: h[0]) if "1" in names else taps

    monkeypatch.setitem(REQUESTS, "edit output", refusing)
    tally = judge_model(model, x)
    assert tally.refused == 2  # with gradients and without
    assert [text.partition(":")[0] for text in tally.wrong] == ["edit output, no_grad", "edit output, grad"]
