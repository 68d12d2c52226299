"""The backbones to compare: specs, globs, and tables of backbones with their weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from extract.backbones.sources import match_specs
from extract.errors import InputError
from extract.images.csv_lists import read_table
from pipelines.terminal.text_output import printable

__all__ = ["RESERVED", "Candidate", "candidates_of"]

RESERVED = ("probe",)  # folders of a comparison that are not data sets
_COLUMNS = ("backbone", "weights", "name")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Candidate:
    """A backbone to compare.

    Attributes:
        name: name of its data set, and in tables.
        spec: spec of the backbone.
        weights: name or file of weights, or "random"; None: the source's own.
    """

    name: str
    spec: str
    weights: str | None = None


def candidates_of(specs: Sequence[str], table: Path | None) -> list[Candidate]:
    """Return the candidates in order, without repeated ones.

    Args:
        specs: specs, or globs of specs.
        table: CSV file with the column `backbone` and optionally `weights`, relative to the file, and `name`.

    Raises:
        InputError: the table cannot be used, two different candidates have the same name, or there are none.
        UnknownNameError: no backbone matches a glob.
    """
    found = [_candidate(spec) for text in specs for spec in (match_specs(text) if _GLOB.search(text) else [text])]
    found = list(dict.fromkeys(found + (_of_table(table) if table is not None else [])))
    if not found:
        raise InputError("there are no backbones to compare", hint="name each with -b, or a table with --from FILE.csv")
    by_name: dict[str, Candidate] = {}
    for candidate in found:
        other = by_name.setdefault(candidate.name.lower(), candidate)  # some file systems ignore case
        if other is not candidate:
            raise InputError(
                f"two backbones are called {printable(candidate.name)}: {printable(other.spec)} and "
                f"{printable(candidate.spec)}",
                hint="give each a name in the column `name` of --from FILE.csv",
            )
    return found


def _candidate(spec: str, weights: str | None = None, name: str = "") -> Candidate:
    if not name:
        stem = "" if weights is None else f"-{Path(weights).stem}"
        name = re.sub(r"[^\w.-]+", "-", spec + stem).strip("-.")
    return Candidate(name, spec, weights)


def _of_table(table: Path) -> list[Candidate]:
    columns, lines = read_table(str(table), "backbone")
    if unknown := [name for name in columns if name not in _COLUMNS]:
        raise InputError(f"{table} has the column {printable(unknown[0])}; expected {', '.join(_COLUMNS)}")
    found, empty = [], [""] * len(columns["backbone"])
    for number, values in enumerate(zip(*(columns.get(column, empty) for column in _COLUMNS), strict=True)):
        spec, weights, name = (str(value or "").strip() for value in values)
        where = f"{table}, line {lines[number]}" if lines else f"{table}, row {number}"
        if not spec:
            raise InputError(f"{where}: no backbone")
        if name and (not re.fullmatch(r"[\w.-]+", name) or name.startswith(".") or name.lower() in RESERVED):
            raise InputError(
                f"{where}: the name {name!r} cannot be that of a folder; expected letters, digits, '-', '_' and '.'"
            )
        if weights and (table.parent / weights).is_file():
            weights = str(table.parent / weights)
        found.append(_candidate(spec, weights or None, name))
    return found
