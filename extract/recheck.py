"""Whether stored features are really of these images, with these weights: some are computed again and compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.backbones import Backbone, load_backbone
from extract.errors import InputError
from extract.forward import ready
from extract.images import ImageFolder, load_batches
from extract.planning import plan_for
from extract.status import Status
from extract.store.dataset import DataSet, differences
from extract.store.reader import FeatureReader

__all__ = ["TOLERANCE", "Recheck", "recheck"]

# Of the largest value of a row. Other batches, thread counts and machines change features by 1e-6 to 1e-4 of it in
# float32, and rounding to float16 by 5e-4 at most; another picture, or other preprocessing, by more than 1e-2.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Recheck:
    """How features that were computed again compare with those that are stored.

    Attributes:
        rows: (S,) those that were compared.
        differences: (S,) largest deviation in any feature, as a part of the largest value of the row.
        faults: (row, path, what is wrong); row -1: of the whole data set.
    """

    rows: NDArray[np.int64]
    differences: NDArray[np.float64]
    faults: list[tuple[int, str, str]]


def recheck(
    out: Path,
    sample: int,
    *,
    seed: int = defaults.SEED,
    images: Path | None = None,
    backbone: Backbone | None = None,
    weights: str | None = None,
    device: str = defaults.DEVICE,
    workers: int = defaults.WORKERS,
) -> Recheck:
    """Compute random rows again, as the data set says they were made, and compare.

    Args:
        out: folder of the data set.
        sample: rows; all that have features, if there are fewer.
        seed: of the choice.
        images: where the images lie now; None: where they lay.
        backbone: None loads the one that the data set names.
        weights: a name or file; None: those the data set names.
        device: to compute on.
        workers: processes that decode.

    Raises:
        InputError: no data set there, no image folder, or its backbone cannot be loaded.
        LayertapError: as of `FeatureReader` and `load_backbone`.
    """
    with FeatureReader(out, partial=True) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        if not len(good):
            raise InputError(f"{out} has no row with features")
        chosen = np.sort(np.random.default_rng(seed).permutation(good)[:sample])
        rows, paths = reader.rows[chosen], [reader.paths[row] for row in chosen]
        provenance, dataset = reader.provenance, DataSet.open(out)
        stored = {name: reader[name][chosen] for name in reader.layers}
        hashes = reader.column("source_hash")[chosen]
    root = images or Path(dataset.images["root"])
    if not root.is_dir():
        raise InputError(f"the images of {out} are not in {root} any more; say where they are")
    configuration = provenance.get("configuration", {})
    try:
        layers, seed_of_weights = list(configuration["layers"]), int(configuration["seed"])
        spec, asked = str(provenance["backbone"]), weights or configuration["weights"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{out} does not say how it was made: {error} is missing in its provenance") from error
    if backbone is None:
        backbone = load_backbone(spec, weights=asked, device=device, seed=seed_of_weights)
    folder = ImageFolder(root, paths, np.full(len(paths), -1), [], [""] * len(paths))
    plan = plan_for(
        folder, out, backbone, {"layers": layers, "batch_size": min(64, len(paths)), "workers": workers,
                                "dtype": dataset.features[0].dtype, "shard_rows": None, "compress": None},
    )  # fmt: skip
    if changed := differences(dataset.depends_on, plan.dataset.depends_on):
        return Recheck(rows[:0], np.empty(0), [(-1, "", f"made with another {line}") for line in changed])
    deviations, faults = np.zeros(len(rows)), []
    batch_rows = [list(range(i, min(i + 64, len(rows)))) for i in range(0, len(rows), 64)]
    batches = load_batches(folder, batch_rows, backbone.preprocessing.prepare, workers=workers if len(rows) > 64 else 0)
    with ready(plan) as forward:
        for batch in batches:
            features, status, reasons = forward(batch)
            for i, at in enumerate(batch.rows.tolist()):
                row, path = int(rows[at]), paths[at]
                if status[i] in (Status.MISSING, Status.DECODE_ERROR):
                    faults.append((row, path, f"its image cannot be read any more: {reasons.get(at, '')}"))
                    deviations[at] = np.nan
                    continue
                deviations[at] = max(_deviation(stored[name][at], values[i]) for name, values in features.items())
                if not deviations[at] <= TOLERANCE:
                    changed = batch.source_hash[i].tobytes() != hashes[at].tobytes()
                    why = "its image has changed since" if changed else "its image is the same"
                    faults.append((row, path, f"features computed again differ by {deviations[at]:.1e}; {why}"))
    return Recheck(rows, deviations, faults)


def _deviation(stored: NDArray[Any], again: NDArray[Any]) -> float:
    largest = float(np.abs(stored.astype(np.float64)).max(initial=0))
    apart = float(np.abs(stored.astype(np.float64) - again.astype(np.float64)).max(initial=0))
    return apart / largest if largest else apart
