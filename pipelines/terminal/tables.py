"""Tables as CSV files and on the terminal."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from extract.system.atomic_files import atomic_write
from extract.system.csv_cells import safe_cell

__all__ = ["holds_columns", "numeral", "print_aligned", "table_file"]


@contextlib.contextmanager
def table_file(path: Path) -> Iterator[Callable[[list[Any]], Any]]:
    """Context manager: yield a function that writes one row of a CSV file. The file appears when it is complete.

    Text that a spreadsheet or a terminal would run is escaped; see `extract.system.csv_cells`. None is an empty cell.
    """
    with atomic_write(path) as file:
        # surrogateescape: file names may have undecodable bytes
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        writer = csv.writer(text, lineterminator="\n")
        yield lambda row: writer.writerow(map(safe_cell, row))
        text.flush()
        text.detach()


def holds_columns(path: Path, columns: Sequence[str]) -> bool:
    """Return whether a file is a CSV table that starts with these columns, by its first line."""
    try:
        with path.open("rb") as file:
            head = file.readline(1000).decode(errors="replace").strip()
    except OSError:
        return False
    return f"{head},".startswith(",".join([*columns, ""]))


def numeral(value: float | None, form: str) -> str:
    """Return a number in a table on the terminal; "-" if it is not known or not finite."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def print_aligned(rows: Sequence[Sequence[str]], align: str, echo: Callable[[str], None]) -> None:
    """Print columns, each as wide as its widest cell; the first row is the header.

    Args:
        rows: rows of cells.
        align: one letter per column: "<" for text, ">" for numbers.
        echo: prints a line.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        echo("  ".join(cells).rstrip())
