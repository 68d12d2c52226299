"""The printed sbatch file on a real SLURM, which is started here: `apt-get install slurm-wlm`, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extract import FeatureReader
from extract.store.verify import verify
from tests.pipelines.cluster.test_slurm import write
from tests.pipelines.test_cli import layertap

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("slurmctld") is None or os.geteuid() != 0, reason="needs slurm-wlm, and root"),
]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
# Two images take two seconds, so that a task with 200 images does not end within its time limit of five minutes.
BACKBONE = """
import time
import torch
from torchvision.transforms.v2 import Compose, Resize, ToDtype, ToImage

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 5)
        self.last = torch.nn.Identity()

    def forward(self, x):
        if len(x) == 2:
            time.sleep(2)
        return self.last(self.head(x.mean((2, 3))))

def slow():
    torch.manual_seed(0)
    return Slow(), Compose([ToImage(), Resize((32, 32)), ToDtype(torch.float32, scale=True)])
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of one node with two cores: this machine."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname().split(".")[0]))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = []
    try:
        for command in (
            ["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *files],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-c"],
        ):
            daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(2)
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], timeout=60)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)


def submit(config: Path, folder: Path) -> str:
    """Submit an array of two tasks from a shell without an environment; return the job's number."""
    script = folder / "job.sbatch"
    words = ["--slurm", 2, "--gpus", 0, "--cpus", 1, "--time", "00:05:00"]
    script.write_text(layertap("slurm", config, *words).stdout)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "SLURM_CONF": os.environ["SLURM_CONF"]}
    printed = subprocess.check_output(
        ["sbatch", "--export=NONE", "--parsable", script], text=True, cwd=folder, env=environment
    )
    return printed.strip()


def states(job: str) -> list[str]:
    """Return the state of each task of a job that has not ended."""
    printed = subprocess.check_output(["squeue", "--array", "--noheader", "--format=%T", f"--jobs={job}"], text=True)
    return printed.split()


def job_of(tmp_path: Path) -> tuple[Path, Path]:
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    for number in range(400):
        Image.fromarray(np.full((32, 32, 3), number % 256, np.uint8)).save(images / f"{number:03d}.png")
    (tmp_path / "slow.py").write_text(BACKBONE)
    config = write(
        tmp_path / "job.yaml", images=str(images), out=str(out), backbone=f"python/{tmp_path}/slow.py:slow",
        layers=["last"], shard_rows=20, batch_size=2, workers=0, compile="off",
    )  # fmt: skip
    return config, out


@pytest.mark.usefixtures("cluster")
def test_tasks_that_reach_their_time_limit_are_queued_again_until_the_data_set_is_complete(tmp_path: Path) -> None:
    config, out = job_of(tmp_path)
    job = submit(config, tmp_path)
    end = time.monotonic() + 1200
    while states(job):
        assert time.monotonic() < end
        time.sleep(5)
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert len(logs) == 2
    assert all("To resume" in log for log in logs)  # each was stopped once at least
    assert verify(out).faults == []
    with FeatureReader(out) as reader:
        assert len(reader) == 400
        assert (reader.status == 1).all()
