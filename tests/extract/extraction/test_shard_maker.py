"""Shards that are made one after another, with decoding that goes on with the next, are those of one run."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import FeatureReader, LayertapError, extract_features, load_backbone
from extract.extraction import shard_decoding as module
from extract.extraction.shard_maker import ShardMaker
from extract.images.sources import Files
from extract.store.format.writer import ShardWriter
from extract.store.places.shared_folder import SharedFolder
from extract.store.verify import verify
from pipelines.embed.cluster.dispatch import Done, Failed, Left
from pipelines.embed.cluster.worker import Worker
from tests.conftest import TINY_INPUT, make_picture
from tests.extract.compute.test_backends import BY_OPENVINO
from tests.extract.compute.test_transfers import on_a_gpu
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


class Waiting:
    """Shards that wait, as a worker knows them; at most one besides the one that is made."""

    def __init__(self, shards: list[int]):
        self._later = deque(shards)

    def __iter__(self) -> Iterator[int]:
        while self._later:
            yield self._later.popleft()

    def following(self, known: Container[int]) -> int | None:
        return next((shard for shard in list(self._later)[:1] if shard not in known), None)


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


def maker_of(pictures: Path, tmp_path: Path, options: dict[str, Any], workers: int) -> ShardMaker:
    planned = plan(pictures, out=tmp_path / "out", workers=workers, **options)
    return ShardMaker(planned, SharedFolder(tmp_path / "out"), tmp_path / "scratch")


def assert_same(out: Path, expected: FeatureReader) -> None:
    assert verify(out).faults == []
    with FeatureReader(out) as reader:
        assert reader.paths == expected.paths
        assert np.array_equal(reader["embedding"][:], expected["embedding"][:])


@pytest.mark.parametrize(
    ("workers", "ahead", "in_time"),  # ahead: batches, less than a shard, and several shards
    [(0, 1, True), (1, 20, True), (1, 1, False)]
    + [
        pytest.param(*some, marks=pytest.mark.slow)
        for some in [(0, 20, True), (1, 1, True), (0, 1, False), (0, 20, False), (1, 20, False)]
    ],
)
def test_what_decodes_goes_on_with_the_next_shard(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader, begun: list[int],
    workers: int, ahead: int, in_time: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("extract.images.loading._BATCHES_AHEAD", ahead)
    waiting, rows = Waiting([3, 0, 1, 5, 4, 2]), 0

    def count(computed: int, found: bool) -> None:
        nonlocal rows
        rows += computed

    with maker_of(pictures, tmp_path, options, workers) as maker:
        for shard in waiting:
            assert maker.make(shard, count, following=waiting.following if in_time else lambda known: None)
            receipt = maker.publish(shard)
            assert receipt is not None
            assert receipt["status"] == {"ok": ROWS}
    assert rows == ROWS * SHARDS
    assert begun == [workers]
    assert_same(tmp_path / "out", expected)


@pytest.mark.slow
def test_shards_that_come_otherwise_than_was_said_are_right(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    with maker_of(pictures, tmp_path, options, 1) as maker:
        for shard in [0, 2, 1, 3, 5, 4]:
            maker.make(shard, following=lambda known, next_one=shard + 1: None if next_one in known else next_one % 6)
            maker.publish(shard)
    assert_same(tmp_path / "out", expected)


def test_a_shard_that_was_stopped_is_gone_on_with(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    for attempt, shards in enumerate((range(SHARDS), [2])):
        found: list[tuple[int, bool]] = []
        waiting = Waiting(list(shards))
        with maker_of(pictures, tmp_path, options, 1) as maker:
            for shard in waiting:
                if maker.make(
                    shard,
                    lambda rows, is_found, found=found: found.append((rows, is_found)),
                    lambda stops=(attempt, shard) == (0, 2): stops,
                    waiting.following,
                ):
                    maker.publish(shard)
        if attempt == 0:
            assert not (tmp_path / "out" / "shards" / "000002.h5").exists()
        else:
            assert found == [(ROWS // 2, True), (ROWS // 2, False)]  # a batch was computed before it was stopped
    assert_same(tmp_path / "out", expected)


def test_a_shard_does_not_answer_for_an_image_of_the_next_that_kills_what_decodes(
    pictures: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Files.read

    def deadly(self: Files, row: int) -> Any:
        if row == 3 * ROWS and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, row)

    monkeypatch.setattr(Files, "read", deadly)
    waiting, failed = Waiting(list(range(SHARDS))), {}
    with maker_of(pictures, tmp_path, options, 1) as maker:
        for shard in waiting:
            try:
                assert maker.make(shard, following=waiting.following)
            except LayertapError as error:
                failed[shard] = str(error)
    assert list(failed) == [3]
    assert "a process that decodes images died" in failed[3]


@pytest.mark.parametrize(
    "engine", ["a made-up GPU", pytest.param("openvino", marks=[*BY_OPENVINO.marks, pytest.mark.slow])]
)
@pytest.mark.parametrize(
    "failing", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_after_a_shard_that_failed_the_others_are_right(
    pictures: Path, tmp_path: Path, options: dict[str, Any], engine: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of batches that were begun before, nobody takes the features for those of his own."""
    options = {**options, "batch_size": 2, "compile": "openvino" if engine == "openvino" else "off"}
    expected = extract_features(pictures, out=tmp_path / "expected", workers=0, **options)
    write, calls = ShardWriter.write, itertools.count(1)

    def fails(self: ShardWriter, *args: Any) -> None:
        if next(calls) == 4 + failing:
            raise LayertapError("the disk is full")
        write(self, *args)

    monkeypatch.setattr(ShardWriter, "write", fails)
    failed = []
    on_gpu = on_a_gpu(failing) if engine != "openvino" else contextlib.nullcontext()
    with on_gpu, maker_of(pictures, tmp_path, options, 0) as maker:
        for shard in [0, 1, 2, 3, 1, 5, 4]:
            try:
                assert maker.make(shard)
                maker.publish(shard)
            except LayertapError as error:
                failed.append((shard, str(error)))
    assert failed == [(1, "the disk is full")]
    assert_same(tmp_path / "out", expected)


