"""The whole path, against direct calls of the same model on the same files."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from extract import FeatureReader, InputError, LayertapError, Status, extract_features, load_backbone
from extract.compute.backbone import Backbone
from extract.extraction import pipeline
from extract.extraction.pipeline import Summary, batches_of
from extract.extraction.plan import default_batch_size
from extract.extraction.run import extract, work_of
from extract.images import Batch, Decoding, list_images, load_batches
from extract.store.format.dataset import DataSet
from extract.store.format.writer import ShardWriter
from extract.system.atomic_files import holder
from tests.conftest import TINY_INPUT, make_picture
from tests.planning import NET, plan


@pytest.fixture(scope="module")
def lite0() -> Backbone:
    return load_backbone("bundled/efficientnet_lite0", device="cpu")


@pytest.fixture(scope="module")
def small() -> Backbone:
    return load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)


def direct(model: nn.Module, images: Path, layers: dict[str, nn.Module]) -> dict[str, np.ndarray]:
    """Each layer's output for each file: timm's own transform, batches of one, and a hook that clones."""
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: found[name].append(out[0].clone()))
        for name, module in layers.items()
    ]
    with torch.no_grad():
        for path in sorted(images.rglob("*.*"), key=lambda path: str(path).encode()):
            model(transform(Image.open(path).convert("RGB")).unsqueeze(0))
    for handle in handles:
        handle.remove()
    return {name: torch.stack(values).numpy() for name, values in found.items()}


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Whether every row lies within the tolerance of the expected row, relative to that row's norm."""
    found, expected = (x.reshape(len(x), -1).astype(np.float64) for x in (found, expected))
    return bool((np.linalg.norm(found - expected, axis=1) <= tolerance * np.linalg.norm(expected, axis=1)).all())


