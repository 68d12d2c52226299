"""What a comparison prints and writes: its table, compare.json, tables, matrices and the page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from extract.analysis.probe.metrics import LEVEL, metric_name
from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.system.atomic_files import write_json, write_whole
from extract.system.json_files import mapped, read_json, without_nan
from extract.system.optional_libraries import own_version
from pipelines.compare.comparison import Compared, Comparison, Score, Task
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.page.assembly import assembled
from pipelines.terminal.page.thumbnail_sheets import ThumbnailSheets, sheets_of_rows
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.tables import numeral, print_aligned, table_file
from pipelines.terminal.text_output import printable

__all__ = ["as_json", "check_out", "mark_out", "print_comparison", "write_page", "write_results"]

_RESULTS = "compare.json"
_FORMAT = "layertap comparison"
_PAGE_BYTES = 5_000_000  # of the page, at most, about; thumbnails take the rest
_MEASURES = ("cka", "procrustes", "mutual_knn", "rsa")
_SOMETIMES = ("tasks.csv", "layers.csv", *(f"{measure}.csv" for measure in _MEASURES))


def check_out(out: Path) -> None:
    """Check that a folder is new, empty, or of a comparison.

    Raises:
        InputError: it holds other files.
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


def mark_out(out: Path) -> None:
    """Create the folder of a comparison, and mark it, so that an interrupted run can be resumed."""
    check_folder(out)
    if not (out / _RESULTS).exists():
        write_json(out / _RESULTS, {"format": _FORMAT, "complete": False})


def write_results(comparison: Comparison, out: Path) -> list[Path]:
    """Write the results, and return the files."""
    write_json(out / _RESULTS, {"format": _FORMAT, "complete": True, **as_json(comparison)})
    written = [out / _RESULTS]

    def write_table(name: str, header: Sequence[str], rows: Iterable[list[Any]]) -> None:
        written.append(out / name)
        with table_file(written[-1]) as write:
            write([*header])
            for row in rows:
                write(without_nan(row))

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
    for name in _SOMETIMES:
        if out / name not in written:  # of an earlier run with other labels
            (out / name).unlink(missing_ok=True)
    return written


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
    return without_nan(content)  # type: ignore[no-any-return]


def _task_as_json(task: Task) -> dict[str, Any]:
    names = {"n_test": "test_images", "chosen_on": "layers_chosen_on"}
    return {names.get(name, name): value for name, value in asdict(task).items()}


def write_page(comparison: Comparison, out: Path, images: str) -> Path:
    """Write the page, and return the file.

    Args:
        comparison: the comparison.
        out: its folder, with the data sets.
        images: location of the images.
    """
    path = out / "compare.html"
    data: dict[str, Any] = mapped(as_json(comparison), str, printable) | {
        "title": printable(without_credentials(images).rstrip("/").rpartition("/")[2] or "images"),
        "written": datetime.now(UTC).isoformat(" ", "seconds"),
        "version": own_version(),
        "notes": [*map(printable, _notes(comparison))],
        "about_thumbnails": "",
    }
    disputed = [image for task in data["tasks"] for image in task["disputed"]]
    for task in data["tasks"]:
        task["metric_name"] = metric_name(task["metric"]).capitalize()
    data["classes"] = []  # an image may have a class in each task
    data["rows"] = {image["row"]: [image["path"], -1, ""] for image in disputed}
    data["thumbnails"] = vars(ThumbnailSheets())
    page = partial(assembled, "comparison", data, "pipelines.compare", ["compare.js"])
    if disputed:
        data_set, room = out / comparison.best.name, _PAGE_BYTES - len(page())
        sheets, data["about_thumbnails"] = _thumbnails(comparison, data_set, images, room)
        data["thumbnails"] = vars(sheets)
    write_whole(path, page())
    return path


def _thumbnails(comparison: Comparison, data_set: Path, images: str, room: int) -> tuple[ThumbnailSheets, str]:
    """Return thumbnails of the disputed images, and a note about missing ones."""
    rows = list(dict.fromkeys(disputed.row for task in comparison.tasks for disputed in task.disputed))
    with FeatureReader(data_set) as reader:
        source = Pictures(reader, DataSet.open(data_set).images["root"], rows, images)
        if source.why_not:
            return ThumbnailSheets(), printable(f"No pictures: {source.why_not}")
        return sheets_of_rows(source, rows, room)[0], ""


