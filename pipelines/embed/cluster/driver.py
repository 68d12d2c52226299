"""Run `layertap embed` with several workers: one progress, one log and one summary for all.

The first process loads no backbone and lists no images: it learns the data set from the first worker that joins. It
needs no GPU, and the fingerprint is that of the device that computes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from extract.errors import LayertapError
from extract.images.folders import check_exists
from extract.images.listing import kind_of
from extract.store.format.dataset import BUILDING, DataSet
from extract.store.places.destination import destination_of
from extract.store.reader import FeatureReader
from extract.system.atomic_files import append_line
from extract.system.folder_lock import locked
from extract.system.urls import is_url
from pipelines.embed.cluster.launch import engine_of
from pipelines.embed.cluster.shard_loop import ShardLoop
from pipelines.embed.cluster.worker import Done, Event, Joined, Left, Message, Rows
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import command_line, print_failures, print_line, print_remedy, printable

__all__ = ["SharedRun", "as_json", "embed_shared", "exit_code", "print_shared"]


@dataclass
class SharedRun:
    """Result of a run with several workers.

    Attributes:
        config: configuration of the job.
        dataset: the data set.
        published_before: number of shards that were published before.
        requested: number of shards that this run had to build.
        loop: what became of these shards.
        seconds: time from the first worker that joined to the last shard.
        hosts: host -> number of rows computed there, of shards that this run published.
        status: row status -> number of rows, likewise.
        failures: (row, path, status, reason) of rows without good features; empty while shards are missing.
        signal: signal that stopped the run; 0: none.
    """

    config: EmbedConfig
    dataset: DataSet
    published_before: int
    requested: int
    loop: ShardLoop
    seconds: float = 0.0
    hosts: Counter[str] = field(default_factory=Counter)
    status: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str, str]] = field(default_factory=list)
    signal: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all requested shards are published."""
        return self.loop.done == self.requested


def embed_shared(config: EmbedConfig) -> SharedRun:
    """Run the job and print progress on stderr.

    Raises:
        InputError: see `pipelines.embed.job.embed`.
        LockedError: another run is building this data set.
        LayertapError: no worker can be started.
    """
    # A worker loads PyTorch and the backbone before it lists the images. Nodes of a cluster may have other files.
    if config.engine != "ray" and not is_url(config.images) and kind_of(config.images) == "folder":
        check_exists(config.images)
    # Tasks of an array share the folder; a bucket has no locks.
    alone = config.shards_of is None and not is_url(config.place)
    with locked(config.folder) if alone else contextlib.nullcontext():
        shared = _run(config)
        if alone and shared.is_complete:
            shutil.rmtree(config.folder / BUILDING, ignore_errors=True)
    if shared.is_complete and shared.published_before + shared.loop.done == shared.dataset.n_shards:
        with FeatureReader(config.place) as reader:
            shared.failures = reader.failures
    return shared


def _run(config: EmbedConfig) -> SharedRun:
    place, reporter = destination_of(config.place), _Reporter(config)
    # Signals are held first: an exception while workers are being started would leave some of them.
    with signals_held() as received, engine_of(config) as engine, contextlib.ExitStack() as at_the_end:

        def shards() -> list[int]:
            dataset, published = place.dataset, set(place.published().tolist())
            number, count = map(int, (config.shards_of or "0/1").split("/"))
            pending = [shard for shard in range(number, dataset.n_shards, count) if shard not in published]
            shared = SharedRun(config, dataset, len(published), len(pending), loop)
            _print_plan(shared)
            reporter.begin(shared, at_the_end.enter_context(Progress(dataset.n_rows)))
            reporter.progress.advance(sum(len(dataset.shard_range(shard)) for shard in published), True)
            return pending

        loop = ShardLoop(engine, shards, reporter, lambda: set(place.published().tolist()))
        loop.run(lambda: bool(received))
        if reporter.shared is None:
            print_line("stopped before a worker joined; nothing was computed", err=True)
            raise click.exceptions.Exit(128 + received[0])
        place.clean()
        reporter.end()
    shared = reporter.shared
    shared.signal = received[0] if received and not shared.is_complete else 0
    return shared


def _print_plan(shared: SharedRun) -> None:
    """Print what will be built before the work starts."""
    dataset, config = shared.dataset, shared.config
    lines = [f"images    {dataset.n_rows:,} in {printable(dataset.images['root'])}, in {dataset.n_shards:,} shards"]
    for number, feature in enumerate(dataset.features):
        shape = ", ".join(map(str, feature.shape))
        source = f"{feature.attributes.get('layer', '')}, {feature.attributes.get('pooling', '')}"
        lines.append(f"{'' if number else 'features':10}{feature.name} ({shape}) from {source}")
    share = f"; this task builds the shards of {config.shards_of}" if config.shards_of else ""
    if shared.published_before or share:
        lines.append(
            f"shards    {shared.published_before:,} are published, {shared.requested:,} are to be built{share}"
        )
    print_line("\n".join(lines), err=True)


