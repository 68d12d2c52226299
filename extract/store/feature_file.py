"""Features that another program has stored: an array in a `.npy` or HDF5 file, or a column of Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean

__all__ = ["checked_values", "feature_file"]

_HDF5 = (".h5", ".hdf5")


Rows = tuple[NDArray[Any], list[str] | None]


def feature_file(path: Path, layer: str | None = None) -> Rows:
    """Read the features of a file; those of HDF5 and Parquet into memory.

    Args:
        path: `.npy`, `.h5` or `.parquet`.
        layer: name of the data set or column; None: the only one with a vector of numbers in each row.

    Returns:
        (N, *shape) of numbers; and the path of the image of each row, if the file has a column `path`.

    Raises:
        InputError: there is no such file, or it has no features, or several and none is named.
        UnknownNameError: it has no data set or column of this name.
        LayertapError: pyarrow is not installed.
    """
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"{path}: no such file or data set", hint=did_you_mean(path))
    if suffix not in (".npy", ".parquet", *_HDF5):
        raise InputError(f"{path}: expected a data set, .npy, .h5 or .parquet", hint="pass the array in Python")
    try:
        if suffix == ".npy":
            return checked_values(np.load(path, mmap_mode="r", allow_pickle=False), path), None
        return (_from_hdf5 if suffix in _HDF5 else _from_parquet)(path, layer)
    except LayertapError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error


def _from_hdf5(path: Path, layer: str | None) -> Rows:
    found: list[str] = []
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.append(name) if _is_matrix(item) else None)
        name = _named(layer, found, path, "data set")
        paths = file.get("path")
        texts = (
            list(paths.asstr()[:]) if isinstance(paths, h5py.Dataset) and h5py.check_string_dtype(paths.dtype) else None
        )
        return checked_values(np.asarray(file[name]), path), texts


def _is_matrix(item: Any) -> bool:
    return isinstance(item, h5py.Dataset) and item.ndim >= 2 and item.dtype.kind == "f"


def _from_parquet(path: Path, layer: str | None) -> Rows:
    parquet = library("pyarrow.parquet", "parquet", f"{path}: Parquet")
    types = library("pyarrow", "parquet", "Parquet").types
    file = parquet.ParquetFile(path)
    lists = [
        each.name for each in file.schema_arrow
        if (types.is_list(each.type) or types.is_large_list(each.type) or types.is_fixed_size_list(each.type))
        and types.is_floating(each.type.value_type)
    ]  # fmt: skip
    name = _named(layer, lists, path, "column")
    has_paths = "path" in file.schema_arrow.names
    table = file.read(columns=[name, *(["path"] if has_paths else [])])
    flat = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if not len(table) or len(flat) % len(table):
        raise InputError(f"{path}: the rows of {name} are not all of one length")
    return flat.reshape(len(table), -1), table["path"].to_pylist() if has_paths else None


def _named(layer: str | None, found: list[str], path: Path, kind: str) -> str:
    if layer is not None:
        named = next((name for name in found if name in (layer, f"features/{layer}")), None)
        if named is None and (len(found) != 1 or "/" in found[0]):
            raise unknown_name(kind, layer, found, str(path))
        return named or found[0]
    if len(found) != 1:
        what = ", ".join(found[:8]) or "none"
        raise InputError(f"{path}: expected one {kind} of vectors, found {what}", hint="name one of them: -l NAME")
    return found[0]


def checked_values(values: NDArray[Any], where: object) -> NDArray[Any]:
    """Return an array if it has numbers, and a row for each image.

    Raises:
        InputError: it has not.
    """
    if values.ndim < 2 or values.dtype.kind not in "fiu" or not values.size:
        raise InputError(f"{where} is {values.dtype} {values.shape}; expected numbers (N, ...), a row for each image")
    return values
