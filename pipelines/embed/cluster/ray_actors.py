"""Workers that are actors on a Ray cluster: one or more per accelerator, and more when a node joins.

Each actor loads the backbone once. Messages are shard numbers in one direction and events with receipts in the other;
images and features never pass through Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import library
from pipelines.embed.cluster.dispatch import Done, Event, Failed, Joined, Left
from pipelines.embed.cluster.processes import Slot, WorkerProcess
from pipelines.embed.cluster.ray_output import bar_protected
from pipelines.embed.cluster.worker import Start
from pipelines.terminal.text_output import print_line

__all__ = ["ActorResources", "RayWorkers", "actor_resources"]

_EARLY_DEATHS = 3  # consecutive deaths before joining, after which no actor is started
_SILENT_S = 1200.0  # without events from an actor with shards: it counts as hanging
_LOOK_S = 10.0  # interval of checks for new nodes
_END_S = 60.0  # for the batch in flight, when the run stops
_CONNECT_S = 10.0
_ANSWER_S = 5.0  # longest wait of an actor for events before it answers without any
_PARENT_EVERY_S = 1.0  # interval at which an actor looks for the process of its node


@dataclass(frozen=True)
class ActorResources:
    """Resources of an actor.

    Attributes:
        cpus: number of cores.
        gpus: fraction of a GPU; 0: the actor computes on the cores.
    """

    cpus: int
    gpus: float

    def places(self, nodes: list[dict[str, Any]]) -> int:
        """Return how many actors fit on these nodes."""
        return sum(
            int(
                min(
                    node["Resources"].get("CPU", 0.0) // self.cpus,
                    (node["Resources"].get("GPU", 0.0) + 1e-6) // self.gpus if self.gpus else float("inf"),
                )
            )
            for node in nodes
        )


def actor_resources(
    nodes: list[dict[str, Any]], cpus_per_worker: int | None, workers_per_gpu: int, on_cpu: bool
) -> ActorResources:
    """Return the resources of an actor: by default a GPU with its share of the cores, or all cores of a node.

    Args:
        nodes: live nodes of the cluster, as `ray.nodes()` returns them.
        cpus_per_worker: number of cores; None: an equal share.
        workers_per_gpu: number of actors that share a GPU.
        on_cpu: whether to use no GPU.
    """
    with_gpu = [] if on_cpu else [node for node in nodes if node["Resources"].get("GPU", 0.0) >= 1]
    shares = [
        int(node["Resources"].get("CPU", 1.0) // (node["Resources"]["GPU"] * workers_per_gpu if with_gpu else 1))
        for node in with_gpu or nodes
        if node["Resources"].get("CPU", 0.0) >= 1
    ]
    cpus = cpus_per_worker or max(1, min(shares, default=1))
    return ActorResources(cpus, 1 / workers_per_gpu if with_gpu else 0.0)


class RayWorkers:
    """Workers as Ray actors, see `dispatch.Workers`; a context manager that ends them on exit.

    Args:
        address: address of the cluster; "auto": the cluster of this machine; "local": a cluster that is started here.
        start: returns the start function of an actor with these resources.
        cpus_per_worker: see `actor_resources`.
        workers_per_gpu: see `actor_resources`.
        on_cpu: see `actor_resources`.

    Raises:
        LayertapError: ray is not installed, or there is no cluster at the address.
    """

    def __init__(
        self,
        address: str,
        start: Callable[[ActorResources], Start],
        cpus_per_worker: int | None,
        workers_per_gpu: int,
        on_cpu: bool,
    ):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address != "local":  # Ray reads it when it is imported. By default, it tries 20 times, 40 s each
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
        self._ray = library("ray", "ray", "--engine ray")
        self._address, self._start = address, start
        self._asked = cpus_per_worker, workers_per_gpu, on_cpu
        self._actors: dict[int, _Actor] = {}
        self._count = self._deaths = 0
        self._looked = 0.0
        self._last_error = ""

    def __enter__(self) -> Self:
        if self._address.startswith("ray://"):
            raise InputError(
                f"--address {self._address}: not supported", hint="run on a machine of the cluster, with --address auto"
            )
        with contextlib.ExitStack() as at_the_end:
            self._ray_stream = at_the_end.enter_context(bar_protected())
            self._was_there = self._ray.is_initialized()
            if not self._was_there:
                self._connect()
            self._resources = actor_resources(self._nodes(), *self._asked)
            self._grow()
            self._at_the_end = at_the_end.pop_all()
        return self

    def _connect(self) -> None:
        """Connect to the cluster, or start one.

        Raises:
            LayertapError: there is no cluster at the address.
        """
        ray, address = self._ray, self._address
        try:
            if match := re.fullmatch(r"(?:\[(.+)\]|([^:/]+)):(\d{1,5})", address):
                host, port = match[1] or match[2], int(match[3])
                if host in ("localhost", "127.0.0.1", "::1"):  # Ray connects to an address that other nodes can reach
                    host = ray.util.get_node_ip_address()
                    address += f" (for Ray: {host}:{port})"
                print_line(f"connecting to the Ray cluster at {address}", err=True)
                # Ray itself would try for 40 s.
                socket.create_connection((host, port), _CONNECT_S).close()
            with contextlib.redirect_stderr(self._ray_stream):  # of its log
                ray.init(
                    address=self._address,
                    include_dashboard=False if self._address == "local" else None,
                    log_to_driver=False,
                    logging_level="error",
                    namespace="layertap",
                )
        except (OSError, OverflowError, ValueError, RuntimeError) as error:  # OverflowError: the port is above 65535
            raise LayertapError(
                f"no Ray cluster at {address}: {first_line(error).rstrip('.')}",
                hint="start a cluster (`ray start --head`), name its --address, or use --address local",
            ) from error

    def __exit__(self, *_: object) -> None:
        ray = self._ray
        with self._at_the_end:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                ending = [actor.handle.end.remote() for actor in self._actors.values() if actor.joined]
                ray.wait(ending, num_returns=len(ending), timeout=2 * _END_S) if ending else None
                for actor in self._actors.values():
                    ray.kill(actor.handle)
            if not self._was_there:
                ray.shutdown()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _grow(self) -> None:
        """Start an actor for each free place, and a waiting actor, which makes an autoscaling cluster grow."""
        self._looked = time.monotonic()
        count = self._resources.places(self._nodes()) + 1
        while len(self._actors) < count and self._deaths < _EARLY_DEATHS:
            self._start_actor()

    def _start_actor(self) -> None:
        options = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus, "max_concurrency": 4}
        actor_class = self._ray.remote(**options)(_Remote)
        handle = actor_class.remote(self._count, self._start(self._resources))
        self._actors[self._count] = _Actor(handle, handle.events.remote(_ANSWER_S))
        self._count += 1

    def events(self, timeout_s: float) -> list[Event]:
        """See `dispatch.Workers`."""
        ray = self._ray
        if time.monotonic() - self._looked > _LOOK_S:
            self._grow()
        if not self._actors:
            raise LayertapError(f"no worker can be started: {self._last_error}")
        by_answer = {actor.answer: number for number, actor in self._actors.items()}
        ready, _ = ray.wait(list(by_answer), num_returns=len(by_answer), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(by_answer), num_returns=1, timeout=timeout_s)
        events: list[Event] = []
        for answer in ready:
            events += self._read_events(by_answer[answer], answer)
        for number, actor in list(self._actors.items()):
            if actor.shards and time.monotonic() - actor.heard > _SILENT_S:
                events += self._replace(number, Left(number, f"sent no events for {_SILENT_S / 60:.0f} minutes"))
        return events

    def _read_events(self, number: int, answer: Any) -> list[Event]:
        actor = self._actors[number]
        try:
            events: list[Event] = self._ray.get(answer)
        except Exception as error:  # of Ray: the actor or its node has died
            return self._replace(number, Left(number, f"{type(error).__name__}: {first_line(error)}"))
        if events:
            actor.heard = time.monotonic()
        for place, event in enumerate(events):
            if isinstance(event, Left):
                return events[:place] + self._replace(number, event)
            if isinstance(event, Joined):
                actor.joined, self._deaths = True, 0
            if isinstance(event, Done | Failed):
                actor.shards.discard(event.shard)
        actor.answer = actor.handle.events.remote(_ANSWER_S)
        return events

    def _replace(self, number: int, event: Left) -> list[Event]:
        actor = self._actors.pop(number)
        self._ray.kill(actor.handle)
        self._last_error = event.why
        if not actor.joined:
            self._deaths += 1
        if self._deaths < _EARLY_DEATHS:
            self._start_actor()
        return [event]

    def coming(self) -> bool:
        """See `dispatch.Workers`; the actor that waits for a node does not count."""
        joined = sum(actor.joined for actor in self._actors.values())
        return joined < min(self._resources.places(self._nodes()), len(self._actors))

    def submit(self, worker: int, shard: int) -> None:
        """See `dispatch.Workers`."""
        actor = self._actors[worker]
        if not actor.shards:
            actor.heard = time.monotonic()
        actor.shards.add(shard)
        actor.handle.submit.remote(shard)

    def cancel(self, worker: int, shard: int) -> None:
        """See `dispatch.Workers`."""
        self._actors[worker].shards.discard(shard)
        self._actors[worker].handle.cancel.remote(shard)

    def retire(self, worker: int) -> None:
        """See `dispatch.Workers`. The actor keeps its place; otherwise another actor would start there."""
        for shard in list(self._actors[worker].shards):
            self.cancel(worker, shard)


class _Actor:
    """An actor, as seen by the driver."""

    def __init__(self, handle: Any, answer: Any):
        self.handle, self.answer = handle, answer  # the pending answer to `events`
        self.heard, self.joined = time.monotonic(), False
        self.shards: set[int] = set()


class _Remote:
    """A worker in a child process of the actor: it forks decoding processes, which Ray's own process would not survive.

    Its methods are called by several threads at once.
    """

    def __init__(self, number: int, start: Start):
        import ray

        threading.Thread(target=_exit_without, args=(os.getppid(),), daemon=True).start()
        self._node = ray.get_runtime_context().get_node_id()[:8]
        self._process = WorkerProcess(number, Slot(start))

    def submit(self, shard: int) -> None:
        """See `Worker`."""
        self._process.submit(shard)

    def cancel(self, shard: int) -> None:
        """See `Worker`."""
        self._process.cancel(shard)

    def end(self) -> None:
        """See `Worker`; return when the process has ended."""
        self._process.end()
        self._process.stop()

    def events(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait at most `timeout_s` for the first event."""
        events = self._process.events(timeout_s)
        return [
            replace(event, host=f"{event.host}/{self._node}") if isinstance(event, Joined) else event
            for event in events
        ]


def _exit_without(parent: int) -> None:
    """End this process when its parent process has ended.

    Ray lets actors live on when the process of their node (the raylet) is killed. The child process that holds the
    backbone ends when the pipe to the actor closes. The kernel's own signal (PR_SET_PDEATHSIG) does not serve here: it
    is sent when the thread that started the process ends, too.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_EVERY_S)
    os._exit(1)