@pytest.fixture(scope="module")
def truth(photos: Path, lite0: Backbone) -> dict[str, np.ndarray]:
    model = lite0.model
    layers = {"global_pool": model.global_pool, "conv_stem": model.conv_stem, "classifier": model.classifier}
    layers |= {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    return direct(model, photos, layers)


@pytest.mark.parametrize(
    ("batch_size", "workers"),
    [
        pytest.param(7, 0, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(64, 2, marks=pytest.mark.slow),
    ],
)
def test_every_row_equals_a_direct_timm_call_on_the_same_file(
    photos: Path, tmp_path: Path, lite0: Backbone, truth: dict[str, np.ndarray], batch_size: int, workers: int
) -> None:
    reader = extract_features(
        photos, out=tmp_path / "out", backbone=lite0, batch_size=batch_size, workers=workers, progress=False
    )
    files = sorted((str(path.relative_to(photos)) for path in photos.rglob("*.*")), key=str.encode)
    assert reader.paths == files
    assert reader.labels.tolist() == list(range(200))
    assert close(reader["embedding"][:], truth["global_pool"])


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_rows_of_generated_pictures_equal_a_direct_call_too(
    folder: Path, tmp_path: Path, lite0: Backbone, batch_size: int
) -> None:
    model = lite0.model
    expected = direct(model, folder, {"blocks.3": model.blocks[3], "global_pool": model.global_pool})
    options = {"layers": ["blocks.3:none", "embedding"], "batch_size": batch_size, "progress": False}
    with extract_features(folder, out=tmp_path / "out", backbone=lite0, **options) as reader:
        assert close(reader["blocks.3"][:], expected["blocks.3"])
        assert close(reader["embedding"][:], expected["global_pool"])


@pytest.mark.slow
def test_many_layers_in_one_pass_equal_a_direct_call_with_a_cloning_hook(
    photos: Path, tmp_path: Path, lite0: Backbone, truth: dict[str, np.ndarray]
) -> None:
    layers = ["blocks.*", "conv_stem:none", "global_pool", "classifier"]
    with extract_features(
        photos, out=tmp_path / "out", backbone=lite0, layers=layers, workers=0, progress=False
    ) as reader:
        assert reader.layers == [*(f"blocks.{i}" for i in range(7)), "conv_stem", "global_pool", "classifier"]
        for i in range(7):
            assert close(reader[f"blocks.{i}"][:], truth[f"blocks.{i}"].mean((2, 3)))
        for layer in ("conv_stem", "global_pool", "classifier"):
            assert close(reader[layer][:], truth[layer])
        assert reader["conv_stem"].shape == (200, 32, 112, 112)
        # One photo of every fifth class in the order of the classes: 88.3 % were seen on 1,000 such photos.
        top1 = (reader["classifier"][:].argmax(1) == np.arange(200) * 5 + 2).mean()
        assert top1 > 0.83


def test_kept_activations_are_those_before_the_inplace_relu(folder: Path, tmp_path: Path) -> None:
    squeezenet = load_backbone("torchvision/squeezenet1_1", weights="random", device="cpu")
    layers = ["features.0:none", "features.1:none"]
    with extract_features(
        folder, out=tmp_path / "s", backbone=squeezenet, layers=layers, limit=3, workers=0, progress=False
    ) as reader:
        before, after = reader["features.0"][:], reader["features.1"][:]
        assert before.shape == (3, 64, 111, 111)
        assert before.min() < 0
        assert np.array_equal(np.maximum(before, 0), after)


@pytest.mark.slow
def test_kept_activations_of_a_resnet_are_those_before_the_inplace_relu(folder: Path, tmp_path: Path) -> None:
    resnet = load_backbone("torchvision/resnet18", weights="random", device="cpu")
    layers = ["layer3:none", "bn1:max_map", "bn1:none"]
    with extract_features(
        folder, out=tmp_path / "r", backbone=resnet, layers=layers, limit=3, workers=0, progress=False
    ) as reader:
        assert reader["layer3"].shape == (3, 256, 14, 14)
        assert reader["bn1:none"][:].min() < 0
        assert np.array_equal(reader["bn1:none"][:].max((2, 3)), reader["bn1:max_map"][:])


def test_results_do_not_depend_on_shards(folder: Path, tmp_path: Path, small: Backbone) -> None:
    layers = ["layer1", "embedding", "layer2:none"]
    options = {"backbone": small, "layers": layers, "batch_size": 4, "workers": 0, "progress": False}
    one = extract_features(folder, out=tmp_path / "one", **options)
    many = extract_features(folder, out=tmp_path / "many", shard_rows=5, **options)
    assert sorted(path.name for path in (tmp_path / "many" / "shards").glob("*.h5")) == [
        "000000.h5", "000001.h5", "000002.h5",
    ]  # fmt: skip
    assert one.paths == many.paths
    assert one.labels.tolist() == many.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for layer in one.layers:
        assert close(many[layer][:], one[layer][:])


def test_plain_h5py_reads_what_was_written(folder: Path, tmp_path: Path, small: Backbone) -> None:
    extract_features(folder, out=tmp_path / "out", backbone=small, layers="layer4", workers=0, progress=False)
    with h5py.File(tmp_path / "out" / "shards" / "000000.h5") as file:
        assert file["features/layer4"].shape == (12, small.model.fc.in_features)
        assert file["features/layer4"].attrs["pooling"] == "mean_map"
        assert file["path"].asstr()[:].tolist() == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))
        assert [file["classes"].asstr()[i] for i in file["label"][:]] == ["ant"] * 4 + ["bee"] * 4 + ["cat"] * 4


def test_broken_files_are_rows_with_a_status_and_nan(folder: Path, tmp_path: Path, small: Backbone) -> None:
    (folder / "ant" / "00.png").write_bytes(b"")
    (folder / "bee" / "01.jpg").write_bytes((folder / "bee" / "01.jpg").read_bytes()[:-200])
    (folder / "cat" / "gone.jpg").symlink_to(tmp_path / "nothing")
    reader = extract_features(folder, out=tmp_path / "out", backbone=small, batch_size=5, workers=0, progress=False)
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


