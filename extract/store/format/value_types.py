"""Types of stored features, and how their values are kept.

    float32, float16   (N, *shape) of that type
    bfloat16           (N, *shape) uint16: the upper half of float32, rounded to the nearest, ties to even
    int32, int64       (N, *shape) of that type, for layers whose output is whole numbers
    int8               (N,) records of `scale`, float32, and `values`, int8 (*shape): a value is scale * values

The scale of an int8 row is the largest magnitude of the row over 127, so a value is off by at most 1/254 of that. A row
with a value that is NaN or infinite is NaN in all values. The smallest int32 and int64 stand for NaN: 0 and -1 are
values of many models.

A row of int8 is one record with its scale, so that code that writes, copies or hashes rows need not know what is in it.
HDF5 has no bfloat16 that h5py maps to a type of NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.store.format.layout import WHOLE_TYPES, kept_as, read_as

__all__ = [
    "ROUNDING", "STORED_TYPES", "VALUE_TYPES", "decoded", "encoded", "finite_rows", "kept_as", "read_as",
    "value_type_of",
]  # fmt: skip

VALUE_TYPES = ("float32", "float16", "bfloat16", "int8")  # of a run
STORED_TYPES = (*VALUE_TYPES, *WHOLE_TYPES)  # of a feature
# Largest error of a stored value, as part of the largest of its row.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 0.5 / 127, "int32": 0.0, "int64": 0.0}
_LARGEST = 127
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_LARGEST), np.float32(0))  # 127 times it is finite
_BFLOAT16_INFINITE = 0x7F80  # its exponent, with a fraction of 0


def value_type_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the type and the shape of features, by the dtype in a file and the shape of a row; None if it is none."""
    if dtype.names is not None:
        values = dtype.fields["values"][0] if dtype.fields and "values" in dtype.fields else None
        candidates = [("int8", values.shape)] if values is not None and not shape else []
    else:
        candidates = [(name, shape) for name in STORED_TYPES if name != "int8"]
    return next((kind for kind in candidates if kept_as(*kind) == (dtype, shape)), None)


def encoded(values: NDArray[Any], value_type: str) -> NDArray[Any]:
    """Return float32 values (R, *shape) as they are kept; values of another dtype are kept already."""
    if values.dtype != np.float32 or value_type == read_as(value_type):
        return values
    if value_type == "bfloat16":
        bits = np.ascontiguousarray(values).view("<u4")
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        rounded -= np.isfinite(values) & (rounded & 0x7FFF == _BFLOAT16_INFINITE)  # the largest finite value
        return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
    rows = values.reshape(len(values), math.prod(values.shape[1:]))
    largest = np.abs(rows).max(1, initial=0)
    good = np.isfinite(largest)
    scales = np.minimum(largest / np.float32(_LARGEST), _LARGEST_SCALE)
    records = np.zeros(len(rows), kept_as(value_type, values.shape[1:])[0])
    records["scale"] = np.where(good, scales, np.nan)
    whole = np.zeros(rows.shape, np.float32)
    np.divide(rows, scales[:, None], out=whole, where=(good & (scales > 0))[:, None])
    # The quotient of the largest value may be beyond 127 by rounding, where the scale is a subnormal number.
    records["values"] = np.clip(np.rint(whole), -_LARGEST, _LARGEST).astype(np.int8).reshape(values.shape)
    return records


def decoded(kept: NDArray[Any], value_type: str) -> NDArray[Any]:
    """Return rows as values: float32, or the dtype of the features if they are kept as they are."""
    if value_type == "bfloat16":
        return (kept.astype(np.uint32) << 16).view(np.float32)
    if value_type == "int8":
        values = kept["values"].astype(np.float32)
        values *= kept["scale"].reshape(kept["scale"].shape + (1,) * (values.ndim - kept.ndim))
        return values
    return kept


def finite_rows(kept: NDArray[Any], value_type: str) -> NDArray[np.bool_]:
    """Return, for each row as it is kept, whether all values are finite."""
    rows = kept["scale"][:, None] if value_type == "int8" else kept.reshape(len(kept), -1)
    finite: NDArray[np.bool_]
    if value_type in WHOLE_TYPES:
        finite = rows != np.iinfo(value_type).min
    elif value_type == "bfloat16":
        finite = rows & _BFLOAT16_INFINITE != _BFLOAT16_INFINITE
    else:
        finite = np.isfinite(rows)
    return np.asarray(finite.all(1))
