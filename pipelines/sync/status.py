"""Status of a data set that follows a folder: `layertap show OUT --status`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from extract.errors import InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.format.layout import row_bytes
from extract.store.reader import FeatureReader
from extract.store.row_selection import read_one_version
from extract.system.atomic_files import bytes_below
from extract.system.json_files import TIME, Text, read_json_lines
from pipelines.terminal.text_output import counted, print_failures

__all__ = ["describe_run", "describe_status", "local_time", "print_status", "read_runs"]

_LAST_RUNS = 10

# Shape of a line of runs.jsonl; see `extract.system.json_files`.
_RUN = {
    "event": Text("synced|stopped|failed"),
    "started": TIME,
    "seconds": float,
    "added?": int,
    "changed?": int,
    "renamed?": int,
    "deleted?": int,
    "failed?": int,
    "waiting?": int,
    "computed?": int,
}


def describe_status(out: Path) -> dict[str, Any]:
    """Return everything that `show --status` prints, as JSON-compatible data.

    Raises:
        InputError: `out` is not a data set of `layertap sync`.
        LayertapError: the data set cannot be read.
    """
    runs = read_runs(out)
    content: dict[str, Any] = {"out": str(out), "runs": runs[-_LAST_RUNS:]}
    if not (out / "dataset.json").exists() and runs:
        return {**content, "version": 0, "rows": 0, "status": {}, "failures": [], "bytes": bytes_below(out)}
    return {**content, **read_one_version(out, _version_status)}


def _version_status(dataset: DataSet) -> dict[str, Any]:
    if dataset.version is None:
        raise InputError(f"{dataset.out} is not a data set of `layertap sync`", hint="`layertap show` describes it")
    out = dataset.out
    with FeatureReader(out) as reader:
        status, failures = reader.counts.status, reader.failures
    table = dataset.version_rows()
    is_copy = (np.diff(table.passes) == 0) & (np.diff(table.rows) == 0)  # of the image of the row before it
    needed = dataset.n_rows - int(is_copy.sum())
    stored = 0
    for folder in (out / "passes").glob("[0-9]" * 6):
        with contextlib.suppress(LayertapError):  # it may have been removed just now
            pass_data = DataSet.open(folder)
            stored += pass_data.n_rows if None not in pass_data.published() else 0  # otherwise it is being computed
    return {
        "images": dataset.images["root"],
        "version": dataset.version.number,
        "rows": dataset.n_rows,
        "status": status,
        "failures": [{"path": path, "status": text, "reason": reason} for _, path, text, reason in failures],
        "passes": len(dataset.version.passes),
        "stored_rows": stored,
        "dead_rows": stored - needed,
        "dead_bytes": (stored - needed) * row_bytes(dataset.features),
        "bytes": bytes_below(out),
    }


def read_runs(out: Path) -> list[dict[str, Any]]:
    """Return the runs in `runs.jsonl`, oldest first, without lines that a power cut has damaged."""
    return list(read_json_lines(out / "runs.jsonl", _RUN))


def print_status(content: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the status."""
    out = content["out"]
    if not content["version"]:
        echo(f"{out}: nothing is published yet")
    else:
        counts = ", ".join(f"{count:,} {status}" for status, count in content["status"].items()) or "none"
        echo(f"{out}: version {content['version']}, synchronised with {content['images']}")
        echo(f"rows      {content['rows']:,}: {counts}")
        dead = content["dead_rows"]
        share = dead / max(1, content["stored_rows"])
        unused = ""
        if dead:
            rows = f"{counted(dead, 'stored row')} ({share:.0%}, {content['dead_bytes'] / 1e6:,.1f} MB)"
            unused = f"; {rows} of deleted or replaced images"
        passes = f"{content['passes']} pass" + ("" if content["passes"] == 1 else "es")
        echo(f"disk      {content['bytes'] / 1e6:,.1f} MB in {passes}{unused}")
        if share > 0.2:
            echo(f"          to remove them: layertap sync {out} --compact")
    if content["runs"]:
        echo("last runs")
        for run in content["runs"]:
            echo(f"  {local_time(datetime.fromisoformat(run['started']))}  {describe_run(run)}")
    failures = [(failure["path"], failure["status"], failure["reason"]) for failure in content["failures"]]
    print_failures(failures, Path(out), echo)


def describe_run(run: dict[str, Any]) -> str:
    """Return what a pass did, as one line."""
    if run.get("event") == "failed":
        return f"FAILED after {run['seconds']:.1f} s: {run.get('error', '')}"
    if run.get("stopped") or run.get("event") == "stopped":
        return f"stopped after {run.get('seconds', 0):.1f} s; the next pass continues"
    names = ("added", "changed", "renamed", "deleted")
    changes = ", ".join(f"{run[name]:,} {name}" for name in names if run.get(name)) or "nothing new"
    others = "".join(f", {run[name]:,} {name}" for name in ("failed", "waiting") if run.get(name))
    return f"{changes}{others}; {run.get('computed', 0):,} computed, {run.get('seconds', 0):.1f} s"


def local_time(at: datetime | None) -> str:
    """Return a time as a user of this machine reads it; None: never."""
    return "never" if at is None else at.astimezone().isoformat(" ", timespec="seconds")