def test_a_folder_of_nothing_but_broken_files_is_a_data_set_of_failures(tmp_path: Path, small: Backbone) -> None:
    (tmp_path / "in").mkdir()
    for i in range(3):
        (tmp_path / "in" / f"{i}.jpg").write_bytes(b"broken")
    reader = extract_features(tmp_path / "in", out=tmp_path / "out", backbone=small, workers=0, progress=False)
    assert reader.status.tolist() == [Status.DECODE_ERROR] * 3
    assert np.isnan(reader["embedding"][:]).all()


class Spiky(nn.Module):
    """Gives infinity for dark pictures and large numbers for others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean((1, 2, 3))
        return self.out(torch.where(level < -0.99, torch.inf, 1e5)[:, None].expand(-1, 4))


def test_values_that_are_not_finite_have_a_status(tmp_path: Path, small: Backbone) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "0.png")
    make_picture(1).save(tmp_path / "in" / "1.png")
    spiky = Backbone(**{**small.__dict__, "model": Spiky(), "classifier": None})
    plain = extract_features(
        tmp_path / "in", out=tmp_path / "a", backbone=spiky, layers="out", workers=0, progress=False
    )
    assert plain.status.tolist() == [Status.NOT_FINITE, Status.OK]
    assert plain["out"][0].tolist() == [np.inf] * 4  # as computed
    half = extract_features(
        tmp_path / "in", out=tmp_path / "b", backbone=spiky, layers="out", dtype="float16", workers=0, progress=False
    )
    assert half.status.tolist() == [Status.NOT_FINITE] * 2
    assert "the largest float16 is 65504" in half.failures[1][3]


def test_float16_is_float32_rounded(folder: Path, tmp_path: Path, small: Backbone) -> None:
    options = {"backbone": small, "layers": ["layer1", "embedding"], "workers": 0, "progress": False}
    whole = extract_features(folder, out=tmp_path / "32", **options)
    half = extract_features(folder, out=tmp_path / "16", dtype="float16", **options)
    for layer in whole.layers:
        assert half[layer].dtype == np.float16
        assert np.array_equal(half[layer][:], whole[layer][:].astype(np.float16))


def test_the_model_is_handed_back_as_it_came(folder: Path, tmp_path: Path, small: Backbone) -> None:
    model = small.model
    model.train()
    model.layer2.eval()
    model.conv1.requires_grad_(False)
    flags = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        trained = extract_features(folder, out=tmp_path / "a", backbone=small, workers=0, progress=False)
        assert {name: module.training for name, module in model.named_modules()} == flags
        assert not any(p.requires_grad for p in model.conv1.parameters())
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    finally:
        model.eval()
        model.conv1.requires_grad_(True)
    frozen = extract_features(folder, out=tmp_path / "b", backbone=small, workers=0, progress=False)
    assert np.array_equal(trained["embedding"][:], frozen["embedding"][:])  # batch norm in eval mode both times


def test_provenance_says_what_the_numbers_come_from(folder: Path, tmp_path: Path, small: Backbone) -> None:
    provenance = extract_features(folder, out=tmp_path / "out", backbone=small, workers=0, progress=False).provenance
    assert provenance["backbone"] == "timm/test_resnet"
    assert provenance["weights"] == "random (seed 0)"
    assert provenance["depends_on"]["weights_sha256"] == small.weights.sha256
    assert provenance["depends_on"]["preprocessing"]["crop_px"] == [64, 64]
    assert provenance["versions"]["torch"] == torch.__version__.split("+")[0]


# A second run


def count_images(folder: Path, out: Path, backbone: Backbone, **options: object) -> int:
    return extract(plan(folder, out=out, backbone=backbone, workers=0, **options)).computed


def test_a_second_run_computes_nothing(folder: Path, tmp_path: Path, small: Backbone) -> None:
    assert count_images(folder, tmp_path / "out", small) == 12
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.h5")}
    assert count_images(folder, tmp_path / "out", small) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.h5")} == before


@pytest.mark.parametrize(
    "after", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_run_that_was_stopped_goes_on_where_it_was(folder: Path, tmp_path: Path, small: Backbone, after: int) -> None:
    options = {"batch_size": 3, "shard_rows": 7, "layers": ["layer1", "embedding"]}
    batches = iter(range(1, 99))
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, **options)
    first = extract(planned, stop=lambda: next(batches) == after)
    assert first.stopped
    with pytest.raises(LayertapError, match="unfinished|missing"):
        FeatureReader(tmp_path / "out")
    assert first.computed + count_images(folder, tmp_path / "out", small, **options) == 12
    whole = extract_features(folder, out=tmp_path / "whole", backbone=small, workers=0, progress=False, **options)
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.paths == whole.paths
        for layer in whole.layers:
            assert np.array_equal(reader[layer][:], whole[layer][:])


def test_rows_that_failed_are_tried_again_when_a_run_goes_on(folder: Path, tmp_path: Path, small: Backbone) -> None:
    good = (folder / "ant" / "00.png").read_bytes()
    (folder / "ant" / "00.png").write_bytes(b"")
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=4)
    assert extract(planned, stop=lambda: True).status == {"decode error": 1, "ok": 3}
    (folder / "ant" / "00.png").write_bytes(good)
    assert count_images(folder, tmp_path / "out", small, batch_size=4) == 9
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.failures == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ["layer1"]}, "features.embedding: stored .*, now nothing"),
        ({"dtype": "float16"}, "stored_as: stored float32, now float16"),
        ({"limit": 5}, "images.count: stored 12, now 5"),
        ({"shard_rows": 5}, "shard_rows: stored 12, now 5"),
    ],
)
def test_other_features_do_not_go_into_the_same_folder(
    folder: Path, tmp_path: Path, small: Backbone, change: dict[str, object], message: str
) -> None:
    count_images(folder, tmp_path / "out", small)
    with pytest.raises(InputError, match=message):
        count_images(folder, tmp_path / "out", small, **change)
    with FeatureReader(tmp_path / "out") as reader:
        assert (reader.status == Status.OK).all()


def test_other_weights_do_not_go_into_the_same_folder(folder: Path, tmp_path: Path, small: Backbone) -> None:
    count_images(folder, tmp_path / "out", small)
    other = load_backbone("timm/test_resnet", weights="random", seed=1, device="cpu", preprocessing=TINY_INPUT)
    with pytest.raises(InputError, match="weights_sha256: "):
        count_images(folder, tmp_path / "out", other)


def test_a_moved_folder_is_the_same_and_other_images_under_its_names_are_not(
    folder: Path, tmp_path: Path, small: Backbone
) -> None:
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=4)
    extract(planned, stop=lambda: True)
    moved = folder.rename(tmp_path / "elsewhere")
    assert count_images(moved, tmp_path / "out", small, batch_size=4) == 8
    for i, path in enumerate(list_images(moved).paths):
        other = tmp_path / "others" / path
        other.parent.mkdir(parents=True, exist_ok=True)
        make_picture(100 + i).save(other)
    with pytest.raises(InputError, match="features of the images in .*pictures; those in .*others are others: ant/00"):
        count_images(tmp_path / "others", tmp_path / "out", small)


def test_a_run_that_does_not_say_takes_the_shards_as_they_are(folder: Path, tmp_path: Path, small: Backbone) -> None:
    assert count_images(folder, tmp_path / "out", small, shard_rows=5) == 12
    assert count_images(folder, tmp_path / "out", small) == 0


def test_a_refused_folder_is_not_written_into(folder: Path, tmp_path: Path, small: Backbone) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty and not a layertap data set"):
        count_images(folder, tmp_path / "thesis", small)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]


def test_a_worker_that_dies_is_told_and_nothing_is_lost(folder: Path, tmp_path: Path, small: Backbone) -> None:
    preprocessing = dataclasses.replace(small.preprocessing, library_transform=KilledByTheSeventh())
    deadly = dataclasses.replace(small, preprocessing=preprocessing)
    with pytest.raises(LayertapError, match="a process that decodes images died .*run again to resume"):
        extract(plan(folder, out=tmp_path / "out", backbone=deadly, workers=1, batch_size=2))
    with ShardWriter(DataSet.open(tmp_path / "out"), 0) as writer:
        assert 0 < (writer.status == Status.OK).sum() <= 6


class KilledByTheSeventh:
    """A transform whose process is killed, as by the kernel when memory is short."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, picture: Image.Image) -> Tensor:
        self.seen += 1
        if self.seen == 7:
            time.sleep(1)  # for the batches before it to be stored
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3, 160, 160)


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


