"""Features that another program has stored: an array in a `.npy` or HDF5 file, or a column of Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
from numpy.typing import NDArray

from extract.errors import InputError, first_line, unknown_name
from extract.images.arrays import SUFFIXES, arrays_in, open_array
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean

__all__ = ["checked_values", "feature_file"]


def feature_file(path: Path, layer: str | None = None) -> tuple[Any, list[str] | None]:
    """Open the features of a file. Those of Parquet are read into memory.

    Args:
        path: `.npy`, `.h5`, `.hdf5` or `.parquet`.
        layer: name of the HDF5 data set or the column; None: the only one with floating-point numbers in each row.

    Returns:
        (N, *shape) of numbers, as an array or an HDF5 data set; and the path of the image of each row, if the file has
        a column `path`.

    Raises:
        InputError: there is no such file, or it has no features, or several and none is named, or rows of several
            lengths, or it stores its data in other files.
        UnknownNameError: it has no data set or column of this name.
        LayertapError: pyarrow is not installed.
    """
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"{path}: no such file or data set", hint=did_you_mean(path))
    if suffix == ".parquet":
        return _from_parquet(path, layer)
    if suffix == ".npy":
        return checked_values(open_array(str(path), ""), path), None
    if suffix in SUFFIXES:
        return _from_hdf5(str(path), layer)
    raise InputError(f"{path}: expected a data set, .npy, .h5 or .parquet", hint="pass the array in Python")


def _from_hdf5(path: str, layer: str | None) -> tuple[Any, list[str] | None]:
    names = arrays_in(path)
    arrays = {name: open_array(path, name) for name in names}
    candidates = [name for name, array in arrays.items() if array.ndim >= 2 and array.dtype.kind == "f"]
    values = checked_values(arrays[_named(layer, candidates, path, "data set")], path)
    paths = arrays.get("path")
    if paths is None or h5py.check_string_dtype(paths.dtype) is None:
        return values, None
    return values, list(paths.asstr()[:])


def _from_parquet(path: Path, layer: str | None) -> tuple[NDArray[Any], list[str] | None]:
    parquet = library("pyarrow.parquet", "parquet", f"{path}: Parquet")
    pa = library("pyarrow", "parquet", f"{path}: Parquet")
    try:
        file = parquet.ParquetFile(path)
        lists = [each.name for each in file.schema_arrow if _is_list_of_numbers(pa, each.type)]
        name = _named(layer, lists, str(path), "column")
        table = file.read(columns=[name, *{"path"}.intersection(file.schema_arrow.names)])
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    rows = table[name].combine_chunks()
    lengths = library("pyarrow.compute", "parquet", f"{path}: Parquet").list_value_length(rows)
    if not len(rows) or rows.null_count or len(lengths.unique()) != 1 or rows.flatten().null_count:
        raise InputError(f"{path}: the rows of {name} are not all of one length, without empty values")
    values = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
    return checked_values(values, path), table["path"].to_pylist() if "path" in table.column_names else None


def _is_list_of_numbers(pa: Any, kind: Any) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_floating(kind.value_type))


def _named(layer: str | None, candidates: list[str], path: str, kind: str) -> str:
    if layer is not None:
        named = next((name for name in candidates if name in (layer, f"features/{layer}")), None)
        if named is None and (len(candidates) != 1 or "/" in candidates[0]):
            raise unknown_name(kind, layer, candidates, path)
        return named or candidates[0]
    if len(candidates) != 1:
        what = ", ".join(candidates[:8]) or "none"
        raise InputError(f"{path}: expected one {kind} of vectors, found {what}", hint="name one of them: -l NAME")
    return candidates[0]


def checked_values(values: Any, where: object) -> Any:
    """Return an array, or HDF5 data set, if it has numbers, and a row for each image.

    Raises:
        InputError: it has not.
    """
    if values.ndim < 2 or values.dtype.kind not in "fiu" or not values.size:
        raise InputError(f"{where} is {values.dtype} {values.shape}; expected numbers (N, ...), a row for each image")
    return values
