"""Run `layertap embed` with several workers: one progress and one summary for all.

The first process loads no backbone and lists no images: it learns the data set from the first worker that joins. It
needs no GPU, and the fingerprint is that of the device that computes.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import click

from extract.errors import DisagreementError, InputError, LayertapError
from extract.images.listing import check_exists, kind_of
from extract.store.format.dataset import BUILDING, DataSet
from extract.store.places.destination import destination_of
from extract.store.reader import FeatureReader
from extract.system.atomic_files import locked
from extract.system.urls import is_url
from pipelines.embed.cluster.processes import Done, Event, Failed, Message, Processes, Rows, starts_of
from pipelines.embed.cluster.ray_tasks import RayTasks, ray_tasks_of
from pipelines.embed.config import EmbedConfig, check_output
from pipelines.terminal.graceful_stop import signals_held
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import command_line, counted, print_failures, print_remedy, printable

__all__ = ["SharedRun", "as_json", "build", "embed_shared", "exit_code", "print_shared"]


_TICK_S = 1.0
_JOIN_S = 1800.0  # wait for the first worker: a cluster that grows on demand takes minutes
_ATTEMPTS = 3  # at a shard
_HINT = "fix the cause, and run the command again; published shards are safe"
_HOPELESS = 10  # shards of which an attempt failed since the last one that was built: the cause is not in the shards


def build(
    engine: Processes | RayTasks,
    shards: Sequence[int | None],
    on_event: Callable[[Event], None],
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Have shards built, in any order and several at once; a failed attempt is repeated after the shards that wait.

    A shard of which too many attempts fail is left out.

    Args:
        engine: builds shards.
        shards: their numbers; None: only wait until a worker is ready and has created or opened the data set.
        on_event: called with each event.
        stop: called about once a second; True ends the wait.

    Returns:
        whether all were built before `stop` ended the wait.

    Raises:
        LayertapError: the configuration is wrong, the cause of failures is not in the shards, or shards were left out.
    """
    left, given_up, is_proven = set(shards), list[int | None](), False
    reasons: defaultdict[int | None, list[str]] = defaultdict(list)  # why each attempt at a shard failed
    failing: set[int | None] = set()  # shards of which an attempt failed since the last one that was built
    for shard in shards:
        engine.submit(shard)
    while left and not stop():
        for event in engine.events(_TICK_S):
            if isinstance(event, Done):
                left.discard(event.shard)
                failing.clear()
                is_proven = is_proven or event.shard is not None
            elif isinstance(event, Failed) and event.shard in left:
                # Errors of the configuration appear before the first shard is published, on all workers: one message
                # is enough.
                is_of_user = event.shard is None or isinstance(event.error, InputError | DisagreementError)
                if event.error is not None and is_of_user and not is_proven:
                    raise event.error
                failing.add(event.shard)
                if len(failing) >= _HOPELESS:
                    what = f"{_HOPELESS} shards failed, and none was built between them"
                    raise LayertapError(f"{what}. The last error: {event.why}", hint=_HINT)
                reasons[event.shard].append(event.why)
                if len(reasons[event.shard]) < _ATTEMPTS:
                    engine.submit(event.shard)
                else:
                    left.discard(event.shard)
                    given_up.append(event.shard)
            on_event(event)
    if given_up and not left:
        raise LayertapError("\n".join(_told(shard, reasons[shard]) for shard in given_up), hint=_HINT)
    return not left


def _told(shard: int | None, reasons: list[str]) -> str:
    what = "no worker can be started" if shard is None else f"shard {shard} failed {len(reasons)} times and is missing"
    return f"{what}: {', '.join(dict.fromkeys(reasons))}"


