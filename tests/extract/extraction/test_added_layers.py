"""Layers that are added to a data set, compared with those of a data set that was computed with all layers at once."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import FeatureReader, InputError, LayertapError, Status
from extract.compute.backbone import Backbone
from extract.errors import LockedError
from extract.extraction.plan import existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.store import row_selection
from extract.store.format.dataset import DataSet
from extract.store.merge import merge
from extract.store.verify import verify
from tests.extract.store.kill import die_at, forked, network

OLD, NEW, ALL = ["0"], ["2", "4"], ["0", "2", "4"]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return network()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Nine pictures, of which one is broken, two are the same, and one makes features that are not finite."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(9):
        pixels = np.random.default_rng(max(1, i)).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "5.png").write_bytes(b"no picture")
    return folder


def embed(images: Path, out: Path, backbone: Backbone, layers: list[str], add: bool = False, **options: Any) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "workers": 0, "shard_rows": 4, "sync_s": 0, **options}
    existing = existing_at(out, add_layers=add)
    extract(resolve(ExtractionSettings(layers=layers, **settings), list_images(images), backbone, existing))


def content(out: Path) -> dict[str, Any]:
    """Everything that a reader gives, by name, and the names of the files."""
    with FeatureReader(out, check=True) as reader:
        columns = ("row_hash", "record_hash", "source_hash", "status")
        found = {name: reader.column(name).tobytes() for name in columns}
        found |= {layer: reader[layer][:].tobytes() for layer in reader.layers}
        found |= {"failures": reader.failures, "paths": list(reader.paths), "fingerprint": reader.fingerprint}
        return {**found, "files": sorted(str(path.relative_to(out)) for path in out.rglob("*"))}


@pytest.mark.parametrize("kind", ["float32", "int8", "float16 gzip"])
def test_added_layers_are_bit_for_bit_those_of_a_run_with_all_layers(
    photos: Path, tmp_path: Path, backbone: Backbone, kind: str
) -> None:
    dtype, _, compress = kind.partition(" ")
    options: dict[str, Any] = {"dtype": dtype, "compress": compress or None}
    embed(photos, tmp_path / "all", backbone, ALL, **options)
    embed(photos, tmp_path / "added", backbone, OLD, **options)
    options.pop("compress", None)  # new shards have the compression of the old ones
    embed(photos, tmp_path / "added", backbone, NEW, add=True, **options)
    assert content(tmp_path / "added") == content(tmp_path / "all")
    assert verify(tmp_path / "added").faults == []
    with FeatureReader(tmp_path / "added") as added:
        assert added.layers == ALL
        assert [status for *_, status, _ in added.failures] == ["decode error"]
    written = (tmp_path / "added/shards/000000.h5").stat().st_ino
    embed(photos, tmp_path / "added", backbone, ALL, **options)  # nothing is left to do for this run and the next
    embed(photos, tmp_path / "added", backbone, ["4"], add=True, **options)
    assert content(tmp_path / "added") == content(tmp_path / "all")
    assert (tmp_path / "added/shards/000000.h5").stat().st_ino == written


def test_a_row_that_is_not_finite_in_an_old_layer_keeps_its_status_and_reason(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    bias = backbone.model[4].bias.detach()
    try:
        bias[3] = 1e6  # beyond float16
        for out, steps in (("all", [["4", "0"]]), ("added", [["4"], ["0"]])):
            for step, layers in enumerate(steps):
                embed(photos, tmp_path / out, backbone, layers, add=step == 1, dtype="float16")
    finally:
        bias[3] = 0
    assert content(tmp_path / "added") == content(tmp_path / "all")
    with FeatureReader(tmp_path / "added") as reader:
        assert set(reader.status.tolist()) == {Status.NOT_FINITE, Status.DECODE_ERROR}
        assert reader.layers == ["0", "4"]  # in the order of the network


def at_each_call(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Look before and after each call that changes the name of a file."""
    looking = [False]

    def looked(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if looking[0]:
                return function(*arguments, **named)
            looking[0] = True
            look()
            looking[0] = False
            result = function(*arguments, **named)
            looking[0] = True
            look()
            looking[0] = False
            return result

        return called

    for name in ("link", "rename", "unlink", "mkdir", "rmdir"):
        monkeypatch.setattr(os, name, looked(getattr(os, name)))


def test_readers_see_all_of_the_old_layers_or_all_layers_at_each_moment(
    photos: Path, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out", list[tuple[str, ...]]()
    embed(photos, tmp_path / "all", backbone, ALL)
    embed(photos, out, backbone, OLD)
    with FeatureReader(tmp_path / "all") as reader:
        expected = {layer: reader[layer][:] for layer in reader.layers}

    def look() -> None:
        with FeatureReader(out, check=True) as reader:
            for layer in reader.layers:
                np.testing.assert_array_equal(reader[layer][:], expected[layer])
            seen.append(tuple(reader.layers))

    with FeatureReader(out) as opened_before:
        with monkeypatch.context() as patched:
            at_each_call(patched, look)
            embed(photos, out, backbone, NEW, add=True)
        np.testing.assert_array_equal(opened_before["0"][:], expected["0"])
        assert opened_before.layers == OLD
    assert list(dict.fromkeys(seen)) == [tuple(OLD), tuple(ALL)]
    assert min(seen.count(tuple(OLD)), seen.count(tuple(ALL))) > 8  # while old files are removed one by one


def publish_after_opening(monkeypatch: pytest.MonkeyPatch, photos: Path, out: Path, backbone: Backbone) -> None:
    """Let layers be added just after the next reader has read the description of a data set."""
    opened = DataSet.open

    class Published(DataSet):
        @staticmethod
        def open(path: Path) -> DataSet:
            dataset = opened(path)
            monkeypatch.setattr(row_selection, "DataSet", DataSet)
            embed(photos, out, backbone, NEW, add=True)
            return dataset

    monkeypatch.setattr(row_selection, "DataSet", Published)


@pytest.mark.parametrize("opened_at_once", [64, 0])
def test_a_reader_that_opens_while_layers_are_published_has_them(
    photos: Path, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, opened_at_once: int
) -> None:
    out = tmp_path / "out"
    embed(photos, out, backbone, OLD)
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", opened_at_once)
    publish_after_opening(monkeypatch, photos, out, backbone)
    if opened_at_once:
        with FeatureReader(out) as reader:
            assert reader.layers == ALL
    else:  # shards are opened on first use
        with FeatureReader(out) as reader, pytest.raises(InputError, match="open the data set again"):
            reader["0"][:]


def test_verify_another_run_and_merge_see_no_fault_while_layers_are_published(
    photos: Path, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("verified", "added", "merged"):
        embed(photos, tmp_path / name, backbone, OLD)
    publish_after_opening(monkeypatch, photos, tmp_path / "verified", backbone)
    assert verify(tmp_path / "verified").faults == []
    publish_after_opening(monkeypatch, photos, tmp_path / "added", backbone)
    assert existing_at(tmp_path / "added", add_layers=True).layers == tuple(ALL)
    publish_after_opening(monkeypatch, photos, tmp_path / "merged", backbone)
    with pytest.raises(LockedError, match="layers were added"):
        merge([tmp_path / "merged"], tmp_path / "both")


@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.soak), pytest.param(16, marks=pytest.mark.slow), 64]
)
def test_a_run_that_is_killed_at_any_call_leaves_the_old_layers_and_is_resumed(
    photos: Path, tmp_path: Path, step: int
) -> None:
    command = [sys.executable, "-m", __name__, str(photos), str(tmp_path), str(step)]  # it forks: without threads
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=900)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all the same\n"


