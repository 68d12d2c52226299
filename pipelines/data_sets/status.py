"""Progress of a data set, from the receipts of its shards: `layertap show OUT --status`."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from extract.errors import LayertapError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.places.destination import destination_of
from extract.system.atomic_files import holder
from extract.system.urls import is_url
from pipelines.terminal.text_output import counted, printable

__all__ = ["ShardProgress", "is_built_in_shards", "print_progress", "watch"]

_RECENT_S = 600.0  # period of the printed rate
_WATCH_S = 5.0


def is_built_in_shards(out: str) -> bool:
    """Return whether `out` is a data set of `layertap embed` or a URL; data sets of `layertap sync` have passes."""
    return is_url(out) or ((Path(out) / "dataset.json").exists() and DataSet.open(Path(out)).version is None)


class ShardProgress:
    """Progress of a data set; each receipt is read only once.

    Args:
        out: folder or URL of the data set.
    """

    def __init__(self, out: str):
        self._out, self._place = out, destination_of(out)
        self._dataset, self._is_local = self._place.dataset, not is_url(out)
        self._read: dict[str, int] = {}  # name of a receipt -> shard
        self._rows = 0
        self._status: Counter[str] = Counter()
        # (host, device) -> shards, rows, and seconds of all workers there
        self._workers: dict[tuple[str, str], NDArray[np.float64]] = {}
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._ended: list[tuple[float, int]] = []  # Unix time, rows

    def read(self) -> dict[str, Any]:
        """Return everything that `show --status` prints, as JSON-compatible data."""
        dataset = self._dataset
        without_receipt: dict[int, str] = {}
        for name, shard, receipt in self._place.receipts(self._read):
            if receipt is None:
                without_receipt[shard] = f"shards/{Path(name).stem}.json"  # it may follow
            else:
                self._read[name] = shard
                self._rows += len(dataset.shard_range(shard))
                self._count(receipt)
        done = len(set(self._read.values())) + len(without_receipt)
        unfinished, stored = self._unfinished()
        now = time.time()
        recent = [(when, rows) for when, rows in self._ended if when > now - _RECENT_S]
        left = dataset.n_rows - self._rows - sum(len(dataset.shard_range(shard)) for shard in without_receipt)
        rate = sum(rows for _, rows in recent) / (now - min(recent)[0]) if left and len(recent) > 1 else None
        return {
            "out": self._out,
            "images": dataset.images["root"],
            "rows": dataset.n_rows,
            "rows_done": dataset.n_rows - left,
            "shards": dataset.n_shards,
            "shards_done": done,
            "shards_unfinished": unfinished,
            "rows_unfinished": stored,
            "writer": self._writer(),
            "receipts_missing": list(without_receipt.values()),
            "status": dict(self._status),
            "images_per_s": rate and round(rate, 2),
            "seconds_left": rate and round(left / rate),
            "stages": {stage: round(seconds, 1) for stage, seconds in self._stages.items()},
            "workers": [
                {
                    "host": host,
                    "device": device,
                    "shards": int(shards),
                    "rows": int(rows),
                    "images_per_s": round(rows / max(seconds, 1e-9), 2),
                }
                for (host, device), (shards, rows, seconds) in sorted(self._workers.items())
            ],
        }

    def _unfinished(self) -> tuple[int, int]:
        """Return the number of shards that hold rows, but are not finished, and the number of these rows.

        Shards of a bucket are built elsewhere, and are not counted.
        """
        count, rows = 0, 0
        for shard, files in enumerate(self._dataset.shard_files() if self._is_local else ()):
            if files.part is None:
                continue
            count += 1
            path = self._dataset.path(shard, files.part, part=True)
            with (
                contextlib.suppress(LayertapError),  # it is created, finished or replaced just now
                contextlib.closing(self._dataset.open_shard(shard, path)) as opened,
            ):
                rows += int((opened.column("status") != Status.PENDING).sum())
        return count, rows

    def _writer(self) -> str:
        """Return what writes to a local data set, such as "pid 12 on host since ..."; empty if nothing does."""
        with contextlib.suppress(LayertapError):  # the file system has no locks
            return holder(self._dataset.out) if self._is_local else ""
        return ""

    def _count(self, receipt: dict[str, Any]) -> None:
        """Add what a receipt says; it has the shape `extract.store.format.schemas.RECEIPT`."""
        self._status.update(receipt["status"])
        built = receipt.get("made")
        if built is None:
            return
        worker = built["host"], built["device"]
        self._workers[worker] = self._workers.get(worker, 0) + np.array([1, built["computed"], built["seconds"]])
        for stage, seconds in built["stages"].items():
            self._stages[stage] += seconds
        self._ended.append((datetime.fromisoformat(built["ended"]).astimezone(UTC).timestamp(), built["computed"]))


def watch(out: str, wait: Callable[[float], None] = time.sleep) -> Iterator[dict[str, Any]]:
    """Yield the progress every few seconds, until the data set is complete."""
    progress = ShardProgress(out)
    while True:
        content = progress.read()
        yield content
        if content["rows_done"] == content["rows"]:
            return
        wait(_WATCH_S)


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
        echo("to resume, run `layertap embed` with the same arguments again")
