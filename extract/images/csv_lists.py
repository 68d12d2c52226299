"""Images named by a list: CSV, TSV or Parquet with a column `path` and optionally `label`, `split` and `id`."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from extract.credentials import parameters_without_credentials, without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.images.image_list import SPLITS, Images, label_text, labels_from_values
from extract.images.kept_columns import Column, arrow_column, chosen_columns, text_column, values_at
from extract.images.sources import Files, read_remote
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean
from extract.system.urls import is_http, is_url, without_query

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

__all__ = [
    "TABLES",
    "Row",
    "check_once",
    "file_and_column",
    "list_rows",
    "list_table",
    "places_of",
    "plain_path",
    "read_table",
    "stored_path",
]

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
    also in a list on a web server, where it is not percent-encoded. Labels are names, or integers from 0; an empty
    label means no class. Splits are train, val (valid, validation), test or empty.

    Args:
        where: CSV, TSV or Parquet file, or URL.
        keep: names of further columns, for `Images.columns`; those of CSV and TSV are text.

    Raises:
        UnknownNameError: a column to keep does not exist.
        InputError: the list has no column `path`, a row is not valid, or a path occurs twice.
    """
    given, lines, kept = _read(where, _COLUMNS, keep, unique="path")
    _check_columns(where, given)
    count = len(given["path"])
    columns = [given.get(name) or [None] * count for name in _COLUMNS]
    places = lines or range(count)
    root, base = places_of(where)
    rows, credentials = [], {}
    for place, *values in zip(places, *columns, strict=True):
        row = _row(where, place, *values)
        if (stored := stored_path(row.path)) != row.path:
            credentials[place] = os.fsdecode(row.path)
            row = row._replace(path=stored)
        rows.append(row)
    order = sorted(range(count), key=rows.__getitem__)
    rows = [rows[i] for i in order]
    for before, row in itertools.pairwise(rows):
        check_once(where, before, row)
    labels, classes = labels_from_values([row.label for row in rows])
    ids = None
    if any(row.id is not None for row in rows):
        ids = [row.id or "" for row in rows]
    paths = [os.fsdecode(row.path) for row in rows]
    kept = {name: values_at(values, order) for name, values in kept.items()}
    full = [credentials.get(row.place, path) for row, path in zip(rows, paths, strict=True)] if credentials else paths
    source = Files(base, full, anywhere=True)
    splits = [row.split for row in rows]
    return Images(root, paths, labels, classes, splits, source, ids, columns=kept)


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


def check_once(where: str, before: Row, row: Row) -> None:
    """Check that a row does not repeat the path of the row before it, in sorted order.

    Raises:
        InputError: the paths are equal.
    """
    if before.path == row.path:
        first, second = sorted((before.place, row.place))
        raise InputError(
            f"{_place(where, second)}: {os.fsdecode(row.path)} is already in {_place(where, first)}; expected each "
            "path only once" + ("; credentials in URLs are not compared" if is_url(os.fsdecode(row.path)) else "")
        )


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
    with _opened(where) as file:
        if _is_parquet(where):
            yield from _parquet_rows(where, file)
            return
        with _text(file) as text:
            header, reader = _table(where, text, _COLUMNS)
            _check_columns(where, header)
            columns = [header.index(name) if name in header else None for name in _COLUMNS]
            for row, line in _lines(where, reader, len(header)):
                yield _row(where, line, *(None if i is None else row[i] for i in columns))


def _parquet_rows(where: str, file: BinaryIO) -> Iterator[Row]:
    with _parquet(where, file, _COLUMNS, _BUFFER_BYTES) as (opened, names):
        _check_columns(where, names)
        wanted = [name for name in _COLUMNS if name in names]
        columns = [names[name] for name in wanted]
        places = itertools.count()
        for batch in opened.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
            given = {name: _values(where, name, batch.column(names[name]), _COLUMNS) for name in wanted}
            values = [given.get(name) or [None] * len(batch) for name in _COLUMNS]
            for row in zip(*values, strict=True):
                yield _row(where, next(places), *row)


