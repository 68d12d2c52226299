"""Runs on a Ray cluster of several nodes on this machine, with faults at random moments in the middle of each.

    python -m tests.pipelines.cluster.faults 20

In each run some of these happen: the process of a task, a whole node, or the first process (which is then begun again)
is killed by SIGKILL; a node has a full disk; decoding hangs. One image is damaged in all of them. In the end each row
must be there once, equal to that of one process, and no file besides.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from extract import FeatureReader, extract_features, load_backbone
from extract.store.verify import verify
from tests.conftest import make_picture

IMAGES, SHARD_ROWS = 60, 3
FAULTS = ("task", "node", "first process", "full disk", "hang")
BACKBONE = "timm/test_resnet"
ROOT = Path(__file__).parents[3]

# Imported by every Python process that finds it, before anything else: reading an image takes a while, one hangs once.
_SITE = """
import importlib.util, os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "extract.images.loading":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def changed(module):
            execute(module)
            change(module)
        spec.loader.exec_module = changed
        return spec
def change(loading):
        from extract.images.sources import Files
        loading._GIVE_UP_S = 4
        read = Files.read
        def slowly(self, row):
            time.sleep({slow_s})
            if self._names[row].endswith("hangs.png") and os.path.exists({hangs!r}):
                os.unlink({hangs!r})
                time.sleep(3600)
            return read(self, row)
        Files.read = slowly
sys.meta_path.insert(0, Finder())
"""


def make_images(folder: Path) -> None:
    """Small pictures, one of them damaged."""
    for i in range(IMAGES - 2):
        path = folder / f"class {i % 3}" / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(i).save(path)
    make_picture(5000).save(folder / "class 1" / "hangs.png")
    (folder / "class 2" / "damaged.jpg").write_bytes(b"\xff\xd8\xff\xe0 no picture")


def expected_of(folder: Path, out: Path) -> FeatureReader:
    """What one process gives."""
    backbone = load_backbone(BACKBONE, weights="random", device="cpu")
    return extract_features(
        folder, out=out, backbone=backbone, shard_rows=SHARD_ROWS, workers=0, compile="off", progress=False
    )


@contextlib.contextmanager
def cluster_of(nodes: int, environment: dict[str, str]) -> Iterator[tuple[Any, list[Any]]]:
    """A Ray cluster, whose first node has no room for tasks."""
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 100 << 20}
    # By default, workers are nice (15): beside other tests, they would wait most of the time.
    environment = {"RAY_worker_niceness": "0", **environment}
    with mock.patch.dict(os.environ, environment), contextlib.ExitStack() as at_the_end:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
        at_the_end.callback(cluster.shutdown)
        yield cluster, [cluster.add_node(num_cpus=1, **size) for _ in range(nodes)]


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[bool]:
    """A file system on which nothing has room; False where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def tasks() -> list[int]:
    """Processes in which a task of layertap runs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::_build"):
                found.append(int(process.name))
    return found


def run(seed: int, folder: Path, expected: FeatureReader, scratch: Path) -> str:
    """One run with faults, with `scratch` for its files; returns what happened.

    Ray's sockets lie in `scratch`, and the path of a socket has at most 107 bytes: it must be short.

    Raises:
        AssertionError: the data set is not what it must be.
    """
    chance = random.Random(seed)
    faults = chance.sample(FAULTS, chance.randint(1, 3))
    if seed < len(FAULTS):
        faults = [FAULTS[seed]]
    out, temporary, site, hangs = (scratch / name for name in ("out", "tmp", "site", "hangs"))
    temporary.mkdir(parents=True)
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(slow_s=0.1, hangs=str(hangs)))
    if "hang" in faults:
        hangs.touch()
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "TMPDIR": str(temporary), "RAY_USAGE_STATS_ENABLED": "0"}
    happened = []
    with contextlib.ExitStack() as at_the_end:
        cluster, nodes = at_the_end.enter_context(cluster_of(2, environment))
        if "full disk" in faults:
            disk = scratch / "full"
            if at_the_end.enter_context(full_disk(disk)):
                cluster.add_node(num_cpus=1, object_store_memory=100 << 20, env_vars={"TMPDIR": str(disk)})
                happened.append("a node with a full disk")
        command = [
            sys.executable, "-m", "layertap", "embed", str(folder), "-o", str(out), "-b", BACKBONE, "--weights",
            "random", "--shard-rows", str(SHARD_ROWS), "--compile", "off", "--workers", "1", "--engine", "ray",
            "--address", cluster.address, "--device", "cpu", "--cpus-per-worker", "1",
        ]  # fmt: skip
        log = at_the_end.enter_context((scratch / "log").open("w+"))

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log)

        def done() -> int:
            return len(list(out.glob("shards/*.h5")))

        def wait_for(count: int) -> None:
            end = time.monotonic() + 180
            while done() < count and process.poll() is None:
                assert time.monotonic() < end, f"only {done()} shards"
                time.sleep(0.05)

        process = begin()
        for fault in sorted(faults, key="hang".__eq__):
            wait_for(min(done() + chance.randint(1, 4), IMAGES // SHARD_ROWS - 1))
            if fault == "task" and (alive := tasks()):
                os.kill(chance.choice(alive), signal.SIGKILL)
                happened.append(f"the process of a task killed at {done()} shards")
            elif fault == "node":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                happened.append(f"a node killed at {done()} shards")
                nodes.append(cluster.add_node(num_cpus=1, object_store_memory=100 << 20))
            elif fault == "first process":
                process.kill()
                process.wait()
                happened.append(f"the first process killed at {done()} shards")
                process = begin()
        code = process.wait(timeout=300)
        if "hang" in faults and not hangs.exists():
            happened.append("decoding hung")
        log.seek(0)
        told = log.read()
    assert code == 0, told
    check(out, expected, told)
    # The next run removes what is left here: the folder of a killed node, and a folder without shards of a task that
    # was starting when the run ended.
    left = sorted(str(path) for path in temporary.rglob("layertap-*") if any(path.rglob("*.h5*")))
    assert len(left) <= faults.count("node"), f"{left}\n{told}"
    return f"run {seed}: {', '.join(happened) or 'nothing happened'}; {re.findall(r'.* rows in .*', told)[-1]}"


def check(out: Path, expected: FeatureReader, told: str) -> None:
    """Whether each row is there once, with no file besides."""
    found = verify(out)
    assert not found.faults, found.faults
    with FeatureReader(out) as reader:
        assert reader.paths == expected.paths, told
        assert np.array_equal(reader.labels, expected.labels)
        assert np.array_equal(reader.status, expected.status)
        values, wanted = reader["embedding"][:], expected["embedding"][:]
        assert np.array_equal(np.isnan(values), np.isnan(wanted))
        assert np.nanmax(np.abs(values - wanted)) <= 1e-5 * np.nanmax(np.abs(wanted))
    shards = range(-(-IMAGES // SHARD_ROWS))
    names = {".lock", "dataset.json"} | {f"{n:06d}.{kind}" for n in shards for kind in ("h5", "json")}
    assert {path.name for path in out.rglob("*") if path.is_file()} == names


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as work:
        make_images(Path(work) / "images")
        with expected_of(Path(work) / "images", Path(work) / "expected") as expected:
            for seed in range(runs):
                print(run(seed, Path(work) / "images", expected, Path(work) / str(seed)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