def print_comparison(comparison: Comparison, echo: Callable[[str], None]) -> None:
    """Print the table of the backbones."""
    task = comparison.only_task
    labelled = [] if task is None else [metric_name(task.metric), "", "behind", "p"]
    if len(comparison.tasks) > 1:
        labelled = ["rank", "p", *(printable(f"{task.name} {metric_name(task.metric)}") for task in comparison.tasks)]
    rows = [["backbone", "layer", *labelled, "images/s", "1M images", "parameters", "width", "bytes",
             "eff. rank", "alignment", "licence"]]  # fmt: skip
    for entry in comparison.backbones:
        if not entry.error:
            rows.append([
                printable(entry.name), printable(entry.layer), *_quality(comparison, entry), *_cost(entry),
                numeral(entry.effective_rank, ".1f"), numeral(entry.alignment, ".2f"), printable(entry.licence or "-"),
            ])  # fmt: skip
    echo(_heading(comparison))
    print_aligned(rows, "<<" + ">" * len(labelled) + ">>>>>>><", echo)
    for entry in comparison.backbones:
        if entry.error:
            echo(f"{printable(entry.name)}: {printable(entry.error)}")
    if comparison.tasks:
        _print_meaning(comparison, echo)
    if comparison.no_similarity_reason:
        echo(f"features are not compared with each other: {printable(comparison.no_similarity_reason)}")
    for note in _notes(comparison):
        echo(f"  {printable(note)}")


def _notes(comparison: Comparison) -> list[str]:
    of_tasks = [note if comparison.only_task else f"{task.name}: {note}" for task in comparison.tasks
                for note in task.notes]  # fmt: skip
    return comparison.notes + of_tasks


def _heading(comparison: Comparison) -> str:
    task = comparison.only_task
    text = f"{comparison.n_images:,} images"
    if not comparison.tasks:
        return f"{text}, no labels"
    of = f"{task.n_test:,} test images" if task else f"{len(comparison.tasks)} tasks"
    return f"{text}, {of}, {comparison.protocol}"


def _print_meaning(comparison: Comparison, echo: Callable[[str], None]) -> None:
    """Print on what layers were chosen, how backbones were tested, and which are not distinguishable from the best."""
    for chosen_on in sorted({task.chosen_on for task in comparison.tasks} - {""}):
        echo(f"layers are chosen on {chosen_on}")
    if sum(not entry.error for entry in comparison.backbones) == 1:
        return
    if comparison.critical_difference is None:
        echo("p is corrected for all pairs of backbones (McNemar, Holm)")
    else:
        echo(
            "rank is the average over the tasks, and p is corrected for all pairs of backbones (Nemenyi); ranks that "
            f"differ by more than {comparison.critical_difference:.2f} are distinguishable (p below {LEVEL})"
        )
    best, *others = comparison.backbones
    if same := [printable(entry.name) for entry in others if entry.is_distinguishable is False]:
        echo(f"not distinguishable from {printable(best.name)}: {', '.join(same)}")


def _quality(comparison: Comparison, entry: Compared) -> list[str]:
    if not comparison.tasks:
        return []
    p = "" if entry.p is None else f"{entry.p:.3f}" if entry.p >= 0.001 else "<0.001"
    if comparison.only_task is None:
        values = [100 * task.scores[entry.name].value for task in comparison.tasks]
        return [numeral(entry.rank, ".2f"), p or "best", *(f"{value:.1f} %" for value in values)]
    interval = f"({100 * (entry.low or 0):.1f} to {100 * (entry.high or 0):.1f})"
    behind = "best" if entry.p is None else f"{100 * (entry.behind or 0):.1f}"
    return [f"{100 * (entry.value or 0):.1f} %", interval, behind, p]


def _cost(entry: Compared) -> list[str]:
    rate = entry.images_per_s
    hours = "-" if not rate else f"{1e6 / rate / 3600:.1f} h"
    millions = "-" if entry.parameters is None else f"{entry.parameters / 1e6:.1f} M"
    return [numeral(rate, ",.0f"), hours, millions, numeral(entry.width, ",d"), numeral(entry.row_bytes, ",d")]