def test_an_image_folder_that_vanishes_stops_the_run_and_fails_no_row(
    folder: Path, tmp_path: Path, small: Backbone
) -> None:
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=3)
    with pytest.raises(LayertapError, match="pictures has vanished"):
        extract(planned, stop=lambda: bool(folder.exists() and folder.rename(tmp_path / "away") and False))
    (tmp_path / "away").rename(folder)
    assert count_images(folder, tmp_path / "out", small, batch_size=3) == 9
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.failures == []


def test_every_run_is_told_of_when_it_starts_and_ends(folder: Path, tmp_path: Path, small: Backbone) -> None:
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=4)
    extract(planned, stop=lambda: True)
    count_images(folder, tmp_path / "out", small, batch_size=4)
    count_images(folder, tmp_path / "out", small, batch_size=4)
    lines = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("rows", line.get("found_done"))) for line in lines] == [
        ("started", 0), ("computing", None), ("ended", 4), ("started", 4), ("computing", None), ("ended", 8),
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1])
def test_each_second_of_a_shard_counts_for_the_stage_that_takes_it(
    folder: Path, tmp_path: Path, small: Backbone, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=4)
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
    [receipt] = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("*.json") if "shards" in str(path)]
    assert receipt["made"]["stages"] == summary.stages
    assert receipt["made"]["seconds"] == 400 + 3 * (20 + 3) + 3 * 1000 + 3 * 0.5


