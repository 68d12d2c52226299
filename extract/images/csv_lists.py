"""Images named by a list: CSV, TSV or Parquet with a column `path` and optionally `label`, `split` and `id`."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from extract.credentials import parameters_without_credentials, without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.images.image_list import (
    SPLITS,
    Column,
    Images,
    arrow_column,
    chosen_columns,
    label_text,
    labels_from_values,
    text_column,
    values_at,
)
from extract.images.sources import Files, read_remote
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean
from extract.system.urls import is_http, is_url, without_query

__all__ = [
    "TABLES", "Row", "file_and_column", "list_rows", "list_table", "opened", "places_of", "plain_path", "read_table",
    "stored_path",
]  # fmt: skip

TABLES = (".csv", ".tsv", ".parquet")
_TEXT, _WHOLE, _NUMBER = "text", "text or whole numbers", "text, numbers or booleans"
_COLUMNS = {"path": _TEXT, "label": _WHOLE, "split": _TEXT, "id": _WHOLE}
_ROWS_AT_ONCE = 1 << 14  # of Parquet
_BUFFER_BYTES = 1 << 20  # for each Parquet column, when read in pieces


class Row(NamedTuple):
    """A row of a list; rows sort by `path`, then by `place`.

    Attributes:
        path: the path as bytes.
        place: line on which the row ends; in Parquet, the row number from 0.
        label: see `label_text`.
        split: train, val, test or empty.
        id: None if the row has no id.
    """

    path: bytes
    place: int
    label: str | None = None
    split: str = ""
    id: str | None = None


def list_table(where: str, keep: Sequence[str] = ()) -> Images:
    """Read the images of a list, sorted by path.

    Paths are absolute, URLs, or relative to the folder of the list; see `plain_path`. A relative path is a file name,
    also in a list on a web server, where it is not percent-encoded: the same list works in both places. Labels are
    names, or integers from 0; an empty label means no class. Splits are train, val (valid, validation), test or empty.

    Args:
        where: CSV, TSV or Parquet file, or URL.
        keep: names of further columns, for `Images.columns`; those of CSV and TSV are text.

    Raises:
        UnknownNameError: a column to keep does not exist.
        InputError: the list has no column `path`, a row is not valid, or a path occurs twice.
    """
    from extract.images.part_source import source_of  # not needed for a folder

    root, base = places_of(where)
    rows: dict[bytes, Row] = {}
    with_credentials: dict[bytes, str] = {}
    texts: dict[str | None, str | None] = {}  # Parquet stores equal texts once: a small file stays small in memory, too
    with _opened_table(where, [*_COLUMNS, *keep]) as table:
        _check_columns(where, table.names)
        chosen = chosen_columns(where, keep, table.names)
        parts: dict[str, list[Any]] = {name: [] for name in chosen}
        for places, columns in table.pieces(_COLUMNS, chosen.values()):
            for row in _rows(where, places, columns):
                if (path := stored_path(row.path)) != row.path:
                    with_credentials[path] = os.fsdecode(row.path)
                row = Row(
                    path, row.place, texts.setdefault(row.label, row.label), row.split, texts.setdefault(row.id, row.id)
                )
                if (before := rows.setdefault(path, row)) is not row:
                    note = "; credentials in URLs are not compared" if is_url(os.fsdecode(path)) else ""
                    raise InputError(
                        f"{_place(where, row.place)}: {os.fsdecode(path)} is already in {_place(where, before.place)}; "
                        f"expected each path only once{note}"
                    )
            for name, column in chosen.items():
                parts[name].append(columns[column])
        places = [row.place for row in rows.values()]
        kept = {name: table.kept(name, chosen[name], parts[name], places) for name in chosen}
    listed = list(rows.values())
    order = sorted(range(len(listed)), key=listed.__getitem__)
    listed = [listed[i] for i in order]
    labels, classes = labels_from_values([row.label for row in listed])
    has_ids = any(row.id is not None for row in listed)
    paths = [os.fsdecode(row.path) for row in listed]
    full = [with_credentials.get(row.path, path) for row, path in zip(listed, paths, strict=True)]
    return Images(
        root=root,
        paths=paths,
        labels=labels,
        classes=classes,
        splits=[row.split for row in listed],
        source=source_of(full, partial(Files, base, anywhere=True)),
        ids=[row.id or "" for row in listed] if has_ids else None,
        columns={name: values_at(values, order) for name, values in kept.items()},
    )


def places_of(where: str) -> tuple[str, str]:
    """Return a list's absolute path, or its URL without credentials, and the folder that its paths are relative to.

    The folder is the place to read from. It has the user name of a URL, but not its query.
    """
    if is_url(where):
        return without_credentials(where), without_query(where).rpartition("/")[0]
    root = str(Path(where).resolve())
    return root, root.rpartition("/")[0] or "/"


def stored_path(path: bytes) -> bytes:
    """Return a path of a list as data sets store it: a URL without credentials, any other path unchanged.

    Args:
        path: the path as bytes.
    """
    if b"?" not in path and b"@" not in path and b"#" not in path:
        return path
    text = os.fsdecode(path)
    return os.fsencode(without_credentials(text)) if is_url(text) else path


def plain_path(path: str, where: str = "") -> str:
    """Return a path of a list without `.` and repeated slashes, so that `./a.jpg` and `a.jpg` are the same image.

    `x/..` stays in a path of the local disk, where `x` may be a link to elsewhere; a web server never sees it, because
    clients resolve it in the URL. Complete URLs, and keys of object stores, which may have such parts, stay unchanged.
    The plain path is stored, since a plan finds duplicates among neighbours in a sorted list.

    Args:
        path: path in the list.
        where: the list; a path or URL.

    >>> plain_path("./x//a.jpg"), plain_path("x/../a.jpg"), plain_path("x/../a.jpg", "https://host/list.csv")
    ('x/a.jpg', 'x/../a.jpg', 'a.jpg')
    """
    if ("./" not in path and "//" not in path) or is_url(path) or (is_url(where) and not is_http(where)):
        return path
    *folders, name = path.split("/")
    kept: list[str] = []
    for folder in folders:
        if folder == ".." and is_http(where) and kept and kept[-1] != "..":
            kept.pop()
        elif folder not in ("", "."):
            kept.append(folder)
    return "/" * path.startswith("/") + "/".join([*kept, name])


def _place(where: str, place: int) -> str:
    return f"{where}: {'row' if _is_parquet(where) else 'line'} {place}"


def _is_parquet(where: str) -> bool:
    return where.partition("?")[0].lower().endswith(".parquet")


def _check_columns(where: str, columns: Collection[str]) -> None:
    if "path" not in columns:
        raise InputError(
            f"{where}: no column 'path' among {_names(columns)}; expected a header with 'path' and "
            "optionally 'label', 'split' and 'id'"
        )


def _row(where: str, place: int, path: Any, label: Any, split: Any, id: Any) -> Row:
    """Check the values of a row and return them as a `Row`."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"{_place(where, place)}: the path is empty, or contains a null character")
    if is_http(where) and not is_url(path) and (public := parameters_without_credentials(path)) != path:
        raise InputError(
            f"{_place(where, place)}: the relative path {public} has a credential, but relative paths are file names",
            hint="write the complete URL",
        )
    for name, value in (("label", label), ("split", split), ("id", id)):
        if isinstance(value, str) and not value.isascii() and any("\udc80" <= char <= "\udcff" for char in value):
            raise InputError(f"{_place(where, place)}: the {name} is not UTF-8", hint="save the list in UTF-8")
    split = str(split or "").strip().lower()
    if split and split not in SPLITS:
        raise InputError(f"{_place(where, place)}: split {split!r}; expected train, val, test or an empty value")
    id = None if id is None else without_credentials(str(id))
    return Row(os.fsencode(plain_path(path, where)), place, label_text(label), SPLITS.get(split, ""), id)


