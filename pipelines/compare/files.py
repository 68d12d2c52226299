"""The files of a comparison: compare.json, tables, matrices and figures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError
from extract.system.atomic_files import write_json
from extract.system.json_files import read_json, without_nan
from pipelines.compare.comparison import Comparison, Score, Task
from pipelines.terminal.tables import table_file

__all__ = ["as_json", "check_out", "mark_out", "write_results"]

_RESULTS = "compare.json"
_FORMAT = "layertap comparison"
_MEASURES = ("cka", "procrustes", "mutual_knn", "rsa")
_SOMETIMES = (
    "tasks.csv", "layers.csv", *(f"{measure}.csv" for measure in _MEASURES), "accuracy-speed.png", "ranks.png",
    "alikeness.png",
)  # fmt: skip


def check_out(out: Path) -> None:
    """Check that a folder is new, empty, or of a comparison of all listed images.

    Raises:
        InputError: it holds other files, or the comparison of a sample, which earlier versions drew.
    """
    if out.is_file():
        raise InputError(f"{out} is a file", hint="name a folder with -o")
    if not out.is_dir() or not any(out.iterdir()):
        return
    content = None
    if (out / _RESULTS).is_file():
        with contextlib.suppress(LayertapError):
            content = read_json(out / _RESULTS)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{out} is not empty and not a comparison of layertap", hint="name another folder with -o")
    if content.get("sample"):
        raise InputError(
            f"{out} compares a sample of the images that an earlier version drew for a given time",
            hint="name another folder with -o, and --limit N for fewer images",
        )


def mark_out(out: Path) -> None:
    """Create the folder of a comparison, and mark it, so that an interrupted run can be resumed."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _RESULTS).exists():
        write_json(out / _RESULTS, {"format": _FORMAT, "complete": False})


def write_results(comparison: Comparison, out: Path) -> list[Path]:
    """Write the results and figures, and return the files."""
    from pipelines.compare.figures import draw

    write_json(out / _RESULTS, {"format": _FORMAT, "complete": True, **as_json(comparison)})
    written = [out / _RESULTS]

    def write_table(name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        written.append(out / name)
        with table_file(written[-1]) as write:
            write([*header])
            for row in rows:
                write([_cell(value) for value in row])

    lines = comparison.table
    columns = [name for name in lines[0] if name not in ("chosen_by", "distinguishable")]
    write_table("backbones.csv", columns, ([line[name] for name in columns] for line in lines))
    if len(comparison.tasks) > 1:
        scores = ([task.name, backbone, *asdict(score).values()]
                  for task in comparison.tasks for backbone, score in task.scores.items())  # fmt: skip
        write_table("tasks.csv", ["task", "backbone", *(part.name for part in fields(Score))], scores)
    if comparison.tasks:
        columns = ["backbone", "layer", "value", "low", "high", "chosen_by"]
        layers = ([task.name, *(line[name] for name in columns)] for task in comparison.tasks for line in task.layers)
        write_table("layers.csv", ["task", *columns], layers)
    if comparison.similarity is not None:
        names = [f"{backbone}:{layer}" for backbone, layer in comparison.features]
        for measure in _MEASURES:
            matrix = getattr(comparison.similarity, measure).tolist()
            lines_of = ([name, *row] for name, row in zip(names, matrix, strict=True))
            write_table(f"{measure}.csv", [measure, *names], lines_of)
    written += draw(comparison, out)
    for name in _SOMETIMES:
        if out / name not in written:  # of an earlier run with other labels
            (out / name).unlink(missing_ok=True)
    return written


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON-compatible data; NaN is null."""
    similarity = comparison.similarity
    content: dict[str, Any] = {
        "images": comparison.n_images,
        "protocol": comparison.protocol,
        "backbones": [asdict(entry) | {"distinguishable": entry.is_distinguishable} for entry in comparison.backbones],
        "critical_difference": comparison.critical_difference,
        "tasks": [_task_as_json(task) for task in comparison.tasks],
        "notes": comparison.notes,
    }
    if similarity is not None:
        content["alikeness"] = {
            "features": [list(feature) for feature in comparison.features],
            **{measure: getattr(similarity, measure).tolist() for measure in _MEASURES},
            "k": similarity.k, "mutual_knn_images": similarity.knn_rows,
            "rsa_images": similarity.rsa_rows,
        }  # fmt: skip
    result: dict[str, Any] = without_nan(content)
    return result


def _task_as_json(task: Task) -> dict[str, Any]:
    names = {"n_test": "test_images", "chosen_on": "layers_chosen_on"}
    return {names.get(name, name): value for name, value in asdict(task).items()}
