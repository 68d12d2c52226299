"""What a record says of itself: values by name and glob, and what is missing and why."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from extract import Site, Taps, UnknownNameError


class Branches(nn.Module):
    """`used` runs twice, `unused` never, `items` returns a generator, `lost` runs and returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.items, self.lost = Items(), Lost()

    def forward(self, x: Tensor) -> Tensor:
        self.lost(x)
        return sum(self.items(self.used(self.used(x))), torch.zeros(()))


class Items(nn.Module):
    def forward(self, x: Tensor):
        return (row for row in x)


class Lost(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


def test_a_record_says_what_is_missing_and_why() -> None:
    names = ["used", "unused", "items", "lost", "used#2", "used:3"]
    with torch.no_grad(), Taps(Branches(), names[:4]).keep("items", "input").keep("used", "input", call=2) as taps:
        taps(torch.randn(3, 4))
    assert taps.record.missing == {
        "unused": "layer 'unused' did not run in this forward",
        "items": "layer 'items' ran, but returned no tensor",
        "lost": "layer 'lost' ran, but returned no tensor",
        "used#2@input": "layer 'used' ran 2 times in this forward; there is no call 2, since the first is 0",
    }
    assert "unused: none, layer 'unused' did not run" in repr(taps.record)
    for text, reason in taps.record.missing.items():
        with pytest.raises(UnknownNameError, match=reason.split(";")[0]):
            taps.record[text]


def test_a_path_that_no_output_has_is_missing() -> None:
    with torch.no_grad(), Taps(Branches(), ["used:3"]) as taps:
        taps(torch.randn(3, 4))
    reason = "layer 'used' ran, but returned no tensor at path 3 (to pool, pass a function as `reduce`)"
    assert taps.record.missing == {"used:3": reason}


def test_layers_of_a_glob_that_did_not_run_are_not_missing() -> None:
    with torch.no_grad(), Taps(Branches(), "*") as taps:
        taps(torch.randn(3, 4))
    assert list(taps.record) == ["used#0", "used#1"]
    assert taps.record.missing == {}


def test_the_input_is_no_answer_where_the_output_was_asked_for() -> None:
    with torch.no_grad(), Taps(Branches(), "items").keep("items", "input") as taps:
        taps(torch.randn(3, 4))
    assert taps.record["items@input"].shape == (3, 4)
    with pytest.raises(UnknownNameError, match="'items' ran, but returned no tensor"):
        taps.record["items"]
    with torch.no_grad(), Taps(Branches()).keep("items", "input") as taps:
        taps(torch.randn(3, 4))
    assert taps.record["items"].shape == (3, 4)


def test_values_are_selected_by_a_glob() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with Taps(model, "**").keep("**", "grad") as taps:
        taps(x).sum().backward()
    record = taps.record
    assert list(record.select("?")) == ["0", "1", "2", "2@grad", "1@grad", "0@grad"]
    assert list(record.select("?@output")) == ["0", "1", "2"]
    assert list(record.select("0.*@grad")) == ["0.1@grad", "0.0@grad"]
    assert list(record.select("**.0@output")) == ["0.0", "0", "1.0"]
    assert all(value is record[name] for name, value in record.select("**").items())
    with pytest.raises(UnknownNameError, match="'blocks.\\*' not found"):
        record.select("blocks.*")
    with pytest.raises(UnknownNameError, match=r"record.select\('0.\*'\)"):
        record["0.*"]


def test_functions_are_selected_by_a_glob() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).relu() + x

    with torch.no_grad(), Taps(nn.Sequential(Adds(), Adds()), "*/add") as taps:
        taps(torch.randn(3, 4))
    assert list(taps.record.select("*/add")) == ["0/add#0", "0/add#1", "1/add#0", "1/add#1"]
    assert list(taps.record.select("1/*")) == ["1/add#0", "1/add#1"]
    assert list(taps.record.select("**/*#1")) == ["0/add#1", "1/add#1"]
    assert list(taps.record.select("1/add#1")) == ["1/add#1"]
    with torch.no_grad(), Taps(nn.Sequential(nn.LSTM(4, 4)), "*") as taps:
        taps(torch.randn(3, 4))
    assert list(taps.record.select("*:1")) == ["0:1.0", "0:1.1"]