def read_table(where: str, column: str) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Read a table of values for images.

    Args:
        where: CSV, TSV or Parquet file, or URL.
        column: name of the column of values, text, numbers or booleans; case-insensitive.

    Returns:
        name in lower case -> values, in file order; and the line on which each row ends (empty for Parquet). Of a
        Parquet file, they are the named column, `path`, `id` and `split`, and without `path` those of text or whole
        numbers.

    Raises:
        InputError: the table lacks the column, or is damaged.
    """
    column = column.strip().lower()
    kinds = {"path": _TEXT, "id": _WHOLE, "split": _TEXT, column: _NUMBER}
    given, lines, _ = _read(where, kinds, others="path")
    if column not in given:
        raise InputError(f"{where}: expected a column {column!r}; it has {_names(given)}")
    return {name: values for name, values in given.items() if len(values) == len(given[column])}, lines


def _names(columns: Collection[str]) -> str:
    return ", ".join(map(repr, list(columns)[:8])) or "none"


def _read(
    where: str, kinds: Mapping[str, str], keep: Sequence[str] = (), others: str = "", unique: str = ""
) -> tuple[dict[str, Sequence[Any]], list[int], dict[str, Column]]:
    """Return name -> values, the line on which each row ends (CSV), and the columns to keep."""
    if _is_parquet(where):
        given, kept = _read_parquet(where, kinds, keep, others, unique)
        return given, [], kept
    given, lines = _read_csv(where, [*kinds, *keep])
    chosen = chosen_columns(where, keep, {name: name for name in given})
    kept = {
        name: text_column(where, name, given[column], lambda i: f"line {lines[i]}") for name, column in chosen.items()
    }
    return given, lines, kept


@contextlib.contextmanager
def _opened(where: str) -> Iterator[BinaryIO]:
    """Context manager: open a list for reading."""
    try:
        with io.BytesIO(read_remote(where)) if is_url(where) else Path(where).open("rb") as content:
            yield content
    except FileNotFoundError as error:
        raise InputError(f"{where}: no such file", hint="" if is_url(where) else did_you_mean(where)) from error
    except OSError as error:
        raise LayertapError(f"{where} cannot be read: {error.strerror or error}") from error


def _text(file: BinaryIO) -> io.TextIOWrapper:
    """Wrap a list as text; lines keep their ends, as `csv` requires."""
    start = file.read(2)
    file.seek(0)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # Excel's "Unicode text"
        return io.TextIOWrapper(file, "utf-16", "replace", newline="")
    # File names may have any bytes (surrogateescape); Excel writes a byte order mark (utf-8-sig).
    return io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")


def _table(where: str, text: io.TextIOWrapper, once: Collection[str]) -> tuple[list[str], CsvReader]:
    """Return the column names, those of `once` being unique, and a reader of the rows."""
    head = text.readline()
    if "\0" in head:
        raise InputError(f"{where}: line 1 is not text; expected a table as text in UTF-8 (save a spreadsheet as CSV)")
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(itertools.chain([head], text), delimiter=delimiter)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num}: {error}") from error
    _unique(where, header, once)
    return header, reader


def _lines(where: str, reader: CsvReader, width: int) -> Iterator[tuple[list[str], int]]:
    """Yield each row with the line on which it ends."""
    try:
        for row in reader:
            if not row:
                continue
            if len(row) != width:
                raise InputError(f"{where}: line {reader.line_num} has {len(row)} values, but the header has {width}")
            yield row, reader.line_num
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num}: {error}") from error


def _read_csv(where: str, once: Collection[str]) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Return name -> values of all columns, those of `once` being unique, and the line on which each row ends."""
    with _opened(where) as file, _text(file) as text:
        header, reader = _table(where, text, once)
        rows = list(_lines(where, reader, len(header)))
    return {name: [row[i] for row, _ in rows] for i, name in enumerate(header)}, [line for _, line in rows]


