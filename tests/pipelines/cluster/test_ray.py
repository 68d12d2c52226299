"""Workers that are Ray actors."""

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
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from extract import FeatureReader
from extract.store.verify import verify
from pipelines.cli import main
from pipelines.embed.cluster import ray_actors
from pipelines.embed.cluster.launch import start_of_actor
from pipelines.embed.cluster.ray_actors import ActorResources, RayWorkers, actor_resources
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.config import load_config
from tests.conftest import make_picture
from tests.pipelines.cluster import faults


def node(cpus: float, gpus: float = 0) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


@pytest.mark.parametrize(("nodes", "asked", "cpus", "gpus", "places"), [
    ([node(8)], (None, 1, False), 8, 0, 1),  # all cores of a node
    ([node(8), node(4)], (None, 1, False), 4, 0, 3),
    ([node(8)], (2, 1, False), 2, 0, 4),
    ([node(16, 4)], (None, 1, False), 4, 1, 4),  # a GPU with its share of the cores
    ([node(16, 4)], (None, 2, False), 2, 0.5, 8),
    ([node(16, 4), node(0), node(64)], (None, 1, False), 4, 1, 4),  # nodes without a GPU are not asked
    ([node(16, 4)], (None, 1, True), 16, 0, 1),
    ([node(2, 4)], (None, 1, False), 1, 1, 2),  # fewer cores than GPUs
    ([node(16, 3)], (None, 3, False), 1, 1 / 3, 9),
    ([], (None, 1, False), 1, 0, 0),
])  # fmt: skip
def test_what_an_actor_takes_of_a_node(
    nodes: list[dict[str, Any]], asked: tuple[Any, ...], cpus: int, gpus: float, places: int
) -> None:
    found = actor_resources(nodes, *asked)
    assert (found.cpus, found.gpus, found.places(nodes)) == (cpus, pytest.approx(gpus), places)


def test_an_actor_finds_what_is_named_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    start = start_of_actor(given, ActorResources(1, 0))
    monkeypatch.chdir(there)
    with start(lambda text: None) as maker:
        assert [shard for shard, receipt in maker.build([0]) if receipt] == [0]
    assert list(there.iterdir()) == []
    with FeatureReader(here / "out") as reader:
        assert reader.provenance["backbone"] == f"python/{here}/net.py:make"


def test_images_and_out_are_found_on_a_machine_without_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shards = {"images": "shards-{0..9}.tar", "out": "out", "scratch": "scratch", "engine": "ray"}
    start = start_of_actor(load_config(EmbedConfig, None, shards), ActorResources(4, 0))
    assert start.config.images == f"{tmp_path}/shards-{{0..9}}.tar"
    assert (start.config.out, start.scratch) == (f"{tmp_path}/out", tmp_path / "scratch")


def test_a_cluster_without_room_for_a_worker_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = mock.MagicMock(nodes=lambda: [node(4)])
    monkeypatch.setattr(ray_actors, "library", lambda *names: ray)
    for cores, text in ((4, ""), (5, "no node has 5 cores and 0 GPUs for a worker; waiting for a node that joins\n")):
        with RayWorkers("auto", mock.Mock(), (cores, 1, True)):
            assert capsys.readouterr().err == text


def test_a_cluster_that_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    words = ["embed", str(folder), "-o", str(tmp_path / "out"), "--engine", "ray", "--address", "127.0.0.1:1"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 1
    assert "no Ray cluster at 127.0.0.1:1 (for Ray: " in found.output
    assert "ray start --head" in found.output


def test_a_cluster_that_only_listens_on_the_loopback_address_is_refused_with_the_address_that_ray_uses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["embed", str(folder), "-o", str(tmp_path / "out"), "--engine", "ray", "--address", address]
        found = CliRunner().invoke(main, words)
    assert found.exit_code == 1
    wanted = f"{address} (for Ray: 127.0.0.2:{address.partition(':')[2]})"
    assert f"connecting to the Ray cluster at {wanted}" in found.stderr
    assert f"error: no Ray cluster at {wanted}: [Errno 111] Connection refused" in found.stderr


@pytest.mark.slow
def test_a_server_that_is_not_ray_and_never_answers_is_given_up_in_a_minute(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["embed", str(folder), "-o", str(tmp_path / "out"), "--engine", "ray", "--address", address]
        command = [sys.executable, "-m", "layertap", *words]
        begin = time.monotonic()
        run = subprocess.run(command, cwd=faults.ROOT, capture_output=True, text=True, timeout=100)
    print(f"{time.monotonic() - begin:.0f} s")
    assert run.returncode == 1
    assert run.stderr.startswith(f"connecting to the Ray cluster at {address} (for Ray: ")
    assert f"\nerror: no Ray cluster at {address} (for Ray: " in f"\n{run.stderr}"
    assert run.stdout == ""


def test_a_process_whose_parent_is_killed_ends() -> None:
    actor = "import time\nfrom pipelines.embed.cluster.processes import exit_with_parent as run\nprint(1, flush=True)\n"
    node = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {actor + 'run(); time.sleep(600)'!r}])\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", node], cwd=faults.ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert not select.select([process.stdout], [], [], 1.5)[0]  # it lives as long as its parent
        process.kill()
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.read() == b""  # all processes that had the pipe have ended


@pytest.mark.slow
def test_actors_and_workers_of_a_node_whose_raylet_is_killed_end(folder: Path, tmp_path: Path) -> None:
    with TemporaryDirectory() as short:
        scratch = Path(short)
        (scratch / "sitecustomize.py").write_text(faults._SITE.format(slow_s=0.5, hangs=""))
        environment = {"PYTHONPATH": f"{scratch}:{faults.ROOT}", "TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        with faults.cluster_of(1, environment) as (cluster, nodes):
            command = [
                sys.executable, "-m", "layertap", "embed", str(folder), "-o", str(tmp_path / "out"), "--shard-rows",
                "3", "--compile", "off", "--workers", "1", "--engine", "ray", "--address", cluster.address,
                "--device", "cpu", "--cpus-per-worker", "1",
            ]  # fmt: skip
            with subprocess.Popen(command, cwd=faults.ROOT, env={**os.environ, **environment}) as process:
                end = time.monotonic() + 180
                while not list(tmp_path.glob("out/shards/*.h5")):
                    assert time.monotonic() < end
                    assert process.poll() is None
                    time.sleep(0.1)
                raylet = nodes[0].all_processes["raylet"][0].process.pid
                (actor,) = (pid for pid in faults.actors() if parent_of(pid) == raylet)
                below = [pid for pid in descendants(actor) if memory_mb(pid) > 100]
                assert below  # the process with the backbone, and one that decodes
                os.kill(raylet, signal.SIGKILL)
                killed = time.monotonic()
                alive, ended = {actor, *below}, []
                while alive:
                    assert time.monotonic() < killed + 30, alive
                    time.sleep(0.1)
                    gone = {pid for pid in alive if not memory_mb(pid)}
                    ended += [round(time.monotonic() - killed, 1)] * len(gone)
                    alive -= gone
                print(f"processes ended after {ended} s")
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
    """Byte for byte from a process with one thread, as an actor here has; nearly from one with all cores."""
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