class _Reporter:
    """Prints the events of workers on stderr, and logs them as lines of JSON.

    Attributes:
        shared: result of the run so far; None before a worker has joined.
        progress: the progress bar.
    """

    def __init__(self, config: EmbedConfig):
        number, _, count = (config.shards_of or "").partition("/")
        name = f"runs-{number}-of-{count}.jsonl" if count else "runs.jsonl"
        # Objects in a bucket cannot be appended to; the receipts say where and when each shard was made.
        self._log = None if is_url(config.place) else config.folder / name
        self._say: Callable[[str], None] = lambda text: print_line(text, err=True)
        self._said: set[str] = set()
        self._hosts: dict[int, str] = {}
        self._counted: Counter[int] = Counter()  # shard in progress -> rows in the progress bar
        self.shared: SharedRun | None = None

    def begin(self, shared: SharedRun, progress: Progress) -> None:
        """Report from now on with this progress bar."""
        self.shared, self.progress, self._say = shared, progress, progress.say
        self._start = time.monotonic()
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._note("started", engine=shared.config.engine or "processes", shards=shared.requested)

    def end(self) -> None:
        """Note the end of the run."""
        assert self.shared is not None
        self.shared.seconds = time.monotonic() - self._start
        self._note("ended", seconds=round(self.shared.seconds, 3), rows=self.shared.hosts.total())

    def _note(self, event: str, **content: Any) -> None:
        """Add a line to the log."""
        if self._log is None or self.shared is None:
            return
        try:
            append_line(self._log, json.dumps({"event": event, "started": self._started, **content}))
        except OSError as error:
            raise LayertapError(f"cannot write to {self._log}: {error.strerror}") from error

    def __call__(self, worker: int, event: Event) -> None:
        host = self._hosts.get(worker, "")
        if isinstance(event, Message):
            if event.text not in self._said:
                self._said.add(event.text)
                self._say(event.text)
        elif isinstance(event, Joined):
            self._hosts[worker] = event.host
            self._say(f"worker {worker} on {event.host}, {event.about}")
            self._note("joined", worker=worker, host=event.host, device=event.about)
        elif isinstance(event, Rows):
            self._count(event.shard, event.stored, event.resumed)
        elif isinstance(event, Left):
            self._say(f"worker {worker}{host and f' on {host}'} has ended: {event.why}")
            self._note("left", worker=worker, host=host, why=event.why)
        elif isinstance(event, Done) and self.shared is not None:
            self._count(event.shard, len(self.shared.dataset.shard_range(event.shard)), False)
            del self._counted[event.shard]
            receipt = event.receipt or {}
            self.shared.status.update(receipt.get("status", {}))
            if made := receipt.get("made"):
                self.shared.hosts[made["host"]] += made["computed"]
            fields = {name: receipt[name] for name in ("status", "made") if name in receipt}
            self._note("shard", shard=event.shard, worker=worker, host=host, **fields)

    def _count(self, shard: int, stored: int, resumed: bool) -> None:
        """Advance the bar by the rows of a shard that are not in it yet: a shard may be begun several times."""
        self.progress.advance(max(0, stored - self._counted[shard]), resumed)
        self._counted[shard] = max(stored, self._counted[shard])


def print_shared(shared: SharedRun, echo: Callable[[str], None]) -> None:
    """Print the result of a run."""
    out, loop, dataset = shared.config.place, shared.loop, shared.dataset
    if not shared.requested and shared.config.shards_of:
        echo(f"{out}: no shard of {shared.config.shards_of} is missing; nothing to do")
    elif not shared.requested:
        failed = f", {len(shared.failures):,} of them without features" if shared.failures else ""
        echo(f"{out} is complete: all {dataset.n_rows:,} rows were done before{failed}; nothing to do")
    else:
        published = f"{shared.published_before + loop.done:,} of {dataset.n_shards:,} shards are published"
        echo(f"{out}: {published}, {loop.own:,} of them by this run")
        rows = shared.hosts.total()
        echo(f"{rows:,} rows in {shared.seconds:.1f} s, {rows / max(shared.seconds, 1e-9):.1f} images/s")
    for shard, reasons in sorted(loop.failed.items()):
        echo(f"shard {shard} failed {len(reasons)} times and is missing:")
        for reason in dict.fromkeys(reasons):
            echo(f"  {printable(reason)}")
    if not shared.is_complete:
        echo(f"To {'retry' if loop.failed else 'resume'}:\n  {command_line()}")
    print_failures([failure[1:] for failure in shared.failures], Path(out), echo)
    if not is_url(out):
        print_remedy(shared.failures, echo, " in one process (without --engine)")


def as_json(shared: SharedRun) -> dict[str, Any]:
    """Return the result of a run as JSON-compatible data."""
    loop, rows = shared.loop, shared.hosts.total()
    return {
        "out": shared.config.place,
        "fingerprint": shared.dataset.fingerprint,
        "rows": shared.dataset.n_rows,
        "shards": shared.dataset.n_shards,
        "found_done": shared.published_before,
        "made": loop.own,
        "computed": rows,
        "attempts_failed": loop.attempts,
        # Earlier versions began slow shards a second time, and retired workers. The keys stay for their readers.
        "begun_again": 0,
        "failed_shards": {str(shard): reasons for shard, reasons in sorted(loop.failed.items())},
        "retired": [],
        "stopped": bool(shared.signal),
        "status": dict(shared.status),
        "failures": [
            {"row": row, "path": path, "status": status, "reason": reason}
            for row, path, status, reason in shared.failures
        ],
        "hosts": dict(shared.hosts),
        "seconds": round(shared.seconds, 3),
        "images_per_s": round(rows / shared.seconds, 2) if shared.seconds else 0.0,
    }


def exit_code(shared: SharedRun) -> int:
    """Return the exit code of the process."""
    if shared.signal:
        return 128 + shared.signal
    if not shared.is_complete:
        return 1
    return 3 if shared.config.strict and shared.failures else 0
