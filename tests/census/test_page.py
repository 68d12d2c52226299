"""The page of the documentation is the one that the results of the census give."""

from __future__ import annotations

from pathlib import Path

from tests.census.page import page, read

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "census.md"


def test_the_page_is_the_one_that_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(*read(RESULTS))


def test_the_page_names_what_is_wrong_refused_and_not_run() -> None:
    network = {"library": "timm", "name": "net", "family": "nets", "parameters": 7, "size": [32, 32]}
    numbers = {"layers": 3, "calls": 4, "outputs": 5, "gradients": 5, "rounded gradients": 1, "rows": 2}
    results = [
        network | {"numbers": numbers, "wrong": {"outputs": 2}, "examples": {"outputs": ["conv"]}},
        network | {"name": "other", "numbers": numbers, "refused": {"rows: not the images": 6}},
        network | {"name": "third", "not run": "cannot be built: ImportError: no natten"},
    ]
    lines = page({"timm": "1.0", "date": "2026-11-23", "families": 5}, results).splitlines()
    assert any("2 networks of 1 families: 8 calls of 6 layers. 2 values are wrong" in line for line in lines)
    assert any(
        "5 families" in line and "Of 0, no network ran" in line and "and 4 have not been tried yet" in line
        for line in lines
    )
    assert "| timm/net | outputs | 2 | `conv` |" in lines
    assert "| rows: not the images | 6 | 1 |" in lines
    assert "| needs a library that is not installed | 1 |" in lines
