"""Content of a report that needs no features: settings of the extraction, and run times."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from extract.errors import LayertapError
from extract.store.format.dataset import DataSet
from extract.store.format.schemas import RUN
from extract.store.format.version import pass_folder
from extract.system.json_files import is_finite_number, read_json_lines
from pipelines.terminal.text_output import printable

__all__ = ["facts", "runs", "stages"]

_LAST_RUNS = 50
_PLACES = 4  # hosts and devices named per run


def facts(content: dict[str, Any]) -> list[list[str]]:
    """Return (name, text) pairs from the description of `pipelines.data_sets.show.describe`."""
    depends_on, provenance = content["depends_on"], content.get("provenance", {})
    preprocessing = ", ".join(f"{name} {value}" for name, value in depends_on.get("preprocessing", {}).items())
    configuration = provenance.get("configuration", {})
    versions = ", ".join(f"{name} {number}" for name, number in provenance.get("versions", {}).items())
    state = "complete" if content["complete"] else f"unfinished: {content['rows_done']:,} rows done"
    if content["version"]:
        state += f", version {content['version']}, synchronised with a folder"
    pairs = [
        ("Images", content["images"]["root"]),
        ("Rows", f"{content['rows']:,}, {state}"),
        ("Classes", f"{len(content['classes']):,}" if content.get("classes") else "none"),
        ("Splits", ", ".join(f"{name} {count:,}" for name, count in content.get("splits", {}).items()) or "none"),
        ("Backbone", provenance.get("backbone") or depends_on.get("architecture", "")),
        ("Weights", f"{provenance.get('weights', '')}, sha256 {depends_on.get('weights_sha256', '')}"),
        ("Preprocessing", preprocessing),
        ("Set by the user", ", ".join(configuration.get("preprocessing") or {})),
        ("Decoder", depends_on.get("decoder", "")),
        ("Precision", depends_on.get("precision", "")),
        ("Stored as", f"{depends_on.get('stored_as', '')}, {content['bytes'] / 1e6:,.1f} MB in all files"),
        ("Computed", f"{provenance.get('started', '')} on {provenance.get('device', '')} with {versions}"),
        ("Fingerprint", content["fingerprint"]),
        ("Data set", content["out"]),
    ]
    return [[name, printable(str(text))] for name, text in pairs if text]


def runs(out: Path) -> list[dict[str, Any]]:
    """Return the last logged runs or passes in words and numbers, newest first."""
    log: list[dict[str, Any]] = []
    for file in _logs(out):
        log += _runs_of(file)
    log.sort(key=operator.itemgetter("started"))  # stable: runs that started in the same second stay in order
    last = log[-_LAST_RUNS:][::-1]
    return [run | {name: printable(run.get(name, "")) for name in ("how", "where", "engine")} for run in last]


def _runs_of(file: Path) -> list[dict[str, Any]]:
    log: list[dict[str, Any]] = []
    by_start: dict[str, dict[str, Any]] = {}
    workers: dict[str, Counter[str]] = {}  # start of the run -> its workers
    for line in _lines(file):
        started = str(line["started"])
        if line["event"] == "started":
            machine = line.get("machine") or {}
            where = f"{line.get('device', '')} of {machine.get('host', '')}" if machine else ""
            by_start[started] = {"started": started, "how": "did not finish", "where": where}
            log.append(by_start[started])
        elif line["event"] == "joined" and started in by_start:
            workers.setdefault(started, Counter())[f"{line.get('device', '')} of {line.get('host', '')}"] += 1
        elif line["event"] == "computing" and started in by_start:
            computation = line.get("computation") or {}
            by_start[started]["engine"] = str(computation.get("engine", ""))
        elif line["event"] == "ended" and started in by_start:
            by_start[started] |= {"how": "ended", **_numbers(line)}
        elif line["event"] in ("synced", "stopped", "failed") and "shard" not in line:
            changed = [f"{line[name]:,} {name}" for name in ("added", "changed", "renamed", "deleted")
                       if isinstance(line.get(name), int) and line[name]]  # fmt: skip
            outcome = {"synced": "nothing new", "stopped": "stopped", "failed": f"failed: {line.get('error', '')}"}
            how_it_ended = ", ".join(changed) if changed and line["event"] == "synced" else outcome[line["event"]]
            numbers = _numbers({**line, "rows": line.get("computed")})
            log.append({"started": started, "how": how_it_ended, "where": "", **numbers})
    for started, places in workers.items():
        named = [f"{count} × {place}" if count > 1 else place for place, count in places.most_common(_PLACES)]
        unnamed = [f"{len(places) - _PLACES:,} more"] if len(places) > _PLACES else []
        by_start[started]["where"] = ", ".join(named + unnamed)
    return log


def stages(dataset: DataSet) -> dict[str, float]:
    """Return stage -> seconds, summed over completed runs, shards of several workers, and passes of a version."""
    total: dict[str, float] = {}
    folders = [dataset.out] if dataset.version is None else [
        pass_folder(dataset.out, number) for number in dataset.version.passes
    ]  # fmt: skip
    for line in (line for folder in folders for file in _logs(folder) for line in _lines(file)):
        spent = line.get("made") if line["event"] == "shard" else line if line["event"] == "ended" else None
        spent = spent.get("stages") if isinstance(spent, dict) else None
        for stage, seconds in spent.items() if isinstance(spent, dict) else ():
            if is_finite_number(seconds):
                total[printable(str(stage))] = total.get(printable(str(stage)), 0.0) + float(seconds)
    return total


def _logs(out: Path) -> list[Path]:
    """Return `runs.jsonl` and the logs that tasks of an array write beside it."""
    return sorted(out.glob("runs*.jsonl"))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the undamaged lines of a log; none if the log cannot be read."""
    with contextlib.suppress(LayertapError):
        yield from read_json_lines(file, RUN)


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("rows", "seconds") if is_finite_number(line.get(name))}
