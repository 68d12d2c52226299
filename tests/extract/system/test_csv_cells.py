from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract.system.csv_cells import exact_text, safe_cell


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("@eaDir/a.jpg", "'@eaDir/a.jpg"), ("+a", "'+a"), ("-a", "'-a"),
        ("'=a", "''=a"), ("\t=a", "'\t=a"), ("\r=a", "'\\x0d=a"), ("＝a", "'＝a"), ("--1", "'--1"), ("-1+1", "'-1+1"),
        ("a\x1b[31m\x07\x9b", "a\\x1b[31m\\x07\\x9b"), ("a\\x1b", "a\\x5cx1b"), ("\x00", "\\x00"),
    ],
)  # fmt: skip
def test_what_a_spreadsheet_or_terminal_would_run_is_text(text: str, cell: str) -> None:
    assert safe_cell(text) == cell
    assert exact_text(cell) == text


SAME = ["-1.5", "+1", "-1e-05", "-.5", "3.", "-inf", "nan", "a=b.jpg", "dir/-a.jpg", "'a.jpg", "a\\b.jpg", "a\nb",
        "a,b", 'a"b', "", " =a", "ä/日.jpg", "a\udcff.jpg", "C:\\xylophone.jpg"]  # fmt: skip


@pytest.mark.parametrize("text", SAME)
def test_numbers_and_ordinary_paths_are_unchanged(text: str) -> None:
    assert safe_cell(text) == text
    assert exact_text(text) == text


def test_what_is_no_text_is_unchanged() -> None:
    assert [safe_cell(value) for value in (-1, -1.5, None, True)] == [-1, -1.5, None, True]


@given(st.one_of(st.text(), st.text("'=+-@\t\r\n\\x1b\x1b09af.e")))
def test_the_exact_text_follows_from_the_cell(text: str) -> None:
    cell = safe_cell(text)
    assert exact_text(cell) == text
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerow([cell, "x"])
    assert next(csv.reader(io.StringIO(file.getvalue(), newline=""))) == [cell, "x"]
