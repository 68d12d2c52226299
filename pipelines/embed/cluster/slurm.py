"""The sbatch file of a job: an array whose tasks build the shards of a data set."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from extract.errors import InputError
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.config import load_config
from pipelines.terminal.text_output import LAYERTAP, printable

__all__ = ["as_sbatch"]

_WARNED_S = 120  # before the time limit, for a task to finish its batch; SLURM may send the signal 60 s earlier


def as_sbatch(
    path: Path, tasks: int, gpus: int = 1, cpus: int = 8, time: str | None = None, partition: str | None = None
) -> str:
    """Return an sbatch file that runs `layertap embed --config PATH` as an array.

    Args:
        path: config file.
        tasks: number of tasks.
        gpus: GPUs per task; 0: none.
        cpus: cores per task.
        time: time limit of each task in SLURM's format, which sbatch checks; None: the partition's limit.
        partition: partition; None: the default partition.

    Raises:
        InputError: the configuration is wrong or cannot run as an array.
    """
    config = load_config(EmbedConfig, path, {})
    if config.engine == "ray" or config.shards_of:
        key = "engine: ray" if config.engine == "ray" else "shards_of"
        raise InputError(f"{path}: an array assigns the shards to its tasks", hint=f"remove {key}")
    name = re.sub(r"[^\w.-]", "-", config.folder.name, flags=re.ASCII)
    lines = [
        f"--job-name=layertap-{name}",
        f"--array=0-{tasks - 1}",
        "--ntasks=1",
        f"--cpus-per-task={cpus}",
        *([f"--gpus-per-task={gpus}"] if gpus else []),
        *([f"--time={time}"] if time else []),
        *([f"--partition={partition}"] if partition else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{_WARNED_S}",
        f"--output=layertap-{name}-%A_%a.log",
    ]
    device = "cpu" if not gpus else "all" if gpus > 1 else "cuda"
    command = shlex.join(["srun", *LAYERTAP, "embed", "--config", str(path.absolute()), "--device", device])
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in lines),
        "",
        "# To build missing shards, submit this file again. To see the progress:",
        f"#   layertap show {printable(shlex.quote(str(config.folder)))} --status",
        "set -euo pipefail",
        f"cd -- {shlex.quote(str(Path.cwd()))}",
        "code=0",
        f'{command} --shards-of "$SLURM_ARRAY_TASK_ID/{tasks}" \\',
        '    --scratch "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}" || code=$?',
        "# 143: stopped by SIGTERM. A task that reaches its time limit is queued again, a cancelled one is not.",
        'task="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        'if [ "$code" = 143 ] && [ "$(squeue --noheader --format=%T --jobs="$task")" = RUNNING ]; then',
        '    scontrol requeue "$task"',
        "fi",
        'exit "$code"',
    ]) + "\n"  # fmt: skip
