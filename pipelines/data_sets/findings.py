"""Findings about the images of a data set, as a file or on the terminal: `layertap findings OUT`."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from extract.analysis.row_findings import KINDS, LABELS_DIFFER, Finding, findings
from extract.errors import InputError
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader, as_utf8
from extract.system.atomic_files import link_target, write_whole
from extract.system.csv_cells import safe_cell
from extract.system.json_files import mapped
from extract.system.optional_libraries import library
from pipelines.terminal.output_paths import check_file
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import SHOWN, counted, printable

__all__ = ["as_csv", "as_json", "findings_by_pictures", "print_findings", "run_findings"]


_COLUMNS = tuple(column.name for column in fields(Finding))


def run_findings(
    out: Path | str,
    output: Path | None,
    layer: str | None,
    kinds: Sequence[str],
    images: str | None,
    say: Callable[[str], None],
) -> list[Finding]:
    """Return the findings, and write them if `output` is given: as CSV, JSON or Parquet, by its suffix.

    Raises:
        InputError: `out` is not a data set, a layer must be named, the images are not in `images`, or the file cannot
            be written.
        UnknownNameError: the layer does not exist.
    """
    if output is not None:
        check_file(output, tuple(_WRITERS))
    with FeatureReader(out, check=isinstance(out, Path)) as reader:
        root = data_set_at(out).images["root"]
        pictures = functools.cache(lambda: Pictures(reader, root, range(len(reader)), images))
        if images is not None and pictures().why_not:
            raise InputError(pictures().why_not)
        table = findings_by_pictures(reader, pictures, say, layer=layer, kinds=kinds or KINDS)
    if output is not None:
        write_whole(link_target(output), _WRITERS[output.suffix.lower()](table))
    return table


def findings_by_pictures(
    reader: FeatureReader, pictures: Callable[[], Pictures], say: Callable[[str], None], **how: Any
) -> list[Finding]:
    """Return the findings, by the sizes of the pictures; say how many of these cannot be read, and what follows.

    Args:
        reader: the data set.
        pictures: returns the pictures of all rows; not called if there are no near-duplicates.
        say: receives the line.
        how: further arguments of `findings`.
    """
    size = functools.cache(lambda row: pictures().size(row))
    table = findings(reader, picture_size=size, **how)
    rows = [found.row for found in table if found.kind == "near-duplicate"]
    if unread := [row for row in rows if size(row) is None]:
        why = pictures().why_not or f"{pictures().picture(unread[0])[1]}; name their place: --images FOLDER"
        say(printable(
            f"{len(unread):,} of {counted(len(rows), 'picture')} of near-duplicates cannot be read; of such a group, "
            f"the largest file is to keep, not the largest picture: {why}"
        ))  # fmt: skip
    return table


def as_json(table: Sequence[Finding]) -> list[dict[str, object]]:
    """Return the findings as JSON-compatible data."""
    return [asdict(found) for found in table]


def as_csv(table: Sequence[Finding]) -> bytes:
    """Return the CSV file of the findings."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(safe_cell, line) for line in [_COLUMNS, *map(astuple, table)])
    return text.getvalue().encode(errors="surrogateescape")


def _json(table: Sequence[Finding]) -> bytes:
    return json.dumps(as_json(table), indent=1).encode()


def _parquet(table: Sequence[Finding]) -> bytes:
    arrow, parquet = (library(name, "parquet", "Parquet") for name in ("pyarrow", "pyarrow.parquet"))
    kinds = {"row": arrow.int64(), "score": arrow.float64(), "group": arrow.int64(), "keep": arrow.bool_()}
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in _COLUMNS])
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(mapped(as_json(table), str, as_utf8), schema), file)
    return file.getvalue()


_WRITERS = {".csv": as_csv, ".json": _json, ".parquet": _parquet}


def print_findings(table: Sequence[Finding], echo: Callable[[str], None]) -> None:
    """Print the number of findings of each kind, and the first of them."""
    if not table:
        echo("nothing found: no failed images, copies, near-duplicates, outliers or suspect labels")
    for kind, found in groupby(table, key=lambda finding: finding.kind):
        rows = list(found)
        groups = {row.group for row in rows} - {None}
        echo(f"{kind}: {counted(len(rows), 'image')}" + (f" in {counted(len(groups), 'group')}" if groups else ""))
        if kind == "suspect label":
            echo("  many of these labels are right; the first are the most likely to be wrong")
        for row in rows[:SHOWN]:
            score = "" if row.score is None else f"{row.score:.4f}  "
            echo(f"  {score}{printable(row.path)}  {printable(_note(row))}")
        if len(rows) > SHOWN:
            echo(f"  ... and {len(rows) - SHOWN:,} more: write them to a file with -o findings.csv")


def _note(row: Finding) -> str:
    if row.suggested:
        return f"[{row.label}] is probably [{row.suggested}]"
    if row.group is None:
        return row.meaning
    differ = f", labels differ: [{row.label}]" if row.meaning.endswith(LABELS_DIFFER) else ""
    return f"group {row.group}" + (", to keep" if row.keep else "") + differ
