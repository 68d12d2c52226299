"""Images that a table names, to leave them out: the table of `layertap findings`, or paths."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from extract.credentials import text_without_credentials
from extract.errors import InputError
from extract.images.csv_lists import TABLES, opened, plain_path, read_table
from extract.images.part_names import file_of
from extract.images.sources import suffix_of
from extract.system.csv_cells import exact_text
from extract.system.json_files import parse_json

__all__ = ["NamedImages", "named_images"]

Item = TypeVar("Item")

# Values of the column `keep` as text: of `layertap findings`, of spreadsheets, and of pandas and polars.
_KEPT = {"true": True, "1": True, "1.0": True}
_KEPT |= dict.fromkeys(("", "false", "0", "0.0", "none", "nan", "<na>"), False)


@dataclass
class NamedImages:
    """Images that a table names, and that are left out.

    Attributes:
        where: the table, for messages.
        names: their paths, as data sets store them, in the order of the table.
        found: those that `others` has found.
        n_left_out: images that it has left out: of a file, all its parts.
        example: path of the first image that it has not left out; empty if there was none.
    """

    where: str
    names: dict[str, None]
    found: set[str] = field(default_factory=set)
    n_left_out: int = 0
    example: str = ""

    def others(self, items: Iterable[Item], path_of: Callable[[Item], str]) -> Iterator[Item]:
        """Yield the items whose paths are not named, nor, of parts of files, the paths of their files."""
        for item in items:
            path = path_of(item)
            if named := [name for name in (path, file_of(path)) if name in self.names]:
                self.found.update(named)
                self.n_left_out += 1
            else:
                self.example = self.example or path
                yield item

    def rows_of_others(self, paths: Iterable[str]) -> list[int]:
        """Return the rows of the images that are not named, ascending.

        Raises:
            InputError: see `check`.
        """
        rows = [row for row, _ in self.others(enumerate(paths), operator.itemgetter(1))]
        self.check()
        return rows

    def check(self) -> None:
        """Check what `others` has left out.

        Raises:
            InputError: no image, although some are named; or all.
        """
        if self.names and not self.found:
            raise InputError(
                f"{self.where} names no image: its first path is {next(iter(self.names))!r}, expected a path such as "
                f"{self.example!r}"
            )
        if self.names and not self.example:
            raise InputError(f"{self.where} names all images; none is left")

    @property
    def note(self) -> str:
        """How many images were left out, and how many names are those of no image, in words."""
        note = f"images left out by {self.where}: {self.n_left_out:,}"
        if absent := [name for name in self.names if name not in self.found]:
            note += (
                f"; paths in it without an image: {len(absent):,} of {len(self.names):,}, the first is {absent[0]!r}"
            )
        return note


def named_images(table: Any) -> NamedImages:
    """Read a table of images to leave out. A row whose `keep` is true names none; paths may be repeated.

    Args:
        table: CSV, TSV, Parquet or JSON file with a column `path` and perhaps `keep`, any other file with a path on
            each line, or the URL of such a file; a DataFrame of pandas or polars; or paths or findings.

    Raises:
        InputError: the file does not exist or has no rows; there is no column `path`; a path is not text, or `keep`
            neither true, false nor empty.
        LayertapError: the file cannot be read.
    """
    where, lines = "the table", list[int]()
    if isinstance(table, str | os.PathLike):
        where = text_without_credentials(os.fspath(table))
        rows, lines = _rows_in(os.fspath(table))
        if not rows:
            hint = "to leave out no image, do not name it"
            raise InputError(f"{where} has no rows; expected paths of images to leave out", hint=hint)
    elif hasattr(table, "columns"):
        if "path" not in table.columns:
            raise InputError(f"{where}: expected a column 'path'; it has {', '.join(map(repr, table.columns))}")
        marks = table["keep"] if "keep" in table.columns else [None] * len(table)
        rows = list(zip(table["path"], marks, strict=True))
    else:
        rows = [(getattr(item, "path", item), getattr(item, "keep", None)) for item in table]
    names: dict[str, None] = {}
    for number, (path, keep) in enumerate(rows):
        place = f"{where}: line {lines[number]}" if lines else f"{where}: row {number}"
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(name, str) or not name:
            raise InputError(f"{place}: the path is {path!r}; expected text")
        if (is_kept := _KEPT.get(str(keep).strip().lower())) is None:
            raise InputError(f"{place}: keep is {keep!r}; expected true, false or no value")
        if not is_kept:
            names[plain_path(name)] = None
    return NamedImages(where, names)


def _rows_in(where: str) -> tuple[list[tuple[Any, Any]], list[int]]:
    """Return `path` and `keep` of each row of a file, and the line of each if it is text."""
    if suffix_of(where, TABLES) in TABLES:
        columns, lines = read_table(where, "path", ("keep",))
        # `layertap findings` escapes a few names as text.
        paths = map(exact_text, columns["path"]) if lines else columns["path"]
        return list(zip(paths, columns.get("keep") or itertools.repeat(None), strict=False)), lines
    with opened(where) as file:
        content = file.read()
    if suffix_of(where, (".json",)) == ".json":
        shape = {"rows": [{"path": str, "keep?": object}]}
        table = parse_json(b'{"rows": %b}' % (content.strip() or b"[]"), where, shape)
        return [(row["path"], row.get("keep")) for row in table["rows"]], []
    if b"\0" in content:
        raise InputError(f"{where} is not text; expected a path on each line, or a .csv, .json or .parquet table")
    text = content.decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n").split("\n")
    lines = [number for number, line in enumerate(text, 1) if line]
    return [(text[line - 1], None) for line in lines], lines
