"""Shards that are built by tasks of Ray."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from extract import FeatureReader
from extract.store.verify import verify
from pipelines.embed.cluster.ray_tasks import resources_of, start_of_task
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.config import load_config
from tests.conftest import make_picture
from tests.pipelines.cluster import faults


def node(cpus: float, gpus: float = 0) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus}


@pytest.mark.parametrize(("nodes", "keys", "cpus", "gpus"), [
    ([node(8)], {}, 8, 0),  # all cores of a node
    ([node(8), node(4)], {}, 4, 0),
    ([node(8)], {"cpus_per_worker": 2}, 2, 0),
    ([node(16, 4)], {}, 4, 1),  # a GPU with its share of the cores
    ([node(16, 4)], {"workers_per_gpu": 2}, 2, 0.5),
    ([node(16, 4), node(0), node(64)], {}, 4, 1),  # nodes without a GPU are not asked
    ([node(16, 4)], {"device": "cpu"}, 16, 0),
    ([node(2, 4)], {}, 1, 1),  # fewer cores than GPUs
    ([node(16, 3)], {"workers_per_gpu": 3}, 1, 1 / 3),
    ([], {}, 1, 0),
])  # fmt: skip
def test_what_a_task_takes_of_a_node(
    nodes: list[dict[str, float]], keys: dict[str, Any], cpus: int, gpus: float
) -> None:
    config = load_config(EmbedConfig, None, {"images": "photos", "engine": "ray", **keys})
    assert resources_of(config, nodes) == {"num_cpus": cpus, "num_gpus": pytest.approx(gpus)}


def test_a_task_finds_what_is_named_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "net.py").write_text(
        "from torch import nn, ones\n"
        "def make():\n    return nn.Sequential(nn.Conv2d(3, 5, 1)), lambda picture: ones(3, 8, 8)\n"
    )
    (here / "images").mkdir()
    make_picture(0).save(here / "images" / "a.png")
    monkeypatch.chdir(here)
    given = load_config(EmbedConfig, None, {
        "images": "images", "out": "out", "scratch": "scratch", "engine": "ray", "backbone": "python/net.py:make",
        "layers": ["0:mean_map"], "compile": "off", "workers": 0,
    })  # fmt: skip
    start = start_of_task(given, {"num_cpus": 1, "num_gpus": 0})
    monkeypatch.chdir(there)
    with start(lambda text: None) as maker:
        assert maker.build(0)
    assert list(there.iterdir()) == []
    with FeatureReader(here / "out") as reader:
        assert reader.provenance["backbone"] == f"python/{here}/net.py:make"


def test_images_and_out_are_found_on_a_machine_without_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shards = {"images": "shards-{0..9}.tar", "out": "out", "scratch": "scratch", "engine": "ray"}
    start = start_of_task(load_config(EmbedConfig, None, shards), {"num_cpus": 4, "num_gpus": 0})
    assert start.config.images == f"{tmp_path}/shards-{{0..9}}.tar"
    assert (start.config.out, start.scratch) == (f"{tmp_path}/out", tmp_path / "scratch")


@pytest.mark.slow
def test_a_server_that_is_not_ray_and_never_answers_is_given_up_after_one_attempt(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["embed", str(folder), "-o", str(tmp_path / "out"), "--engine", "ray", "--address", address]
        command = [sys.executable, "-m", "layertap", *words]
        environment = {**os.environ, "RAY_py_gcs_connect_timeout_s": "4"}  # by default an attempt takes 40 s
        run = subprocess.run(command, cwd=faults.ROOT, env=environment, capture_output=True, text=True, timeout=75)
    assert run.returncode == 1
    assert run.stderr.startswith(f"connecting to the Ray cluster at {address}\n")
    assert f"\nerror: no Ray cluster at {address}: " in f"\n{run.stderr}"
    assert "ray start --head" in run.stderr
    assert run.stdout == ""


def test_a_process_whose_parent_is_killed_ends() -> None:
    child = (
        "import time\nfrom pipelines.embed.cluster import processes\nprocesses._PARENT_EVERY_S = 0.05\n"
        "print(1, flush=True)\nprocesses."
    )
    node = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child + 'exit_with_parent(); time.sleep(600)'!r}])\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", node], cwd=faults.ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert not select.select([process.stdout], [], [], 0.3)[0]  # it lives as long as its parent
        process.kill()
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.read() == b""  # all processes that had the pipe have ended


@pytest.mark.slow
def test_tasks_and_workers_of_a_node_whose_raylet_is_killed_end(folder: Path, tmp_path: Path) -> None:
    with TemporaryDirectory() as short:
        scratch = Path(short)
        (scratch / "sitecustomize.py").write_text(faults._SITE.format(slow_s=3, hangs=""))
        environment = {"PYTHONPATH": f"{scratch}:{faults.ROOT}", "TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        with faults.cluster_of(1, environment) as (cluster, nodes):
            command = [
                sys.executable, "-m", "layertap", "embed", str(folder), "-o", str(tmp_path / "out"), "-b",
                faults.BACKBONE, "--weights", "random", "--compile", "off", "--workers", "1", "--batch-size", "2",
                "--engine", "ray", "--address", cluster.address, "--device", "cpu", "--cpus-per-worker", "1",
            ]  # fmt: skip
            with subprocess.Popen(command, cwd=faults.ROOT, env={**os.environ, **environment}) as process:
                end = time.monotonic() + 180
                raylet, alive = nodes[0].all_processes["raylet"][0].process.pid, list[int]()
                while len(alive) < 3:  # the task, the process with the backbone, and one that decodes
                    assert time.monotonic() < end
                    assert process.poll() is None
                    time.sleep(0.1)
                    tasks = [pid for pid in faults.tasks() if parent_of(pid) == raylet]
                    alive = [pid for task in tasks for pid in (task, *descendants(task)) if memory_mb(pid) > 100]
                os.kill(raylet, signal.SIGKILL)
                end = time.monotonic() + 30
                while any(memory_mb(pid) for pid in alive):
                    assert time.monotonic() < end, alive
                    time.sleep(0.1)
                process.kill()


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def descendants(pid: int) -> list[int]:
    children = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(int(path.name)) == pid]
    return children + [other for child in children for other in descendants(child)]


def memory_mb(pid: int) -> float:
    """Resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int((re.findall(r"VmRSS:\s+(\d+)", status) or [0])[0]) / 1024
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(2, marks=pytest.mark.soak), 5])
def test_whatever_is_killed_each_row_is_there_once(seed: int, tmp_path: Path) -> None:
    """The first process; and it, a full disk and decoding that hangs."""
    faults.make_images(tmp_path / "images")
    with faults.expected_of(tmp_path / "images", tmp_path / "expected") as expected, TemporaryDirectory() as short:
        print(faults.run(seed, tmp_path / "images", expected, Path(short)))


