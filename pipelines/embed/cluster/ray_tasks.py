"""Build shards as tasks on a Ray cluster, which places them on nodes, also on nodes that join.

A task builds one shard. Ray runs one task after another in the same process, which keeps the loaded backbone. Retries
are those of the driver: it counts the attempts at a shard, and names the reason of each. Images and features never pass
through Ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import library
from extract.system.urls import is_url
from pipelines.embed.cluster.processes import Done, Embed, Event, Failed, Start, Worker, exit_with_parent
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.text_output import print_line

__all__ = ["RayTasks", "ray_tasks_of", "resources_of", "start_of_task"]


class RayTasks:
    """Build shards as tasks.

    Args:
        ray: the module, connected to a cluster.
        resources: what a task takes: `num_cpus` and `num_gpus`.
        start: see `Worker`.
    """

    def __init__(self, ray: Any, resources: dict[str, float], start: Start):
        # max_calls: without it, Ray starts a new process, which loads the backbone, for each task that uses a GPU.
        remote = ray.remote(**resources, num_returns="streaming", max_calls=0, max_retries=0)
        self._ray, self._start, self._task = ray, start, remote(_build)
        self._running: dict[Any, int | None] = {}  # generator of events -> shard

    def submit(self, shard: int | None) -> None:
        """See `Processes`."""
        self._running[self._task.remote(self._start, shard)] = shard

    def events(self, timeout_s: float) -> Iterator[Event]:
        """See `Processes`."""
        ready, _ = self._ray.wait(list(self._running), timeout=timeout_s)
        for generator in ready:
            try:
                event = self._ray.get(next(generator))
            except Exception as error:  # of Ray: the process of the task or its node has died
                event = Failed(self._running[generator], f"{type(error).__name__}: {first_line(error)}")
            if isinstance(event, Done | Failed):
                del self._running[generator]
            yield event


_WORKERS: dict[str, Worker] = {}  # the worker of this process, under the GPUs that it may use


def _build(start: Start, shard: int | None) -> Iterator[Event]:
    """Build a shard in a child process, which the next tasks in this process use, too.

    Processes that decode images are forked, which is not safe beside Ray's threads; and a crash of the child leaves a
    task that reports the reason.
    """
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if gpus not in _WORKERS:
        exit_with_parent()  # Ray lets processes live on when the raylet of their node is killed
        while _WORKERS:  # Ray has given this process another GPU
            _WORKERS.popitem()[1].kill()
        _WORKERS[gpus] = Worker(start)
    worker, event = _WORKERS[gpus], None
    worker.begin(shard)
    while not isinstance(event, Done | Failed):
        event = worker.event()
        yield event


@contextlib.contextmanager
def ray_tasks_of(config: EmbedConfig) -> Iterator[RayTasks]:
    """Context manager: connect to the cluster of a configuration, or start one (`--address local`).

    At the end, Ray kills the processes of the tasks.

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
    with contextlib.redirect_stdout(sys.stderr):
        print_line(f"connecting to the Ray cluster at {config.address}", err=True)
        dashboard = False if config.address == "local" else None
        try:
            ray.init(config.address, include_dashboard=dashboard, log_to_driver=False, logging_level="error")
        except (OSError, ValueError, RuntimeError) as error:
            raise LayertapError(
                f"no Ray cluster at {config.address}: {first_line(error).rstrip('.')}",
                hint="start a cluster (`ray start --head`), name its --address, or use --address local",
            ) from error
        try:
            resources = resources_of(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            print_line(f"a worker takes {resources['num_cpus']} cores and {resources['num_gpus']:g} GPUs", err=True)
            yield RayTasks(ray, resources, start_of_task(config, resources))
        finally:
            ray.shutdown()


def resources_of(config: EmbedConfig, nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what a task takes: by default a GPU with its share of the cores, or all cores of the smallest node."""
    with_cpu = [node for node in nodes if node.get("CPU", 0) >= 1]
    with_gpu = [node for node in with_cpu if node.get("GPU", 0) >= 1 and config.device != "cpu"]
    shares = [node["CPU"] // (node["GPU"] * config.workers_per_gpu) for node in with_gpu]
    cores = config.cpus_per_worker or max(1, min(shares or [node["CPU"] for node in with_cpu], default=1))
    return {"num_cpus": int(cores), "num_gpus": 1 / config.workers_per_gpu if with_gpu else 0}


def start_of_task(config: EmbedConfig, resources: dict[str, float]) -> Embed:
    """Return the start function of tasks; images and OUT are found from any folder."""
    changes: dict[str, Any] = {"device": "auto" if resources["num_gpus"] else "cpu"}
    if not is_url(config.place):
        changes["out"] = str(config.folder.absolute())
    if not is_url(config.images):
        changes["images"] = str(Path(config.images).absolute())
    scratch = config.scratch and config.scratch.absolute()
    return Embed(config.model_copy(update=changes), scratch, int(resources["num_cpus"]))
