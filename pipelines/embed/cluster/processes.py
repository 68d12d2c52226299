"""Workers that are processes of this machine, one or more per device."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from extract import defaults
from extract.errors import LayertapError
from pipelines.embed.cluster.dispatch import Done, Event, Failed, Joined, Left
from pipelines.embed.cluster.worker import Start, Worker

__all__ = ["Processes", "Slot", "WorkerProcess"]

_EARLY_DEATHS = 3  # consecutive deaths before joining, after which a slot stays empty
_SILENT_S = 1200.0  # without events from a worker with shards: it counts as hanging
_END_S = 60.0  # for the batch in flight, when the run stops
_CLOSE_S = 15.0  # for closing files after SIGTERM, if the batch did not end


@dataclass(frozen=True)
class Slot:
    """A place for one worker at a time.

    Attributes:
        start: start function of the worker.
        cores: cores that it runs on; None: any.
    """

    start: Start
    cores: Sequence[int] | None = None


class Processes:
    """Workers as processes, see `dispatch.Workers`; a context manager that ends them on exit.

    Args:
        slots: one slot per worker.
    """

    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots
        self._processes: dict[int, WorkerProcess] = {}
        self._count = 0
        self._deaths = [0] * len(slots)
        self._last_error = ""

    def __enter__(self) -> Self:
        for slot_index in range(len(self._slots)):
            self._start_worker(slot_index)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.end()
        end = time.monotonic() + _END_S
        for process in self._processes.values():
            # A worker that has not joined has nothing to finish.
            process.stop(end - time.monotonic() if process.joined else 0.0)

    def _start_worker(self, slot_index: int) -> None:
        self._processes[self._count] = WorkerProcess(self._count, self._slots[slot_index], slot_index)
        self._count += 1

    def events(self, timeout_s: float) -> list[Event]:
        """See `dispatch.Workers`."""
        if not self._processes:
            raise LayertapError(f"no worker can be started: {self._last_error}")
        by_pipe = {process.pipe: number for number, process in self._processes.items()}
        events: list[Event] = []
        for pipe in wait(list(by_pipe), timeout_s):
            events += self._read_events(by_pipe[pipe])  # type: ignore[index]
        for number, process in list(self._processes.items()):
            if process.shards and time.monotonic() - process.heard > _SILENT_S:
                events += self._replace(number, Left(number, f"sent no events for {_SILENT_S / 60:.0f} minutes"))
        return events

    def _read_events(self, number: int) -> list[Event]:
        """Return the events of a worker; replace the worker if it has ended."""
        process = self._processes[number]
        events = process.events()
        if any(isinstance(event, Joined) for event in events):
            self._deaths[process.slot_index] = 0
        if events and isinstance(events[-1], Left):
            return events[:-1] + self._replace(number, events[-1])
        return events

    def _replace(self, number: int, event: Left) -> list[Event]:
        process = self._processes.pop(number)
        process.kill()
        self._last_error = event.why
        self._deaths[process.slot_index] += 1
        if self._deaths[process.slot_index] < _EARLY_DEATHS:
            self._start_worker(process.slot_index)
        return [event]

    def coming(self) -> bool:
        """See `dispatch.Workers`."""
        return any(not process.joined for process in self._processes.values())

    def submit(self, worker: int, shard: int) -> None:
        """See `dispatch.Workers`."""
        self._processes[worker].submit(shard)

    def cancel(self, worker: int, shard: int) -> None:
        """See `dispatch.Workers`."""
        self._processes[worker].cancel(shard)

    def retire(self, worker: int) -> None:
        """See `dispatch.Workers`."""
        self._processes.pop(worker).kill()


class WorkerProcess:
    """A worker in its own process, as seen by the process that started it.

    Args:
        number: number of the worker.
        slot: slot with its start function and cores.
        slot_index: index of the slot.

    Attributes:
        pipe: connection to wait for events.
        slot_index: index of the slot.
        joined: whether the worker is ready.
        shards: shards that it was given and has not finished.
        heard: time of its last event, or of a shard that it was given while it had none.
    """

    def __init__(self, number: int, slot: Slot, slot_index: int = 0):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.pipe, theirs = context.Pipe()
        start_method = multiprocessing.get_start_method()
        self._process = context.Process(
            target=_work, args=(number, theirs, slot, start_method), name=f"worker-{number}"
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with the process
        self._number, self._sending = number, threading.Lock()
        self.slot_index, self.heard, self.joined = slot_index, time.monotonic(), False
        self.shards: set[int] = set()

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """Return the events since the last call; the last event is `Left` if the worker has ended."""
        events: list[Event] = []
        try:
            while self.pipe.poll(0.0 if events else timeout_s):
                event: Event = self.pipe.recv()
                events.append(event)
                self.heard = time.monotonic()
                if isinstance(event, Joined):
                    self.joined = True
                elif isinstance(event, Done | Failed):
                    self.shards.discard(event.shard)
                elif isinstance(event, Left):
                    break
        except (EOFError, OSError):
            events.append(Left(self._number, self._exit_reason()))
        return events

    def submit(self, shard: int) -> None:
        """See `Worker`."""
        if not self.shards:
            self.heard = time.monotonic()
        self.shards.add(shard)
        self._send("submit", shard)

    def cancel(self, shard: int) -> None:
        """See `Worker`."""
        self.shards.discard(shard)
        self._send("cancel", shard)

    def end(self) -> None:
        """See `Worker`."""
        self._send("end")

    def _send(self, method: str, shard: int = 0) -> None:
        """Send a message. If the process has ended, reading the pipe reports it."""
        with self._sending, contextlib.suppress(OSError):
            self.pipe.send((method, shard))

    def _exit_reason(self) -> str:
        """Return in words how the process ended, after the end of the pipe."""
        self._process.join(_END_S)
        code = self._process.exitcode
        if code is None:
            return "its process closed its pipe"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def stop(self, timeout_s: float = _END_S) -> None:
        """Wait at most `timeout_s` for the process to end, then terminate it, and finally kill it."""
        self._process.join(max(0.0, timeout_s))
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process; its decoding processes notice this and end."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(number: int, pipe: Connection[Any, Any], slot: Slot, start_method: str) -> None:
    """Run a worker in this process: the main thread builds shards, another thread receives messages."""
    # The spawn method would also apply to decoding processes, which would cost 6 s per shard.
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the first process acts on it
    signal.signal(signal.SIGTERM, lambda *_: terminate())
    if slot.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, slot.cores)
    sending = threading.Lock()
    joined, ended_at = False, math.inf

    def end() -> None:
        nonlocal ended_at
        ended_at = min(ended_at, time.monotonic())
        worker.end()

    def terminate() -> None:
        """End the worker; exit if it has been ending for some time, or has nothing to finish.

        A service manager sends SIGTERM to all processes, perhaps several times at once. The first process sends its own
        if the batch in flight does not end.
        """
        if worker.ending and (not joined or time.monotonic() - ended_at > defaults.AT_ONCE_S):
            sys.exit(1)
        end()

    def send(event: Event) -> None:
        nonlocal joined
        joined = joined or isinstance(event, Joined)
        with sending, contextlib.suppress(OSError):  # the other end is closed: `receive` ends the worker
            pipe.send(event)

    worker = Worker(number, slot.start, send)

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                method, shard = pipe.recv()
                if method == "end":
                    break
                (worker.submit if method == "submit" else worker.cancel)(shard)
        end()
        time.sleep(_END_S + _CLOSE_S)  # the process that would kill a hanging worker may have been killed itself
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    worker.run()
