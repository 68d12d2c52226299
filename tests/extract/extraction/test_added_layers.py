"""Layers that are added to a data set, compared with those of a data set that was computed with all layers at once."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import FeatureReader, InputError, LayertapError, Status
from extract.compute.backbone import Backbone
from extract.errors import LockedError
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.store import row_selection
from extract.store.format.dataset import DataSet
from extract.store.merge import merge
from extract.store.verify import verify
from tests.extract.store.kill import die_at, forked, network

OLD, NEW, ALL = ["0"], ["2", "4"], ["0", "2", "4"]


def planned(images: Path, out: Path, backbone: Backbone, layers: list[str], add: bool = False, **options: Any) -> Plan:
    settings: dict[str, Any] = {"batch_size": 2, "workers": 0, "shard_rows": 4, "sync_s": 0, **options}
    existing = existing_at(out, add_layers=add)
    return resolve(ExtractionSettings(layers=layers, **settings), list_images(images), backbone, existing)


def embed(images: Path, out: Path, backbone: Backbone, layers: list[str], add: bool = False, **options: Any) -> None:
    extract(planned(images, out, backbone, layers, add, **options))


def content(out: Path) -> dict[str, Any]:
    """Everything that a reader gives, by name, and the names of the files."""
    with FeatureReader(out, check=True) as reader:
        columns = ("row_hash", "record_hash", "source_hash", "status")
        found: dict[str, Any] = {name: reader.column(name).tobytes() for name in columns}
        found |= {layer: reader[layer][:].tobytes() for layer in reader.layers}
        found |= {"failures": reader.failures, "paths": list(reader.paths), "fingerprint": reader.fingerprint}
        return {**found, "files": sorted(str(path.relative_to(out)) for path in out.rglob("*"))}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return network()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Path:
    """Data sets of the old layers and of all layers, which no test changes, and their pictures.

    There are nine, of which one is broken, two are the same, and one makes features that are not finite.
    """
    root = tmp_path_factory.mktemp("prepared")
    (root / "photos").mkdir()
    for i in range(9):
        pixels = np.random.default_rng(max(1, i)).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(root / "photos" / f"{i}.png")
    (root / "photos" / "5.png").write_bytes(b"no picture")
    embed(root / "photos", root / "old", backbone, OLD)
    embed(root / "photos", root / "all", backbone, ALL)
    return root


@pytest.fixture
def photos(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "photos", tmp_path / "photos")


@pytest.fixture
def out(prepared: Path, tmp_path: Path) -> Path:
    """A data set of the old layers."""
    return shutil.copytree(prepared / "old", tmp_path / "out")


@pytest.fixture(scope="module")
def expected(prepared: Path) -> dict[str, Any]:
    """The content of a data set of all layers."""
    return content(prepared / "all")


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


def test_a_row_that_is_not_finite_in_an_old_layer_keeps_its_status_and_reason(photos: Path, tmp_path: Path) -> None:
    backbone: Any = network()
    backbone.model[4].bias.detach()[3] = 1e6  # beyond float16
    for out, steps in (("all", [["4", "0"]]), ("added", [["4"], ["0"]])):
        for step, layers in enumerate(steps):
            embed(photos, tmp_path / out, backbone, layers, add=step == 1, dtype="float16")
    assert content(tmp_path / "added") == content(tmp_path / "all")
    with FeatureReader(tmp_path / "added") as reader:
        assert set(reader.status.tolist()) == {Status.NOT_FINITE, Status.DECODE_ERROR}
        assert reader.layers == ["0", "4"]  # in the order of the network


def at_each_call(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Look before and after each call that changes the name of a file."""
    looking = False

    def look_once() -> None:
        nonlocal looking
        if not looking:  # to look calls these functions, too
            looking = True
            look()
            looking = False

    def looked(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            look_once()
            result = function(*arguments, **named)
            look_once()
            return result

        return called

    for name in ("link", "rename", "unlink", "mkdir", "rmdir"):
        monkeypatch.setattr(os, name, looked(getattr(os, name)))


def test_readers_see_all_of_the_old_layers_or_all_layers_at_each_moment(
    photos: Path, out: Path, backbone: Backbone, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[str, ...]]()

    def look() -> None:
        with FeatureReader(out, check=True) as reader:
            for layer in reader.layers:
                assert reader[layer][:].tobytes() == expected[layer]
            seen.append(tuple(reader.layers))

    with FeatureReader(out) as opened_before:
        with monkeypatch.context() as patched:
            at_each_call(patched, look)
            embed(photos, out, backbone, NEW, add=True)
        assert opened_before["0"][:].tobytes() == expected["0"]
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
    photos: Path, out: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, opened_at_once: int
) -> None:
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", opened_at_once)
    publish_after_opening(monkeypatch, photos, out, backbone)
    with FeatureReader(out) as reader:
        if opened_at_once:
            assert reader.layers == ALL
        else:  # shards are opened on first use
            with pytest.raises(InputError, match="open the data set again"):
                reader["0"][:]


