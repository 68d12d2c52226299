"""Check that stored features belong to these images and weights: compute some again and compare."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from extract import defaults
from extract.compute.agreement import deviation
from extract.compute.backbone import Backbone
from extract.errors import InputError
from extract.extraction.reproduce import computed_rows, recorded_plan
from extract.images import Images, listed_again
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.differences import differences
from extract.store.format.value_types import ROUNDING
from extract.store.reader import FeatureReader
from extract.store.verify import Fault, Remedy

__all__ = ["TOLERANCE", "Recheck", "recheck"]

# Relative to the largest value of a row. Other batches, thread counts and machines change float32 features by 1e-6 to
# 1e-4 of it, and rounding to float16 by at most 5e-4. Another image or other preprocessing changes them by more than
# 1e-2. Lower precision changes them by a few roundings, of 2^-11 in TF32 and float16 and 2^-8 in bfloat16.
TOLERANCE = {"float32": 1e-3, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 3e-2, "bfloat16-weights": 3e-2}


@dataclass
class Recheck:
    """Comparison of features computed again with the stored ones.

    Attributes:
        n_rows: number of rows compared.
        largest: largest deviation of a feature, relative to the largest value of its row.
        faults: rows that differ by more than `TOLERANCE` and the rounding of the stored type, are not finite now, or
            whose image cannot be read. If the fingerprint differs, no row is compared, and each fault is a difference
            of the fingerprint.
        apart: faults whose image has not changed since it was stored, and differences of the fingerprint.
    """

    n_rows: int
    largest: float
    faults: list[Fault]
    apart: list[Fault] = field(default_factory=list)


def recheck(
    out: Path,
    sample: int,
    *,
    seed: int = defaults.SEED,
    images: str | os.PathLike[str] | None = None,
    backbone: Backbone | str | None = None,
    weights: str | None = None,
    device: str = defaults.DEVICE,
    workers: int = defaults.WORKERS,
) -> Recheck:
    """Compute random rows again with the recorded settings of the data set, and compare them with the stored rows.

    Args:
        out: folder of the data set.
        sample: number of rows; all rows with features if there are fewer.
        seed: seed of the random choice.
        images: location of the images; None: the recorded one, unless images would be fetched from a URL.
        backbone: a loaded backbone or a spec; None loads the recorded backbone, unless that runs code.
        weights: a name or file; None: the recorded weights.
        device: device to compute on.
        workers: processes that decode, if there is more than one batch.

    Raises:
        InputError: the data set, its features or its images are missing, or its backbone cannot be loaded.
        LayertapError: see `FeatureReader` and `load_backbone`.
    """
    dataset = DataSet.open(out)
    with FeatureReader(out, partial=True) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        if not len(good):
            raise InputError(f"{out} has no row with features")
        chosen = np.sort(np.random.default_rng(seed).permutation(good)[:sample])
        sampled = _listed(dataset, [reader.paths[row] for row in chosen], images)
        workers = workers if len(chosen) > defaults.BATCH_SIZE else 0
        plan = recorded_plan(dataset, reader.provenance, sampled, backbone, weights, device, workers)
        if changed := differences(dataset.depends_on, plan.dataset.depends_on):
            others = [Fault(f"computed with another {line}", Remedy.NONE) for line in changed]
            return Recheck(0, 0.0, others, others)
        size = defaults.BATCH_SIZE
        batches = [list(range(len(chosen)))[start : start + size] for start in range(0, len(chosen), size)]
        tolerance = TOLERANCE[plan.settings.precision] + max(ROUNDING[feature.dtype] for feature in dataset.features)
        checked = Recheck(0, 0.0, [], [])

        def fault(what: str, remedy: Remedy, position: int, path: str) -> None:
            file, shard, row = reader.place_of(position)
            checked.faults.append(Fault(what, remedy, shard, file.relative_to(out).as_posix(), row, path))

        with contextlib.closing(computed_rows(plan, batches)) as computed:
            for batch, (again, status, reasons) in computed:
                here = chosen[batch.rows]
                stored = {name: reader[name][here] for name in reader.layers}
                hashes = reader.column("source_hash")[here]
                for i, row in enumerate(here.tolist()):
                    path, reason = sampled.paths[batch.rows[i]], reasons.get(int(batch.rows[i]), "")
                    if status[i] not in (Status.OK, Status.NOT_FINITE):
                        fault(f"its image cannot be read any more: {reason}", Remedy.NONE, row, path)
                        continue
                    checked.n_rows += 1
                    same_image = (batch.source_hash[i] == hashes[i]).all()
                    if status[i] == Status.NOT_FINITE:
                        what = f"features computed again are not finite: {reason}"
                    else:
                        off = max(deviation(values[i], stored[name][i]) for name, values in again.items())
                        checked.largest = max(checked.largest, off)
                        if off <= tolerance:
                            continue
                        why = "its image is the same" if same_image else "its image has changed since"
                        what = f"features computed again differ by {off:.1e}; {why}"
                    fault(what, Remedy.ROW, row, path)
                    if same_image:
                        checked.apart.append(checked.faults[-1])
    return checked


def _listed(dataset: DataSet, paths: list[str], images: str | os.PathLike[str] | None) -> Images:
    try:
        return listed_again(dataset.images["root"], paths, None if images is None else os.fspath(images))
    except InputError as error:
        raise InputError(f"{dataset.out}: {error}") from error
