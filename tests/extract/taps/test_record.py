"""What a record says of itself: values by name and glob, and what is missing and why."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from extract import Site, Taps, UnknownNameError
from extract.taps.layer_names import match_layers, named_layers
from tests.extract.taps.networks import Net, linear, same

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def branches() -> Net:
    """`used` runs twice, `unused` never, `items` returns a generator, `lost` runs and returns no tensor."""

    def forward(model: Net, x: Tensor) -> Any:
        model.lost(x)
        return sum(model.items(model.used(model.used(x))), torch.zeros(()))

    items, lost = Net(lambda self, x: (row for row in x)), Net(lambda self, x: None)
    return Net(forward, used=linear(), unused=linear(), items=items, lost=lost)


def test_a_record_says_what_is_missing_and_why() -> None:
    with torch.no_grad(), Taps(branches(), ["used", "unused", "items", "lost"]).keep("used", "input", call=2) as taps:
        taps(X)
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
    with torch.no_grad(), Taps(branches(), "*") as taps:  # layers of a glob need not run
        taps(X)
    assert list(taps.record) == ["used#0", "used#1"]
    assert taps.record.missing == {}


def test_the_input_is_no_answer_where_the_output_was_asked_for() -> None:
    with torch.no_grad(), Taps(branches(), "items").keep("items", "input") as taps:
        taps(X)
    assert taps.record["items@input"].shape == (3, 4)
    with pytest.raises(UnknownNameError, match="'items' ran, but returned no tensor"):
        taps.record["items"]
    with torch.no_grad(), Taps(branches()).keep("items", "input") as taps:
        taps(X)
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
    adds = Net(lambda self, x: (x + 1).relu() + x)
    with torch.no_grad(), Taps(nn.Sequential(adds, Net(adds.compute)), "*/add") as taps:
        taps(X)
    assert list(taps.record.select("*/add")) == ["0/add#0", "0/add#1", "1/add#0", "1/add#1"]
    assert list(taps.record.select("1/*")) == ["1/add#0", "1/add#1"]
    assert list(taps.record.select("**/*#1")) == ["0/add#1", "1/add#1"]
    assert list(taps.record.select("1/add#1")) == ["1/add#1"]
    with torch.no_grad(), Taps(nn.Sequential(nn.LSTM(4, 4)), "*") as taps:
        taps(X)
    assert list(taps.record.select("*:1")) == ["0:1.0", "0:1.1"]


def test_a_loaded_record_and_one_that_outlives_its_model_say_what_is_missing(tmp_path: Path) -> None:
    model = nn.Sequential(branches())
    alive = weakref.ref(model)
    with torch.no_grad(), Taps(model, ["0.used", "0.unused"]) as taps:
        taps(X)
    record = loaded = taps.record
    for _ in range(2):
        torch.save(loaded, tmp_path / "record.pt")
        loaded = torch.load(tmp_path / "record.pt", weights_only=False)
        assert list(loaded) == ["0.used#0", "0.used#1"]
        assert all(torch.equal(loaded[name], record[name]) for name in record)
        assert loaded.missing == {"0.unused": "layer '0.unused' did not run in this forward"}
        assert repr(loaded) == repr(record)
        with pytest.raises(UnknownNameError, match="'0.unused' did not run"):
            loaded["0.unused"]
    del model, taps
    gc.collect()
    assert alive() is None
    assert list(record) == list(loaded)
    assert list(record.missing) == ["0.unused"]
    with pytest.raises(UnknownNameError, match="0.unused"):
        record["0.unused"]


def test_taps_say_what_they_keep_and_edit() -> None:
    taps = Taps(branches(), ["used", "/add"]).keep("", "input").edit("unused", same, "grad", call=1)
    assert repr(taps).splitlines() == [
        "Taps(Net)",
        "  keep used",
        "  keep /add",
        "  keep @input",
        "  edit unused#1@grad",
    ]
    many = nn.Sequential(*[nn.ReLU() for _ in range(30)])
    assert repr(Taps(many, "*")).splitlines()[-1] == "  ... 10 more"


def test_a_function_or_another_call_asked_for_does_not_hide_the_input() -> None:
    model, x = nn.Sequential(Net(lambda self, x: x + 1)), X
    with torch.no_grad(), Taps(model, "0/add").keep("0", "input") as taps:
        taps(x)
    assert torch.equal(taps.record["0"], x)
    with torch.no_grad(), Taps(model).keep("0", call=5).keep("0", "input") as taps:
        taps(x)
    assert torch.equal(taps.record["0"], x)
    assert list(taps.record.missing) == ["0#5"]


def test_reasons_are_those_of_the_call_and_path_that_is_looked_up() -> None:
    with torch.no_grad(), Taps(branches()).keep("used", call=0).keep("used", call=3) as taps:
        taps(X)
    assert taps.record.missing == {
        "used#3": "layer 'used' ran 2 times in this forward; there is no call 3, since the first is 0"
    }
    with torch.no_grad(), Taps(branches(), "used") as taps:
        taps(X)
    with torch.no_grad(), Taps(branches(), ["used:3"]) as paths:
        paths(X)
    reason = "layer 'used' ran, but returned no tensor at path 3 (to pool, pass a function as `reduce`)"
    assert paths.record.missing == {"used:3": reason}
    for text, reason in (("used#5", "there is no call 5"), ("used#0:7", "returned no tensor at path 7")):
        with pytest.raises(UnknownNameError, match=reason):
            taps.record[text]
    with pytest.raises(UnknownNameError, match="not found in this record"):
        taps.record["unused"]


def test_a_glob_of_layers_selects_neither_functions_nor_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad(), Taps(model, ["", "*", "1/*"]) as taps:
        taps(X)
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


# Names of layers, and patterns of names


NAMES = ["stem", "blocks", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.10", "head", "norm[0]"]


@pytest.mark.parametrize(("patterns", "expected"), [
    ("stem", ["stem"]),
    ("blocks.*", ["blocks.0", "blocks.1", "blocks.10"]),
    ("blocks.?", ["blocks.0", "blocks.1"]),
    ("blocks.[1-9]*", ["blocks.1", "blocks.10"]),
    ("blocks.*.attn", ["blocks.0.attn"]),
    ("*", ["stem", "blocks", "head", "norm[0]"]),
    ("norm[0]", ["norm[0]"]),
    (["head", "blocks.?", "*"], ["head", "blocks.0", "blocks.1", "stem", "blocks", "norm[0]"]),
])  # fmt: skip
def test_patterns(patterns: str | list[str], expected: list[str]) -> None:
    assert match_layers(NAMES, patterns) == expected


@pytest.mark.parametrize(("pattern", "nearest"), [("block.0", "'blocks.0'"), ("haed", "'head'"), ("blocks.2*", "'bl")])
def test_a_miss_names_the_nearest(pattern: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(f"layer {pattern!r} not found in net; nearest: {nearest}")):
        match_layers(NAMES, pattern, "net")


def dotted(letters: str) -> st.SearchStrategy[str]:
    """One to three parts of one to three letters."""
    return st.lists(st.text(letters, min_size=1, max_size=3), min_size=1, max_size=3).map(".".join)


def as_regex(pattern: str) -> str:
    """The pattern as a regular expression: `*` is a part of one component, `**` any number of components."""
    *parts, last = pattern.split(".")
    inner = "".join(r"([^.]+\.)*" if part == "**" else part.replace("*", "[^.]*") + r"\." for part in parts)
    return inner + (r"[^.]+(\.[^.]+)*" if last == "**" else last.replace("*", "[^.]*"))


@settings(max_examples=25, deadline=None)
@given(st.lists(dotted("ab01"), unique=True, min_size=1), dotted("ab01*"))
def test_a_star_stands_for_a_part_of_one_component_and_two_for_any_number_of_them(
    names: list[str], pattern: str
) -> None:
    expected = [name for name in names if re.fullmatch(as_regex(pattern), name)]
    if expected:
        assert match_layers(names, pattern) == expected
    else:
        with pytest.raises(UnknownNameError):
            match_layers(names, pattern)


def test_shared_modules_have_all_their_names() -> None:
    shared = nn.Sequential(nn.ReLU())
    names = named_layers(nn.ModuleDict({"a": shared, "b": shared}))
    assert list(names) == ["a", "a.0", "b", "b.0"]
    assert names["a.0"] is names["b.0"]