def test_a_finished_shard_is_published_while_the_next_is_computed(
    folder: Path, tmp_path: Path, small: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_is_computed, publish = threading.Event(), ShardWriter.publish
    stored: list[int] = []

    def patiently(self: ShardWriter, *args: Any) -> Path:
        if self.first_row == 0:
            assert next_is_computed.wait(60)
            time.sleep(0.5)
        return publish(self, *args)

    def notice(rows: int, stored_earlier: bool) -> None:
        stored.append(rows)
        if sum(stored) >= 6:  # a shard of four rows, and the first batch of the next
            next_is_computed.set()

    monkeypatch.setattr(ShardWriter, "publish", patiently)
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=2, shard_rows=4)
    summary = extract(planned, on_rows=notice)
    assert summary.stages["write"] >= 0.4  # the run waited for it
    with FeatureReader(tmp_path / "out") as reader:
        assert (reader.status == Status.OK).tolist() == [True] * 12


def test_ctrl_c_while_a_publisher_starts_leaves_no_shard_that_is_published_without_the_lock(
    folder: Path, tmp_path: Path, small: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, start = ShardWriter.publish, threading.Thread.start
    holders: list[str] = []
    publishers: list[threading.Thread] = []

    def slowly(self: ShardWriter, *args: Any) -> Path:
        time.sleep(0.3)
        holders.append(holder(tmp_path / "out"))
        return publish(self, *args)

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name.startswith("publisher"):
            publishers.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "publish", slowly)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=2, shard_rows=3))
    publishers[0].join(10)
    assert "" not in holders


