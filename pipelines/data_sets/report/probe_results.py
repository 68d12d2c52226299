"""Results of `layertap probe` in a report: metrics by layer, the confusion matrix, and predictions of test images."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from extract.errors import LayertapError
from extract.system.atomic_files import open_regular
from extract.system.csv_cells import safe_cell
from extract.system.json_files import is_finite_number, read_json
from pipelines.terminal.text_output import printable

__all__ = ["Prediction", "predictions_of", "probes"]

_PROBES = 50  # most results read
_CLASSES = 200  # most classes of a confusion matrix


class Prediction(NamedTuple):
    """Prediction of a probe for a test image.

    Attributes:
        label: class of the image.
        predicted: predicted class.
        probability: probability of the predicted class; None if the probe has none.
    """

    label: str
    predicted: str
    probability: float | None


def probes(out: Path, others: Sequence[Path]) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """Return folder -> results of `layertap probe`, of OUT/probe/* and `others`, and notes on unreadable files.

    A result has `name` (its folder, and the file of targets or dissimilarities), `protocol`, `metrics` (their names),
    `complete`, and `layers`: data set, fingerprint, task, layer, width, rows, chosen value, metric -> [value, low,
    high]; with at most 200 classes also `classes` and `confusion`, whose rows are the true classes.
    """
    files = sorted((out / "probe").glob("*/results.json"))
    files += [path / "results.json" if path.is_dir() else path for path in others]
    results: dict[Path, dict[str, Any]] = {}
    notes = []
    for file in files[:_PROBES]:
        try:
            content = read_json(file)
            layers = [_probed(probe, content["data_sets"]) for probe in content["probes"]]
            asked = content["configuration"]
            protocol = str(asked["protocol"])
            files_of = [str(asked[key]) for key in ("targets", "rdm", "triplets") if asked.get(key)]
            name = printable(", ".join([str(file.parent), *files_of]))
        except (LayertapError, OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            notes.append(printable(f"{file} cannot be read as results of a probe: {type(error).__name__}: {error}"))
            continue
        if layers:
            metrics = list(dict.fromkeys(name for layer in layers for name in layer["metrics"]))
            results[file.parent] = {
                "name": name, "protocol": printable(protocol), "metrics": metrics,
                "complete": bool(content.get("complete", True)), "layers": layers,
            }  # fmt: skip
    if len(files) > _PROBES:
        notes.append(f"{_PROBES} of {len(files):,} probe results are shown")
    return results, notes


def _probed(probe: dict[str, Any], data_sets: dict[str, Any]) -> dict[str, Any]:
    chosen = ", ".join(f"{name} {value:.3g}" for name, value in probe["chosen"].items())
    rows, data_set = probe["rows"], data_sets[probe["data_set"]]
    metrics = {
        printable(str(name)): [float(estimate[end]) if is_finite_number(estimate[end]) else None
                               for end in ("value", "low", "high")]
        for name, estimate in probe["metrics"].items()
    }  # fmt: skip
    layer: dict[str, Any] = {
        "data_set": printable(str(probe["data_set"])), "layer": printable(str(probe["layer"])),
        "fingerprint": str(data_set["fingerprint"]), "task": str(data_set["task"]),
        "width": int(probe["width"]),
        "train": int(rows["train"]), "test": int(rows["test"]), "chosen": printable(chosen),
        "metrics": metrics,
    }  # fmt: skip
    confusion, classes = probe.get("confusion"), probe.get("classes") or []
    if confusion is not None and len(classes) <= _CLASSES:
        layer["classes"] = [printable(str(name)) for name in classes]
        layer["confusion"] = [[int(count) for count in line] for line in confusion]
        if [len(line) for line in layer["confusion"]] != [len(classes)] * len(classes):
            raise ValueError("the confusion matrix does not have a row and a column for each class")
    return layer


def predictions_of(
    results: dict[Path, dict[str, Any]], fingerprint: str, layer: str, paths: Sequence[str]
) -> tuple[dict[str, Any], dict[int, Prediction], list[str]]:
    """Return the predictions of the probe that a report shows image by image.

    It is the first probe of this data set that classifies `layer`; without one, the first probe of another layer.

    Args:
        results: results of `probes`.
        fingerprint: fingerprint of the data set.
        layer: layer by which the report compares images, as printed.
        paths: path of each row.

    Returns:
        the result's `name`, `protocol` and `layer` (empty if there is none); row -> prediction; and notes on unreadable
        files.
    """
    notes = []
    candidates = [
        (folder, item) for folder, result in results.items() for item in result["layers"]
        if item["fingerprint"] == fingerprint and item["task"] == "classification"
    ]  # fmt: skip
    for folder, item in sorted(candidates, key=lambda pair: pair[1]["layer"] != layer):
        file = folder / "predictions.csv"
        try:
            by_path = _read_predictions(file, item["data_set"], item["layer"])
        except FileNotFoundError:  # few-shot probes predict no single image
            continue
        except (OSError, csv.Error, KeyError, TypeError, ValueError) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            notes.append(printable(f"{file} cannot be read as predictions: {reason}"))
            continue
        by_row = {row: by_path[cell] for row, path in enumerate(paths) if (cell := safe_cell(path)) in by_path}
        if by_row:
            about = results[folder]
            return {"name": about["name"], "protocol": about["protocol"], "layer": item["layer"]}, by_row, notes
    return {}, {}, notes


def _read_predictions(file: Path, data_set: str, layer: str) -> dict[str, Prediction]:
    """Return path -> prediction for a layer."""
    predictions = {}
    with os.fdopen(open_regular(file), encoding="utf-8", errors="surrogateescape", newline="") as text:
        for line in csv.DictReader(text):
            if printable(line["data_set"]) == data_set and printable(line["layer"]) == layer:
                cell = line.get("probability")
                probability = float(cell) if cell else None
                label, predicted = printable(line["label"]), printable(line["predicted"])
                predictions[line["path"]] = Prediction(label, predicted, probability)
    return predictions
