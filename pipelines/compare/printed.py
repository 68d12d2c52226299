"""A comparison on the terminal: the table of the backbones, and what it means."""

from __future__ import annotations

import math
from collections.abc import Callable

from extract.analysis.probe.metrics import metric_name
from extract.analysis.probe.significance_tests import LEVEL
from pipelines.compare.comparison import Compared, Comparison
from pipelines.terminal.tables import print_aligned
from pipelines.terminal.text_output import printable

__all__ = ["print_comparison"]


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
                _number(entry.effective_rank, ".1f"), _number(entry.alignment, ".2f"), printable(entry.licence or "-"),
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
    for note in comparison.notes:
        echo(f"  {printable(note)}")
    for task in comparison.tasks:
        for note in task.notes:
            echo(f"  {printable(note if comparison.only_task else f'{task.name}: {note}')}")


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
        return [_number(entry.rank, ".2f"), p or "best", *(f"{value:.1f} %" for value in values)]
    interval = f"({100 * (entry.low or 0):.1f} to {100 * (entry.high or 0):.1f})"
    behind = "best" if entry.p is None else f"{100 * (entry.behind or 0):.1f}"
    return [f"{100 * (entry.value or 0):.1f} %", interval, behind, p]


def _cost(entry: Compared) -> list[str]:
    rate = entry.images_per_s
    hours = "-" if not rate else f"{1e6 / rate / 3600:.1f} h"
    millions = "-" if entry.parameters is None else f"{entry.parameters / 1e6:.1f} M"
    return [_number(rate, ",.0f"), hours, millions, _number(entry.width, ",d"), _number(entry.row_bytes, ",d")]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
