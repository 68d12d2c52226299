"""Configure the workers of `layertap embed`: processes of this machine, or actors on a Ray cluster."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract import defaults
from extract.errors import InputError
from extract.store.format.dataset import BUILDING
from extract.system.urls import is_url
from pipelines.embed.cluster.processes import Processes
from pipelines.embed.cluster.worker import Embed
from pipelines.embed.config import EmbedConfig

if TYPE_CHECKING:
    from pipelines.embed.cluster.ray_actors import ActorResources, RayWorkers

__all__ = ["engine_of", "start_of_actor"]


def engine_of(config: EmbedConfig) -> Processes | RayWorkers:
    """Return the workers that a configuration requests."""
    if config.engine == "ray":
        from pipelines.embed.cluster.ray_actors import RayWorkers

        start = partial(start_of_actor, config)
        asked = config.cpus_per_worker, config.workers_per_gpu, config.device == "cpu"
        return RayWorkers(config.address, start, asked)
    return Processes(_starts(config))


def start_of_actor(config: EmbedConfig, resources: ActorResources) -> Embed:
    """Return the start function of an actor, which Ray starts in another folder.

    Its machine may not have the folder of this process; then images and OUT are found all the same.
    """
    changes: dict[str, Any] = {"device": "auto" if resources.gpus else "cpu"}
    if not is_url(config.place):
        changes["out"] = str(config.folder.absolute())
    if not is_url(config.images):
        changes["images"] = str(Path(config.images).absolute())
    if "workers" not in config.model_fields_set:
        changes["workers"] = min(8, resources.cpus)
    scratch = config.scratch and config.scratch.absolute()
    threads = None if resources.gpus else resources.cpus
    return Embed(config.model_copy(update=changes), scratch, threads, folder=Path.cwd())


def _starts(config: EmbedConfig) -> list[Embed]:
    """Return the start functions of one or more workers per device, each with its own cores."""
    devices = _devices(config)
    cores = sorted(_cores())
    if config.cpus_per_worker is not None and config.cpus_per_worker > len(cores):
        raise InputError(f"cpus_per_worker is {config.cpus_per_worker}; this process may use {len(cores)} cores")
    if devices == ["cpu"]:
        devices *= max(1, len(cores) // (config.cpus_per_worker or len(cores)))
    else:
        devices = [device for device in devices for _ in range(config.workers_per_gpu)]
    cores_per_worker = config.cpus_per_worker or max(1, len(cores) // len(devices))
    has_own_folder = not config.shards_of and not is_url(config.place)
    scratch = config.scratch or (config.folder / BUILDING if has_own_folder else None)
    starts = []
    for number, device in enumerate(devices):
        places = range(number * cores_per_worker, number * cores_per_worker + min(cores_per_worker, len(cores)))
        worker_cores = [cores[place % len(cores)] for place in places]
        changes: dict[str, Any] = {"device": device}
        if "workers" not in config.model_fields_set:
            changes["workers"] = min(defaults.WORKERS, len(worker_cores))
        worker_config = config.model_copy(update=changes)
        starts.append(Embed(worker_config, scratch, len(worker_cores), worker_cores if len(devices) > 1 else None))
    return starts


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _devices(config: EmbedConfig) -> list[str]:
    if config.device != "all" and (config.device != "auto" or config.engine != "processes"):
        return [device.strip() for device in config.device.split(",")]
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
