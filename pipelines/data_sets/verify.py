"""Whether a data set is what was written, and of these images: `layertap verify OUT [--sample N] [--repair]`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.verify import Fault, Remedy, repair, verify
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import SHOWN, printable

__all__ = ["Check", "as_json", "check", "print_check"]


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        out: folder of the data set.
        faults: all of them, those of the sample included.
        rows: status -> number of rows.
        sampled: rows that were computed again.
        largest: deviation among them, as a part of the largest value of the row.
        skipped: why none were, though it was asked for.
        made_pending: rows that the repair made pending; None: it was not asked for.
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
    mend: bool = False,
) -> Check:
    """Run the job; progress goes to stderr.

    Args:
        out: folder of the data set.
        sample: rows to compute again; None: none.
        seed: of their choice.
        images: where the images lie; None: where they lay.
        backbone: its spec; to be given where it is code.
        weights: name or file; None: those the data set names.
        device: to compute on.
        mend: whether to make wrong rows pending.

    Raises:
        InputError: no data set there.
        LockedError: something is to be mended, and another run writes to it.
        LayertapError: the backbone cannot be loaded, or the disk refuses.
    """
    try:
        dataset = DataSet.open(out)
    except InputError as error:
        if not (out / "dataset.json").exists():
            raise
        what = str(error).removeprefix(f"{out / 'dataset.json'} ")
        return Check(out, [Fault(what, Remedy.NONE, file="dataset.json")], {})
    with Progress(dataset.n_rows, "rows") as progress:
        found = verify(out, on_rows=lambda rows: progress.advance(rows, False))
    sampled, largest, skipped = 0, 0.0, ""
    if sample and found.faults:
        skipped = "no rows were computed again: what is wrong already comes first"
    elif sample and found.rows[Status.OK.text]:
        from extract.extraction.recheck import recheck

        again = recheck(out, sample, seed=seed, images=images, backbone=backbone, weights=weights, device=device)
        sampled, largest = again.n_rows, again.largest
        found.faults += again.faults
    made_pending = repair(found) if mend else None
    return Check(out, found.faults, dict(found.rows), sampled, largest, skipped, made_pending)


def print_check(result: Check, echo: Callable[[str], None]) -> None:
    """The findings, for people."""
    counts = ", ".join(f"{count:,} {status}" for status, count in result.rows.items() if count)
    for fault in result.faults[:SHOWN]:
        row = "" if fault.row is None else f" row {fault.row} ({fault.path})"
        echo(printable(f"{fault.file or result.out}{row}: {fault.what}"))
    if len(result.faults) > SHOWN:
        echo(f"... and {len(result.faults) - SHOWN:,} more: layertap verify {shlex.quote(str(result.out))} --json")
    faults = f"{len(result.faults):,} fault{'s' if len(result.faults) > 1 else ''}" if result.faults else "no fault"
    echo(f"{result.out}: {faults}" + (f"; rows: {counts}" if counts else ""))
    if result.sampled:
        echo(f"{result.sampled:,} rows computed again differ by {result.largest:.1e} of their largest value at most")
    if result.skipped:
        echo(result.skipped)
    if result.made_pending is not None:
        filled = "; run the command that made the data set again to fill them" if result.made_pending else ""
        echo(f"{result.made_pending:,} rows made pending{filled}")


def as_json(result: Check) -> dict[str, Any]:
    """The findings, for machines."""
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