def list_rows(where: str) -> Iterator[Row]:
    """Yield the rows of a list in file order.

    Args:
        where: CSV, TSV or Parquet file, or URL; the content of a URL is held in memory.

    Raises:
        InputError: the list has no column `path`, or a row is not valid.
    """
    with _opened_table(where, _COLUMNS) as table:
        _check_columns(where, table.names)
        for places, columns in table.pieces(_COLUMNS):
            yield from _rows(where, places, columns)


def _rows(where: str, places: Sequence[int], columns: Mapping[str, Any]) -> Iterator[Row]:
    values = [columns.get(name) or itertools.repeat(None, len(places)) for name in _COLUMNS]
    return itertools.starmap(partial(_row, where), zip(places, *values, strict=True))


def read_table(
    where: str, column: str | None, further: Collection[str] = ()
) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Read a table of values for images.

    Args:
        where: CSV, TSV or Parquet file, or URL.
        column: name of the column of values, text, numbers or booleans; case-insensitive. None: all columns.
        further: further columns of such values, in lower case, which may be missing.

    Returns:
        name in lower case -> values, in file order; and the line on which each row ends (empty for Parquet). Of a
        Parquet file, they are the named columns, `path`, `id` and `split`, and without `path` those of text or whole
        numbers.

    Raises:
        InputError: the table lacks the column, or is damaged.
    """
    named = () if column is None else (column.strip().lower(), *further)
    kinds = {"path": _TEXT, "id": _WHOLE, "split": _TEXT, **dict.fromkeys(named, _NUMBER)}
    lines: list[int] = []
    texts: dict[str, str] = {}  # see `list_table`
    with _opened_table(where, kinds if named else None) as table:
        if named and named[0] not in table.names:
            raise InputError(f"{where}: expected a column {named[0]!r}; it has {_names(table.names)}")
        if not named:
            kinds = dict.fromkeys(table.names, _NUMBER)
        elif "path" not in table.names:
            kinds = table.keys() | kinds
        values: dict[str, Any] = {name: [] for name in kinds if name in table.names}
        for places, columns in table.pieces(kinds):
            lines += places
            for name, some in columns.items():
                some = [texts.setdefault(value, value) if isinstance(value, str) else value for value in some]
                values.setdefault(name, []).extend(some)
    return values, [] if _is_parquet(where) else lines


def _names(columns: Collection[str]) -> str:
    return ", ".join(map(repr, list(columns)[:8])) or "none"


@contextlib.contextmanager
def opened(where: str) -> Iterator[BinaryIO]:
    """Context manager: open a list for reading."""
    try:
        with io.BytesIO(read_remote(where)) if is_url(where) else Path(where).open("rb") as content:
            yield content
    except FileNotFoundError as error:
        raise InputError(f"{where}: no such file", hint="" if is_url(where) else did_you_mean(where)) from error
    except OSError as error:
        raise LayertapError(f"{where} cannot be read: {error.strerror or error}") from error


class _CsvTable:
    """A table as text. `names`: name in lower case -> column; those of `once` are unique."""

    def __init__(self, where: str, text: io.TextIOWrapper, once: Collection[str] | None):
        head = text.readline()
        if "\0" in head:
            raise InputError(
                f"{where}: line 1 is not text; expected a table as text in UTF-8 (save a spreadsheet as CSV)"
            )
        delimiter = max(",;\t", key=head.count)
        self._where, self._reader = where, csv.reader(itertools.chain([head], text), delimiter=delimiter)
        self._header = [name.strip().lower() for name in next(self._lines(None), ([], 0))[0]]
        _unique(where, self._header, once)
        self.names = {name: name for name in self._header}

    def keys(self) -> dict[str, str]:
        """Return the columns that may identify images, and their kinds: those of text or whole numbers."""
        return dict.fromkeys(self.names, _TEXT)

    def pieces(self, kinds: Mapping[str, str], kept: Iterable[str] = ()) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Yield the line on which each row ends, and name -> values of all columns, for pieces of the rows."""
        rows = self._lines(len(self._header))
        while piece := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            yield (
                [line for _, line in piece],
                {name: [row[i] for row, _ in piece] for i, name in enumerate(self._header)},
            )

    def kept(self, name: str, column: str, parts: list[Any], places: Sequence[int]) -> Column:
        """Return the column of some parts, to be stored."""
        values = list(itertools.chain.from_iterable(parts))
        return text_column(self._where, name, values, lambda i: f"line {places[i]}")

    def _lines(self, width: int | None) -> Iterator[tuple[list[str], int]]:
        """Yield each row with the line on which it ends."""
        try:
            for row in self._reader:
                if not row and width is not None:
                    continue
                line = self._reader.line_num
                if width not in (None, len(row)):
                    raise InputError(f"{self._where}: line {line} has {len(row)} values, but the header has {width}")
                yield row, line
        except csv.Error as error:
            raise InputError(f"{self._where}: line {self._reader.line_num}: {error}") from error