def kill_runs(photos: Path, tmp_path: Path, step: int) -> None:
    """Kill a run that adds layers before or after each call that changes files, or each few, and resume it."""
    torch.set_num_threads(1)
    backbone = network()
    whole, start, out = (tmp_path / name for name in ("whole", "start", "out"))
    embed(photos, start, backbone, OLD)
    embed(photos, whole, backbone, ALL)
    expected = content(whole)

    def count() -> None:
        shutil.copytree(start, out)
        counted = die_at(-1)
        embed(photos, out, backbone, NEW, add=True)
        (tmp_path / "count").write_text(str(counted()))

    assert forked(count) == 0
    moments, left, ends = int((tmp_path / "count").read_text()), set(), list[int]()
    assert moments > 100
    for moment in range(moments - 6, -1, -step):  # from the end, where layers are published
        shutil.rmtree(out)
        shutil.copytree(start, out)

        def killed(moment: int = moment) -> None:
            die_at(moment)
            embed(photos, out, backbone, NEW, add=True)

        ends.append(forked(killed))  # 0 after a call that fails, as to remove a file that is not there
        with FeatureReader(out, check=True) as reader:
            left.add(tuple(reader.layers))
            for layer in reader.layers:
                assert reader[layer][:].tobytes() == expected[layer], moment
        assert verify(out).faults == [], moment
        assert forked(functools.partial(embed, photos, out, backbone, NEW, add=True)) == 0, moment
        assert content(out) == expected, moment
    assert left == {tuple(OLD), tuple(ALL)}
    assert set(ends) <= {0, -signal.SIGKILL}
    assert ends.count(-signal.SIGKILL) > 0.8 * len(ends)
    print("all the same")


