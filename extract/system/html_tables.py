"""HTML for notebooks: a title, tables and notes. All text is escaped, and nothing is loaded from other servers."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Table", "html_summary"]

_MAX_ROWS = 100  # a notebook keeps its output in its file


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        heads: names of the columns.
        rows: rows of cells.
        numbers: number of columns at the end that are aligned to the right.
        folded: text to click on to see the table; empty: it is always visible.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 0
    folded: str = ""


def html_summary(title: str, tables: Iterable[Table] = (), notes: Iterable[str] = ()) -> str:
    """Return HTML with a title in bold, notes, and tables, for `_repr_html_`."""
    parts = [f"<strong>{_escaped(title)}</strong>"]
    parts += [f"<div>{_escaped(note)}</div>" for note in notes]
    parts += [_table(table) for table in tables if table.rows]
    return "<div>" + "\n".join(parts) + "</div>"


def _table(table: Table) -> str:
    sides = ["left"] * (len(table.heads) - table.numbers) + ["right"] * table.numbers
    lines = ["<table>", f"<thead>{_row('th', table.heads, sides)}</thead>", "<tbody>"]
    lines += [_row("td", row, sides) for row in table.rows[:_MAX_ROWS]]
    lines.append("</tbody></table>")
    if (more := len(table.rows) - _MAX_ROWS) > 0:
        lines.append(f"<div>... and {more:,} more rows</div>")
    body = "\n".join(lines)
    return f"<details><summary>{_escaped(table.folded)}</summary>\n{body}</details>" if table.folded else body


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    filled = (
        f'<{tag} style="text-align:{side}">{_escaped(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(filled)}</tr>"


def _escaped(text: str) -> str:
    # Undecodable bytes of file names are lone surrogates, which no JSON of a notebook can hold.
    return html.escape(text.encode("utf-8", "backslashreplace").decode())
