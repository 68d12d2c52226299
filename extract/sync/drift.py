"""Compare the features of a pass with those of the other rows, to detect another camera or a wrong folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from extract.store.format.dataset import DataSet
from extract.store.format.version import pass_folder
from extract.store.reader import FeatureReader
from extract.sync.manifest import Manifest

__all__ = ["Drift", "drift_of"]

_SAMPLED = 2000  # rows of each group, new and old
_SAMPLE_BYTES = 1 << 26  # of a group; large features are compared on fewer rows, so that they fit in memory
_LEAST_NEW, _LEAST_OLD = 8, 32  # fewer rows are not enough for a comparison

# Measured with the embedding of efficientnet_lite0: new images of a single class out of ten shift by 0.19 to 0.32
# (CIFAR-10) and 0.24 to 0.48 (handwritten digits); ImageNet photos added to CIFAR-10 shift by 0.54, digits added to
# CIFAR-10 by 0.90, with a spread of 0.44.
_FAR_SHIFT = 0.5
_FAR_SPREAD = 2.0


@dataclass(frozen=True)
class Drift:
    """Difference between the new rows of a feature and the other rows.

    Attributes:
        layer: name of the feature.
        shift: distance between the means in standard deviations (of the average variance of both groups), root mean
            square over the dimensions; the mean square expected by chance is subtracted.
        spread: standard deviation of the new rows divided by that of the other rows.
        new_rows, old_rows: number of rows compared.
        far: whether the difference is larger than new images of the same kind cause.
    """

    layer: str
    shift: float
    spread: float
    new_rows: int
    old_rows: int
    far: bool


def drift_of(out: Path, manifest: Manifest, number: int) -> list[Drift]:
    """Compare the rows of one pass with all other rows, on random samples.

    The samples are drawn from the manifest: the table and the status of all rows take 0.8 GB at 10 million files. A row
    that several files share counts once.

    Returns:
        A `Drift` for each feature; empty if there are too few rows.

    Raises:
        LayertapError: the data set cannot be read.
    """
    if manifest.passes() == [number]:
        return []
    new, old = (manifest.sample_rows(number, _SAMPLED, of_others=of_others) for of_others in (False, True))
    if len(new) < _LEAST_NEW or len(old) < _LEAST_OLD:
        return []
    numbers = sorted({of_pass for of_pass, _ in new + old})
    folders = [pass_folder(out, of_pass) for of_pass in numbers]
    n_rows = [DataSet.open(folder).n_rows for folder in folders]
    starts = dict(zip(numbers, (np.cumsum(n_rows) - n_rows).tolist(), strict=True))
    places = [np.array([starts[of_pass] + row for of_pass, row in rows], np.int64) for rows in (new, old)]
    drifts = []
    with FeatureReader(folders) as reader:
        for layer in reader.layers:
            at_most = min(_SAMPLED, _SAMPLE_BYTES // reader[layer].row_bytes)
            if at_most >= _LEAST_OLD:
                drifts.append(_drift(layer, *(_flat(reader, layer, np.sort(rows[:at_most])) for rows in places)))
    return drifts


def _flat(reader: FeatureReader, layer: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    return reader[layer].take(rows).reshape(len(rows), -1).astype(np.float64)


def _drift(layer: str, new: NDArray[np.float64], old: NDArray[np.float64]) -> Drift:
    variance = (new.var(0) + old.var(0)) / 2
    varying = variance > 1e-12 * variance.max(initial=0)
    squared_shifts = (new.mean(0) - old.mean(0))[varying] ** 2 / variance[varying]
    by_chance = 1 / len(new) + 1 / len(old)
    shift = math.sqrt(max(0.0, float(squared_shifts.mean()) - by_chance)) if varying.any() else 0.0
    total = float(old.var(0).sum())
    spread = math.sqrt(float(new.var(0).sum()) / total) if total else 1.0
    far = shift > _FAR_SHIFT or not 1 / _FAR_SPREAD < spread < _FAR_SPREAD
    return Drift(layer, shift, spread, len(new), len(old), far)
