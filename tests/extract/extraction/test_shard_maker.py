"""Shards that are made one after another, with decoding that goes on with the next, are those of one run."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import FeatureReader, LayertapError, extract_features, load_backbone
from extract.extraction import shard_maker as module
from extract.extraction.shard_maker import ShardMaker
from extract.images.sources import Files
from extract.store.format.writer import ShardWriter
from extract.store.places.shared_folder import SharedFolder
from extract.store.verify import verify
from tests.conftest import TINY_INPUT, make_picture
from tests.planning import plan

ROWS = 8  # of a shard: one batch of two pieces for those that decode
SHARDS = 6


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for i in range(ROWS * SHARDS):
        make_picture(i, 40, 50).save(root / f"{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    return {"backbone": backbone, "shard_rows": ROWS, "batch_size": ROWS // 2, "compile": "off"}


@pytest.fixture(scope="module")
def expected(pictures: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    out = tmp_path_factory.mktemp("expected") / "out"
    return extract_features(pictures, out=out, workers=0, progress=False, **options)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often processes that decode were started."""
    found: list[int] = []
    load = module.load_batches

    def counted(images: Any, batches: Any, decoding: Any) -> Any:
        found.append(decoding.workers)
        return load(images, batches, decoding)

    monkeypatch.setattr(module, "load_batches", counted)
    return found


def maker_of(
    pictures: Path, tmp_path: Path, options: dict[str, Any], workers: int = 0, place: SharedFolder | None = None
) -> ShardMaker:
    planned = plan(pictures, out=tmp_path / "out", workers=workers, **options)
    return ShardMaker(planned, place or SharedFolder(tmp_path / "out"), tmp_path / "scratch")


def left_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "scratch").rglob("*.h5*"))


def assert_same(out: Path, expected: FeatureReader) -> None:
    assert verify(out).faults == []
    with FeatureReader(out) as reader:
        assert reader.paths == expected.paths
        assert np.array_equal(reader["embedding"][:], expected["embedding"][:])


