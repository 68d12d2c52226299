from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from extract.errors import UnknownNameError
from extract.taps.layer_names import match_layers, named_layers

NAMES = ["stem", "blocks", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.10", "head", "norm[0]"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("stem", ["stem"]),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.10"]),
        ("blocks.?", ["blocks.0", "blocks.1"]),
        ("blocks.[1-9]*", ["blocks.1", "blocks.10"]),
        ("blocks.*.attn", ["blocks.0.attn"]),
        ("*", ["stem", "blocks", "head", "norm[0]"]),
        ("norm[0]", ["norm[0]"]),
        (["head", "blocks.?", "*"], ["head", "blocks.0", "blocks.1", "stem", "blocks", "norm[0]"]),
    ],
)
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