def test_verify_another_run_and_merge_see_no_fault_while_layers_are_published(
    prepared: Path, photos: Path, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, added, merged = (shutil.copytree(prepared / "old", tmp_path / str(number)) for number in range(3))
    publish_after_opening(monkeypatch, photos, verified, backbone)
    assert verify(verified).faults == []
    publish_after_opening(monkeypatch, photos, added, backbone)
    assert existing_at(added, add_layers=True).layers == tuple(ALL)
    publish_after_opening(monkeypatch, photos, merged, backbone)
    with pytest.raises(LockedError, match="layers were added"):
        merge([merged], tmp_path / "both")


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Forked processes do not have the threads of PyTorch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.soak), pytest.param(16, marks=pytest.mark.slow), 64]
)
def test_a_run_that_is_killed_at_any_call_leaves_the_old_layers_and_is_resumed(
    prepared: Path, photos: Path, out: Path, tmp_path: Path, backbone: Backbone, expected: dict[str, Any], step: int
) -> None:
    """A run that adds layers is killed before or after each call that changes files, or each few, and resumed."""

    def add_until(moment: int) -> None:
        signal.alarm(100)  # a process that hangs is ended
        count = die_at(moment)
        embed(photos, out, backbone, NEW, add=True)
        (tmp_path / "count").write_text(str(count()))

    assert forked(functools.partial(add_until, -1)) == 0
    moments, left, ends = int((tmp_path / "count").read_text()), set(), list[int]()
    assert moments > 100
    for moment in range(moments - 6, -1, -step):  # from the end, where layers are published
        shutil.rmtree(out)
        shutil.copytree(prepared / "old", out)
        ends.append(forked(functools.partial(add_until, moment)))  # 0 after a call that fails, as to remove no file
        with FeatureReader(out, check=True) as reader:
            left.add(tuple(reader.layers))
            for layer in reader.layers:
                assert reader[layer][:].tobytes() == expected[layer], moment
        assert verify(out).faults == [], moment
        embed(photos, out, backbone, NEW, add=True)
        assert content(out) == expected, moment
    assert left == {tuple(OLD), tuple(ALL)}
    assert set(ends) <= {0, -signal.SIGKILL}
    assert ends.count(-signal.SIGKILL) > 0.8 * len(ends)


