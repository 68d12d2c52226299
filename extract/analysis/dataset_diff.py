"""Compare two data sets: the settings that their numbers depend on, and the features of shared images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.compute.agreement import cosines, deviations
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.differences import changes
from extract.store.format.shard import BLOCK_BYTES
from extract.store.reader import FeatureReader

__all__ = ["compare", "distinct_images", "image_hashes", "shared_images"]


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Compare two data sets. Images match if their bytes are equal, regardless of their names.

    Args:
        first: folder of the first data set, which may be incomplete.
        second: folder of the second data set, which may be incomplete.

    Returns:
        JSON-compatible data. `changes`: dotted key -> the two values of each entry of `depends_on` that differs;
        `images`: numbers of images with features; `features`: name -> `least` and `median` cosine of shared images,
        the `path` of the least in the first data set, and the largest `deviation` of a row, relative to the largest
        value of the row in the first data set; or `not_compared`, the reason.

    Raises:
        InputError: a folder is not a data set.
        LayertapError: a data set cannot be read.
    """
    changed = changes(DataSet.open(first).depends_on, DataSet.open(second).depends_on)
    with FeatureReader(first, partial=True) as first_reader, FeatureReader(second, partial=True) as second_reader:
        first_rows, second_rows = shared_images(first_reader, second_reader)
        features: dict[str, Any] = {}
        for name in dict.fromkeys([*first_reader.layers, *second_reader.layers]):
            if name not in first_reader.layers or name not in second_reader.layers:
                features[name] = {"not_compared": f"only in {first if name in first_reader.layers else second}"}
            elif (ours := first_reader[name].shape[1:]) != (theirs := second_reader[name].shape[1:]):
                features[name] = {"not_compared": f"different shapes, {ours} and {theirs}"}
            elif not len(first_rows):
                features[name] = {"not_compared": "no shared images"}
            else:
                features[name] = _similarity(first_reader, second_reader, name, first_rows, second_rows)
        only = [len(distinct_images(reader)[1]) - len(first_rows) for reader in (first_reader, second_reader)]
    return {
        "same_fingerprint": not changed,
        "changes": {setting: values for setting, *values in changed},
        "images": {"in_both": len(first_rows), "only_in_first": only[0], "only_in_second": only[1]},
        "features": features,
    }


def image_hashes(reader: FeatureReader) -> NDArray[Any]:
    """Return (N,) hashes of the image bytes, as 16-byte values that can be sorted and compared."""
    return np.ascontiguousarray(reader.column("source_hash")).view("V16")[:, 0]


def shared_images(first: FeatureReader, second: FeatureReader) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows (M,) of each data set that have features of the same images, in the order of the first."""
    (first_hashes, first_rows), (second_hashes, second_rows) = distinct_images(first), distinct_images(second)
    _, in_first, in_second = np.intersect1d(first_hashes, second_hashes, assume_unique=True, return_indices=True)
    order = np.argsort(first_rows[in_first])
    return first_rows[in_first][order], second_rows[in_second][order]


def distinct_images(reader: FeatureReader) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct hashes of images with features, and the first row of each."""
    rows_with_features = np.flatnonzero(reader.status == Status.OK)
    unique, rows = np.unique(image_hashes(reader)[rows_with_features], return_index=True)
    return unique, rows_with_features[rows]


def _similarity(
    reader: FeatureReader, other: FeatureReader, name: str, rows: NDArray[np.int64], other_rows: NDArray[np.int64]
) -> dict[str, Any]:
    values, largest = np.empty(len(rows)), 0.0
    step = max(1, BLOCK_BYTES // (16 * max(1, int(np.prod(reader[name].shape[1:])))))
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        ours, theirs = reader[name][rows[block]], other[name][other_rows[block]]
        values[block] = cosines(ours, theirs)
        largest = max(largest, float(deviations(theirs, ours).max()))
    least = int(values.argmin())
    found = {"least": float(values[least]), "median": float(np.median(values))}
    return {**found, "path": reader.paths[int(rows[least])], "deviation": largest}
