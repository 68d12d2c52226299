"""How fast a backbone was, from the log of its data set."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from extract.errors import LayertapError
from extract.store.format.schemas import RUN
from extract.system.json_files import is_finite_number, read_json_lines

__all__ = ["forward_rate"]


def forward_rate(out: Path) -> float | None:
    """Return images per second of the forwards of all logged runs, without their preparation; None if not known."""
    rows = seconds = 0.0
    prepared: dict[str, float] = {}  # start of a run -> seconds
    with contextlib.suppress(LayertapError):
        for line in read_json_lines(out / "runs.jsonl", RUN):
            in_advance: Any = (line.get("computation") or {}).get("prepared_in_s")
            if line["event"] == "computing" and is_finite_number(in_advance):
                prepared[str(line["started"])] = float(in_advance)
            stages: Any = line.get("stages")
            if line["event"] == "ended" and isinstance(stages, dict) and is_finite_number(stages.get("forward")):
                rows += float(line.get("rows") or 0)
                seconds += float(stages["forward"]) - prepared.pop(str(line["started"]), 0.0)
    return rows / seconds if rows and seconds > 0 else None
