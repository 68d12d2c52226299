"""List images once, into a file, for jobs with very many images: `layertap embed IMAGES --plan -o PLAN`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.images import Images
from extract.images.listing import is_plan
from extract.images.plan_writing import write_plan
from extract.system.atomic_files import bytes_below
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import counted, printable

__all__ = ["PlanResult", "as_json", "plan", "print_plan"]

_SHOWN = 5  # kinds of skipped files


@dataclass(frozen=True)
class PlanResult:
    """A finished plan.

    Attributes:
        images: the planned images.
        out: folder of the plan, as given.
        was_complete: whether it was finished before this run.
        bytes: size on disk.
        seconds: duration of this run.
        listed: number of images that this run listed.
    """

    images: Images
    out: Path
    was_complete: bool
    bytes: int
    seconds: float
    listed: int


def plan(images: str, out: Path) -> PlanResult:
    """Write the plan, and print progress on stderr.

    Raises:
        InputError, LayertapError: see `write_plan`.
    """
    was_complete, start = is_plan(out), time.perf_counter()
    with Progress(None) as listing, Progress(None, "images written") as writing:
        progress = {"listed": listing, "written": writing}
        written = write_plan(images, out, lambda stage, rows: progress[stage].advance(rows, resumed=False))
    listed = 0 if was_complete else len(written)
    return PlanResult(written, out, was_complete, bytes_below(out), time.perf_counter() - start, listed)


def print_plan(planned: PlanResult, echo: Callable[[str], None]) -> None:
    """Print a summary of the plan."""
    images = planned.images
    if planned.was_complete:
        echo(f"{planned.out} is already complete; nothing was listed. To list the images again, delete it")
    splits = f", splits {' '.join(images.split_names)}" if images.split_names else ""
    classes = f", {counted(len(images.classes), 'class')}" if images.classes else ""
    echo(f"{planned.out}: {counted(len(images), 'image')} in {printable(images.root)}{classes}{splits}")
    if images.left_out:
        kinds = ", ".join(f"{printable(kind)} {count:,}" for kind, count in images.left_out.most_common(_SHOWN))
        echo(f"{images.left_out.total():,} other files left out ({kinds})")
    rate = f"; {planned.seconds:.1f} s, {planned.listed / planned.seconds:,.0f} images/s" if planned.listed else ""
    echo(f"{planned.bytes / 1e6:,.1f} MB{rate}")
    echo(f"to use the plan in place of the images: layertap embed {shlex.quote(str(planned.out))}")


def as_json(planned: PlanResult) -> dict[str, Any]:
    """Return a summary of the plan as JSON-compatible data."""
    images = planned.images
    return {
        "out": str(planned.out),
        "root": images.root,
        "images": len(images),
        "classes": images.classes,
        "splits": images.split_names,
        "left_out": dict(images.left_out),
        "paths_xxh3": images.paths_xxh3,
        "found_done": planned.was_complete,
        "listed": planned.listed,
        "bytes": planned.bytes,
        "seconds": round(planned.seconds, 3),
    }
