"""Workers that are actors on a Ray cluster: one or more per accelerator, and more when a node joins.

An actor and not a task for each shard: loading PyTorch and a backbone takes 4 to 10 s of CPU time, and Ray starts a new
process for each task that uses a GPU. Ray places actors, and tells when they have died. It does not restart them: with
`max_restarts`, the restarted actor answers the call that was pending, and nobody hears of the death, which counts as an
attempt at a shard. Images and features never pass through Ray.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import library
from extract.system.urls import is_url
from pipelines.embed.cluster.processes import Child, Embed, Event, Left, Start, exit_with_parent
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.text_output import print_line

__all__ = ["Actor", "actors_of", "places_of", "resources_of", "start_of_actor"]

_LOOK_S = 10.0  # interval of checks for new nodes


class Actor:
    """An actor, used like a `Child`; Ray chooses its node.

    Args:
        ray: the module, connected to a cluster.
        resources: what the actor takes: `num_cpus` and `num_gpus`.
        start: see `Child`.
    """

    def __init__(self, ray: Any, resources: dict[str, float], start: Start):
        self._ray, self._actor = ray, ray.remote(**resources, max_concurrency=2)(_Remote).remote(start)

    def submit(self, shards: Sequence[int]) -> None:
        """See `Child`."""
        self._actor.submit.remote(shards)

    def events(self) -> Iterator[Event]:
        """See `Child`."""
        try:
            for reference in self._actor.events.options(num_returns="streaming").remote():
                yield self._ray.get(reference)
        except Exception as error:  # of Ray: the actor or its node has died
            yield Left(f"{type(error).__name__}: {first_line(error)}")

    def kill(self) -> None:
        """See `Child`."""
        with contextlib.suppress(Exception):  # the cluster itself may be gone
            self._ray.kill(self._actor)


class _Remote:
    """A worker in a child process of the actor.

    Processes that decode images are forked, which is not safe beside Ray's threads; and a crash of the worker leaves an
    actor that reports the reason.
    """

    def __init__(self, start: Start):
        exit_with_parent()  # Ray lets actors live on when the process of their node, the raylet, is killed
        self._child = Child(start)

    def submit(self, shards: Sequence[int]) -> None:
        self._child.submit(shards)

    def events(self) -> Iterator[Event]:
        yield from self._child.events()


@contextlib.contextmanager
def actors_of(config: EmbedConfig) -> Iterator[Callable[[], list[Callable[[], Actor]]]]:
    """Context manager: connect to the cluster of a configuration, or start one (`--address local`).

    Yields:
        what returns the functions that start actors: one more than fit, which makes an autoscaling cluster grow.

    Raises:
        InputError: the address is that of a Ray client.
        LayertapError: ray is not installed, or there is no cluster at the address.
    """
    if config.address.startswith("ray://"):
        raise InputError(
            f"--address {config.address}: not supported", hint="run on a machine of the cluster, with --address auto"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.address != "local":
        # Ray reads it when it is imported. By default, it tries to connect 20 times, 40 s each.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    ray = library("ray", "ray", "--engine ray")
    # Ray prints errors of the cluster on stdout, which would spoil --json.
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as at_the_end:
        if not ray.is_initialized():
            print_line(f"connecting to the Ray cluster at {config.address}", err=True)
            try:
                ray.init(
                    address=config.address,
                    include_dashboard=False if config.address == "local" else None,
                    log_to_driver=False,
                    logging_level="error",
                    namespace="layertap",
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise LayertapError(
                    f"no Ray cluster at {config.address}: {first_line(error).rstrip('.')}",
                    hint="start a cluster (`ray start --head`), name its --address, or use --address local",
                ) from error
            at_the_end.callback(ray.shutdown)
        resources = resources_of(config, _nodes(ray))
        print_line(f"a worker takes {resources['num_cpus']} cores and {resources['num_gpus']:g} GPUs", err=True)
        start = partial(Actor, ray, resources, start_of_actor(config, resources))
        looked, places = -_LOOK_S, 0

        def starts() -> list[Callable[[], Actor]]:
            nonlocal looked, places
            if time.monotonic() - looked > _LOOK_S:
                looked, places = time.monotonic(), places_of(_nodes(ray), resources)
            return [start] * (places + 1)

        yield starts


def _nodes(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each live node."""
    return [{"CPU": 0.0, "GPU": 0.0} | node["Resources"] for node in ray.nodes() if node["Alive"]]


def resources_of(config: EmbedConfig, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what an actor takes: by default a GPU with its share of the cores, or all cores of the smallest node."""
    with_cpu = [node for node in nodes if node["CPU"] >= 1]
    with_gpu = [node for node in with_cpu if node["GPU"] >= 1 and config.device != "cpu"]
    shares = [node["CPU"] // (node["GPU"] * config.workers_per_gpu) for node in with_gpu]
    cores = config.cpus_per_worker or max(1, min(shares or [node["CPU"] for node in with_cpu], default=1))
    return {"num_cpus": int(cores), "num_gpus": 1 / config.workers_per_gpu if with_gpu else 0}


def places_of(nodes: Sequence[dict[str, float]], resources: dict[str, float]) -> int:
    """Return how many actors fit on these nodes."""
    cpus, gpus = resources["num_cpus"], resources["num_gpus"]
    fitting = [(node["CPU"] // cpus, (node["GPU"] + 1e-6) // gpus if gpus else math.inf) for node in nodes]
    return int(sum(map(min, fitting)))


def start_of_actor(config: EmbedConfig, resources: dict[str, float]) -> Embed:
    """Return the start function of an actor; images and OUT are found from any folder."""
    changes: dict[str, Any] = {"device": "auto" if resources["num_gpus"] else "cpu"}
    if not is_url(config.place):
        changes["out"] = str(config.folder.absolute())
    if not is_url(config.images):
        changes["images"] = str(Path(config.images).absolute())
    scratch = config.scratch and config.scratch.absolute()
    return Embed(config.model_copy(update=changes), scratch, int(resources["num_cpus"]))
