"""Groups of rows that tell of each other: copies, parts of one file, rows of one patient, slide or video.

A probe that is tested on a row whose group it was fitted on recognises the group, and seems better than it is. So rows
of a group are on one side of every split, fold and draw.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from extract.analysis.dataset_diff import image_hashes
from extract.row_status import Status
from extract.store.reader import FeatureReader

__all__ = ["components", "first_rows_of", "row_groups"]


def row_groups(reader: FeatureReader, further: Sequence[str | None] | None = None) -> NDArray[np.int64]:
    """Return the number (N,) of the group of each row, from 0, by its first row.

    Args:
        reader: the data set. Rows with the same bytes, and parts of one file, are in one group.
        further: value of each row, such as a patient; rows with the same value are in one group. None or "": no value.
    """
    good = (reader.status == Status.OK).tolist()
    copies = (digest if ok else None for digest, ok in zip(image_hashes(reader).tolist(), good, strict=True))
    first_rows = [first_rows_of(copies), first_rows_of(reader.files)]
    if further is not None:
        first_rows.append(first_rows_of(value or None for value in further))
    pairs = [np.stack([first, np.arange(len(good))], 1) for first in first_rows]
    return np.unique(components(np.concatenate(pairs), len(good)), return_inverse=True)[1]


def first_rows_of(keys: Iterable[Hashable | None]) -> NDArray[np.int64]:
    """Return the first row (N,) with the key of each row; a row without a key is its own."""
    first: dict[Hashable, int] = {}
    rows = (row if key is None else first.setdefault(key, row) for row, key in enumerate(keys))
    return np.fromiter(rows, np.int64)


def components(pairs: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the smallest place (N,) that each place is joined with, by pairs (P, 2) in any number of steps."""
    lowest = np.arange(count)
    while True:
        joined = lowest.copy()
        for ends in (pairs, pairs[:, ::-1]):
            np.minimum.at(joined, ends[:, 0], lowest[ends[:, 1]])
        joined = joined[joined]
        if np.array_equal(joined, lowest):
            return lowest
        lowest = joined
