"""The whole path, against direct calls of the same model on the same files."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

from extract import FeatureReader, InputError, LayertapError, Status, extract_features, load_backbone
from extract.compute.backbone import Backbone
from extract.extraction import pipeline
from extract.extraction.pipeline import Summary, batches_of
from extract.extraction.plan import default_batch_size
from extract.extraction.run import extract, work_of
from extract.images import Batch, list_images, load_batches
from extract.store.format.dataset import DataSet
from extract.store.format.writer import ShardWriter
from extract.system.atomic_files import holder
from tests.conftest import make_picture
from tests.extract.compute.small_network import Job, small_network

LAYERS = ["layer1", "layer1.1:none", "layer1.1:max_map", "layer1.2:none", "layer2:none", "embedding"]


@pytest.fixture(scope="module")
def small() -> Backbone:
    return small_network()


def direct(
    model: nn.Module, images: Path, layers: dict[str, nn.Module], count: int | None = None
) -> dict[str, np.ndarray]:
    """Each layer's output for each of the first files: timm's own transform, batches of one, and a hook that clones."""
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: found[name].append(out[0].clone()))
        for name, module in layers.items()
    ]
    with torch.no_grad():
        for path in sorted(images.rglob("*.*"), key=lambda path: str(path).encode())[:count]:
            model(transform(Image.open(path).convert("RGB")).unsqueeze(0))
    for handle in handles:
        handle.remove()
    return {name: torch.stack(values).numpy() for name, values in found.items()}


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Whether every row lies within the tolerance of the expected row, relative to that row's norm."""
    found, expected = (x.reshape(len(x), -1).astype(np.float64) for x in (found, expected))
    return bool((np.linalg.norm(found - expected, axis=1) <= tolerance * np.linalg.norm(expected, axis=1)).all())


