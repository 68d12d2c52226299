"""Workers that are processes of this machine, one or more per device.

`_work` is what the process of a worker runs. `Worker` is that process as seen by the process that started it, and
`Processes` gives shards to several of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
    "Done", "Embed", "Event", "Failed", "Message", "Processes", "Rows", "Start", "Worker", "exit_with_parent",
    "starts_of",
]  # fmt: skip

_EXIT_S = 60.0  # for a process whose pipe has ended
_ROWS_EVERY_S = 0.5
_PARENT_EVERY_S = 1.0
# Ctrl-C, and the SIGTERM of a service manager, reach all processes; only the first process acts on them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Message(NamedTuple):
    """A message for the user, printed once even if several workers send it."""

    text: str


class Rows(NamedTuple):
    """Number of stored rows of a shard in progress; the first time with those of an earlier run (`resumed`)."""

    shard: int
    stored: int
    resumed: bool


class Done(NamedTuple):
    """A shard is published; without a receipt, it was published before. Shard None: the worker is ready."""

    shard: int | None
    receipt: dict[str, Any] | None


class Failed(NamedTuple):
    """An attempt at a shard failed, and ended the worker: why, and the error if layertap raised it on purpose."""

    shard: int | None
    why: str
    error: LayertapError | None = None


Event = Message | Rows | Done | Failed


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
        if self.folder.is_dir():  # Ray runs tasks in another folder, perhaps on a machine without this one
            os.chdir(self.folder)

        import torch

        from extract.extraction.shard_maker import ShardMaker
        from extract.store.places.destination import destination_of
        from pipelines.embed.config import images_of
        from pipelines.embed.job import describe_computation, plan_of
        from pipelines.terminal.backbone import backbone_of

        torch.set_num_threads(self.threads)
        config = self.config
        if "workers" not in config.model_fields_set:
            config = config.model_copy(update={"workers": min(defaults.WORKERS, self.threads)})
        images = images_of(config)
        for note in images.notes:
            say(f"note: {note}")
        plan = plan_of(config, backbone_of(config, say), images)
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
    """Run a worker in this process: build the shards whose numbers come through the pipe, until it ends."""
    exit_with_parent()
    # "spawn" would also apply to processes that decode images, and each shard would wait 6 s for them.
    multiprocessing.set_start_method(start_method, force=True)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    sending = threading.Lock()  # a bucket that does not answer is reported by the thread of its library
    shard: int | None = None
    stored, sent_at = 0, 0.0

    def send(event: Event) -> None:
        with sending, contextlib.suppress(OSError):  # the other end is closed: `recv` ends the worker
            pipe.send(event)

    def on_rows(rows: int, resumed: bool) -> None:
        nonlocal stored, sent_at
        assert shard is not None
        stored = rows if resumed else stored + rows
        if resumed or time.monotonic() - sent_at > _ROWS_EVERY_S:
            sent_at = time.monotonic()
            send(Rows(shard, stored, resumed))

    def say(text: str) -> None:
        send(Message(text))

    try:
        with store_warnings_to(say), start(say) as maker:
            say(f"a worker on {platform.node()}, {maker.about}")
            while True:
                try:
                    shard = pipe.recv()
                except (EOFError, ConnectionError):  # the first process has ended
                    break
                send(Done(shard, None if shard is None else maker.build(shard, on_rows)))
    except LayertapError as error:
        send(Failed(shard, str(error), error))
    except Exception as error:
        send(Failed(shard, f"{type(error).__name__}: {first_line(error)}"))
        raise


class Worker:
    """A process that builds one shard after another, until an attempt fails; then the next attempt starts another.

    Args:
        start: what the process loads first.
    """

    def __init__(self, start: Start):
        self._start = start
        self._shard: int | None = None
        self._process: Any = None

    def begin(self, shard: int | None) -> None:
        """Have the process build a shard, and start it if there is none; `event` gives its events.

        Args:
            shard: its number; None: only get ready.

        Raises:
            OSError: the system has no room for a process.
        """
        self._shard = shard
        self.start()
        with contextlib.suppress(OSError):  # it has ended, and its last event tells why
            self._pipe.send(shard)

    def start(self) -> None:
        """Start the process, unless there is one; raises OSError as `begin`."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._start, multiprocessing.get_start_method()))
        # A signal that comes before `_work` ignores it would end the process with a traceback. The process that tracks
        # resources starts first, because its start unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # so that the pipe ends with the process
        self._process = process

    @property
    def sources(self) -> list[Any]:
        """What `wait` finds ready when there is an event. Processes that decode inherit the pipe, which may not end."""
        return [self._pipe, self._process.sentinel]

    def event(self) -> Event:
        """Wait for the next event of an attempt, of which the last is `Done` or `Failed`, and return it."""
        try:
            event = self._pipe.recv() if self._pipe in wait(self.sources) else Failed(None, self._exit_reason())
        except (EOFError, OSError):
            event = Failed(None, self._exit_reason())
        except Exception as error:  # the next attempt would be mixed up with this one
            event = Failed(None, f"its message cannot be read: {type(error).__name__}: {first_line(error)}")
        if isinstance(event, Failed):
            event = event._replace(shard=self._shard)  # it may have ended before it heard of the shard
            self.kill()
        return event

    def _exit_reason(self) -> str:
        self._process.join(_EXIT_S)
        code = self._process.exitcode or 0
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def kill(self) -> None:
        """Kill the process: what it has stored is safe, and processes that decode images notice it and end."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


class Processes:
    """Context manager: build shards in processes of this machine, and kill these at the end.

    Args:
        starts: the start function of each process.
    """

    def __init__(self, starts: list[Start]):
        self._idle = [Worker(start) for start in starts]
        self._busy: list[Worker] = []
        self._waiting: deque[int | None] = deque()

    def __enter__(self) -> Processes:
        for worker in self._idle:  # all get ready while the first joins; the next attempt goes to another than the last
            with contextlib.suppress(OSError):  # `events` tries again, and reports the error
                worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._idle, *self._busy):
            worker.kill()

    def submit(self, shard: int | None) -> None:
        """Have a shard built, after those that wait; None: only have a worker get ready."""
        self._waiting.append(shard)

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Yield the events that workers have within this time."""
        for _ in range(min(len(self._idle), len(self._waiting))):
            worker, shard = self._idle.pop(0), self._waiting.popleft()
            self._busy.append(worker)
            try:
                worker.begin(shard)
            except OSError as error:
                self._rest(worker)
                yield Failed(shard, f"its process cannot be started: {error.strerror}")
        ready = set(wait([source for worker in self._busy for source in worker.sources], timeout_s))
        for worker in [worker for worker in self._busy if ready.intersection(worker.sources)]:
            event = worker.event()
            if isinstance(event, Done | Failed):
                self._rest(worker)
            yield event

    def _rest(self, worker: Worker) -> None:
        self._busy.remove(worker)
        self._idle.append(worker)


def starts_of(config: EmbedConfig) -> list[Start]:
    """Return the start functions of one or more workers per device, which share the cores.

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
    return [Embed(config.model_copy(update={"device": device}), scratch, threads) for device in devices]


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
