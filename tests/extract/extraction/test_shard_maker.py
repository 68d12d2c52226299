"""Shards that are made one after another are those of one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract import FeatureReader, LayertapError, extract_features
from extract.extraction.shard_maker import ShardMaker
from extract.store.format.writer import ShardWriter
from extract.store.places.shared_folder import SharedFolder
from extract.store.verify import verify
from tests.conftest import make_picture
from tests.extract.compute.small_network import small_network
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
    return {"backbone": small_network(), "shard_rows": ROWS, "batch_size": ROWS // 2, "compile": "off"}


@pytest.fixture(scope="module")
def expected(pictures: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    out = tmp_path_factory.mktemp("expected") / "out"
    return extract_features(pictures, out=out, workers=0, progress=False, **options)


Makers = Callable[..., ShardMaker]


@pytest.fixture
def maker_of(pictures: Path, tmp_path: Path, options: dict[str, Any]) -> Makers:
    """Makes a maker of shards of one data set, in one scratch folder, as processes of a machine have them."""

    def make(workers: int = 0, place: SharedFolder | None = None, **changes: Any) -> ShardMaker:
        planned = plan(pictures, out=tmp_path / "out", workers=workers, **(options | changes))
        return ShardMaker(planned, place or SharedFolder(tmp_path / "out"), tmp_path / "scratch")

    return make


def left_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "scratch").rglob("*.h5*"))


def assert_complete(tmp_path: Path, expected: FeatureReader) -> None:
    """The data set is that of one run, and nothing is left beside it."""
    assert verify(tmp_path / "out").faults == []
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.paths == expected.paths
        assert np.array_equal(reader["embedding"][:], expected["embedding"][:])
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_in_any_order_are_those_of_one_run(
    maker_of: Makers, tmp_path: Path, expected: FeatureReader, workers: int
) -> None:
    rows: list[tuple[int, bool]] = []
    with maker_of(workers) as maker:
        for shard in (3, 0, 1, 5, 4, 2):
            receipt = maker.build(shard, lambda *event: rows.append(event))
            assert receipt is not None
            assert receipt["status"] == {"ok": ROWS}
    assert sum(count for count, resumed in rows if not resumed) == ROWS * SHARDS
    assert [count for count, resumed in rows if resumed] == [0] * SHARDS
    assert_complete(tmp_path, expected)


def test_a_shard_of_a_process_that_died_is_resumed_by_any_process_of_the_machine(
    maker_of: Makers, tmp_path: Path, expected: FeatureReader
) -> None:
    def dies(rows: int, resumed: bool) -> None:
        if not resumed:
            raise KeyboardInterrupt

    with maker_of(1) as maker:
        maker.build(0)
        with pytest.raises(KeyboardInterrupt):
            maker.build(2, dies)
    assert left_in(tmp_path) == ["000002.h5.part"]
    rows: list[tuple[int, bool]] = []
    with maker_of(1) as maker:
        assert maker.build(0) is None  # published before
        for shard in range(1, SHARDS):
            assert maker.build(shard, lambda *event: rows.append(event))
    assert rows[2][0] >= ROWS // 2  # of the rows of shard 2, a batch was stored at least
    assert sum(count for count, _ in rows) == ROWS * (SHARDS - 1)
    assert_complete(tmp_path, expected)


def test_a_finished_shard_of_a_process_that_was_killed_is_published_and_not_computed_again(
    maker_of: Makers, tmp_path: Path, expected: FeatureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreachable(SharedFolder):
        def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
            raise LayertapError("the place does not answer")

    unreachable = maker_of(place=Unreachable(tmp_path / "out"))
    with unreachable as maker, pytest.raises(LayertapError, match="does not answer"):
        maker.build(4)
    assert left_in(tmp_path) == ["000004.h5"]
    write = ShardWriter.write
    monkeypatch.setattr(ShardWriter, "write", None)
    with maker_of() as maker:
        assert maker.build(4)
        monkeypatch.setattr(ShardWriter, "write", write)
        for shard in (0, 1, 2, 3, 5):
            maker.build(shard)
    assert_complete(tmp_path, expected)


def test_a_finished_shard_without_its_receipt_is_built_again(
    maker_of: Makers, tmp_path: Path, expected: FeatureReader
) -> None:
    with maker_of() as maker:
        folder = tmp_path / "scratch" / f"{maker._building._name}-000004-0" / "shards"
        folder.mkdir(parents=True)
        (folder / "000004.h5").write_bytes(b"left by a process that was killed")
        assert all(maker.build(shard) for shard in range(SHARDS))
    assert_complete(tmp_path, expected)


def test_processes_that_build_the_same_shard_have_a_folder_each_and_one_of_them_publishes(
    maker_of: Makers, tmp_path: Path, expected: FeatureReader
) -> None:
    # `other` computes first: what PyTorch's inference mode was before is restored in the opposite order.
    with maker_of() as other, maker_of() as maker:
        of_other: list[dict[str, Any] | None] = []

        def meanwhile(rows: int, resumed: bool) -> None:
            if resumed:  # the first has locked its folder
                of_other.append(other.build(shard))

        for shard in range(SHARDS):
            assert maker.build(shard, meanwhile) is None
        assert all(of_other)
        assert len(of_other) == SHARDS
    assert_complete(tmp_path, expected)


def test_what_killed_processes_left_of_published_shards_is_removed(maker_of: Makers, tmp_path: Path) -> None:
    with maker_of() as maker:
        for shard in (1, 2):
            folder = tmp_path / "scratch" / f"{maker._building._name}-{shard:06d}-0" / "shards"
            folder.mkdir(parents=True)
            (folder / f"{shard:06d}.h5.part").touch()
    with maker_of() as maker:
        (tmp_path / "scratch" / f"{maker._building._name}-000001-0" / "shards" / "000001.h5.part").unlink()
        maker.build(1)
        stale = tmp_path / "scratch" / f"{maker._building._name}-000001-7" / "shards"
        stale.mkdir(parents=True)
        (stale / "000001.h5.part").touch()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "scratch" / f"{maker._building._name}-000001-8").symlink_to(elsewhere)
        (tmp_path / "scratch" / f"{maker._building._name}-x-y").mkdir()  # not by layertap
    assert left_in(tmp_path) == ["000002.h5.part"]
    assert list(elsewhere.iterdir()) == []


def test_what_is_refused_is_compared_again_by_the_next_process(maker_of: Makers) -> None:
    for shard in (0, 1):
        strict = maker_of(precision="bfloat16", min_cosine=1.0)
        with strict as maker, pytest.raises(LayertapError, match="is required"):
            maker.build(shard)
