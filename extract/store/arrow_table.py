"""Rows of a reader as an Arrow table: one row for each image, features as lists of a fixed size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError
from extract.row_status import Status
from extract.store.feature_array import FeatureArray
from extract.system.optional_libraries import library

__all__ = ["ArrowRows", "RowPictures", "Rows", "Tables"]

RowPictures = Callable[[int, int], Sequence[bytes | None]]


class Rows(Protocol):
    """Source of the rows, such as `extract.store.reader.FeatureReader`, whose attributes these are."""

    def __len__(self) -> int: ...
    def __getitem__(self, layer: str) -> FeatureArray: ...
    @property
    def layers(self) -> list[str]: ...  # noqa: D102
    @property
    def rows(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def paths(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def splits(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def ids(self) -> Sequence[str] | None: ...  # noqa: D102
    @property
    def columns(self) -> Mapping[str, Sequence[str] | NDArray[Any]]: ...  # noqa: D102
    @property
    def classes(self) -> list[str]: ...  # noqa: D102
    @property
    def labels(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def status(self) -> NDArray[np.uint8]: ...  # noqa: D102
    @property
    def provenance(self) -> dict[str, Any]: ...  # noqa: D102


class ArrowRows:
    """Converts rows to Arrow.

    The columns are `row`, `path`, `label`, `class`, `split`, `status`, `id` if there are ids, kept columns, and the
    features. A path with bytes that are not UTF-8 is escaped; then `path_bytes` has the bytes of all paths. The
    metadata of a feature are its shape and its attributes, and those of the table the provenance.

    Args:
        reader: source of the rows.
        names: features.
        pictures: returns the encoded pictures of the rows from START to STOP, None for a missing one; they are stored
            in the column `image` as the library `datasets` stores them.

    Attributes:
        schema: the schema of the tables.

    Raises:
        InputError: a feature has the name of another column.
        LayertapError: pyarrow is not installed.
    """

    def __init__(self, reader: Rows, names: Sequence[str], pictures: RowPictures | None = None):
        self._pictures = pictures
        self._arrow = pa = library("pyarrow", "parquet", "Arrow")
        self._reader, self._names = reader, names
        text, number = pa.string(), pa.int64()
        columns = {"row": number, "path": text, "label": number, "class": text, "split": text, "status": text}
        if reader.ids is not None:
            columns["id"] = text
        self._kept = reader.columns
        if reserved := columns.keys() & self._kept.keys():  # of a file that another program wrote
            raise InputError(f"the column {min(reserved)!r} cannot be converted: the table has one of this name")
        for name, values in self._kept.items():
            columns[name] = pa.from_numpy_dtype(values.dtype) if isinstance(values, np.ndarray) else text
        if any("\udc80" <= char <= "\udcff" for path in reader.paths for char in path):
            columns["path_bytes"] = pa.binary()
        if pictures is not None:
            columns["image"] = pa.struct({"bytes": pa.binary(), "path": text})
        if reserved := columns.keys() & set(names):
            raise InputError(f"the layer {min(reserved)!r} cannot be converted: the table has a column of this name")
        fields = [pa.field(name, kind) for name, kind in columns.items()]
        for name in names:
            shape = reader[name].shape[1:]
            kind = pa.list_(pa.from_numpy_dtype(reader[name].dtype), math.prod(shape))
            fields.append(pa.field(name, kind, metadata={"shape": json.dumps(shape), **reader[name].attributes}))
        self.schema = pa.schema(fields, {"layertap": json.dumps(reader.provenance)})
        self._classes = [*map(_as_text, reader.classes), None]  # label -1 gives the last item

    def table(self) -> Any:
        """Return the table of all rows. Features that are stored as they are read are not copied."""
        parts = zip(*(self._reader[name].parts() for name in self._names), strict=True)
        batches = [self.batch(part[0][0], part[0][1], [values for _, _, values in part]) for part in parts]
        if not self._names:
            batches = [self.batch(0, len(self._reader), [])]
        return self._arrow.Table.from_batches(batches, self.schema)

    def batch(self, start: int, stop: int, features: Sequence[NDArray[Any]]) -> Any:
        """Return a record batch of the rows of a range; `features`: (stop - start, *shape) of each name."""
        reader, pa = self._reader, self._arrow
        paths, labels = reader.paths[start:stop], reader.labels[start:stop].tolist()
        columns: dict[str, Any] = {
            "row": reader.rows[start:stop],
            "path": [_as_text(path) for path in paths],
            "label": labels,
            "class": [self._classes[label] for label in labels],
            "split": reader.splits[start:stop],
            "status": [Status(code).text for code in reader.status[start:stop].tolist()],
        }
        if reader.ids is not None:
            columns["id"] = [_as_text(each) for each in reader.ids[start:stop]]
        for name, values in self._kept.items():
            part = values[start:stop]
            columns[name] = part if isinstance(part, np.ndarray) else [_as_text(each) for each in part]
        if "path_bytes" in self.schema.names:
            columns["path_bytes"] = [os.fsencode(path) for path in paths]
        if self._pictures is not None:
            encoded = zip(self._pictures(start, stop), columns["path"], strict=True)
            columns["image"] = [None if data is None else {"bytes": data, "path": path} for data, path in encoded]
        arrays = [pa.array(values, self.schema.field(name).type) for name, values in columns.items()]
        for name, values in zip(self._names, features, strict=True):
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=self.schema.field(name).type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class Tables:
    """The methods of a reader that return its rows as a table."""

    def to_arrow(self: Rows, layers: str | Sequence[str] | None = None) -> Any:
        """Return all rows as a `pyarrow.Table`: row, path, label, class, split, status, id, kept columns, layers.

        Features are lists of a fixed size; their shape is in the metadata of the column. Features of files on this
        machine that are neither compressed nor encoded are not copied; the table keeps the files mapped.

        Args:
            layers: names of features; None for all.

        Raises:
            UnknownNameError: no such layer.
            LayertapError: pyarrow is not installed.
        """
        return ArrowRows(self, _chosen(self, layers)).table()

    def to_pandas(self: Rows, layers: str | Sequence[str] | None = None) -> Any:
        """Return all rows as a `pandas.DataFrame`: the columns of `to_arrow`, and features as arrays.

        Raises:
            UnknownNameError: no such layer.
            LayertapError: pandas or pyarrow is not installed.
        """
        library("pandas", "pandas", "to_pandas")
        return ArrowRows(self, _chosen(self, layers)).table().to_pandas()

    def to_polars(self: Rows, layers: str | Sequence[str] | None = None) -> Any:
        """Return all rows as a `polars.DataFrame`: the columns of `to_arrow`, and features of type Array.

        Raises:
            UnknownNameError: no such layer.
            LayertapError: polars or pyarrow is not installed.
        """
        polars = library("polars", "polars", "to_polars")
        return polars.from_arrow(ArrowRows(self, _chosen(self, layers)).table())


def _chosen(reader: Rows, layers: str | Sequence[str] | None) -> list[str]:
    names = [layers] if isinstance(layers, str) else reader.layers if layers is None else list(layers)
    for name in names:
        reader[name]  # raises if it does not exist
    return list(dict.fromkeys(names))


def _as_text(text: str) -> str:
    return os.fsencode(text).decode("utf-8", "backslashreplace")