@pytest.mark.slow
def test_rows_of_many_layers_equal_direct_timm_calls_with_a_cloning_hook_on_the_same_files(
    photos: Path, tmp_path: Path
) -> None:
    backbone = load_backbone("bundled/efficientnet_lite0", device="cpu")
    model: Any = backbone.model
    modules = {"embedding": model.global_pool, "conv_stem": model.conv_stem, "classifier": model.classifier}
    modules |= {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    truth = direct(model, photos, modules, count=100)
    layers = ["embedding", "blocks.*", "conv_stem:none", "classifier"]
    with Job(photos, tmp_path, backbone).run(layers=layers, limit=100, batch_size=7, workers=2) as reader:
        files = sorted((str(path.relative_to(photos)) for path in photos.rglob("*.*")), key=str.encode)
        assert reader.paths == files[:100]
        assert reader.labels.tolist() == list(range(100))
        assert reader.layers == ["embedding", *(f"blocks.{i}" for i in range(7)), "conv_stem", "classifier"]
        assert reader["conv_stem"].shape == (100, 32, 112, 112)
        for layer in reader.layers:
            assert close(reader[layer][:], truth[layer].mean((2, 3)) if "blocks" in layer else truth[layer])
        # One photo of every fifth class in the order of the classes: 88.3 % were seen on 1,000 such photos.
        top1 = (reader["classifier"][:].argmax(1) == np.arange(100) * 5 + 2).mean()
        assert top1 > 0.83


def test_rows_of_generated_pictures_equal_a_direct_call_too(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    model: Any = backbone.model
    expected = direct(model, folder, {"layer2": model.layer2, "global_pool": model.global_pool})
    layers = ["layer2:none", "embedding"]
    with extract_features(
        folder, out=tmp_path / "out", backbone=backbone, layers=layers, batch_size=5, progress=False
    ) as reader:
        assert close(reader["layer2"][:], expected["layer2"])
        assert close(reader["embedding"][:], expected["global_pool"])


# One data set that several tests read


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures in three classes, which no test changes."""
    root = tmp_path_factory.mktemp("pictures")
    for i in range(12):
        path = root / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        make_picture(i, 40 + 5 * i, 70 - 3 * i).save(path)
    return root


@pytest.fixture
def job(pictures: Path, tmp_path: Path, small: Backbone) -> Job:
    """Runs over these pictures."""
    return Job(pictures, tmp_path, small)


@pytest.fixture
def own(folder: Path, tmp_path: Path, small: Backbone) -> Job:
    """Runs over pictures that the test changes."""
    return Job(folder, tmp_path, small)


@pytest.fixture(scope="module")
def whole(pictures: Path, small: Backbone, tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    return Job(pictures, tmp_path_factory.mktemp("whole"), small).run(layers=LAYERS, batch_size=4)


def test_kept_activations_are_those_before_the_inplace_relu(whole: FeatureReader) -> None:
    before, after = whole["layer1.1:none"][:], whole["layer1.2"][:]
    assert before.shape == (12, 8, 16, 16)
    assert before.min() < 0
    assert np.array_equal(np.maximum(before, 0), after)
    assert np.array_equal(before.max((2, 3)), whole["layer1.1:max_map"][:])


def test_results_do_not_depend_on_shards(job: Job, whole: FeatureReader) -> None:
    many = job.run("many", layers=LAYERS, batch_size=4, shard_rows=5)
    assert sorted(path.name for path in (job.root / "many" / "shards").glob("*.h5")) == [
        "000000.h5", "000001.h5", "000002.h5",
    ]  # fmt: skip
    assert whole.paths == many.paths
    assert whole.labels.tolist() == many.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for layer in whole.layers:
        assert close(many[layer][:], whole[layer][:])


def test_float16_is_float32_rounded(job: Job, whole: FeatureReader) -> None:
    half = job.run("16", layers=LAYERS, batch_size=4, dtype="float16")
    for layer in whole.layers:
        assert half[layer].dtype == np.float16
        assert np.array_equal(half[layer][:], whole[layer][:].astype(np.float16))


def test_provenance_says_what_the_numbers_come_from(whole: FeatureReader, small: Backbone) -> None:
    provenance = whole.provenance
    assert provenance["backbone"] == "test/small"
    assert provenance["weights"] == "random (seed 0)"
    assert provenance["depends_on"]["weights_sha256"] == small.weights.sha256
    assert provenance["depends_on"]["preprocessing"]["crop_px"] == [32, 32]
    assert provenance["versions"]["torch"] == torch.__version__.split("+")[0]


# Rows without features


def test_broken_files_are_rows_with_a_status_and_nan(own: Job) -> None:
    (own.images / "ant" / "00.png").write_bytes(b"")
    (own.images / "bee" / "01.jpg").write_bytes((own.images / "bee" / "01.jpg").read_bytes()[:-200])
    (own.images / "cat" / "gone.jpg").symlink_to(own.root / "nothing")
    reader = own.run("out", batch_size=5)
    expected = [Status.OK] * 13
    expected[0], expected[4], expected[12] = Status.DECODE_ERROR, Status.DECODE_ERROR, Status.MISSING
    assert reader.status.tolist() == expected
    bad = np.array(expected) != Status.OK
    assert np.isnan(reader["embedding"][bad]).all()
    assert np.isfinite(reader["embedding"][~bad]).all()
    assert [failure[:3] for failure in reader.failures] == [
        (0, "ant/00.png", "decode error"), (4, "bee/01.jpg", "decode error"), (12, "cat/gone.jpg", "missing"),
    ]  # fmt: skip
    assert reader.failures[0][3] == "empty file"
    for path in own.images.rglob("*.*"):  # nothing but broken files
        path.write_bytes(b"broken")
    reader = dataclasses.replace(own, images=own.images / "ant").run("failures")
    assert reader.status.tolist() == [Status.DECODE_ERROR] * 4
    assert np.isnan(reader["embedding"][:]).all()


class Spiky(nn.Module):
    """Gives infinity for dark pictures and large numbers for others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        level = x.mean((1, 2, 3))
        return self.out(torch.where(level < -0.99, torch.inf, 1e5)[:, None].expand(-1, 4))


def test_values_that_are_not_finite_have_a_status(tmp_path: Path, small: Backbone) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "0.png")
    make_picture(1).save(tmp_path / "in" / "1.png")
    spiky = dataclasses.replace(small, model=Spiky(), classifier=None)
    job = Job(tmp_path / "in", tmp_path, spiky, {"layers": "out"})
    plain = job.run("a")
    assert plain.status.tolist() == [Status.NOT_FINITE, Status.OK]
    assert plain["out"][0].tolist() == [np.inf] * 4  # as computed
    half = job.run("b", dtype="float16")
    assert half.status.tolist() == [Status.NOT_FINITE] * 2
    assert "the largest float16 is 65504" in half.failures[1][3]


def test_the_model_is_handed_back_as_it_came(pictures: Path, tmp_path: Path, whole: FeatureReader) -> None:
    backbone = small_network()
    model: Any = backbone.model
    model.train()
    model.layer2.eval()
    model.conv1.requires_grad_(False)
    flags = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trained = Job(pictures, tmp_path, backbone).run(layers=LAYERS, batch_size=4)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert not any(p.requires_grad for p in model.conv1.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert np.array_equal(trained["embedding"][:], whole["embedding"][:])  # batch norm in eval mode both times


# A second run


def test_a_second_run_computes_nothing_and_takes_the_shards_as_they_are(job: Job) -> None:
    assert job.count(shard_rows=5) == 12
    before = {path: path.stat().st_mtime_ns for path in (job.root / "out").rglob("*.h5")}
    assert job.count() == 0
    assert {path: path.stat().st_mtime_ns for path in (job.root / "out").rglob("*.h5")} == before


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_stopped_goes_on_where_it_was(job: Job, after: int) -> None:
    options: dict[str, Any] = {"batch_size": 3, "shard_rows": 7, "layers": ["layer1", "embedding"]}
    batches = iter(range(1, 99))
    first = extract(job.plan(**options), stop=lambda: next(batches) == after)
    assert first.stopped
    with pytest.raises(LayertapError, match="unfinished|missing"):
        FeatureReader(job.root / "out")
    assert first.computed + job.count(**options) == 12
    expected = job.run("whole", **options)
    with FeatureReader(job.root / "out") as reader:
        assert reader.paths == expected.paths
        for layer in expected.layers:
            assert np.array_equal(reader[layer][:], expected[layer][:])


def test_rows_that_failed_are_tried_again_when_a_run_goes_on(own: Job) -> None:
    good = (own.images / "ant" / "00.png").read_bytes()
    (own.images / "ant" / "00.png").write_bytes(b"")
    planned = own.plan(batch_size=4)
    assert extract(planned, stop=lambda: True).status == {"decode error": 1, "ok": 3}
    (own.images / "ant" / "00.png").write_bytes(good)
    assert own.count(batch_size=4) == 9
    with FeatureReader(own.root / "out") as reader:
        assert reader.failures == []


def test_other_features_do_not_go_into_the_same_folder(job: Job) -> None:
    job.count()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"layers": ["layer1"]}, "features.embedding: stored .*, now nothing"),
        ({"dtype": "float16"}, "stored_as: stored float32, now float16"),
        ({"limit": 5}, "images.count: stored 12, now 5"),
        ({"shard_rows": 5}, "shard_rows: stored 12, now 5"),
    ]
    for change, message in changes:
        with pytest.raises(InputError, match=message):
            job.count(**change)
    with pytest.raises(InputError, match="weights_sha256: "):
        dataclasses.replace(job, backbone=small_network(seed=1)).count()
    with FeatureReader(job.root / "out") as reader:
        assert (reader.status == Status.OK).all()