@pytest.mark.parametrize(
    ("workers", "ahead"),  # ahead: batches, less than a shard, and several shards
    [(0, 1), (1, 20), pytest.param(0, 20, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow)],
)
def test_what_decodes_goes_on_with_the_next_shard(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader, begun: list[int],
    workers: int, ahead: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("extract.images.loading._BATCHES_AHEAD", ahead)
    rows: list[tuple[int, int, bool]] = []
    with maker_of(pictures, tmp_path, options, workers) as maker:
        for shards in ([3, 0, 1], [5, 4, 2]):
            built = dict(maker.build(shards, lambda *event: rows.append(event)))
            assert list(built) == shards
            assert [receipt and receipt["status"] for receipt in built.values()] == [{"ok": ROWS}] * 3
    assert sum(count for _, count, resumed in rows if not resumed) == ROWS * SHARDS
    assert [shard for shard, _, resumed in rows if resumed] == [3, 0, 1, 5, 4, 2]
    assert begun == [workers, workers]  # once for each list
    assert_same(tmp_path / "out", expected)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_shard_that_was_stopped_is_resumed_by_any_process_of_the_machine(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    at: list[int] = []
    with maker_of(pictures, tmp_path, options, 1) as maker:
        built = dict(maker.build(range(SHARDS), lambda shard, rows, resumed: at.append(shard), lambda: at[-1] == 2))
    assert list(built) == [0, 1]
    assert left_in(tmp_path) == ["000002.h5.part"]
    rows: list[tuple[int, int, bool]] = []
    with maker_of(pictures, tmp_path, options, 1) as maker:
        assert list(dict(maker.build(range(2, SHARDS), lambda *event: rows.append(event)))) == [2, 3, 4, 5]
    assert rows[:2] == [(2, ROWS // 2, True), (2, ROWS // 2, False)]  # a batch was computed before it was stopped
    assert_same(tmp_path / "out", expected)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_finished_shard_of_a_process_that_was_killed_is_published_and_not_computed_again(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreachable(SharedFolder):
        def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
            raise LayertapError("the place does not answer")

    unreachable = maker_of(pictures, tmp_path, options, place=Unreachable(tmp_path / "out"))
    with unreachable as maker, pytest.raises(LayertapError, match="does not answer"):
        list(maker.build([4]))
    assert left_in(tmp_path) == ["000004.h5"]
    write = ShardWriter.write
    monkeypatch.setattr(ShardWriter, "write", None)
    with maker_of(pictures, tmp_path, options) as maker:
        assert [shard for shard, receipt in maker.build([4]) if receipt] == [4]
        monkeypatch.setattr(ShardWriter, "write", write)
        list(maker.build([0, 1, 2, 3, 5]))
    assert_same(tmp_path / "out", expected)


def test_a_finished_shard_without_its_receipt_is_built_again(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    with maker_of(pictures, tmp_path, options) as maker:
        folder = tmp_path / "scratch" / f"{maker._name}-000004-0" / "shards"
        folder.mkdir(parents=True)
        (folder / "000004.h5").write_bytes(b"left by a process that was killed")
        assert [shard for shard, receipt in maker.build(range(SHARDS)) if receipt] == list(range(SHARDS))
    assert_same(tmp_path / "out", expected)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_processes_that_build_the_same_shard_have_a_folder_each_and_one_of_them_publishes(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    with maker_of(pictures, tmp_path, options) as maker, maker_of(pictures, tmp_path, options) as other:
        first, second = maker.build(range(SHARDS)), other.build(range(SHARDS))
        for _ in range(SHARDS):  # alternating: each has locked its next shards when the other asks for them
            (shard, receipt), (of_second, receipt_of_second) = next(first), next(second)
            assert shard == of_second
            assert (receipt is None) != (receipt_of_second is None)
        assert list(first) == list(second) == []
    assert_same(tmp_path / "out", expected)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_killed_processes_left_of_published_shards_is_removed(
    pictures: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with maker_of(pictures, tmp_path, options) as maker:
        for shard in (1, 2):
            folder = tmp_path / "scratch" / f"{maker._name}-{shard:06d}-0" / "shards"
            folder.mkdir(parents=True)
            (folder / f"{shard:06d}.h5.part").touch()
    with maker_of(pictures, tmp_path, options) as maker:
        (tmp_path / "scratch" / f"{maker._name}-000001-0" / "shards" / "000001.h5.part").unlink()
        list(maker.build([1]))
        stale = tmp_path / "scratch" / f"{maker._name}-000001-7" / "shards"
        stale.mkdir(parents=True)
        (stale / "000001.h5.part").touch()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "scratch" / f"{maker._name}-000001-8").symlink_to(elsewhere)
        (tmp_path / "scratch" / f"{maker._name}-x-y").mkdir()  # not by layertap
    assert left_in(tmp_path) == ["000002.h5.part"]
    assert list(elsewhere.iterdir()) == []


def test_an_image_that_kills_what_decodes_fails_its_own_shard_when_that_is_built_alone(
    pictures: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Files.read

    def deadly(self: Files, row: int) -> Any:
        if row == 3 * ROWS and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, row)

    monkeypatch.setattr(Files, "read", deadly)
    for shards, built in (([0, 1, 2, 3], None), ([2], [2]), ([3], None), ([4], [4])):
        with maker_of(pictures, tmp_path, options, 1) as maker:
            if built is None:
                with pytest.raises(LayertapError, match="a process that decodes images died"):
                    list(maker.build(shards))
            else:
                assert list(dict(maker.build(shards))) == built


def test_after_an_error_the_shard_before_it_is_reported(
    pictures: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardWriter.write

    def fails(self: ShardWriter, *args: Any) -> None:
        if self.first_row >= ROWS:
            raise LayertapError("the disk is full")
        write(self, *args)

    monkeypatch.setattr(ShardWriter, "write", fails)
    with maker_of(pictures, tmp_path, options) as maker:
        built = maker.build([0, 1, 2])
        assert next(built)[0] == 0
        with pytest.raises(LayertapError, match="the disk is full"):
            next(built)


@pytest.mark.parametrize("flags", [{"precision": "bfloat16"}])
def test_what_is_refused_is_compared_again_by_the_next_process(
    pictures: Path, tmp_path: Path, options: dict[str, Any], flags: dict[str, Any]
) -> None:
    for shard in (0, 1):
        strict = maker_of(pictures, tmp_path, {**options, **flags, "min_cosine": 1.0})
        with strict as maker, pytest.raises(LayertapError, match="is required"):
            list(maker.build([shard]))


def test_a_shard_is_published_while_the_next_is_made(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    computing = {shard: threading.Event() for shard in range(SHARDS)}

    class Patient(SharedFolder):
        """Takes a shard when rows of the next one are computed."""

        def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
            shard = int(path.stem)
            assert shard == SHARDS - 1 or computing[shard + 1].wait(60)
            return super().publish(path, receipt)

    def on_rows(shard: int, rows: int, resumed: bool) -> None:
        if not resumed:
            computing[shard].set()

    with maker_of(pictures, tmp_path, options, place=Patient(tmp_path / "out")) as maker:
        assert [shard for shard, receipt in maker.build(range(SHARDS), on_rows) if receipt] == list(range(SHARDS))
    assert_same(tmp_path / "out", expected)
