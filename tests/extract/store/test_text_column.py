from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.store.text_column import TextColumn

TEXTS = ["a", "", "b/c.jpg", "ü", "a"]


def column(texts: list[str]) -> TextColumn:
    return TextColumn(len(texts), lambda start, stop: texts[start:stop])


@settings(max_examples=30)
@given(st.lists(st.text("aü/", max_size=2), max_size=8), st.slices(8))
def test_it_is_a_sequence_like_a_list(texts: list[str], index: slice) -> None:
    values = column(texts)
    assert values[index] == texts[index]
    assert (list(values), len(values), list(reversed(values))) == (texts, len(texts), texts[::-1])
    assert [values[i] for i in range(-len(texts), len(texts))] == texts + texts
    assert values == texts
    assert np.array(values).tolist() == texts
    for text in texts:
        assert text in values
        assert values.index(text) == texts.index(text)


def test_it_differs_from_other_texts() -> None:
    for other in (TEXTS[:-1], [*TEXTS[:-1], "z"], None):
        assert column(TEXTS) != other
    assert "z" not in column(TEXTS)


def test_a_text_gives_a_mask_as_of_an_array() -> None:
    values = column(TEXTS)
    assert (values == "a").tolist() == [True, False, False, False, True]
    assert (values != "a").tolist() == [False, True, True, True, False]
    assert (column([]) == "a").shape == (0,)
    assert np.arange(5)[values == "a"].tolist() == [0, 4]


@pytest.mark.parametrize(
    "rows", [[3, 0, 3], [-1], [], np.array([4, 2]), np.array(TEXTS) == "a", [True, False, False, True, False]]
)
def test_rows_by_number_or_mask_are_those_of_an_array(rows: object) -> None:
    expected = np.array(TEXTS)[np.asarray(rows, None if len(rows) else int)].tolist()  # type: ignore[arg-type]
    assert column(TEXTS)[rows] == expected  # type: ignore[index]


@pytest.mark.parametrize("rows", [[True, False], [5], 5, -6])
def test_a_mask_of_another_length_and_a_row_that_does_not_exist_are_refused(rows: Any) -> None:
    with pytest.raises(IndexError):
        column(TEXTS)[rows]


def test_many_texts_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract.store.text_column._AT_ONCE", 2)
    reads = []

    def read(start: int, stop: int) -> list[str]:
        reads.append((start, stop))
        return TEXTS[start:stop]

    assert list(TextColumn(5, read)) == TEXTS
    assert reads == [(0, 2), (2, 4), (4, 5)]