class SharedRun:
    """A run with several workers: prints their events on stderr. The receipts of shards say who built them.

    Attributes:
        config: configuration of the job.
        dataset: the data set; known when a worker has joined.
        published_before: number of shards that were published before.
        done: number of shards that this run had to build and that are published now.
        own: number of shards that this run published, and not another writer of the same data set.
        attempts_failed: number of attempts at a shard that failed or were lost with their worker.
        seconds: time from the first worker that joined to the last shard.
        hosts: host -> number of rows computed there, of shards that this run published.
        status: row status -> number of rows, likewise.
        failures: (row, path, status, reason) of rows without good features; empty while shards are missing.
        signal: signal that stopped the run; 0: none.
    """

    dataset: DataSet

    def __init__(self, config: EmbedConfig, engine: Processes | RayTasks):
        self.config, self._engine = config, engine
        self.published_before = self.done = self.own = self.attempts_failed = self.signal = 0
        self.seconds = 0.0
        self.hosts: Counter[str] = Counter()
        self.status: Counter[str] = Counter()
        self.failures: list[tuple[int, str, str, str]] = []
        self._place = destination_of(config.place)
        # Tasks of an array share the folder; a bucket has no locks.
        self._is_alone = config.shards_of is None and not is_url(config.place)
        self._printed: set[str] = set()
        self._counted: Counter[int] = Counter()  # shard in progress -> rows in the progress bar

    def run(self, received: list[int]) -> Self:
        """Have the workers build the missing shards, until `received` has the number of a signal.

        Raises:
            LockedError: another run is building this data set.
            LayertapError: see `build`; or no worker joins.
        """
        lock = locked(self.config.folder) if self._is_alone else contextlib.nullcontext()
        with lock, Progress(None) as self._progress:
            end = time.monotonic() + _JOIN_S
            if not build(self._engine, [None], self._report, lambda: bool(received) or time.monotonic() > end):
                if not received:
                    raise LayertapError(f"no worker joined within {_JOIN_S / 60:.0f} minutes")
                self._progress.say("stopped before a worker joined; nothing was computed")
                raise click.exceptions.Exit(128 + received[0])
            start = time.monotonic()
            is_complete = build(self._engine, self._begin(), self._report, lambda: bool(received))
            self.seconds = time.monotonic() - start
            self._place.clean()
            if not is_complete:
                self.signal = received[0]
            elif self._is_alone:
                shutil.rmtree(self.config.folder / BUILDING, ignore_errors=True)
        if self.published_before + self.done == self.dataset.n_shards:
            with FeatureReader(self.config.place) as reader:
                self.failures = reader.failures
        return self

    def _begin(self) -> list[int]:
        """Print what will be built, and return the shards to build."""
        dataset, published = self._place.dataset, set(self._place.published().tolist())
        number, count = map(int, (self.config.shards_of or "0/1").split("/"))
        missing = [shard for shard in range(number, dataset.n_shards, count) if shard not in published]
        self.dataset, self.published_before = dataset, len(published)
        features = ", ".join(f"{feature.name} ({', '.join(map(str, feature.shape))})" for feature in dataset.features)
        shards = f"{dataset.n_shards:,}; {len(published):,} are published, {len(missing):,} are to be built"
        self._progress.say(f"images    {dataset.n_rows:,} in {printable(dataset.images['root'])}")
        self._progress.say(f"features  {features}")
        self._progress.say(f"shards    {shards}" + (f" by this task ({number}/{count})" if count > 1 else ""))
        self._progress.expect(dataset.n_rows)
        self._progress.advance(sum(len(dataset.shard_range(shard)) for shard in published), True)
        return missing

    def _report(self, event: Event) -> None:
        if isinstance(event, Message):
            if event.text not in self._printed:
                self._printed.add(event.text)
                self._progress.say(event.text)
        elif isinstance(event, Rows):
            self._count(event.shard, event.stored, event.resumed)
        elif isinstance(event, Failed):
            self.attempts_failed += 1
            where = "before it was ready" if event.shard is None else f"at shard {event.shard}"
            self._progress.say(f"a worker has ended {where}: {event.why}")
        elif event.shard is not None:
            self._published(event.shard, event.receipt)

    def _published(self, shard: int, receipt: dict[str, Any] | None) -> None:
        self.done += 1
        self._count(shard, len(self.dataset.shard_range(shard)), False)
        if receipt is not None:
            self.own += 1
            self.status.update(receipt["status"])
            made = receipt.get("made", {})
            self.hosts[made.get("host", "")] += made.get("computed", 0)

    def _count(self, shard: int, stored: int, resumed: bool) -> None:
        """Advance the bar by the rows of a shard that are not in it yet: a shard may be begun several times."""
        self._progress.advance(max(0, stored - self._counted[shard]), resumed)
        self._counted[shard] = max(stored, self._counted[shard])


def embed_shared(config: EmbedConfig) -> SharedRun:
    """Run the job and print progress on stderr.

    Raises:
        InputError: see `pipelines.embed.job.embed`.
        LayertapError: see `SharedRun.run`; or there is no Ray cluster.
    """
    # A worker loads PyTorch and the backbone before it lists the images. Nodes of a cluster may have other files.
    check_output(config)
    if config.engine != "ray" and not is_url(config.images) and kind_of(config.images) == "folder":
        check_exists(config.images)
    engine = ray_tasks_of(config) if config.engine == "ray" else Processes(starts_of(config))
    # Signals are held first: an exception while workers are being started would leave some of them.
    with signals_held("stopping the workers ...") as received, engine as builder:
        return SharedRun(config, builder).run(received)


def print_shared(shared: SharedRun, echo: Callable[[str], None]) -> None:
    """Print the result of a run."""
    out, dataset = shared.config.place, shared.dataset
    if shared.done or shared.signal:
        published = f"{shared.published_before + shared.done:,} of {dataset.n_shards:,} shards are published"
        echo(f"{out}: {published}, {shared.own:,} of them by this run")
        rows = shared.hosts.total()
        echo(f"{counted(rows, 'row')} in {shared.seconds:.1f} s, {rows / max(shared.seconds, 1e-9):.1f} images/s")
    elif shared.config.shards_of:
        echo(f"{out}: no shard of {shared.config.shards_of} is missing; nothing to do")
    else:
        failed = f", {len(shared.failures):,} of them without features" if shared.failures else ""
        echo(f"{out} is complete: all {dataset.n_rows:,} rows were done before{failed}; nothing to do")
    if shared.signal:
        echo(f"To resume:\n  {command_line()}")
    print_failures([failure[1:] for failure in shared.failures], Path(out), echo)
    if not is_url(out):
        print_remedy(shared.failures, echo, " in one process (without --engine)")


def as_json(shared: SharedRun) -> dict[str, Any]:
    """Return the result of a run as JSON-compatible data."""
    rows = shared.hosts.total()
    return {
        "out": shared.config.place,
        "fingerprint": shared.dataset.fingerprint,
        "rows": shared.dataset.n_rows,
        "shards": shared.dataset.n_shards,
        "found_done": shared.published_before,
        "made": shared.own,
        "computed": rows,
        "attempts_failed": shared.attempts_failed,
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
    return 3 if shared.config.strict and shared.failures else 0