def test_stored_rows_of_an_interrupted_run_are_computed_again_if_the_old_rows_have_changed(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    out, plain = tmp_path / "out", existing_at(tmp_path / "out")
    embed(photos, out, backbone, OLD)
    settings = ExtractionSettings(layers=NEW, batch_size=2, workers=0, shard_rows=4, sync_s=0)
    images = list_images(photos)
    extract(resolve(settings, images, backbone, existing_at(out, add_layers=True)), shards=[1])
    (photos / "5.png").write_bytes((photos / "6.png").read_bytes())
    old = ExtractionSettings(layers=OLD, batch_size=2, workers=0, shard_rows=4, sync_s=0)
    extract(resolve(old, images, backbone, plain), retry_failed=True)
    before = content(out)
    embed(photos, out, backbone, NEW, add=True)
    embed(photos, tmp_path / "all", backbone, ALL)
    found, expected = content(out), content(tmp_path / "all")
    assert found["0"] == before["0"]
    assert (found["2"], found["4"], found["failures"]) == (expected["2"], expected["4"], [])
    assert verify(out).faults == []


def begin_to_add(images: Path, out: Path, backbone: Backbone, shard: int) -> Path:
    """Store one shard with the new layers, as an interrupted run does, and return its file."""
    settings = ExtractionSettings(layers=NEW, batch_size=2, workers=0, shard_rows=4, sync_s=0)
    extract(resolve(settings, list_images(images), backbone, existing_at(out, add_layers=True)), shards=[shard])
    (file,) = out.glob(f"shards-*/{shard:06d}.h5")
    return file


@pytest.mark.parametrize("name", ["000001.h5", "000001.h5.part"])
def test_a_damaged_shard_of_an_interrupted_run_is_computed_again(
    photos: Path, tmp_path: Path, backbone: Backbone, name: str
) -> None:
    out = tmp_path / "out"
    embed(photos, tmp_path / "all", backbone, ALL)
    embed(photos, out, backbone, OLD)
    file = begin_to_add(photos, out, backbone, 1).rename(next(out.glob("shards-*")) / name)
    os.truncate(file, file.stat().st_size // 2)
    embed(photos, out, backbone, NEW, add=True)
    assert content(out) == content(tmp_path / "all")


def test_a_copy_made_while_layers_were_added_does_not_replace_complete_shards(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    out = tmp_path / "out"
    embed(photos, out, backbone, ALL)
    expected, written = content(out), (out / "shards/000001.h5").stat().st_ino
    stale = out / f"shards-{expected['fingerprint'][:16]}"
    stale.mkdir()
    shutil.copy(out / "shards/000000.h5", stale)  # copied to this folder before the others
    embed(photos, out, backbone, ALL)
    assert content(out) == expected
    assert (out / "shards/000001.h5").stat().st_ino == written


def test_files_of_the_user_in_the_folders_of_shards_are_kept(photos: Path, tmp_path: Path, backbone: Backbone) -> None:
    out = tmp_path / "out"
    embed(photos, out, backbone, OLD)
    for folder in (out / "shards/of mine", out / "shards-0123456789abcdef"):
        folder.mkdir()
        (folder / f"{folder.name}.txt").write_text("mine")
    (out / "shards-fedcba9876543210").write_text("mine")
    embed(photos, out, backbone, NEW, add=True)
    assert sorted(path.name for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"mine") == [
        "of mine.txt", "shards-0123456789abcdef.txt", "shards-fedcba9876543210",
    ]  # fmt: skip
    assert verify(out).faults == []


def test_an_image_that_is_not_the_stored_one_is_refused_and_nothing_changes(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    out = tmp_path / "out"
    embed(photos, out, backbone, OLD)
    before = content(out)
    whole = (photos / "7.png").read_bytes()
    Image.new("RGB", (40, 40), "red").save(photos / "7.png")
    with pytest.raises(InputError, match=r"7\.png is not the image of its stored row: it has changed"):
        embed(photos, out, backbone, NEW, add=True)
    (photos / "7.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"7\.png is not the image of its stored row: not an image"):
        embed(photos, out, backbone, NEW, add=True)
    (photos / "7.png").write_bytes(whole)
    (photos / "5.png").write_bytes(whole)
    with pytest.raises(InputError, match=r"5\.png is not the image of its stored row: it has changed.*--retry-failed"):
        embed(photos, out, backbone, NEW, add=True)
    assert {**content(out), "files": []} == {**before, "files": []}


def test_layers_are_added_to_complete_rows_of_the_same_backbone_only(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    out = tmp_path / "out"
    plan = resolve(
        ExtractionSettings(layers=OLD, workers=0, shard_rows=4), list_images(photos), backbone, existing_at(out)
    )
    extract(plan, shards=[0])
    with pytest.raises(LayertapError, match="is unfinished, and layers are added to all rows"):
        embed(photos, out, backbone, NEW, add=True)
    extract(plan)
    before = content(out)
    other = Backbone("test/other", "test/other", backbone.model, backbone.weights, backbone.preprocessing)
    with pytest.raises(InputError, match="architecture: stored test/small, now test/other"):
        embed(photos, out, other, NEW, add=True)
    with pytest.raises(InputError, match="precision: stored float32, now bfloat16"):
        embed(photos, out, backbone, NEW, add=True, precision="bfloat16")
    with pytest.raises(InputError, match="needs principal axes, and this run does not fit any"):
        embed(photos, out, backbone, ["4:pca2"], add=True)
    with pytest.raises(InputError, match="features.0: stored 0 mean_map"):
        embed(photos, out, backbone, ["0:max_map"], add=True)
    (photos / "9.png").write_bytes((photos / "8.png").read_bytes())
    with pytest.raises(InputError, match=r"images\.count: stored 9, now 10"):
        embed(photos, out, backbone, NEW, add=True)
    assert content(out) == before


if __name__ == "__main__":
    kill_runs(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
