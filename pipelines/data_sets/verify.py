"""Check that a data set is intact and matches its images: `layertap verify OUT [--sample N] [--repair]`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.verify import Fault, Remedy, verify
from extract.store.verify import repair as repair_data_set
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import SHOWN, counted, printable

__all__ = ["Check", "as_json", "check", "print_check"]


@dataclass(frozen=True)
class Check:
    """Result of a check.

    Attributes:
        out: folder of the data set.
        faults: all faults, including faults of the sample.
        rows: status -> number of rows.
        sampled: number of rows that were computed again.
        largest: largest deviation among them, relative to the largest value of the row.
        skipped: why no rows were computed again, although requested.
        made_pending: number of rows that the repair set to pending; None: no repair was requested.
    """

    out: Path
    faults: list[Fault]
    rows: dict[str, int]
    sampled: int = 0
    largest: float = 0.0
    skipped: str = ""
    made_pending: int | None = None


def check(
    out: Path,
    *,
    sample: int | None = None,
    seed: int = 0,
    images: str | None = None,
    backbone: str | None = None,
    weights: str | None = None,
    device: str = "auto",
    repair: bool = False,
) -> Check:
    """Run the job and print progress on stderr.

    Args:
        out: folder of the data set.
        sample: number of rows to compute again; None: no rows.
        seed: seed of their choice.
        images: location of the images; None: the recorded location, unless images would be fetched from a URL.
        backbone: spec of the backbone; required if the backbone is code.
        weights: name or file of the weights; None: the recorded weights.
        device: device to compute on.
        repair: whether to set wrong rows to pending.

    Raises:
        InputError: `out` is not a data set.
        LockedError: there is something to repair, and another run is writing to the data set.
        LayertapError: the backbone cannot be loaded, or writing to the disk fails.
    """
    try:
        dataset = DataSet.open(out)
    except InputError as error:
        if not (out / "dataset.json").exists():
            raise
        problem = str(error).removeprefix(f"{out / 'dataset.json'} ")
        return Check(out, [Fault(problem, Remedy.NONE, file="dataset.json")], {})
    with Progress(dataset.n_rows, "rows") as progress:
        report = verify(out, on_rows=lambda rows: progress.advance(rows, False))
    sampled, largest, skipped = 0, 0.0, ""
    if sample and report.faults:
        skipped = "no rows were computed again: fix the reported faults first"
    elif sample and report.rows[Status.OK.text]:
        from extract.extraction.reproduce import recheck

        recheck_result = recheck(
            out, sample, seed=seed, images=images, backbone=backbone, weights=weights, device=device
        )
        sampled, largest = recheck_result.n_rows, recheck_result.largest
        report.faults += recheck_result.faults
    made_pending = repair_data_set(report) if repair else None
    return Check(out, report.faults, dict(report.rows), sampled, largest, skipped, made_pending)


def print_check(result: Check, echo: Callable[[str], None]) -> None:
    """Print the faults and counts."""
    counts = ", ".join(f"{count:,} {status}" for status, count in result.rows.items() if count)
    for fault in result.faults[:SHOWN]:
        row = "" if fault.row is None else f" row {fault.row} ({fault.path})"
        echo(printable(f"{fault.file or result.out}{row}: {fault.what}"))
    if len(result.faults) > SHOWN:
        echo(f"... and {len(result.faults) - SHOWN:,} more: layertap verify {shlex.quote(str(result.out))} --json")
    faults = counted(len(result.faults), "fault") if result.faults else "no faults"
    echo(f"{result.out}: {faults}" + (f"; rows: {counts}" if counts else ""))
    if result.sampled:
        echo(f"{result.sampled:,} rows computed again differ by at most {result.largest:.1e} of their largest value")
    if result.skipped:
        echo(result.skipped)
    if result.made_pending is not None:
        remedy = "; to compute them again, run the command that created the data set" if result.made_pending else ""
        echo(f"{result.made_pending:,} rows set to pending{remedy}")


def as_json(result: Check) -> dict[str, Any]:
    """Return the result as JSON-compatible data."""
    return {
        "out": str(result.out),
        "ok": not result.faults,
        "rows": result.rows,
        "faults": [
            {"file": fault.file, "shard": fault.shard, "row": fault.row, "path": fault.path, "fault": fault.what}
            for fault in result.faults
        ],
        "sampled": result.sampled,
        "largest_deviation": result.largest,
        "made_pending": result.made_pending,
    }