def test_a_shard_that_cannot_be_published_ends_the_run_after_the_next_ones_are_published(
    folder: Path, tmp_path: Path, small: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = ShardWriter.publish

    def fail_first(self: ShardWriter, *args: Any) -> Path:
        if self.first_row == 0:
            raise LayertapError("the disk is full")
        return publish(self, *args)

    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=2, shard_rows=3)
    with monkeypatch.context() as patched:
        patched.setattr(ShardWriter, "publish", fail_first)
        with pytest.raises(LayertapError, match="the disk is full"):
            extract(planned)
    files = [(where.published, where.part) for where in planned.dataset.shard_files()]
    assert files[0] == (None, 0)
    assert (0, None) not in files[3:]  # the run has ended before
    # No file is left open, and no row is computed again.
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=2, shard_rows=3)
    assert extract(planned).computed == 12 - 3 - 3 * files.count((0, None))
    with FeatureReader(tmp_path / "out") as reader:
        assert (reader.status == Status.OK).tolist() == [True] * 12


def test_a_receipt_counts_the_wait_for_the_first_images_of_its_shard(
    folder: Path, tmp_path: Path, small: Backbone
) -> None:
    planned = plan(folder, out=tmp_path / "out", backbone=small, workers=0, batch_size=4, shard_rows=8)

    def slowly(*args: Any) -> Generator[Batch, None, None]:
        for number, batch in enumerate(load_batches(*args)):
            if number in (0, 2):  # the first of a shard
                assert not planned.dataset.path(number // 2, part=True).exists()
                time.sleep(0.1)
            yield batch

    summary = extract(planned, load=slowly)
    made = [json.loads((tmp_path / "out" / "shards" / f"00000{shard}.json").read_text())["made"] for shard in (0, 1)]
    assert all(0.1 <= each["stages"]["images"] <= each["seconds"] for each in made)
    assert sum(each["stages"]["images"] for each in made) == pytest.approx(summary.stages["images"], abs=0.002)


def test_too_little_space_is_told_before_any_image_is_read(
    folder: Path, tmp_path: Path, small: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(LayertapError, match="MB, 0.0 MB are free on the disk"):
        count_images(folder, tmp_path / "out", small)


@pytest.mark.parametrize("name", ["batch_size", "workers", "limit", "shard_rows"])
def test_numbers_below_their_least_or_not_whole_are_refused(
    folder: Path, tmp_path: Path, small: Backbone, name: str
) -> None:
    with pytest.raises(InputError, match=f"{name} is -1"):
        plan(folder, out=tmp_path / "out", backbone=small, **{name: -1})
    with pytest.raises(InputError, match=f"{name} is 3.0; expected a whole number"):
        plan(folder, out=tmp_path / "out", backbone=small, **{name: 3.0})


def test_where_the_memory_is_short_batches_are_halved_and_no_row_is_lost(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    expected = extract_features(folder, out=tmp_path / "whole", backbone=backbone, workers=0, progress=False)[
        "embedding"
    ][:]
    sizes: list[int] = []

    def short_of_memory(module: Any, args: Any) -> None:
        sizes.append(len(args[0]))
        if len(args[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    planned = plan(folder, out=tmp_path / "out", backbone=backbone, batch_size=11)
    handle = backbone.model.register_forward_pre_hook(short_of_memory)
    summary = extract(planned)
    handle.remove()
    assert sizes == [11, 6, 3, 3, 3, 2, *[1] * 4, 1]  # four pictures of the first batch are computed alone, too
    assert summary.images_at_once == 3
    assert dict(summary.status) == {"ok": 12}
    found = FeatureReader(tmp_path / "out")["embedding"][:]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_where_not_even_one_image_fits_the_run_ends(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    planned = plan(folder, out=tmp_path / "out", backbone=backbone)

    def no_memory(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = backbone.model.register_forward_pre_hook(no_memory)
    with pytest.raises(LayertapError, match="insufficient device memory for one image: CUDA out of memory"):
        extract(planned)
    handle.remove()


IN_A_POOL = """
import multiprocessing, sys, warnings

def extracted(folder, out):
    import torch
    from layertap import extract_features, load_backbone
    torch.set_num_threads(1)
    tiny = load_backbone(
        "timm/test_resnet", weights="random", device="cpu", preprocessing={"size": 64, "crop": 64}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extract_features(folder, out=out, backbone=tiny, workers=2, progress=False).close()
    return [str(warning.message) for warning in caught]

if __name__ == "__main__":
    if sys.argv[1] == "loky":
        import joblib
        [notes] = joblib.Parallel(n_jobs=2)([joblib.delayed(extracted)(*sys.argv[2:])])
    else:
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            notes = pool.apply(extracted, sys.argv[2:])
    print(*notes, sep="\\n")
"""


@pytest.mark.parametrize("start", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "loky"))])
def test_a_worker_of_a_pool_decodes_itself_and_says_so(
    folder: Path, tmp_path: Path, small: Backbone, start: str
) -> None:
    script = tmp_path / "in_a_pool.py"
    script.write_text(IN_A_POOL)
    command = [sys.executable, str(script), start, str(folder), str(tmp_path / "in_pool")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    notes = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert [note for note in notes if "decodes the images itself, without 2 worker processes" in note] == notes
    assert len(notes) == 1
    with extract_features(folder, out=tmp_path / "here", backbone=small, workers=2, progress=False) as here:
        assert close(FeatureReader(tmp_path / "in_pool")["embedding"][:], here["embedding"][:])


def test_a_worker_of_a_data_loader_decodes_itself(folder: Path) -> None:
    class Widths(torch.utils.data.Dataset[int]):
        def __getitem__(self, _: int) -> int:
            how = Decoding(lambda picture: torch.from_numpy(np.array(picture.resize((8, 8)))), workers=1)
            with pytest.warns(UserWarning, match="may start no processes"):
                [batch] = load_batches(list_images(folder), [[0, 1]], how)
            return len(batch.images)

        def __len__(self) -> int:
            return 1

    assert list(torch.utils.data.DataLoader(Widths(), num_workers=1)) == [torch.tensor([2])]


def test_an_existing_data_set_is_read_once_before_the_lock_and_once_under_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, out = ["layer1:pca2", "embedding"], tmp_path / "out"
    settings: dict[str, Any] = {"precision": "bfloat16", "min_cosine": 0.5, "fit_on": 8}
    extract_features(folder, out=out, layers=layers, **settings, **NET).close()
    read, open_data_set = [], DataSet.open
    monkeypatch.setattr(DataSet, "open", lambda out: read.append(out) or open_data_set(out))
    extract_features(folder, out=out, layers=layers, **settings, **NET).close()
    assert read == [out] * 3  # the third time by the reader


def test_a_shard_whose_rows_are_all_stored_is_published_by_the_next_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LayertapError("killed")

    with monkeypatch.context() as patched, pytest.raises(LayertapError, match="killed"):
        patched.setattr(ShardWriter, "publish", fail)
        extract_features(folder, out=tmp_path / "out", **NET)
    assert [path.suffix for path in (tmp_path / "out" / "shards").iterdir()] == [".part"]
    with extract_features(folder, out=tmp_path / "out", **NET) as reader:
        assert len(reader) == 12
        assert np.isfinite(reader["embedding"][:]).all()


def test_where_no_image_can_be_read_no_file_of_a_shard_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = list_images(folder)
    planned = plan(images, out=tmp_path / "out", backbone=load_backbone("timm/test_resnet", weights="random"))
    monkeypatch.setattr(pipeline, "open_part", lambda *_: pytest.fail("a file is made"))
    for path in folder.rglob("*.*"):
        path.unlink()
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(LayertapError):
        extract(planned)
    assert list((tmp_path / "out" / "shards").iterdir()) == []


@pytest.mark.parametrize(("device", "gigabytes", "expected"), [("cpu", 0, 64), ("cuda", 8, 64), ("cuda", 80, 256)])
def test_the_default_batch_is_larger_on_a_large_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gigabytes: int, expected: int
) -> None:
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert default_batch_size(torch.device(device)) == expected