def test_a_loaded_record_still_says_what_is_missing(tmp_path: Path) -> None:
    with torch.no_grad(), Taps(Branches(), ["used", "unused"]) as taps:
        taps(torch.randn(3, 4))
    loaded = pickle.loads(pickle.dumps(taps.record))
    assert loaded.missing == taps.record.missing
    assert repr(loaded) == repr(taps.record)
    with pytest.raises(UnknownNameError, match="'unused' did not run"):
        loaded["unused"]
    again = pickle.loads(pickle.dumps(loaded))
    assert again.missing == loaded.missing
    assert torch.equal(again["used#1"], taps.record["used#1"])


def test_a_record_that_outlives_its_taps_and_model_answers() -> None:
    taps = Taps(Branches(), ["used", "unused"])
    with torch.no_grad(), taps:
        taps(torch.randn(3, 4))
    record = taps.record
    del taps
    assert list(record.missing) == ["unused"]
    with pytest.raises(UnknownNameError, match="unused"):
        record["unused"]


def test_taps_say_what_they_keep_and_edit() -> None:
    taps = Taps(Branches(), ["used", "/add"]).keep("", "input").edit("unused", lambda h: h, "grad", call=1)
    assert repr(taps).splitlines() == [
        "Taps(Branches)",
        "  keep used",
        "  keep /add",
        "  keep @input",
        "  edit unused#1@grad",
    ]
    many = nn.Sequential(*[nn.ReLU() for _ in range(30)])
    assert repr(Taps(many, "*")).splitlines()[-1] == "  ... 10 more"


def test_a_function_or_another_call_asked_for_does_not_hide_the_input() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    x = torch.randn(3, 4)
    with torch.no_grad(), Taps(nn.Sequential(Adds()), "0/add").keep("0", "input") as taps:
        taps(x)
    assert torch.equal(taps.record["0"], x)
    with torch.no_grad(), Taps(nn.Sequential(Adds())).keep("0", call=5).keep("0", "input") as taps:
        taps(x)
    assert torch.equal(taps.record["0"], x)
    assert list(taps.record.missing) == ["0#5"]


def test_reasons_are_those_of_the_call_and_path_that_is_looked_up() -> None:
    with torch.no_grad(), Taps(Branches()).keep("used", call=0).keep("used", call=3) as taps:
        taps(torch.randn(3, 4))
    assert taps.record.missing == {
        "used#3": "layer 'used' ran 2 times in this forward; there is no call 3, since the first is 0"
    }
    with torch.no_grad(), Taps(Branches(), "used") as taps:
        taps(torch.randn(3, 4))
    for text, reason in (("used#5", "there is no call 5"), ("used#0:7", "returned no tensor at path 7")):
        with pytest.raises(UnknownNameError, match=reason):
            taps.record[text]
    with pytest.raises(UnknownNameError, match="not found in this record"):
        taps.record["unused"]


def test_a_glob_of_layers_selects_neither_functions_nor_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad(), Taps(model, ["", "*", "1/*"]) as taps:
        taps(torch.randn(3, 4))
    assert list(taps.record.select("*")) == list(taps.record.select("**")) == ["0", "1"]
    assert list(taps.record.select("**/*")) == ["1/relu"]
    assert list(taps.record.select("")) == [""]
    for pattern in ("*#1", "*@grad", "0:1", "blocks.*", "**/add", "/add"):
        with pytest.raises(UnknownNameError, match="not found in this record"):
            taps.record.select(pattern)


def test_absent_names_are_looked_up_without_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(3)])
    with torch.no_grad(), Taps(model, "*").keep("*", "input") as taps:
        taps(torch.ones(2, 2))
    by_hand = {name: taps.record[name] for name in taps.record}
    monkeypatch.setattr("extract.taps.record.unknown_name", None)
    for text in ("1", "1@input", "1#0", "1@grad", "7", "1:0", "", "1:0@input", "1#1"):
        expected = text in by_hand or text in ("1@input", "1#0")
        assert (text in taps.record) == expected
        assert (taps.record.get(text) is not None) == expected
    assert taps.record.get("7", 5) == 5
    assert taps.record.get(Site("1")) is taps.record["1"]
