"""Check that a data set is intact and matches its images: `layertap verify OUT [--sample N] [--repair]`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.verify import Fault, Remedy, verify
from extract.store.verify import repair as repair_data_set
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import SHOWN, counted, printable

__all__ = ["check", "print_check"]


def check(
    out: Path, *, sample: int | None = None, seed: int = 0, images: str | None = None, backbone: str | None = None,
    weights: str | None = None, device: str = "auto", repair: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run the job, print progress on stderr, and return the result as JSON-compatible data.

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
        return _result(out, [Fault(problem, Remedy.NONE, file="dataset.json")])
    with Progress(dataset.n_rows, "rows") as progress:
        report = verify(out, on_rows=lambda rows: progress.advance(rows, False))
    found: dict[str, Any] = {"rows": dict(report.rows)}
    if sample and report.faults:
        found["not_sampled"] = "no rows were computed again: fix the reported faults first"
    elif sample and report.rows[Status.OK.text]:
        from extract.extraction.reproduce import recheck

        checked = recheck(out, sample, seed=seed, images=images, backbone=backbone, weights=weights, device=device)
        if images is not None and len(checked.faults) == min(sample, report.rows[Status.OK.text]) and not checked.apart:
            raise InputError(
                f"none of the {counted(len(checked.faults), 'sampled image')} in {images} is the one that was stored; "
                f"{checked.faults[0].path}: {checked.faults[0].what}",
                hint="name the place of the images of this data set: --images FOLDER",
            )
        found |= {"sampled": checked.n_rows, "largest_deviation": checked.largest}
        report.faults += checked.faults
    if repair:
        found["made_pending"] = repair_data_set(report)
    return _result(out, report.faults, **found)


def _result(out: Path, faults: list[Fault], **found: Any) -> dict[str, Any]:
    listed = [
        {"file": fault.file, "shard": fault.shard, "row": fault.row, "path": fault.path, "fault": fault.what}
        for fault in faults
    ]
    nothing = {"sampled": 0, "largest_deviation": 0.0, "not_sampled": "", "made_pending": None}
    return {"out": str(out), "ok": not faults, "rows": {}, "faults": listed, **nothing, **found}


def print_check(content: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the faults and counts."""
    out, faults = content["out"], content["faults"]
    for fault in faults[:SHOWN]:
        row = "" if fault["row"] is None else f" row {fault['row']} ({fault['path']})"
        echo(printable(f"{fault['file'] or out}{row}: {fault['fault']}"))
    if len(faults) > SHOWN:
        echo(f"... and {len(faults) - SHOWN:,} more: layertap verify {shlex.quote(out)} --json")
    counts = ", ".join(f"{count:,} {status}" for status, count in content["rows"].items() if count)
    echo(f"{out}: {counted(len(faults), 'fault') if faults else 'no faults'}" + (f"; rows: {counts}" if counts else ""))
    if content["sampled"]:
        largest, why = content["largest_deviation"], f"; why: layertap check {shlex.quote(out)}" if faults else ""
        echo(f"{content['sampled']:,} rows computed again differ by at most {largest:.1e} of their largest value{why}")
    if content["not_sampled"]:
        echo(content["not_sampled"])
    if content["made_pending"] is not None:
        remedy = "; to compute them again, run the command that created the data set" if content["made_pending"] else ""
        echo(f"{content['made_pending']:,} rows set to pending{remedy}")
