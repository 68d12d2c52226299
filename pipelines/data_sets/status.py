"""Progress of a data set, from the receipts of its shards: `layertap show OUT --status`."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from extract.errors import InputError, LayertapError
from extract.images.datasets import is_in_memory
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.places.destination import destination_of
from extract.system.atomic_files import holder
from extract.system.urls import is_url
from pipelines.terminal.text_output import counted, printable

__all__ = ["is_built_in_shards", "print_progress", "progress_of"]

_RECENT_S = 600.0  # period of the printed rate


def is_built_in_shards(out: str) -> bool:
    """Return whether `out` is a data set of `layertap embed` or a URL; data sets of `layertap sync` have passes.

    Raises:
        InputError: the folder is empty.
    """
    if not is_url(out) and Path(out).is_dir() and not {entry.name for entry in Path(out).iterdir()} - {".lock"}:
        raise InputError(f"{out} has no shard yet", hint="a run that is starting loads its backbone first")
    return is_url(out) or ((Path(out) / "dataset.json").exists() and DataSet.open(Path(out)).version is None)


def progress_of(out: str) -> dict[str, Any]:
    """Return everything that `show --status` prints of a folder or URL, as JSON-compatible data."""
    place = destination_of(out)
    dataset = place.dataset
    done_rows, done_shards = 0, 0
    without_receipt: list[str] = []  # it may follow
    status: Counter[str] = Counter()
    # (host, device) -> shards, rows, and seconds of all workers there
    workers: defaultdict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(3))
    stages: Counter[str] = Counter()
    ended: list[tuple[float, int]] = []  # Unix time, rows
    for name, shard, receipt in place.receipts(()):
        done_rows, done_shards = done_rows + len(dataset.shard_range(shard)), done_shards + 1
        if receipt is None:
            without_receipt.append(f"shards/{Path(name).stem}.json")
            continue
        status.update(receipt["status"])
        if (built := receipt.get("made")) is None:
            continue
        workers[built["host"], built["device"]] += [1, built["computed"], built["seconds"]]
        stages.update(built["stages"])
        ended.append((datetime.fromisoformat(built["ended"]).astimezone(UTC).timestamp(), built["computed"]))
    unfinished, stored = (0, 0) if is_url(out) else _unfinished(dataset)
    now, left = time.time(), dataset.n_rows - done_rows
    recent = [(when, rows) for when, rows in ended if when > now - _RECENT_S]
    rate = sum(rows for _, rows in recent) / (now - min(recent)[0]) if left and len(recent) > 1 else None
    writer = ""
    with contextlib.suppress(LayertapError):  # the file system has no locks
        writer = "" if is_url(out) else holder(dataset.out)
    return {
        "out": out,
        "images": dataset.images["root"],
        "rows": dataset.n_rows,
        "rows_done": done_rows,
        "shards": dataset.n_shards,
        "shards_done": done_shards,
        "shards_unfinished": unfinished,
        "rows_unfinished": stored,
        "writer": writer,
        "receipts_missing": without_receipt,
        "status": dict(status),
        "images_per_s": rate and round(rate, 2),
        "seconds_left": rate and round(left / rate),
        "stages": {stage: round(seconds, 1) for stage, seconds in stages.items()},
        "workers": [
            {
                "host": host,
                "device": device,
                "shards": int(shards),
                "rows": int(rows),
                "images_per_s": round(rows / max(seconds, 1e-9), 2),
            }
            for (host, device), (shards, rows, seconds) in sorted(workers.items())
        ],
    }


def _unfinished(dataset: DataSet) -> tuple[int, int]:
    """Return the number of shards that hold rows, but are not finished, and the number of these rows."""
    count, rows = 0, 0
    for shard, files in enumerate(dataset.shard_files()):
        if files.part is None:
            continue
        count += 1
        path = dataset.path(shard, files.part, part=True)
        with (
            contextlib.suppress(LayertapError),  # it is created, finished or replaced just now
            contextlib.closing(dataset.open_shard(shard, path)) as opened,
        ):
            rows += int((opened.column("status") != Status.PENDING).sum())
    return count, rows


def print_progress(content: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the progress."""
    out, done, rows = content["out"], content["rows_done"], content["rows"]
    stored = done + content["rows_unfinished"]
    state = "complete" if done == rows else f"{stored / rows:.1%} of the rows are stored"
    echo(f"{out}: {state}, images in {printable(content['images'])}")
    echo(f"shards    {content['shards_done']:,} of {content['shards']:,}")
    counts = ", ".join(f"{count:,} {printable(status)}" for status, count in content["status"].items()) or "none yet"
    echo(f"rows      {done:,} of {rows:,} in finished shards: {counts}")
    if content["shards_unfinished"]:
        echo(f"          {stored - done:,} in {counted(content['shards_unfinished'], 'unfinished shard')}")
    if content["images_per_s"] and done < rows:
        left = tqdm.format_interval(content["seconds_left"])
        echo(f"rate      {content['images_per_s']:.1f} images/s in the last ten minutes, {left} left")
    if content["workers"]:
        echo("built by")
        width = max(len(printable(worker["host"])) for worker in content["workers"])
        for worker in content["workers"]:
            shards = counted(worker["shards"], "shard")
            echo(
                f"  {printable(worker['host']):{width}}  {printable(worker['device'])}: {shards}, "
                f"{worker['rows']:,} rows, {worker['images_per_s']:.1f} images/s per worker"
            )
    if content["receipts_missing"]:
        few = ", ".join(content["receipts_missing"][:8])
        echo(f"receipts missing or damaged: {few}; if they stay so, `layertap verify --repair` writes them")
    if content["writer"]:
        echo(f"a run is writing: {content['writer']}")
    elif done < rows:
        command = "the same program" if is_in_memory(content["images"]) else "`layertap embed` with the same arguments"
        echo(f"to resume, run {command} again")
