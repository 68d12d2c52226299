"""Further columns of a list or dataset, which are stored with the features of its images: captions, ids, ages.

They are in the shards, so that one shard, a merged data set and a bucket have them, and `h5py` reads them; a table
beside the shards would be a second file that must match. Values of CSV stay text: guessing makes 7 of `007`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.credentials import without_credentials
from extract.errors import InputError, first_line, unknown_name
from extract.system.optional_libraries import library

__all__ = ["Column", "arrow_column", "chosen_columns", "joined", "text_column", "values_at"]

Column = Sequence[str] | NDArray[Any]

# Columns of every table of features, and that of pictures.
_TAKEN = ("row", "path", "path_bytes", "label", "class", "split", "status", "id", "image")


def chosen_columns(where: str, keep: Iterable[str], there: Mapping[str, str]) -> dict[str, str]:
    """Return name, as it was given -> column, of the columns to keep.

    Args:
        where: name of the list or dataset.
        keep: names of columns; case-insensitive.
        there: name in lower case -> column that `where` has.

    Raises:
        UnknownNameError: there is no such column.
        InputError: its name cannot be used.
    """
    chosen: dict[str, str] = {}
    for name in keep:
        key = name.strip().lower()
        if key in _TAKEN:
            raise InputError(
                f"keep {name!r}: a data set has a column of this name in any case", hint="rename a column to keep it"
            )
        if key not in there:
            raise unknown_name("column", name, [each for each in there.values() if each.lower() not in _TAKEN], where)
        if not key or key.startswith(".") or {"/", "\0"} & set(key):
            raise InputError(f"keep {name!r}: a kept column cannot have this name", hint="rename the column")
        chosen.setdefault(name.strip(), there[key])
    return chosen


def text_column(where: str, name: str, values: Sequence[str], place: Callable[[int], str]) -> list[str]:
    """Return the values of a column of text, without credentials of URLs.

    Args:
        where: name of the list.
        name: name of the column.
        values: its values.
        place: position of a value -> its line or row, for messages.

    Raises:
        InputError: a value is not UTF-8, or has a null character.
    """
    for i, value in enumerate(values):
        if not value.isascii() and any("\udc80" <= char <= "\udcff" for char in value):
            raise InputError(f"{where}: {place(i)}: the {name} is not UTF-8", hint="save the list in UTF-8")
        if "\0" in value:
            raise InputError(f"{where}: {place(i)}: the {name} contains a null character")
    return [without_credentials(value) for value in values]


def arrow_column(where: str, name: str, column: Any, names: Sequence[str] | None = None) -> Column:
    """Return a column of Arrow as text, int64 or float64.

    Whole numbers and booleans are int64, or float64 with NaN if some are missing; other numbers are float64. Anything
    else that Arrow writes as text, such as times, is text, and empty if it is missing.

    Args:
        where: name of the list or dataset.
        name: name of the column.
        column: an Arrow array.
        names: names of classes, if the values are their numbers.

    Raises:
        InputError: the values are neither text nor numbers, or too large.
    """
    pa = library("pyarrow", "parquet", f"{where}: Parquet")
    if names is not None:
        known = dict(enumerate(names))
        return [known.get(value, "") for value in column.to_pylist()]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    try:
        plain = column.cast(kind)
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
            if not plain.null_count:
                return np.asarray(plain.cast(pa.int64()).to_numpy(), np.int64)
            plain = plain.cast(pa.int64()).cast(pa.float64())
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return np.asarray(plain.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)
        values = [value or "" for value in plain.cast(pa.string()).to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        raise InputError(
            f"{where}: column {name!r} is {kind}; expected text, int64 or float64: {first_line(error)}"
        ) from error
    return text_column(where, name, values, "row {}".format)


def values_at(column: Any, rows: Sequence[int]) -> Any:
    """Return the values of some rows: a list of a list, an array of an array."""
    return [column[row] for row in rows] if isinstance(column, list) else column[np.asarray(rows, np.int64)]


def joined(where: str, parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the columns of parts, one after the other.

    Raises:
        InputError: a column has text in one part, and numbers in another.
    """
    columns: dict[str, Column] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        arrays = [column for column in values if isinstance(column, np.ndarray)]
        if arrays and len(arrays) < len(values):
            raise InputError(f"{where}: column {name!r} has text in one split, and numbers in another")
        columns[name] = np.concatenate(arrays) if arrays else [text for column in values for text in column]
    return columns