@pytest.mark.soak
def test_forty_shards_of_photos_on_two_nodes_are_those_of_one_process(photos: Path, tmp_path: Path) -> None:
    """Byte for byte from a process with one thread, as a task here has; nearly from one with all cores."""
    originals = itertools.cycle(sorted(photos.rglob("*.JPEG")))
    for i, photo in enumerate(itertools.islice(originals, 4000)):
        path = tmp_path / "images" / f"class {i % 7}" / f"{i:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(photo)

    def embed(name: str, *words: str, cores: int | None = None) -> FeatureReader:
        command = [
            sys.executable, "-m", "layertap", "embed", str(tmp_path / "images"), "-o", str(tmp_path / name), "-b",
            "bundled/efficientnet_lite0", "--shard-rows", "100", "--compile", "off", "--device", "cpu", *words,
        ]  # fmt: skip
        mine = set(sorted(os.sched_getaffinity(0))[:cores])
        subprocess.run(command, cwd=faults.ROOT, check=True, preexec_fn=lambda: os.sched_setaffinity(0, mine))
        return FeatureReader(tmp_path / name)

    with (
        TemporaryDirectory() as short,
        faults.cluster_of(2, {"TMPDIR": short, "PYTHONPATH": str(faults.ROOT)}) as (
            cluster,
            _,
        ),
    ):
        found = embed("found", "--engine", "ray", "--address", cluster.address, "--cpus-per-worker", "1")
    assert verify(tmp_path / "found").faults == []
    assert len(list((tmp_path / "found" / "shards").glob("*.h5"))) == 40
    with found, embed("one core", cores=1) as one_core, embed("all cores") as all_cores:
        assert found.paths == one_core.paths == all_cores.paths == sorted(found.paths, key=os.fsencode)
        assert np.array_equal(found.labels, one_core.labels)
        assert np.bincount(found.labels).tolist() == [572, 572, 572, 571, 571, 571, 571]
        values, wanted = found["embedding"][:], all_cores["embedding"][:]
        assert np.array_equal(values, one_core["embedding"][:])
        assert np.abs(values - wanted).max() <= 1e-5 * np.abs(wanted).max()
        print(f"largest difference {np.abs(values - wanted).max():.1e} of {np.abs(wanted).max():.1f}")