@pytest.mark.parametrize("flags", [{"precision": "bfloat16"}])
def test_what_was_refused_is_compared_again_for_the_next_shard(
    pictures: Path, tmp_path: Path, options: dict[str, Any], flags: dict[str, Any]
) -> None:
    with maker_of(pictures, tmp_path, {**options, **flags, "min_cosine": 1.0}, 0) as maker:
        for shard in (0, 1, 0):
            with pytest.raises(LayertapError, match="is required"):
                maker.make(shard)


def test_a_shard_that_is_not_wanted_any_more_leaves_nothing(
    pictures: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with maker_of(pictures, tmp_path, options, 0) as maker:
        assert maker.make(0)
        assert not maker.make(1, stop=lambda: True)
        left = {path.name for path in (tmp_path / "scratch" / "shards").iterdir()}
        assert left == {"000000.h5", "000000.json", "000001.h5.part"}
        maker.give_up(0)
        maker.give_up(1)
        assert list((tmp_path / "scratch" / "shards").iterdir()) == []


def test_a_shard_is_published_while_the_next_is_made(
    pictures: Path, tmp_path: Path, options: dict[str, Any], expected: FeatureReader
) -> None:
    computing = {shard: threading.Event() for shard in range(SHARDS)}
    order: list[tuple[str, int]] = []

    class Patient(SharedFolder):
        """Takes a shard when rows of the next one are computed."""

        def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
            shard = int(path.stem)
            assert shard == SHARDS - 1 or computing[shard + 1].wait(60)
            order.append(("published", shard))
            return super().publish(path, receipt)

    class Noting(ShardMaker):
        def make(self, shard: int, *given: Any) -> bool:
            found = super().make(shard, lambda *_: computing[shard].set(), *given[1:])
            order.append(("made", shard))
            return found

    @contextlib.contextmanager
    def start(say: Any) -> Iterator[Noting]:
        planned = plan(pictures, out=tmp_path / "out", workers=0, **options)
        with Noting(planned, Patient(tmp_path / "out"), tmp_path / "scratch") as maker:
            yield maker

    told: list[Any] = []

    def tell(event: Any) -> None:
        told.append(event)
        if isinstance(event, Done) and event.shard == SHARDS - 1:
            worker.end()

    worker = Worker(0, start, tell)
    for shard in range(SHARDS):
        worker.submit(shard)
    worker.run()
    assert [event.shard for event in told if isinstance(event, Done)] == list(range(SHARDS))
    assert not [event for event in told if isinstance(event, Left | Failed)]
    ahead = [order.index(("published", shard)) - order.index(("made", shard)) for shard in range(SHARDS)]
    assert max(ahead) <= 3  # no more than one that is published, and one that waits for it
    assert_same(tmp_path / "out", expected)