def test_stored_rows_of_an_interrupted_run_are_computed_again_if_the_old_rows_have_changed(
    prepared: Path, photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    out, plain = tmp_path / "out", existing_at(tmp_path / "out")
    shutil.copytree(prepared / "old", out)
    extract(planned(photos, out, backbone, NEW, add=True), shards=[1])
    (photos / "5.png").write_bytes((photos / "6.png").read_bytes())
    settings = ExtractionSettings(layers=OLD, batch_size=2, workers=0, shard_rows=4, sync_s=0)
    extract(resolve(settings, list_images(photos), backbone, plain), retry_failed=True)
    before = content(out)
    embed(photos, out, backbone, NEW, add=True)
    embed(photos, tmp_path / "all", backbone, ALL)
    found, whole = content(out), content(tmp_path / "all")
    assert found["0"] == before["0"]
    assert (found["2"], found["4"], found["failures"]) == (whole["2"], whole["4"], [])
    assert verify(out).faults == []


@pytest.mark.parametrize("name", ["000001.h5", "000001.h5.part"])
def test_a_damaged_shard_of_an_interrupted_run_is_computed_again(
    photos: Path, out: Path, backbone: Backbone, expected: dict[str, Any], name: str
) -> None:
    extract(planned(photos, out, backbone, NEW, add=True), shards=[1])
    (file,) = out.glob("shards-*/000001.h5")
    file = file.rename(file.with_name(name))
    os.truncate(file, file.stat().st_size // 2)
    embed(photos, out, backbone, NEW, add=True)
    assert content(out) == expected


def test_a_copy_made_while_layers_were_added_does_not_replace_complete_shards(
    prepared: Path, photos: Path, tmp_path: Path, backbone: Backbone, expected: dict[str, Any]
) -> None:
    out = shutil.copytree(prepared / "all", tmp_path / "out")
    written = (out / "shards/000001.h5").stat().st_ino
    stale = out / f"shards-{expected['fingerprint'][:16]}"
    stale.mkdir()
    shutil.copy(out / "shards/000000.h5", stale)  # copied to this folder before the others
    embed(photos, out, backbone, ALL)
    assert content(out) == expected
    assert (out / "shards/000001.h5").stat().st_ino == written


def test_files_of_the_user_in_the_folders_of_shards_are_kept(photos: Path, out: Path, backbone: Backbone) -> None:
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
    photos: Path, out: Path, backbone: Backbone
) -> None:
    before = content(out)
    whole = (photos / "7.png").read_bytes()
    for name, data, message in (
        ("7.png", (photos / "6.png").read_bytes(), r"7\.png is not the image of its stored row: it has changed"),
        ("7.png", b"broken", r"7\.png is not the image of its stored row: not an image"),
        ("5.png", whole, r"5\.png is not the image of its stored row: it has changed.*--retry-failed"),
    ):
        (photos / "7.png").write_bytes(whole)
        (photos / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            embed(photos, out, backbone, NEW, add=True)
    assert {**content(out), "files": []} == {**before, "files": []}


def test_layers_are_added_to_complete_rows_of_the_same_backbone_only(
    photos: Path, tmp_path: Path, backbone: Backbone
) -> None:
    out = tmp_path / "out"
    plan = planned(photos, out, backbone, OLD)
    extract(plan, shards=[0])
    with pytest.raises(LayertapError, match="is unfinished, and layers are added to all rows"):
        embed(photos, out, backbone, NEW, add=True)
    extract(plan)
    before = content(out)
    other = Backbone("test/other", "test/other", backbone.model, backbone.weights, backbone.preprocessing)
    refused: list[tuple[Backbone, list[str], dict[str, Any], str]] = [
        (other, NEW, {}, "architecture: stored test/small, now test/other"),
        (backbone, NEW, {"precision": "bfloat16"}, "precision: stored float32, now bfloat16"),
        (backbone, ["4:pca2"], {}, "needs principal axes, and this run does not fit any"),
        (backbone, ["0:max_map"], {}, "features.0: stored 0 mean_map"),
    ]
    for network_used, layers, options, message in refused:
        with pytest.raises(InputError, match=message):
            embed(photos, out, network_used, layers, add=True, **options)
    (photos / "9.png").write_bytes((photos / "8.png").read_bytes())
    with pytest.raises(InputError, match=r"images\.count: stored 9, now 10"):
        embed(photos, out, backbone, NEW, add=True)
    assert content(out) == before