@contextlib.contextmanager
def _parquet(
    where: str, file: BinaryIO, once: Collection[str], buffer_bytes: int = 0
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Context manager: open a Parquet file; yield it with lower-case name -> column name; `once` are unique."""
    pa, parquet = (library(name, "parquet", f"{where}: Parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # Without threads, which could still be running when an error ends the process.
        opened = parquet.ParquetFile(file, pre_buffer=False, buffer_size=buffer_bytes)
        header = [str(name).strip().lower() for name in opened.schema_arrow.names]
        _unique(where, header, once)
        yield opened, dict(zip(header, opened.schema_arrow.names, strict=True))
    except pa.ArrowException as error:
        raise InputError(f"{where} is not a Parquet file: {first_line(error)}") from error
    except UnicodeDecodeError as error:  # not every program that writes Parquet checks its texts
        raise InputError(f"{where}: a text is not UTF-8", hint="save the list in UTF-8") from error


def _read_parquet(
    where: str, kinds: Mapping[str, str], keep: Sequence[str], others: str, unique: str
) -> tuple[dict[str, Sequence[Any]], dict[str, Column]]:
    """Return name -> values, where columns without a kind are not read and have none; and the columns to keep.

    Parquet stores equal texts once. In memory, too, equal texts are one: a small file stays small.

    Args:
        where: file or URL.
        kinds: column -> kind of its values.
        keep: see `list_table`.
        others: if the file has no column of this name, all columns of text or whole numbers are read, too.
        unique: a column of paths that is refused as soon as it repeats a path, before the rest of the file is read.
    """
    with _opened(where) as file, _parquet(where, file, [*kinds, *keep]) as (opened, names):
        if others and others not in names:
            schema = opened.schema_arrow  # a name that is there twice has the index -1
            found = {name: schema.get_field_index(column) for name, column in names.items()}
            keys = [name for name, i in found.items() if i >= 0 and _fits(schema.field(i).type, _WHOLE)]
            kinds = dict.fromkeys(keys, _WHOLE) | dict(kinds)
        chosen = chosen_columns(where, keep, names)
        wanted = {name: names[name] for name in kinds if name in names}
        columns: dict[str, list[Any]] = {name: [] for name in wanted}
        texts: dict[str, dict[Any, Any]] = {name: {} for name in wanted}
        for batch in opened.iter_batches(_ROWS_AT_ONCE, columns=list(wanted.values()), use_threads=False):
            for name, column in wanted.items():
                values, known = _values(where, name, batch.column(column), kinds), texts[name]
                before = len(known)
                columns[name] += [known.setdefault(each, each) if isinstance(each, str) else each for each in values]
                if name == unique and len(known) < before + len(values):
                    _check_paths(where, columns[name])
        table = opened.read(columns=list(dict.fromkeys(chosen.values())), use_threads=False)
        kept = {name: arrow_column(where, name, table.column(column)) for name, column in chosen.items()}
        return {**dict.fromkeys(names, ()), **columns}, kept


def _check_paths(where: str, paths: Sequence[Any]) -> None:
    """Check that each path is one, and occurs only once.

    Raises:
        InputError: a path is no path, or occurs twice.
    """
    rows: dict[bytes, Row] = {}
    for place, path in enumerate(paths):
        row = _row(where, place, path, None, None, None)
        row = row._replace(path=stored_path(row.path))
        if row.path in rows:
            check_once(where, rows[row.path], row)
        rows[row.path] = row


def _values(where: str, name: str, column: Any, kinds: Mapping[str, str]) -> list[Any]:
    """Return the values of a Parquet column, after checking that its type fits its kind."""
    if not _fits(column.type, kinds[name]):
        raise InputError(f"{where}: column {name!r} is {column.type}; expected {kinds[name]}")
    values: list[Any] = column.to_pylist()
    return values


def _fits(arrow_type: Any, kind: str) -> bool:
    types = library("pyarrow", "parquet", "Parquet").types
    values = arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type
    tests = [types.is_string, types.is_large_string, types.is_string_view, types.is_null]
    tests += [types.is_integer] * (kind != _TEXT) + [types.is_floating, types.is_boolean] * (kind == _NUMBER)
    return any(test(values) for test in tests)


def _unique(where: str, header: Sequence[str], once: Collection[str]) -> None:
    for name in once:
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
