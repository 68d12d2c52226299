"""Images named by a list: CSV, TSV or Parquet with a column `path`, and perhaps `label`, `split` and `id`."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError, first_line
from extract.images.images import SPLITS, Images, labels_from_values, order_of
from extract.images.source import Files, is_url, read_remote
from extract.libraries import library

__all__ = ["list_table", "read_table"]

_TEXT, _WHOLE, _NUMBER = "text", "text or whole numbers", "text or numbers"
_COLUMNS = {"path": _TEXT, "label": _WHOLE, "split": _TEXT, "id": _WHOLE}


def list_table(where: str) -> Images:
    """The images of a list, sorted by path. Paths are whole ones, URLs, or relative to the folder of the list.

    Labels are names, or numbers from 0 on; empty: no class. Splits are train, val (valid, validation), test or empty.
    """
    given, lines = _read(where, _COLUMNS)
    if "path" not in given:
        raise InputError(
            f"{where}: no column 'path' among {_names(given)}; a list has a header, with 'path' and, where there "
            "are any, 'label', 'split' and 'id'"
        )
    paths = given["path"]
    columns = {name: given.get(name) or [None] * len(paths) for name in _COLUMNS}

    def place(row: int) -> str:
        return f"{where}: line {lines[row]}" if lines else f"{where}: row {row}"

    for row, path in enumerate(paths):
        if not isinstance(path, str) or not path or "\0" in path:
            raise InputError(f"{place(row)}: the path is empty, or has a null character")
        for name in ("label", "split", "id"):
            value = columns[name][row]
            if isinstance(value, str) and any("\udc80" <= one <= "\udcff" for one in value):
                raise InputError(f"{place(row)}: the {name} is not UTF-8; save the list in that encoding")
    order = order_of(paths)
    for before, row in itertools.pairwise(order):
        if paths[before] == paths[row]:
            first, second = sorted((before, row))
            raise InputError(f"{place(second)}: {paths[row]} is in {place(first)} already; a list has each image once")
    labels, classes = labels_from_values([columns["label"][row] for row in order])
    splits = []
    for row in order:
        split = str(columns["split"][row] or "").strip().lower()
        if split and split not in SPLITS:
            raise InputError(f"{place(row)}: split {split!r}; expected train, val, test or nothing")
        splits.append(SPLITS.get(split, ""))
    ids = None
    if any(value is not None for value in columns["id"]):
        ids = ["" if columns["id"][row] is None else str(columns["id"][row]) for row in order]
    root = where if is_url(where) else str(Path(where).resolve())
    ordered = [paths[row] for row in order]
    source = Files(root.rpartition("/")[0] or "/", ordered, anywhere=True)
    return Images(root, ordered, labels, classes, splits, source, ids)


def read_table(where: str, column: str) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Values beside images: those of the columns `path`, `id`, `split` and the one named that there are.

    Args:
        where: CSV, TSV or Parquet file, or URL.
        column: name of the column of values, text or numbers; case does not count.

    Returns:
        name -> values, in the order of the file; and the line that each row ends on, of text.

    Raises:
        InputError: neither `path` nor `id` is there, or not the column; or the file is damaged.
    """
    column = column.strip().lower()
    kinds = {"path": _TEXT, "id": _WHOLE, "split": _TEXT, column: _NUMBER}
    given, lines = _read(where, kinds)
    if column not in given or not ("path" in given or "id" in given):
        raise InputError(f"{where}: expected a column 'path' or 'id', and a column {column!r}; it has {_names(given)}")
    return {name: values for name, values in given.items() if name in kinds}, lines


def _names(columns: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(columns)[:8])) or "none"


def _read(where: str, kinds: Mapping[str, str]) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """The columns that there are, with the values of those that have a kind."""
    if where.partition("?")[0].lower().endswith(".parquet"):
        return _read_parquet(where, kinds), []
    return _read_csv(where, kinds)


def _content(where: str) -> bytes:
    try:
        return read_remote(where) if is_url(where) else Path(where).read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{where}: no such file") from error
    except OSError as error:
        raise LayertapError(f"{where} cannot be read: {error.strerror or error}") from error


def _read_csv(where: str, kinds: Mapping[str, str]) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Column -> values of all, and the lines that they end on."""
    # Names of files may have any bytes; a byte order mark is what Excel puts in front.
    data = _content(where)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # Excel's "Unicode text"
        text = data.decode("utf-16", "replace")
    else:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows, lines = [], []
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(f"{where}: line {reader.line_num} has {len(row)} values, its header {len(header)}")
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num}: {error}") from error
    _unique(where, header, kinds)
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}, lines


def _read_parquet(where: str, kinds: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """Column -> values of those that have a kind; the others are not read."""
    pa, parquet = (library(name, "parquet", f"{where}: Parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # Without threads, which may be running still when an error ends the process.
        file = parquet.ParquetFile(pa.BufferReader(_content(where)), pre_buffer=False)
        names = {str(name).strip().lower(): name for name in file.schema_arrow.names}
        _unique(where, [str(name).strip().lower() for name in file.schema_arrow.names], kinds)
        table = file.read(columns=[names[name] for name in kinds if name in names], use_threads=False)
    except pa.ArrowException as error:
        raise InputError(f"{where} is no Parquet file: {first_line(error)}") from error
    found: dict[str, Sequence[Any]] = {}
    for name in names:
        if name not in kinds:
            found[name] = ()
            continue
        values = table.column(names[name])
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
                or (kinds[name] != _TEXT and pa.types.is_integer(kind)) or pa.types.is_null(kind)
                or (kinds[name] == _NUMBER and pa.types.is_floating(kind))):  # fmt: skip
            raise InputError(f"{where}: column {name!r} is {kind}; expected {kinds[name]}")
        found[name] = values.to_pylist()
    return found


def _unique(where: str, header: Sequence[str], kinds: Mapping[str, str]) -> None:
    for name in kinds:
        if list(header).count(name) > 1:
            raise InputError(f"{where}: two columns are called {name!r}")
