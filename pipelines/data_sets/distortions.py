"""What projections change, as the runs of a data set have measured it."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import Any

from extract.compute.distortion import Distortion
from extract.errors import LayertapError
from extract.store.format.dataset import DataSet
from extract.store.format.schemas import RUN
from extract.system.json_files import is_finite_number, read_json_lines

__all__ = ["recorded_distortion"]


def recorded_distortion(dataset: DataSet) -> dict[str, Distortion]:
    """Return feature -> the newest measurement in the logs of a data set. Entries that are not numbers are left out."""
    logs = [log for part in dataset.data_sets_with_shards() for log in sorted(part.out.glob("runs*.jsonl"))]
    recorded: dict[str, Distortion] = {}
    for log in logs:
        with contextlib.suppress(LayertapError):
            for line in read_json_lines(log, RUN):
                recorded |= _of_run(line)
    names = [feature.name for feature in dataset.features]
    return {name: recorded[name] for name in names if name in recorded}


def _of_run(line: dict[str, Any]) -> dict[str, Distortion]:
    measured = (line.get("computation") or {}).get("distortion")
    keys = [field.name for field in fields(Distortion)]
    return {
        str(name): Distortion(**{key: values[key] for key in keys})
        for name, values in (measured.items() if isinstance(measured, dict) else ())
        if isinstance(values, dict) and all(is_finite_number(values.get(key)) for key in keys)
    }
