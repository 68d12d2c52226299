"""Counts of rows, against counts of h5py."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from extract import FeatureReader
from extract.row_status import Status
from extract.store import row_selection
from extract.store.verify import verify
from pipelines.data_sets.show import describe
from tests.extract.store.rows import FEATURES, PATHS, PATHS_XXH3, ROWS, complete_data_set, create, data_set

IMAGES = {"root": "/photos", "count": ROWS, "paths_xxh3": PATHS_XXH3, "labels_xxh3": "0" * 32}
FAILED = (11, 15)  # both in shard 1


@pytest.fixture(autouse=True)
def _on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", 0)


def counted(out: Path) -> dict[str, Any]:
    """Count the rows with h5py."""
    status, classes, splits, labels = Counter[str](), Counter[str](), Counter[str](), Counter[int]()
    for path in sorted(out.glob("shards/*.h5")):
        with h5py.File(path) as file:
            names = [name.decode() for name in file["classes"][()].tolist()]
            classes.update(dict.fromkeys(names, 0))
            status.update(Status(code).text for code in file["status"][()].tolist())
            labels.update(file["label"][()].tolist())
            classes.update(names[label] for label in file["label"][()].tolist() if label >= 0)
            splits.update(split.decode() for split in file["split"][()].tolist() if split)
    return {"status": status, "classes": classes, "unlabelled": labels[-1], "splits": splits}


def check_counts(out: Path) -> None:
    with FeatureReader(out) as reader:
        counts = reader.counts
        assert {name: getattr(counts, name) for name in counted(out)} == counted(out)


def edited(out: Path, shard: int, how: Callable[[dict[str, Any]], object]) -> None:
    """Change a receipt."""
    path = out / f"shards/{shard:06d}.json"
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def _out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_data_set(tmp_path_factory.mktemp("counts") / "out", failed=FAILED, images=IMAGES).out


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_data_set(tmp_path_factory.mktemp("packed") / "out", "gzip", images=IMAGES).out


@pytest.fixture
def out(_out: Path, tmp_path: Path) -> Path:
    """A data set with two failed rows."""
    return shutil.copytree(_out, tmp_path / "out")


def test_rows_are_counted(packed: Path) -> None:
    check_counts(packed)


def test_failed_rows_are_counted_and_listed(out: Path) -> None:
    check_counts(out)
    with FeatureReader(out) as reader:
        assert reader.failures == [(row, PATHS[row], "decode error", f"row {row} failed") for row in FAILED]


def test_compression_is_that_of_the_files(packed: Path) -> None:
    with FeatureReader(packed) as reader:
        compression = reader.compression
    for feature in FEATURES:
        stored = 0
        for path in packed.glob("shards/*.h5"):
            with h5py.File(path) as file:
                stored += file[f"features/{feature.name}"].id.get_storage_size()
        assert compression[feature.name] == ("gzip", feature.row_bytes * ROWS / stored)


def test_a_data_set_may_be_compressed_in_part(out: Path, packed: Path) -> None:
    for suffix in ("h5", "json"):
        shutil.copy(packed / f"shards/000001.{suffix}", out / f"shards/000001.{suffix}")
    with h5py.File(out / "shards/000001.h5") as file:
        stored = file["features/vector"].id.get_storage_size()
    plain = FEATURES[0].row_bytes
    with FeatureReader(out) as reader:
        assert reader.compression["vector"] == ("gzip", plain * ROWS / (plain * (ROWS - 10) + stored))


@pytest.mark.parametrize("content", [None, "", "{}", "[" * 100_000])
def test_without_a_receipt_the_rows_are_counted(out: Path, content: str | None) -> None:
    (out / "shards/000001.json").unlink()
    if content is not None:
        (out / "shards/000001.json").write_text(content)
    check_counts(out)


def test_rows_of_an_unfinished_data_set_are_counted(out: Path) -> None:
    for suffix in ("h5", "json"):
        (out / f"shards/000001.{suffix}").unlink()
    create(data_set(out, images=IMAGES), 1)
    with FeatureReader(out, partial=True) as reader:
        assert reader.counts.status == {"ok": ROWS - 10}
        assert reader.counts.classes == Counter(f"class {i % 3}" for i in range(ROWS) if not 10 <= i < 20)


def test_counts_of_two_data_sets_are_added(out: Path, packed: Path) -> None:
    with FeatureReader([out, packed]) as reader:
        assert reader.counts.status == {"ok": 2 * ROWS - 2, "decode error": 2}
        assert reader.counts.classes == {name: 2 * count for name, count in counted(out)["classes"].items()}


@pytest.mark.parametrize("entry", ["labels", "splits"])
def test_verify_compares_the_counts(out: Path, entry: str) -> None:
    assert verify(out).faults == []
    edited(out, 1, lambda receipt: receipt[entry].clear())
    (fault,) = verify(out).faults
    assert f"its {entry} differs from the receipt" in str(fault)


def test_show_prints_the_same_of_shards_that_are_opened_at_once_or_on_first_use(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_first_use = describe(out)
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", 64)
    assert describe(out) == on_first_use
    assert on_first_use["splits"] == {"train": ROWS}
    assert sum(on_first_use["classes"].values()) == ROWS