def test_a_moved_folder_is_the_same_and_other_images_under_its_names_are_not(own: Job) -> None:
    extract(own.plan(batch_size=4), stop=lambda: True)
    moved = own.images.rename(own.root / "elsewhere")
    assert dataclasses.replace(own, images=moved).count(batch_size=4) == 8
    for i, path in enumerate(list_images(moved).paths):
        other = own.root / "others" / path
        other.parent.mkdir(parents=True, exist_ok=True)
        make_picture(100 + i).save(other)
    with pytest.raises(InputError, match="features of the images in .*pictures; those in .*others are others: ant/00"):
        dataclasses.replace(own, images=own.root / "others").count()


class KilledByTheSeventh:
    """A transform whose process is killed, as by the kernel when memory is short, once rows are stored."""

    def __init__(self, stored: Path) -> None:
        self.seen, self.stored = 0, stored

    def __call__(self, picture: Image.Image) -> Tensor:
        self.seen += 1
        if self.seen == 7:
            while not self.stored.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3, 32, 32)


def test_a_worker_that_dies_is_told_and_nothing_is_lost(job: Job) -> None:
    transform = KilledByTheSeventh(job.root / "stored")
    deadly = dataclasses.replace(
        job.backbone, preprocessing=dataclasses.replace(job.backbone.preprocessing, library_transform=transform)
    )
    planned = dataclasses.replace(job, backbone=deadly).plan(workers=1, batch_size=2)
    with pytest.raises(LayertapError, match="a process that decodes images died .*run again to resume"):
        extract(planned, on_rows=lambda rows, resumed: transform.stored.touch())
    with ShardWriter(DataSet.open(job.root / "out"), 0) as writer:
        assert 0 < (writer.status == Status.OK).sum() <= 6


