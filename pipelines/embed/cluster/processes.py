"""Workers that are processes of this machine, one or more per device."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

from extract import defaults
from extract.errors import InputError
from extract.store.format.dataset import BUILDING
from extract.system.urls import is_url
from pipelines.embed.cluster.worker import SIGNALS, Embed, Event, Left, Start, work
from pipelines.embed.config import EmbedConfig

__all__ = ["Child", "children_of"]

_EXIT_S = 60.0  # for a process whose pipe has ended


class Child:
    """A worker in its own process, as seen by the process that started it."""

    def __init__(self, start: Start):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, start, multiprocessing.get_start_method()))
        # A signal that comes before `work` ignores it would end the process with a traceback. The process that tracks
        # resources starts first, because its start unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
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
        return [device.strip() for device in config.device.split(",")]
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
