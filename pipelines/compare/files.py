"""The files of a comparison: compare.json, backbones.csv, layers.csv, matrices and figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError
from extract.system.atomic_files import write_json
from extract.system.json_files import read_json, without_nan
from pipelines.compare.comparison import Compared, Comparison
from pipelines.terminal.tables import print_aligned, table_file
from pipelines.terminal.text_output import printable

__all__ = ["as_json", "check_out", "mark_out", "print_comparison", "write_results"]

_RESULTS = "compare.json"
_FORMAT = "layertap comparison"
_MEASURES = ("cka", "procrustes", "mutual_knn", "rsa")
_COLUMNS = (
    "name", "backbone", "weights", "licence", "layer", "value", "low", "high", "behind", "p", "images_per_s",
    "parameters", "width", "row_bytes", "effective_rank", "alignment", "error",
)  # fmt: skip


def check_out(out: Path) -> None:
    """Check that a folder is new, empty, or of a comparison.

    Raises:
        InputError: it holds other files.
    """
    if out.is_file():
        raise InputError(f"{out} is a file", hint="name a folder with -o")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if (out / _RESULTS).is_file():
        try:
            content = read_json(out / _RESULTS)
            if isinstance(content, dict) and content.get("format") == _FORMAT:
                return
        except LayertapError:
            pass
    raise InputError(f"{out} is not empty and not a comparison of layertap", hint="name another folder with -o")


def mark_out(out: Path) -> None:
    """Create the folder of a comparison, so that an interrupted run can be resumed."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _RESULTS).exists():
        write_json(out / _RESULTS, {"format": _FORMAT, "complete": False})


def write_results(comparison: Comparison, out: Path) -> list[Path]:
    """Write the results and figures, and return the files."""
    from pipelines.compare.figures import draw

    write_json(out / _RESULTS, {"format": _FORMAT, "complete": True, **as_json(comparison)})
    files = [out / _RESULTS, out / "backbones.csv"]
    with table_file(out / "backbones.csv") as write:
        write([*_COLUMNS])
        for entry in comparison.backbones:
            write([_cell(getattr(entry, name)) for name in _COLUMNS])
    if comparison.layers:
        files.append(out / "layers.csv")
        with table_file(out / "layers.csv") as write:
            write(["backbone", "layer", "value", "low", "high", "chosen_by"])
            for line in comparison.layers:
                write([_cell(line[name]) for name in ("backbone", "layer", "value", "low", "high", "chosen_by")])
    if comparison.alikeness is not None:
        names = [f"{backbone}:{layer}" for backbone, layer in comparison.features]
        for measure in _MEASURES:
            files.append(out / f"{measure}.csv")
            with table_file(files[-1]) as write:
                write([measure, *names])
                for name, values in zip(names, getattr(comparison.alikeness, measure).tolist(), strict=True):
                    write([name, *map(_cell, values)])
    return files + draw(comparison, out)


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON-compatible data; NaN is null."""
    alike = comparison.alikeness
    content: dict[str, Any] = {
        "metric": comparison.metric,
        "protocol": comparison.protocol,
        "images": comparison.n_images,
        "test_images": comparison.n_test,
        "layers_chosen_on": comparison.chosen_on,
        "backbones": [asdict(entry) | {"distinguishable": entry.is_distinguishable} for entry in comparison.backbones],
        "layers": comparison.layers,
        "disputed": [asdict(disputed) for disputed in comparison.disputed],
        "notes": comparison.notes,
    }
    if alike is not None:
        content["alikeness"] = {
            "features": [list(feature) for feature in comparison.features],
            **{measure: getattr(alike, measure).tolist() for measure in _MEASURES},
            "k": alike.k, "mutual_knn_images": alike.knn_rows, "rsa_images": alike.rsa_rows,
        }  # fmt: skip
    result: dict[str, Any] = without_nan(content)
    return result


def print_comparison(comparison: Comparison, echo: Callable[[str], None]) -> None:
    """Print the table of the backbones."""
    from extract.analysis.probe.metrics import metric_name

    labelled = bool(comparison.metric)
    header = ["backbone", "layer", *([metric_name(comparison.metric), "", "behind", "p"] if labelled else []),
              "images/s", "1M images", "parameters", "width", "bytes", "rank", "alignment", "licence"]  # fmt: skip
    rows = [header]
    for entry in comparison.backbones:
        if not entry.error:
            rows.append([printable(entry.name), printable(entry.layer), *(_of_labels(entry) if labelled else []),
                         *_of_cost(entry), _number(entry.effective_rank, ".1f"), _number(entry.alignment, ".2f"),
                         printable(entry.licence or "-")])  # fmt: skip
    echo(
        f"{comparison.n_images:,} images"
        + (f", {comparison.n_test:,} test images, {comparison.protocol}" if labelled else ", no labels")
    )
    print_aligned(rows, "<<" + (">>>>" if labelled else "") + ">>>>>>><", echo)
    for entry in comparison.backbones:
        if entry.error:
            echo(f"{printable(entry.name)}: {printable(entry.error)}")
    if labelled:
        if comparison.chosen_on:
            favours = ", which favours backbones with many layers" * (comparison.chosen_on == "test images")
            echo(f"layers are chosen on {comparison.chosen_on}{favours}")
        echo("p is corrected for all pairs of backbones (McNemar, Holm)")
        same = [entry.name for entry in comparison.backbones if entry.is_distinguishable is False]
        if same:
            echo(
                f"not distinguishable from {printable(comparison.backbones[0].name)}: {', '.join(map(printable, same))}"
            )
    if comparison.why_not_alike:
        echo(f"features are not compared with each other: {printable(comparison.why_not_alike)}")
    for note in comparison.notes:
        echo(f"  {printable(note)}")


def _of_labels(entry: Compared) -> list[str]:
    if entry.value is None:
        return ["-", "", "", ""]
    behind = "best" if entry.p is None else f"{100 * (entry.behind or 0):.1f}"
    interval = f"({100 * (entry.low or 0):.1f} to {100 * (entry.high or 0):.1f})"
    p = "" if entry.p is None else f"{entry.p:.3f}" if entry.p >= 0.001 else "<0.001"
    return [f"{100 * entry.value:.1f} %", interval, behind, p]


def _of_cost(entry: Compared) -> list[str]:
    rate = entry.images_per_s
    hours = "-" if not rate else f"{1e6 / rate / 3600:.1f} h"
    millions = "-" if entry.parameters is None else f"{entry.parameters / 1e6:.1f} M"
    return [_number(rate, ",.0f"), hours, millions, _number(entry.width, ",d"), _number(entry.row_bytes, ",d")]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