@pytest.mark.slow
def test_memory_is_handled_as_before_once_a_run_is_over() -> None:
    """Page faults of work in tensors of 4 MB: none while memory is kept, and not more afterwards than before."""
    code = """
import resource, torch
from extract.system.torch_state import keeping_freed_memory
def faults():
    for _ in range(50): torch.ones(1 << 20).mul(2)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50): torch.ones(1 << 20).mul(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
before = faults()
with keeping_freed_memory():
    with keeping_freed_memory(): pass
    inside = faults()
print(before, inside, faults())
"""
    before, inside, after = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert inside <= 100
    assert after <= before + 100


def test_an_image_folder_that_vanishes_stops_the_run_and_fails_no_row(own: Job) -> None:
    planned = own.plan(batch_size=3)
    with pytest.raises(LayertapError, match="pictures has vanished"):
        extract(planned, stop=lambda: bool(own.images.exists() and own.images.rename(own.root / "away") and False))
    (own.root / "away").rename(own.images)
    assert own.count(batch_size=3) == 9
    with FeatureReader(own.root / "out") as reader:
        assert reader.failures == []


def test_every_run_is_told_of_when_it_starts_and_ends(job: Job) -> None:
    planned = job.plan(batch_size=4)
    extract(planned, stop=lambda: True)
    job.count(batch_size=4)
    job.count(batch_size=4)
    lines = [json.loads(line) for line in (job.root / "out" / "runs.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("rows", line.get("found_done"))) for line in lines] == [
        ("started", 0), ("computing", None), ("ended", 4), ("started", 4), ("computing", None), ("ended", 8),
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1])
def test_each_second_of_a_shard_counts_for_the_stage_that_takes_it(
    job: Job, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = job.plan(batch_size=4)
    planned.dataset.open_or_create()
    [work] = work_of(planned.dataset, planned.images.source, retry_failed=False)
    now = [0.0]

    def takes(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            now[0] += seconds
            return call(*args)

        return timed

    class MadeUp:
        """A forward of which a batch takes 20 s to start, and then 3 s to wait for."""

        is_validated, images_at_once = True, None

        def start(self, images: Tensor) -> Callable[[], dict[str, np.ndarray]]:
            now[0] += 20
            return lambda: self.waited(len(images))

        def waited(self, count: int) -> dict[str, np.ndarray]:
            now[0] += 3
            return {each.name: np.zeros((count, *each.shape), np.float32) for each in planned.dataset.features}

    forward: Any = MadeUp()
    forward.ahead, forward.chosen = ahead, forward
    batches = load_batches(planned.images, batches_of(work.rows, planned), planned.decoding)
    decoded = iter(takes(100, lambda: next(batches, None)), None)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(ShardWriter, "write", takes(1000, ShardWriter.write))
    summary = Summary(n_rows=12)
    publish = pipeline.extract_shard(planned, work, decoded, forward, summary, stop=takes(0.5, lambda: False))
    # Three batches, and the end of the images.
    assert summary.stages == {"images": 400, "forward": 3 * (20 + 3), "write": 3 * 1000}
    assert summary.write_wait_s == 3 * 1000
    assert publish is not None
    publish()
    [receipt] = [json.loads(path.read_text()) for path in (job.root / "out").rglob("*.json") if "shards" in str(path)]
    assert receipt["made"]["stages"] == summary.stages
    assert receipt["made"]["seconds"] == 400 + 3 * (20 + 3) + 3 * 1000 + 3 * 0.5


def test_a_finished_shard_is_published_while_the_next_is_computed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    next_is_computed, publish = threading.Event(), ShardWriter.publish
    stored: list[int] = []

    def patiently(self: ShardWriter, *args: Any) -> Path:
        if self.first_row == 0:
            assert next_is_computed.wait(60)
            time.sleep(0.2)
        return publish(self, *args)

    def notice(rows: int, stored_earlier: bool) -> None:
        stored.append(rows)
        if sum(stored) >= 6:  # a shard of four rows, and the first batch of the next
            next_is_computed.set()

    monkeypatch.setattr(ShardWriter, "publish", patiently)
    planned = job.plan(batch_size=2, shard_rows=4)
    summary = extract(planned, on_rows=notice)
    assert summary.stages["write"] >= 0.15  # the run waited for it
    with FeatureReader(job.root / "out") as reader:
        assert (reader.status == Status.OK).tolist() == [True] * 12


def test_ctrl_c_while_a_publisher_starts_leaves_no_shard_that_is_published_without_the_lock(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, start = ShardWriter.publish, threading.Thread.start
    holders: list[str] = []
    publishers: list[threading.Thread] = []

    def slowly(self: ShardWriter, *args: Any) -> Path:
        time.sleep(0.1)
        holders.append(holder(job.root / "out"))
        return publish(self, *args)

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name.startswith("publisher"):
            publishers.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "publish", slowly)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(job.plan(batch_size=2, shard_rows=3))
    publishers[0].join(10)
    assert "" not in holders


def test_a_shard_that_cannot_be_published_ends_the_run_after_the_next_ones_are_published(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = ShardWriter.publish

    def fail_first(self: ShardWriter, *args: Any) -> Path:
        if self.first_row == 0:
            raise LayertapError("the disk is full")
        return publish(self, *args)

    planned = job.plan(batch_size=2, shard_rows=3)
    with monkeypatch.context() as patched:
        patched.setattr(ShardWriter, "publish", fail_first)
        with pytest.raises(LayertapError, match="the disk is full"):
            extract(planned)
    files = [(where.published, where.part) for where in planned.dataset.shard_files()]
    assert files[0] == (None, 0)
    assert (0, None) not in files[3:]  # the run has ended before
    # No file is left open, and no row is computed again.
    planned = job.plan(batch_size=2, shard_rows=3)
    assert extract(planned).computed == 12 - 3 - 3 * files.count((0, None))
    with FeatureReader(job.root / "out") as reader:
        assert (reader.status == Status.OK).tolist() == [True] * 12


def test_a_receipt_counts_the_wait_for_the_first_images_of_its_shard(job: Job) -> None:
    planned = job.plan(batch_size=4, shard_rows=8)

    def slowly(*args: Any) -> Generator[Batch, None, None]:
        for number, batch in enumerate(load_batches(*args)):
            if number in (0, 2):  # the first of a shard
                assert not planned.dataset.path(number // 2, part=True).exists()
                time.sleep(0.05)
            yield batch

    summary = extract(planned, load=slowly)
    made = [json.loads((job.root / "out" / "shards" / f"00000{shard}.json").read_text())["made"] for shard in (0, 1)]
    assert all(0.05 <= each["stages"]["images"] <= each["seconds"] for each in made)
    assert sum(each["stages"]["images"] for each in made) == pytest.approx(summary.stages["images"], abs=0.002)


def test_too_little_space_is_told_before_any_image_is_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(LayertapError, match="MB, 0.0 MB are free on the disk"):
        job.count()


def test_numbers_below_their_least_or_not_whole_are_refused(job: Job) -> None:
    for name in ("batch_size", "workers", "limit", "shard_rows"):
        for value, message in ((-1, f"{name} is -1"), (3.0, f"{name} is 3.0; expected a whole number")):
            with pytest.raises(InputError, match=message):
                job.plan(**{name: value})


def test_where_the_memory_is_short_batches_are_halved_and_no_row_is_lost(job: Job, whole: FeatureReader) -> None:
    sizes: list[int] = []

    def short_of_memory(module: Any, args: Any) -> None:
        sizes.append(len(args[0]))
        if len(args[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    planned = job.plan(batch_size=11)
    with job.backbone.model.register_forward_pre_hook(short_of_memory):
        summary = extract(planned)
    assert sizes == [11, 6, 3, 3, 3, 2, *[1] * 4, 1]  # four pictures of the first batch are computed alone, too
    assert summary.images_at_once == 3
    assert dict(summary.status) == {"ok": 12}
    found, expected = FeatureReader(job.root / "out")["embedding"][:], whole["embedding"][:]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_where_not_even_one_image_fits_the_run_ends(job: Job) -> None:
    def no_memory(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    planned = job.plan()
    with (
        job.backbone.model.register_forward_pre_hook(no_memory),
        pytest.raises(LayertapError, match="insufficient device memory for one image: CUDA out of memory"),
    ):
        extract(planned)


def extracted(images: Path, out: Path) -> list[str]:
    """Extract features in a process that may start none; what it was warned of."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extract_features(images, out=out, backbone=small_network(), workers=2, progress=False).close()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("start", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "loky"))])
def test_a_worker_of_a_pool_decodes_itself_and_says_so(
    pictures: Path, tmp_path: Path, whole: FeatureReader, start: str
) -> None:
    if start == "loky":
        joblib: Any = pytest.importorskip("joblib")
        [notes] = joblib.Parallel(n_jobs=2)([joblib.delayed(extracted)(pictures, tmp_path / "out")])
        joblib.externals.loky.get_reusable_executor().shutdown()
    else:
        with multiprocessing.get_context(start).Pool(1) as pool:
            notes = pool.apply_async(extracted, (pictures, tmp_path / "out")).get(timeout=120)
    assert len(notes) == 1
    assert "decodes the images itself, without 2 worker processes" in notes[0]
    assert close(FeatureReader(tmp_path / "out")["embedding"][:], whole["embedding"][:])


def test_a_shard_whose_rows_are_all_stored_is_published_by_the_next_run(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LayertapError("killed")

    with monkeypatch.context() as patched, pytest.raises(LayertapError, match="killed"):
        patched.setattr(ShardWriter, "publish", fail)
        job.run("out")
    assert [path.suffix for path in (job.root / "out" / "shards").iterdir()] == [".part"]
    with job.run("out") as reader:
        assert len(reader) == 12
        assert np.isfinite(reader["embedding"][:]).all()


def test_where_no_image_can_be_read_no_file_of_a_shard_is_made(own: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = own.plan()
    monkeypatch.setattr(pipeline, "open_part", lambda *_: pytest.fail("a file is made"))
    shutil.rmtree(own.images)
    with pytest.raises(LayertapError):
        extract(planned)
    assert list((own.root / "out" / "shards").iterdir()) == []


def test_the_default_batch_is_larger_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, gigabytes, expected in (("cpu", 0, 64), ("cuda", 8, 64), ("cuda", 80, 256)):
        properties = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        assert default_batch_size(torch.device(device)) == expected