class _ParquetTable:
    """A table of Parquet; see `_CsvTable`. Columns are read as they are needed."""

    def __init__(self, where: str, file: BinaryIO, once: Collection[str] | None):
        parquet = library("pyarrow.parquet", "parquet", f"{where}: Parquet")
        # Without threads, which could still be running when an error ends the process.
        self._where, self._file = where, parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        self._schema = self._file.schema_arrow
        header = [str(name).strip().lower() for name in self._schema.names]
        _unique(where, header, once)
        self.names = dict(zip(header, self._schema.names, strict=True))

    def keys(self) -> dict[str, str]:
        """See `_CsvTable`."""
        index = {name: self._schema.get_field_index(column) for name, column in self.names.items()}
        fitting = [name for name, i in index.items() if i >= 0 and _fits(self._schema.field(i).type, _WHOLE)]
        return dict.fromkeys(fitting, _WHOLE)  # without names that are there twice, which have the index -1

    def pieces(self, kinds: Mapping[str, str], kept: Iterable[str] = ()) -> Iterator[tuple[range, dict[str, Any]]]:
        """Yield row numbers, and name -> values of the columns of a kind and column -> Arrow array of those kept."""
        wanted = {name: self.names[name] for name in kinds if name in self.names}
        for name, column in wanted.items():
            if not _fits(kind := self._schema.field(column).type, kinds[name]):
                raise InputError(f"{self._where}: column {name!r} is {kind}; expected {kinds[name]}")
        start, columns = 0, list(dict.fromkeys([*wanted.values(), *kept]))
        for batch in self._file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
            arrays = {column: batch.column(column) for column in kept}
            values = {name: batch.column(column).to_pylist() for name, column in wanted.items()}
            yield range(start, start + len(batch)), arrays | values
            start += len(batch)

    def kept(self, name: str, column: str, parts: list[Any], places: Sequence[int]) -> Column:
        """See `_CsvTable`."""
        import pyarrow as pa

        return arrow_column(self._where, name, pa.chunked_array(parts, self._schema.field(column).type))


