"""Workers that are processes of this machine, one or more per device.

A worker builds lists of shards, and reports each event. `_work` is what its process runs; `Child` is the worker as seen
by the process that started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from extract import defaults
from extract.errors import InputError, LayertapError, first_line
from extract.store.format.dataset import BUILDING
from extract.system.urls import is_url
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.progress import store_warnings_to

if TYPE_CHECKING:
    from extract.extraction.shard_maker import ShardMaker

__all__ = [
    "Child", "Done", "Embed", "Event", "Joined", "Left", "Message", "Rows", "Start", "children_of", "exit_with_parent",
]  # fmt: skip

_EXIT_S = 60.0  # for a process whose pipe has ended
_ROWS_EVERY_S = 0.5
_PARENT_EVERY_S = 1.0
# Ctrl-C, and the SIGTERM of a service manager, reach all processes; only the first process acts on them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Joined(NamedTuple):
    """The worker is ready; the machine, and the device that computes."""

    host: str
    about: str


class Message(NamedTuple):
    """A message for the user, printed once even if several workers send it."""

    text: str


class Rows(NamedTuple):
    """Number of stored rows of the shard in progress; the first time with those of an earlier run (`resumed`)."""

    shard: int
    stored: int
    resumed: bool


class Done(NamedTuple):
    """A shard is published; without a receipt, another worker was the first to publish it."""

    shard: int
    receipt: dict[str, Any] | None


class Left(NamedTuple):
    """The worker has ended: why (empty: it was asked to), and the error if layertap raised it on purpose."""

    why: str
    error: LayertapError | None = None


Event = Joined | Message | Rows | Done | Left


# Called in a worker, with a function for messages; must be picklable. Yields what builds shards: a `ShardMaker`.
Start = Callable[[Callable[[str], None]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Embed:
    """Load what a worker of `layertap embed` needs: the backbone, the images, and a folder to build shards in.

    Attributes:
        config: configuration of the job.
        scratch: folder for shards in progress; None: the folder for temporary files.
        threads: threads of the forward on a CPU, and most processes that decode.
        folder: folder that names of files are relative to.
    """

    config: EmbedConfig
    scratch: Path | None
    threads: int
    folder: Path = field(default_factory=Path.cwd)

    @contextlib.contextmanager
    def __call__(self, say: Callable[[str], None]) -> Iterator[ShardMaker]:
        """Context manager, see `Start`."""
        if self.folder.is_dir():  # Ray starts an actor in another folder, perhaps on a machine without this one
            os.chdir(self.folder)

        import torch

        from extract.extraction.shard_maker import ShardMaker
        from extract.images import list_images
        from extract.store.places.destination import destination_of
        from pipelines.embed.job import describe_computation, plan_of
        from pipelines.terminal.backbone import backbone_of

        torch.set_num_threads(self.threads)
        config = self.config
        if "workers" not in config.model_fields_set:
            config = config.model_copy(update={"workers": min(defaults.WORKERS, self.threads)})
        plan = plan_of(config, backbone_of(config, say), list_images(config.images, config.limit, config.keep))
        with ShardMaker(
            plan,
            destination_of(config.place),
            self.scratch,
            lambda computation: say(describe_computation(computation, plan.settings.precision)),
            lambda note: say(f"note: {note}"),
        ) as maker:
            yield maker


def exit_with_parent() -> None:
    """End this process at once when the process that started it has ended.

    `PR_SET_PDEATHSIG` does not serve: the kernel sends that signal when the thread that started the process ends, too.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(pipe: Connection[Any, Any], start: Start, start_method: str) -> None:
    """Run a worker in this process: build the lists of shards that come through the pipe, until an empty one comes."""
    exit_with_parent()
    # "spawn" would also apply to processes that decode images, and each list would wait 6 s for them.
    multiprocessing.set_start_method(start_method, force=True)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    sending = threading.Lock()  # a bucket that does not answer is reported by the thread that publishes
    stored, sent_at = 0, 0.0

    def send(event: Event) -> None:
        with sending, contextlib.suppress(OSError):  # the other end is closed: `recv` ends the worker
            pipe.send(event)

    def on_rows(shard: int, rows: int, resumed: bool) -> None:
        nonlocal stored, sent_at
        stored = rows if resumed else stored + rows
        if resumed or time.monotonic() - sent_at > _ROWS_EVERY_S:
            sent_at = time.monotonic()
            send(Rows(shard, stored, resumed))

    def say(text: str) -> None:
        send(Message(text))

    try:
        with store_warnings_to(say), start(say) as maker, contextlib.suppress(EOFError):
            send(Joined(platform.node(), maker.about))
            while shards := pipe.recv():
                # What arrives while shards are built, or the end of the pipe, asks the worker to stop.
                for shard, receipt in maker.build(shards, on_rows, pipe.poll):
                    send(Done(shard, receipt))
        send(Left(""))
    except LayertapError as error:
        send(Left(str(error), error))
    except Exception as error:
        send(Left(f"{type(error).__name__}: {first_line(error)}"))
        raise


