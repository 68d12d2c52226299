"""Workers that are Ray actors."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from extract import FeatureReader
from extract.store.verify import verify
from pipelines.cli import main
from pipelines.embed.cluster.launch import start_of_actor
from pipelines.embed.cluster.ray_actors import ActorResources, actor_resources
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.config import load_config
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
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "last.pth"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    shards = {"images": "shards-{0..9}.tar", "out": "out", "scratch": "scratch", "engine": "ray"}
    for spec, whole in [
        ("python/net.py:make", f"python/{tmp_path}/net.py:make"),
        ("hub/model:resnet", f"hub/{tmp_path}/model:resnet"),
        ("hub/owner/repository:resnet", "hub/owner/repository:resnet"),
        ("hf/model", f"hf/{tmp_path}/model"),
        ("timm/model", "timm/model"),
    ]:
        given = load_config(EmbedConfig, None, {**shards, "backbone": spec, "weights": "last.pth"})
        found = start_of_actor(given, ActorResources(4, 0)).config
        assert found.backbone == whole
        assert found.images == f"{tmp_path}/shards-{{0..9}}.tar"
        assert (found.out, found.weights) == (f"{tmp_path}/out", f"{tmp_path}/last.pth")
        assert start_of_actor(given, ActorResources(4, 0)).scratch == tmp_path / "scratch"


def test_a_cluster_that_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    words = ["embed", str(folder), "-o", str(tmp_path / "out"), "--engine", "ray", "--address", "127.0.0.1:1"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 1
    assert "no Ray cluster at '127.0.0.1:1'" in found.output
    assert "ray start --head" in found.output


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
