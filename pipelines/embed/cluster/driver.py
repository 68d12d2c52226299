"""Run `layertap embed` with several workers."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from extract.errors import LayertapError
from extract.images.folders import check_exists
from extract.images.kinds import kind_of
from extract.store.format.dataset import BUILDING, DataSet
from extract.store.places.destination import destination_of
from extract.store.places.objects import put
from extract.store.reader import FeatureReader
from extract.system.atomic_files import append_line
from extract.system.folder_lock import locked
from extract.system.leftovers import temporary_folder
from extract.system.urls import is_url
from pipelines.embed.cluster.dispatch import (
    DispatchResult,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Message,
    Progressed,
    Workers,
    dispatch,
)
from pipelines.embed.cluster.launch import engine_of
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import command_line, print_failures, print_line, print_remedy, printable

__all__ = ["SharedRun", "as_json", "embed_shared", "exit_code", "print_shared"]

_JOIN_S = 1800.0  # wait for the first worker: a cluster that grows on demand takes minutes


@dataclass
class SharedRun:
    """Result of a run with several workers.

    Attributes:
        config: configuration of the job.
        dataset: the data set.
        published_before: number of shards that were published before.
        requested: number of shards that this run had to build.
        dispatched: result of the dispatch of these shards.
        computed: rows computed in this run, including failed attempts.
        seconds: time from the first worker that joined to the last shard.
        hosts: host -> number of rows computed there.
        status: row status -> number of rows, in shards of this run.
        failures: (row, path, status, reason) of rows without good features; empty while shards are missing.
        signal: signal that stopped the run; 0: none.
    """

    config: EmbedConfig
    dataset: DataSet
    published_before: int
    requested: int
    dispatched: DispatchResult = field(default_factory=DispatchResult)
    computed: int = 0
    seconds: float = 0.0
    hosts: Counter[str] = field(default_factory=Counter)
    status: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str, str]] = field(default_factory=list)
    signal: int = 0


def embed_shared(config: EmbedConfig) -> SharedRun:
    """Run the job and print progress on stderr.

    Raises:
        InputError: see `pipelines.embed.job.embed`.
        LockedError: another run is building this data set.
        LayertapError: no worker can be started, or all of them fail.
    """
    # A worker loads PyTorch and the backbone before it lists the images. Nodes of a cluster may have other files.
    if config.engine != "ray" and not is_url(config.images) and kind_of(config.images) == "folder":
        check_exists(config.images)
    # Tasks of an array share the folder; a bucket has no locks.
    alone = config.shards_of is None and not is_url(config.place)
    with locked(config.folder) if alone else contextlib.nullcontext():
        with engine_of(config) as workers, signals_held() as received:
            joined, printed = _wait_for_workers(workers, received)
            if not joined:
                print_line("stopped before a worker joined; nothing was computed", err=True)
                raise click.exceptions.Exit(128 + received[0])
            shared = _run(config, workers, joined, printed, received)
        if alone and _is_complete(shared):
            shutil.rmtree(config.folder / BUILDING, ignore_errors=True)
    if _is_complete(shared) and shared.published_before + shared.dispatched.done == shared.dataset.n_shards:
        with FeatureReader(config.place) as reader:
            shared.failures = reader.failures
    return shared


def _is_complete(shared: SharedRun) -> bool:
    return not shared.dispatched.stopped and not shared.dispatched.failed


def _wait_for_workers(workers: Workers, received: list[int]) -> tuple[list[Joined], set[str]]:
    """Return the first workers that join (none if a signal came before) and the messages that were printed.

    Raises:
        LayertapError: the error that ended a worker, or no worker has joined in time.
    """
    end = time.monotonic() + _JOIN_S
    printed: set[str] = set()
    while not received:
        events = workers.events(1.0)
        for event in events:
            if isinstance(event, Message) and event.text not in printed:
                printed.add(event.text)
                print_line(event.text, err=True)
            if isinstance(event, Left) and event.error is not None:
                raise event.error
        if joined := [event for event in events if isinstance(event, Joined)]:
            return joined, printed
        if time.monotonic() > end:
            raise LayertapError(f"no worker joined within {_JOIN_S / 60:.0f} minutes")
    return [], printed


def _run(
    config: EmbedConfig, workers: Workers, joined: list[Joined], printed: set[str], received: list[int]
) -> SharedRun:
    place = destination_of(config.place)
    dataset = place.dataset
    published = np.zeros(dataset.n_shards, np.bool_)
    published[place.published()] = True
    number, count = _share_of(config)
    own_shards = np.arange(dataset.n_shards) % count == number
    pending = np.flatnonzero(own_shards & ~published)
    shared = SharedRun(config, dataset, int(published.sum()), len(pending))
    _print_plan(shared, pending)
    start = time.monotonic()
    with Progress(dataset.n_rows) as progress, _log_of(config) as log:
        published_rows = sum(len(dataset.shard_range(shard)) for shard in np.flatnonzero(published).tolist())
        progress.advance(published_rows, True)
        handle = _EventLog(shared, progress, log, printed)
        for event in joined:
            handle(event)
        shared.dispatched = dispatch(
            pending.tolist(), workers, joined=joined, on_event=handle, stop=lambda: bool(received)
        )
        shared.seconds = time.monotonic() - start
        place.clean()
        handle.note("ended", seconds=round(shared.seconds, 3), rows=shared.computed)
    shared.signal = received[0] if shared.dispatched.stopped and received else 0
    return shared


@contextlib.contextmanager
def _log_of(config: EmbedConfig) -> Iterator[Path]:
    """Context manager: yield the log of this run, with JSON lines: in OUT, or uploaded to the bucket at the end."""
    part, _, count = (config.shards_of or "").partition("/")
    name = f"runs-{part}-of-{count}.jsonl" if count else "runs.jsonl"
    if not is_url(config.place):
        yield config.folder / name
        return
    with temporary_folder(Path(tempfile.gettempdir()) / "layertap-log") as folder:
        path = folder / name
        try:
            yield path
        finally:
            log_name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{platform.node()}-{os.getpid()}"
            try:
                put(f"{config.place.rstrip('/')}/runs/{log_name}.jsonl", path.read_bytes())
            except LayertapError as error:  # it must not take the place of the error that ended the run
                print_line(f"the log of this run is not stored: {error}", fg="yellow", err=True)


def _share_of(config: EmbedConfig) -> tuple[int, int]:
    number, _, count = (config.shards_of or "0/1").partition("/")
    return int(number), int(count)


def _print_plan(shared: SharedRun, pending: NDArray[np.int64]) -> None:
    """Print what will be built before the work starts."""
    dataset, config = shared.dataset, shared.config
    lines = [f"images    {dataset.n_rows:,} in {printable(dataset.images['root'])}, in {dataset.n_shards:,} shards"]
    for number, feature in enumerate(dataset.features):
        shape = ", ".join(map(str, feature.shape))
        source = f"{feature.attributes.get('layer', '')}, {feature.attributes.get('pooling', '')}"
        lines.append(f"{'' if number else 'features':10}{feature.name} ({shape}) from {source}")
    share = f"; this task builds the shards of {config.shards_of}" if config.shards_of else ""
    if shared.published_before or share:
        lines.append(f"shards    {shared.published_before:,} are published, {len(pending):,} are to be built{share}")
    print_line("\n".join(lines), err=True)


class _EventLog:
    """Handle events: print them on stderr, and log them as lines of JSON."""

    def __init__(self, shared: SharedRun, progress: Progress, log: Path, printed: set[str]):
        self._shared, self._progress, self._log, self._printed = shared, progress, log, printed
        self._hosts: dict[int, str] = {}
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self.note("started", engine=shared.config.engine or "processes", shards=shared.requested)

    def note(self, event: str, **content: Any) -> None:
        """Add a line to the log."""
        line = json.dumps({"event": event, "started": self._started, **content})
        try:
            append_line(self._log, line)
        except OSError as error:
            raise LayertapError(f"cannot write to {self._log}: {error.strerror}") from error

    def __call__(self, event: Event) -> None:
        shared = self._shared
        if isinstance(event, Message):
            if event.text not in self._printed:
                self._printed.add(event.text)
                self._progress.say(event.text)
        elif isinstance(event, Progressed):
            self._progress.advance(event.rows, event.resumed)
            if not event.resumed:
                shared.computed += event.rows
                shared.hosts[self._hosts[event.worker]] += event.rows
        elif isinstance(event, Joined):
            self._hosts[event.worker] = event.host
            self._progress.say(f"worker {event.worker} on {event.host}, {event.about}")
            self.note("joined", worker=event.worker, host=event.host, device=event.about)
        elif isinstance(event, Left):
            host = self._hosts.get(event.worker, "")
            self._progress.say(f"worker {event.worker}{host and f' on {host}'} has ended: {event.why}")
            self.note("left", worker=event.worker, host=host, why=event.why)
        elif isinstance(event, Failed):
            host = self._hosts[event.worker]
            self._progress.say(f"shard {event.shard} failed on {host}: {event.why}")
            self.note("failed", shard=event.shard, worker=event.worker, host=host, why=event.why)
        elif isinstance(event, Done):
            receipt = event.receipt or {}
            shared.status.update(receipt.get("status", {}))
            fields = {name: receipt[name] for name in ("status", "made") if name in receipt}
            self.note("shard", shard=event.shard, worker=event.worker, host=self._hosts[event.worker], **fields)


def print_shared(shared: SharedRun, echo: Callable[[str], None]) -> None:
    """Print the result of a run."""
    out, dispatched, dataset = shared.config.place, shared.dispatched, shared.dataset
    published = shared.published_before + dispatched.done
    if not shared.requested and shared.config.shards_of:
        echo(f"{out}: no shard of {shared.config.shards_of} is missing; nothing to do")
    elif not shared.requested:
        failed = f", {len(shared.failures):,} of them without features" if shared.failures else ""
        echo(f"{out} is complete: all {dataset.n_rows:,} rows were done before{failed}; nothing to do")
    else:
        by_this_run = f"{dispatched.own:,} of them by this run"
        echo(f"{out}: {published:,} of {dataset.n_shards:,} shards are published, {by_this_run}")
        rate = shared.computed / shared.seconds if shared.seconds else 0.0
        echo(f"{shared.computed:,} rows in {shared.seconds:.1f} s, {rate:.1f} images/s")
        if len(shared.hosts) > 1:
            for host, rows in shared.hosts.most_common():
                echo(f"  {host}  {rows:,} rows, {rows / max(shared.seconds, 1e-9):.1f} images/s")
    for host, why in dispatched.retired:
        echo(f"a worker on {host} was retired: {why}")
    for shard, reasons in sorted(dispatched.failed.items()):
        echo(f"shard {shard} failed {len(reasons)} times and is missing:")
        for reason in dict.fromkeys(reasons):
            echo(f"  {printable(reason)}")
    if dispatched.stopped or dispatched.failed:
        purpose = "To resume" if dispatched.stopped else "To retry"
        echo(f"{purpose}:\n  {command_line()}")
    print_failures([failure[1:] for failure in shared.failures], Path(out), echo)
    if not is_url(out):
        print_remedy(shared.failures, echo, " in one process (without --engine)")


def as_json(shared: SharedRun) -> dict[str, Any]:
    """Return the result of a run as JSON-compatible data."""
    dispatched = shared.dispatched
    return {
        "out": shared.config.place,
        "fingerprint": shared.dataset.fingerprint,
        "rows": shared.dataset.n_rows,
        "shards": shared.dataset.n_shards,
        "found_done": shared.published_before,
        "made": dispatched.own,
        "computed": shared.computed,
        "attempts_failed": dispatched.attempts,
        "begun_again": dispatched.restarted,
        "failed_shards": {str(shard): reasons for shard, reasons in sorted(dispatched.failed.items())},
        "retired": [{"host": host, "why": why} for host, why in dispatched.retired],
        "stopped": dispatched.stopped,
        "status": dict(shared.status),
        "failures": [
            {"row": row, "path": path, "status": status, "reason": reason}
            for row, path, status, reason in shared.failures
        ],
        "hosts": dict(shared.hosts),
        "seconds": round(shared.seconds, 3),
        "images_per_s": round(shared.computed / shared.seconds, 2) if shared.seconds else 0.0,
    }


def exit_code(shared: SharedRun) -> int:
    """Return the exit code of the process."""
    if shared.signal:
        return 128 + shared.signal
    if shared.dispatched.failed:
        return 1
    return 3 if shared.config.strict and shared.failures else 0
