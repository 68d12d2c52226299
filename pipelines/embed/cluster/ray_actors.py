"""Workers that are actors on a Ray cluster: one or more per accelerator, and more when a node joins.

An actor and not a task for each shard: loading PyTorch and a backbone takes 4 to 10 s of CPU time, and Ray starts a new
process for each task that uses a GPU. Ray places actors, and tells when they have died. It does not restart them: with
`max_restarts`, the restarted actor answers the call that was pending, and nobody hears of the death, which counts as an
attempt at a shard. Images and features never pass through Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import library
from pipelines.embed.cluster.processes import Child, exit_with_parent
from pipelines.embed.cluster.worker import Event, Left, Start
from pipelines.terminal.text_output import print_line

__all__ = ["ActorResources", "RayWorkers", "actor_resources"]

_LOOK_S = 10.0  # interval of checks for new nodes
_CONNECT_S = 10.0


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
        cpus = [node["Resources"].get("CPU", 0.0) // self.cpus for node in nodes]
        gpus = [
            (node["Resources"].get("GPU", 0.0) + 1e-6) // self.gpus if self.gpus else float("inf") for node in nodes
        ]
        return int(sum(map(min, cpus, gpus)))


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
    """Workers as Ray actors, used like `Processes`; a context manager that ends them on exit.

    Args:
        address: address of the cluster; "auto": the cluster of this machine; "local": a cluster that is started here.
        start: returns the start function of an actor with these resources.
        asked: cpus_per_worker, workers_per_gpu and on_cpu; see `actor_resources`.

    Raises:
        LayertapError: ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str, start: Callable[[ActorResources], Start], asked: tuple[int | None, int, bool]):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address != "local":  # Ray reads it when it is imported. By default, it tries to connect 20 times, 40 s each
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
        self._ray = library("ray", "ray", "--engine ray")
        self._address, self._start, self._asked = address, start, asked
        self._actors: dict[int, tuple[Any, Any]] = {}  # worker -> the actor, and its events
        self._lost_places = 0
        self._count = 0

    def __enter__(self) -> Self:
        if self._address.startswith("ray://"):
            raise InputError(
                f"--address {self._address}: not supported", hint="run on a machine of the cluster, with --address auto"
            )
        with contextlib.ExitStack() as at_the_end:
            # Ray prints errors of the cluster on stdout, which would spoil --json.
            at_the_end.enter_context(contextlib.redirect_stdout(sys.stderr))
            if not self._ray.is_initialized():
                self._connect()
                at_the_end.callback(self._ray.shutdown)
            self._resources = actor_resources(self._nodes(), *self._asked)
            self._grow()
            if not self.size:
                needed = f"{self._resources.cpus} cores and {self._resources.gpus:g} GPUs"
                print_line(f"no node has {needed} for a worker; waiting for a node that joins", err=True)
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
        with self._at_the_end, contextlib.suppress(Exception):  # the cluster itself may be gone
            for actor, _events in self._actors.values():
                self._ray.kill(actor)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _grow(self) -> None:
        """Start an actor for each free place, and a waiting actor, which makes an autoscaling cluster grow."""
        self._looked, self.size = time.monotonic(), self._resources.places(self._nodes())
        while len(self._actors) + self._lost_places < self.size + 1:
            options = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus, "max_concurrency": 2}
            actor = self._ray.remote(**options)(_Remote).remote(self._start(self._resources))
            self._actors[self._count] = actor, actor.events.options(num_returns="streaming").remote()
            self._count += 1

    def events(self, timeout_s: float) -> list[tuple[int, Event]]:
        """See `Processes`."""
        if time.monotonic() - self._looked > _LOOK_S:
            self._grow()
        streams = [stream for _, stream in self._actors.values()]
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(streams, num_returns=1, timeout=timeout_s)
        return [(worker, self._event(stream)) for worker, (_, stream) in self._actors.items() if stream in ready]

    def _event(self, stream: Iterator[Any]) -> Event:
        try:
            event: Event = self._ray.get(next(stream))
        except Exception as error:  # of Ray: the actor or its node has died
            return Left(f"{type(error).__name__}: {first_line(error)}")
        return event

    def submit(self, worker: int, shards: Sequence[int]) -> None:
        """See `Processes`."""
        self._actors[worker][0].submit.remote(shards)

    def replace(self, worker: int, *, start_another: bool) -> None:
        """See `Processes`. Ray chooses the node of the other actor."""
        self._ray.kill(self._actors.pop(worker)[0])
        self._lost_places += not start_another
        self._grow()


class _Remote:
    """A worker in a child process of the actor.

    Processes that decode images are forked, which is not safe beside Ray's threads; and a crash of the worker leaves an
    actor that reports the reason.
    """

    def __init__(self, start: Start):
        exit_with_parent()  # Ray lets actors live on when the process of their node, the raylet, is killed
        self._child = Child(start)

    def submit(self, shards: Sequence[int]) -> None:
        """See `Child`."""
        self._child.submit(shards)

    def events(self) -> Iterator[Event]:
        """Yield the events of the worker until it ends."""
        event: Event | None = None
        while not isinstance(event, Left):
            for event in self._child.events(1.0):
                yield event
