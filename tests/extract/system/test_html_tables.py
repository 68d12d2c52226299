"""HTML of results for notebooks."""

from __future__ import annotations

from extract.system.html_tables import Table, html_summary
from tests.extract.html_reader import HtmlReader


def test_cells_title_and_notes_are_text_and_not_html() -> None:
    evil = "<script>alert(1)</script> & 'quoted'"
    page = HtmlReader(html_summary(evil, [Table([evil, "n"], [[evil, "1"]], numbers=1)], [evil]))
    assert page.rows == [[evil, "n"], [evil, "1"]]
    assert page.other == [evil, evil]
    assert page.tags == {"div", "strong", "table", "thead", "tbody", "tr", "td", "th"}


def test_long_tables_are_cut_and_say_so() -> None:
    page = HtmlReader(html_summary("t", [Table(["n"], [[str(i)] for i in range(1234)])]))
    assert page.rows == [["n"], *([str(i)] for i in range(100))]
    assert page.other == ["t", "... and 1,134 more rows"]


def test_a_folded_table_is_in_details_and_an_empty_one_is_left_out() -> None:
    page = HtmlReader(html_summary("t", [Table(["n"], [["1"]], folded="Layers <2>"), Table(["empty"], [])]))
    assert page.rows == [["n"], ["1"]]
    assert page.other == ["t", "Layers <2>"]
    assert {"details", "summary"} <= page.tags


def test_undecodable_names_can_be_stored_in_a_notebook() -> None:
    assert b"photo\\udcff.png" in html_summary("photo\udcff.png").encode()
