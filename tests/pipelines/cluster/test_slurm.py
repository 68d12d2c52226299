"""The sbatch file, run as SLURM would run it, and what `status` tells meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from extract import FeatureReader
from tests.pipelines.test_cli import layertap

SMALL = {"backbone": "timm/test_resnet", "weights": "random", "shard_rows": 2, "workers": 0, "compile": "off"}


def write(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_file_has_what_slurm_needs(folder: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "photos.yaml", images=str(folder), out=str(tmp_path / "out dir"), **SMALL)
    options = ["--gpus", 4, "--time", "04:00:00", "--partition", "gpu"]
    text = layertap("embed", "--config", config, "--slurm", 16, *options).stdout
    for earlier in (["slurm", config, "--tasks", 16, *options], ["slurm", "--tasks", 16, *options, config]):
        assert layertap(*earlier).stdout == text
    told = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"array=0-15", "gpus-per-task=4", "time=04:00:00", "partition=gpu", "requeue"} <= set(told)
    assert "--device all" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize(("key", "value"), [("engine", "ray"), ("shards_of", "0/2")])
def test_what_an_array_cannot_run_is_refused(folder: Path, tmp_path: Path, key: str, value: str) -> None:
    config = write(tmp_path / "photos.yaml", images=str(folder), **SMALL, **{key: value})
    found = layertap("slurm", config, "--tasks", 2)
    assert found.exit_code == 2
    assert f"an array assigns the shards to its tasks\n\nhint: remove {key}" in found.output


@pytest.mark.parametrize(("code", "state", "requeued"), [
    (143, "RUNNING", True), (143, "COMPLETING", False), (143, "", False), (1, "RUNNING", False), (0, "RUNNING", False),
])  # fmt: skip
def test_a_task_that_reaches_its_time_limit_is_queued_again_and_a_cancelled_one_is_not(
    folder: Path, tmp_path: Path, code: int, state: str, requeued: bool
) -> None:
    config = write(tmp_path / "photos.yaml", images=str(folder), **SMALL)
    script = layertap("slurm", config, "--tasks", 2, "--gpus", 0).stdout
    commands = {
        "srun": f"exit {code}",
        "squeue": f'[ "$3" = --jobs=77_1 ] && echo {state}',
        "scontrol": f'echo "$@" > {tmp_path}/called',
    }
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77"}
    assert subprocess.run(["bash"], input=script, text=True, env=environment).returncode == code
    called = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
    assert called == ("requeue 77_1\n" if requeued else "")


@pytest.mark.slow
def test_its_tasks_make_the_data_set_and_status_sees_it_from_the_receipts(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "it's $HOME; out"
    config = write(tmp_path / "photos.yaml", images=str(folder), out=str(out), **SMALL)
    script = tmp_path / "photos.sbatch"
    script.write_text(layertap("slurm", config, "--tasks", 2, "--gpus", 0, "--cpus", 1).stdout)
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    scratch = tmp_path / "scratch"
    path = f"{tmp_path}:/usr/bin:/bin"  # no environment is activated
    for task, done in (("1", 6), ("0", 12), ("1", 12)):
        environment = {**os.environ, "PATH": path, "SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_JOB_ID": "77"}
        environment["SLURM_TMPDIR"] = str(scratch)
        ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        told = json.loads(layertap("status", out, "--json").stdout)
        assert (told["rows_done"], told["shards_done"]) == (done, done // 2)
        assert told["status"] == {"ok": done}
        assert sum(one["rows"] for one in told["workers"]) == done
    assert "no shard of 1/2 is missing; nothing to do" in ended.stdout
    assert "complete" in layertap("status", out).stdout
    assert list(scratch.iterdir()) == []
    with FeatureReader(out) as reader:
        assert len(reader) == 12
