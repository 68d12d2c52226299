"""Whether stored features are really of these images, with these weights: some are computed again and compared."""

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
from extract.extraction.reproduce import computed_rows, plan_as_made
from extract.images import Images, listed_again
from extract.row_status import Status
from extract.store.format.dataset import DataSet, differences
from extract.store.reader import FeatureReader
from extract.store.verify import Fault, Remedy

__all__ = ["TOLERANCE", "Recheck", "recheck"]

# Of the largest value of a row. Other batches, thread counts and machines change features by 1e-6 to 1e-4 of it in
# float32, and rounding to float16 by 5e-4 at most; another picture, or other preprocessing, by more than 1e-2. In lower
# precision they change by some roundings, which are 2^-11 and 2^-8.
TOLERANCE = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Recheck:
    """How features that were computed again compare with those that are stored.

    Attributes:
        n_rows: rows that were compared.
        largest: deviation in any feature of any of them, as a part of the largest value of the row.
        faults: rows that differ by more than `TOLERANCE`, or whose image cannot be read.
        apart: those of them whose image is the same as when they were stored.
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
    """Compute random rows again, as the data set says they were made, and compare.

    Args:
        out: folder of the data set.
        sample: rows; all that have features, if there are fewer.
        seed: of the choice.
        images: where the images lie now; None: where they lay.
        backbone: as loaded, or its spec; None loads the one that the data set records, unless it is code.
        weights: a name or file; None: those the data set names.
        device: to compute on.
        workers: processes that decode.

    Raises:
        InputError: no data set there, no image folder, or its backbone cannot be loaded.
        LayertapError: as of `FeatureReader` and `load_backbone`.
    """
    dataset = DataSet.open(out)
    with FeatureReader(out, partial=True) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        if not len(good):
            raise InputError(f"{out} has no row with features")
        chosen = np.sort(np.random.default_rng(seed).permutation(good)[:sample])
        root = dataset.images["root"] if images is None else os.fspath(images)
        found = _listed(root, [reader.paths[row] for row in chosen], out)
        workers = workers if len(chosen) > defaults.BATCH_SIZE else 0
        plan = plan_as_made(dataset, reader.provenance, found, backbone, weights, device, workers)
        if changed := differences(dataset.depends_on, plan.dataset.depends_on):
            others = [Fault(f"made with another {line}", Remedy.NONE) for line in changed]
            return Recheck(0, 0.0, others, others)
        starts = range(0, len(chosen), defaults.BATCH_SIZE)
        batches = [list(range(start, min(start + defaults.BATCH_SIZE, len(chosen)))) for start in starts]
        compared, largest, faults, apart = 0, 0.0, [], []

        def fault(what: str, remedy: Remedy, position: int, path: str) -> None:
            file, shard, row = reader.place_of(position)
            faults.append(Fault(what, remedy, shard, file.relative_to(out).as_posix(), row, path))

        tolerance = TOLERANCE[plan.settings.precision]
        with contextlib.closing(computed_rows(plan, batches)) as computed:
            for batch, (again, status, reasons) in computed:
                here = chosen[batch.rows]
                stored = {name: reader[name][here] for name in reader.layers}
                hashes = reader.column("source_hash")[here]
                for i, row in enumerate(here.tolist()):
                    if status[i] in (Status.MISSING, Status.DECODE_ERROR, Status.IO_ERROR):
                        what = f"its image cannot be read any more: {reasons.get(int(batch.rows[i]), '')}"
                        fault(what, Remedy.NONE, row, found.paths[batch.rows[i]])
                        continue
                    compared += 1
                    same_image = batch.source_hash[i].tobytes() == hashes[i].tobytes()
                    if status[i] == Status.NOT_FINITE:
                        what = f"features computed again are not finite: {reasons.get(int(batch.rows[i]), '')}"
                        fault(what, Remedy.ROW, row, found.paths[batch.rows[i]])
                        apart += faults[-1:] if same_image else []
                        continue
                    off = max(deviation(one[i], stored[name][i]) for name, one in again.items())
                    largest = max(largest, off)
                    if not off <= tolerance:
                        why = "its image is the same" if same_image else "its image has changed since"
                        what = f"features computed again differ by {off:.1e}; {why}"
                        fault(what, Remedy.ROW, row, found.paths[batch.rows[i]])
                        apart += faults[-1:] if same_image else []
    return Recheck(compared, largest, faults, apart)


def _listed(root: str, paths: list[str], out: Path) -> Images:
    try:
        return listed_again(root, paths)
    except InputError as error:
        raise InputError(f"{out}: {error}") from error
