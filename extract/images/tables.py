"""Images named by a list: CSV, TSV or Parquet with a column `path`, and perhaps `label`, `split` and `id`."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError, first_line
from extract.images.images import SPLITS, Images, labels_from_values, order_of
from extract.images.source import Files, is_url, read_remote
from extract.libraries import library

__all__ = ["list_table"]

_COLUMNS = ("path", "label", "split", "id")


def list_table(where: str) -> Images:
    """The images of a list, sorted by path. Paths are whole ones, URLs, or relative to the folder of the list.

    Labels are names, or numbers from 0 on; empty: no class. Splits are train, val (valid, validation), test or empty.
    """
    columns, lines = (_read_parquet if where.partition("?")[0].lower().endswith(".parquet") else _read_csv)(where)
    paths = columns["path"]

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


def _content(where: str) -> bytes:
    try:
        return read_remote(where) if is_url(where) else Path(where).read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{where}: no such file") from error
    except OSError as error:
        raise LayertapError(f"{where} cannot be read: {error.strerror or error}") from error


def _read_csv(where: str) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Column -> values, and the lines that they end on."""
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
    _check(where, header)
    none = [None] * len(rows)
    return {name: [row[header.index(name)] for row in rows] if name in header else none for name in _COLUMNS}, lines


def _read_parquet(where: str) -> tuple[dict[str, Sequence[Any]], list[int]]:
    """Column -> values; it has no lines."""
    pa, parquet = (library(name, "parquet", f"{where}: Parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # Without threads, which may be running still when an error ends the process.
        file = parquet.ParquetFile(pa.BufferReader(_content(where)), pre_buffer=False)
        names = {str(name).strip().lower(): name for name in file.schema_arrow.names}
        _check(where, list(names))
        table = file.read(columns=[names[name] for name in _COLUMNS if name in names], use_threads=False)
    except pa.ArrowException as error:
        raise InputError(f"{where} is no Parquet file: {first_line(error)}") from error
    found: dict[str, Sequence[Any]] = {}
    for name in _COLUMNS:
        if name not in names:
            found[name] = [None] * table.num_rows
            continue
        values = table.column(names[name])
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
                or (name in ("label", "id") and pa.types.is_integer(kind)) or pa.types.is_null(kind)):  # fmt: skip
            expected = "text or whole numbers" if name in ("label", "id") else "text"
            raise InputError(f"{where}: column {name!r} is {kind}; expected {expected}")
        found[name] = values.to_pylist()
    return found, []


def _check(where: str, header: Sequence[str]) -> None:
    if "path" not in header:
        raise InputError(
            f"{where}: no column 'path' among {', '.join(map(repr, header[:8])) or 'none'}; a list has a header, with "
            "'path' and, where there are any, 'label', 'split' and 'id'"
        )
    for name in _COLUMNS:
        if list(header).count(name) > 1:
            raise InputError(f"{where}: two columns are called {name!r}")