class Child:
    """A worker in its own process, as seen by the process that started it."""

    def __init__(self, start: Start):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, start, multiprocessing.get_start_method()))
        # A signal that comes before `_work` ignores it would end the process with a traceback. The process that tracks
        # resources starts first, because its start unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the pipe ends with the process

    def submit(self, shards: Sequence[int]) -> None:
        """Give shards to a worker that has none; without shards, have it finish the batch in flight and end."""
        with contextlib.suppress(OSError):  # it has ended, and `events` reports that
            self._pipe.send(shards)

    def events(self) -> Iterator[Event]:
        """Yield the events of the worker until it has ended; the last is `Left`."""
        event: Event | None = None
        while not isinstance(event, Left):
            # The pipe alone would not tell the end: processes that decode images inherit it.
            ready = wait([self._pipe, self._process.sentinel])
            try:
                event = self._pipe.recv() if self._pipe in ready else Left(self._exit_reason())
            except (EOFError, OSError):
                event = Left(self._exit_reason())
            except Exception as error:  # nothing may wait for this worker, which may still be alive
                event = Left(f"its message cannot be read: {type(error).__name__}: {first_line(error)}")
            yield event

    def _exit_reason(self) -> str:
        self._process.join(_EXIT_S)
        code = self._process.exitcode or 0
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def kill(self) -> None:
        """Kill the process: what it has stored is safe, and processes that decode images notice it and end."""
        self._process.kill()
        self._process.join()


def children_of(config: EmbedConfig) -> list[Callable[[], Child]]:
    """Return the functions that start one or more workers per device, which share the cores.

    Raises:
        InputError: this process may not use so many cores.
    """
    devices, cores = _devices(config), defaults.CORES
    if (config.cpus_per_worker or 1) > cores:
        raise InputError(f"cpus_per_worker is {config.cpus_per_worker}; this process may use {cores} cores")
    if devices == ["cpu"]:
        devices *= cores // (config.cpus_per_worker or cores)
    else:
        devices = [device for device in devices for _ in range(config.workers_per_gpu)]
    threads = config.cpus_per_worker or max(1, cores // len(devices))
    has_own_folder = not config.shards_of and not is_url(config.place)
    scratch = config.scratch or (config.folder / BUILDING if has_own_folder else None)
    starts = [Embed(config.model_copy(update={"device": device}), scratch, threads) for device in devices]
    return [partial(Child, start) for start in starts]


def _devices(config: EmbedConfig) -> list[str]:
    if config.device != "all" and (config.device != "auto" or config.engine != "processes"):
        devices = [device.strip() for device in config.device.split(",")]
        if any(device.startswith("cuda") for device in devices):  # otherwise, this process does without PyTorch
            from extract.system.torch_state import check_device_exists

            for device in set(devices) - {"auto"}:
                check_device_exists(device)
        return devices
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
