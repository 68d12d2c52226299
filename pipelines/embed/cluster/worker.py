"""A worker: builds lists of shards, and reports each event. It runs in a process of its own; see `processes.Child`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from extract.errors import LayertapError
from pipelines.embed.config import EmbedConfig

if TYPE_CHECKING:
    from extract.extraction.shard_maker import ShardMaker

__all__ = ["Done", "Embed", "Event", "Joined", "Left", "Message", "Rows", "Start"]


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
    """The worker has ended: why, and the error if layertap raised it on purpose."""

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
        threads: threads of the forward on a CPU; None: PyTorch's choice.
        cores: cores that the worker runs on; None: any.
        folder: folder that names of files are relative to; None: that of the process.
    """

    config: EmbedConfig
    scratch: Path | None = None
    threads: int | None = None
    cores: Sequence[int] | None = None
    folder: Path | None = None

    @contextlib.contextmanager
    def __call__(self, say: Callable[[str], None]) -> Iterator[ShardMaker]:
        """Context manager, see `Start`."""
        if self.cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        if self.folder is not None and self.folder.is_dir():
            os.chdir(self.folder)

        import torch

        from extract.extraction.shard_maker import ShardMaker
        from extract.store.places.destination import destination_of
        from pipelines.embed.job import describe_computation, plan_of
        from pipelines.terminal.backbone import backbone_of

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        backbone = backbone_of(self.config, say)
        plan = plan_of(self.config, backbone)
        with ShardMaker(
            plan,
            destination_of(self.config.place),
            self.scratch,
            lambda computation: say(describe_computation(computation, plan.settings.precision)),
            lambda note: say(f"note: {note}"),
        ) as maker:
            yield maker
