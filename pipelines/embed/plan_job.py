"""List images once, into a file, for jobs with very many images: `layertap embed IMAGES --plan -o PLAN`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract.images.listing import is_plan
from extract.images.plan_writing import write_plan
from extract.system.atomic_files import bytes_below
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import counted, printable

__all__ = ["plan", "print_plan"]

_SHOWN = 5  # kinds of skipped files


def plan(images: str, out: Path) -> dict[str, Any]:
    """Write the plan, print progress on stderr, and return a summary as JSON-compatible data.

    Raises:
        InputError, LayertapError: see `write_plan`.
    """
    was_complete, start = is_plan(out), time.perf_counter()
    with Progress(None) as listing, Progress(None, "images written") as writing:
        progress = {"listed": listing, "written": writing}
        written = write_plan(images, out, lambda stage, rows: progress[stage].advance(rows, resumed=False))
    return {
        "out": str(out),
        "root": written.root,
        "images": len(written),
        "classes": written.classes,
        "splits": written.split_names,
        "left_out": dict(written.left_out.most_common()),
        "paths_xxh3": written.paths_xxh3,
        "found_done": was_complete,
        "listed": 0 if was_complete else len(written),
        "bytes": bytes_below(out),
        "seconds": round(time.perf_counter() - start, 3),
    }


def print_plan(planned: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the summary of a plan."""
    out, left_out, listed = planned["out"], planned["left_out"], planned["listed"]
    if planned["found_done"]:
        echo(f"{out} is already complete; nothing was listed. To list the images again, delete it")
    splits = f", splits {' '.join(planned['splits'])}" if planned["splits"] else ""
    classes = f", {counted(len(planned['classes']), 'class')}" if planned["classes"] else ""
    echo(f"{out}: {counted(planned['images'], 'image')} in {printable(planned['root'])}{classes}{splits}")
    if left_out:
        kinds = ", ".join(f"{printable(kind)} {count:,}" for kind, count in list(left_out.items())[:_SHOWN])
        echo(f"{sum(left_out.values()):,} other files left out ({kinds})")
    rate = f"; {planned['seconds']:.1f} s, {listed / max(planned['seconds'], 1e-3):,.0f} images/s" if listed else ""
    echo(f"{planned['bytes'] / 1e6:,.1f} MB{rate}")
    echo(f"to use the plan in place of the images: layertap embed {shlex.quote(out)}")