@contextlib.contextmanager
def _opened_table(where: str, once: Collection[str] | None) -> Iterator[_CsvTable | _ParquetTable]:
    """Context manager: open a table for reading; the column names of `once` are unique; None: all."""
    with opened(where) as file:
        if not _is_parquet(where):
            # File names may have any bytes (surrogateescape); Excel writes a byte order mark (utf-8-sig). Lines keep
            # their ends, as `csv` requires.
            with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
                yield _CsvTable(where, text, once)
            return
        pa = library("pyarrow", "parquet", f"{where}: Parquet")
        try:
            yield _ParquetTable(where, file, once)
        except pa.ArrowException as error:
            raise InputError(f"{where} is not a Parquet file: {first_line(error)}") from error
        except UnicodeDecodeError as error:  # not every program that writes Parquet checks its texts
            raise InputError(f"{where}: a text is not UTF-8", hint="save the list in UTF-8") from error


def _fits(arrow_type: Any, kind: str) -> bool:
    types = library("pyarrow", "parquet", "Parquet").types
    values = arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type
    tests = [types.is_string, types.is_large_string, types.is_string_view, types.is_null]
    tests += [types.is_integer] * (kind != _TEXT) + [types.is_floating, types.is_boolean] * (kind == _NUMBER)
    return any(test(values) for test in tests)


def _unique(where: str, header: Sequence[str], once: Collection[str] | None) -> None:
    for name in header if once is None else once:
        if list(header).count(name.strip().lower()) > 1:
            raise InputError(f"{where}: two columns have the name {name!r}")


def file_and_column(labels: str, default: str = "label") -> tuple[str, str]:
    """Split a name into file and column: labels.csv has the column `default`, labels.csv:age the column `age`."""
    if (without_query(labels) if is_url(labels) else labels).lower().endswith(TABLES):
        return labels, default
    where, _, column = labels.rpartition(":")
    if not where or not column:
        raise InputError(f"labels {labels!r}: expected FILE.csv, .tsv or .parquet, or FILE.csv:COLUMN")
    return where, column
