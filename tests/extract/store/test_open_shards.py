"""Readers of data sets with many shards, which are opened on first use; the limits are lowered for three shards."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import FeatureReader, InputError, LayertapError
from extract.row_status import Status
from extract.store import row_selection
from extract.store.batches import Shuffle
from extract.store.format.shard import Shard
from extract.store.row_selection import OpenShards, ShardFile
from extract.store.text_column import TextColumn
from extract.store.verify import verify
from pipelines.data_sets.show import describe
from tests.extract.store.rows import FEATURES, PATHS, PATHS_XXH3, ROWS, complete_data_set, create, data_set

HOW: tuple[Shuffle, ...] = (None, "chunks", "rows")


@pytest.fixture(autouse=True)
def _on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", 0)


def in_files(out: Path, name: str) -> np.ndarray:
    """Return a dataset of all shards, read by h5py."""
    parts = []
    for path in sorted(out.glob("shards/*.h5")):
        with h5py.File(path) as file:
            parts.append(file[name][()])
    return np.concatenate(parts)


def test_all_is_as_in_the_files_and_only_the_shard_that_is_read_is_opened(complete: Path, opened: list[str]) -> None:
    with FeatureReader(complete) as reader:
        assert opened == []
        row = len(reader) - 1
        np.testing.assert_array_equal(reader["vector"][row], in_files(complete, "features/vector")[row])
    assert opened == ["000002.h5"]
    with FeatureReader(complete) as reader:
        order = np.random.default_rng(0).permutation(len(reader))
        np.testing.assert_array_equal(reader["vector"][order], in_files(complete, "features/vector")[order])
        np.testing.assert_array_equal(reader.status, in_files(complete, "status"))
        assert list(map(os.fsencode, reader.paths)) == in_files(complete, "path").tolist()
        assert list(map(os.fsencode, reader.splits)) == in_files(complete, "split").tolist()
        np.testing.assert_array_equal(reader.rows, np.arange(len(order)))
        hashes = in_files(complete, "row_hash")
        np.testing.assert_array_equal(reader.column("row_hash", slice(3, 17)), hashes[3:17])
        np.testing.assert_array_equal(reader.column("row_hash"), hashes)
        with pytest.raises(ValueError, match="step 2"):
            reader.column("status", slice(0, 8, 2))


def test_batches_are_those_of_a_reader_that_opens_all_shards(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[tuple[np.ndarray, np.ndarray]]:
        with FeatureReader(complete) as reader:
            return [batch for how in HOW for batch in reader.batches("vector", 4, shuffle=how, seed=3)]

    lazy = batches()
    assert lazy
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", 64)
    for (features, rows), (expected, expected_rows) in zip(lazy, batches(), strict=True):
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_array_equal(features, expected)


def test_the_shard_that_was_opened_first_is_closed_at_the_limit(
    complete: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_selection, "_most_open_shards", lambda: 2)
    expected = in_files(complete, "features/vector")
    with FeatureReader(complete) as reader:
        first = [int(start) for start in reader._index.starts[:-1]]
        kept = reader["vector"][first[0] : first[0] + 2]
        for row in (*first, first[1], first[2], first[0]):
            np.testing.assert_array_equal(reader["vector"][row], expected[row])
        np.testing.assert_array_equal(kept, expected[:2])
    assert opened == ["000000.h5", "000001.h5", "000002.h5", "000000.h5"]


def test_a_damaged_removed_or_other_shard_is_named_when_it_is_read(complete: Path) -> None:
    with (complete / "shards/000001.h5").open("r+b") as file:
        file.truncate(1000)
    with FeatureReader(complete) as reader:
        (complete / "shards/000002.h5").unlink()
        assert reader["vector"][0].shape == (6,)
        with pytest.raises(InputError, match=r"000001\.h5 is damaged: it has 1,000 bytes.*verify OUT --repair"):
            reader["vector"][:]
        with pytest.raises(InputError, match=r"000002\.h5 no longer exists: .* open the data set again"):
            reader["vector"][-1]
    for number in (1, 2):
        shutil.copy(complete / "shards/000000.h5", complete / f"shards/00000{number}.h5")
    with FeatureReader(complete) as reader, pytest.raises(InputError, match="is not shard 1 of this data set"):
        reader["vector"][:]


@pytest.mark.parametrize(("at_once", "compress"), [(0, None), (64, None), (64, "gzip")])
def test_a_closed_reader_says_so(
    tmp_path: Path, at_once: int, compress: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", at_once)
    with FeatureReader(complete_data_set(tmp_path / "out", compress).out) as reader:
        reader["vector"][0]
    for use in (lambda: reader["vector"][0], lambda: reader["vector"][22], lambda: reader["vector"][[1, 2]],
                lambda: reader["vector"][:], lambda: reader.status,
                lambda: reader.paths[-1], lambda: reader.provenance):  # fmt: skip
        with pytest.raises(LayertapError, match="is closed"):
            use()
    with pytest.raises(LayertapError, match=r"copy what is needed later, such as reader.paths\[:\]"):
        list(reader.paths)


def test_a_pickled_reader_opens_the_files_again(complete: Path, opened: list[str]) -> None:
    with FeatureReader(complete) as reader:
        reader["vector"][:]
        opened.clear()
        copy = pickle.loads(pickle.dumps(reader))
    assert opened == []
    with copy:
        np.testing.assert_array_equal(copy["vector"][:], in_files(complete, "features/vector"))
        assert list(map(os.fsencode, copy.paths)) == in_files(complete, "path").tolist()
    assert len(opened) == 3


class _ClosedByAnotherThread(OrderedDict[ShardFile, None]):
    def __len__(self) -> int:
        count = super().__len__()
        self.clear()
        return count


def test_a_shard_is_opened_while_another_thread_closes_the_last_one() -> None:
    shards = OpenShards(1)
    first, second = (ShardFile(name, 1, read=lambda: object(), open_shards=shards) for name in "ab")  # type: ignore[arg-type,return-value]
    assert first.shard
    shards._open = _ClosedByAnotherThread(shards._open)
    assert second.shard


def test_a_shard_that_another_thread_closes_at_once_does_not_stay_open() -> None:
    class Interrupted(OpenShards):
        def open(self, file: ShardFile, read: Callable[[], Shard]) -> Shard:
            shard = super().open(file, read)
            if file is first:
                assert second.shard
            return shard

    shards = Interrupted(1)
    first, second = (ShardFile(name, 1, read=lambda: object(), open_shards=shards) for name in "ab")  # type: ignore[arg-type,return-value]
    assert first.shard
    assert [first.opened is not None, second.opened is not None] == [False, True]


# Counts of rows, against counts of h5py


IMAGES = {"root": "/photos", "count": ROWS, "paths_xxh3": PATHS_XXH3, "labels_xxh3": "0" * 32}
FAILED = (11, 15)  # both in shard 1


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


def test_rows_are_counted_and_failed_ones_listed(out: Path, packed: Path) -> None:
    check_counts(packed)
    check_counts(out)
    with FeatureReader(out) as reader:
        assert reader.failures == [(row, PATHS[row], "decode error", f"row {row} failed") for row in FAILED]


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


def test_rows_of_two_data_sets_and_of_an_unfinished_one_are_counted(out: Path, packed: Path) -> None:
    with FeatureReader([out, packed]) as reader:
        assert reader.counts.status == {"ok": 2 * ROWS - 2, "decode error": 2}
        assert reader.counts.classes == {name: 2 * count for name, count in counted(out)["classes"].items()}
    for suffix in ("h5", "json"):
        (out / f"shards/000001.{suffix}").unlink()
    create(data_set(out, images=IMAGES), 1)
    with FeatureReader(out, partial=True) as reader:
        assert reader.counts.status == {"ok": ROWS - 10}
        assert reader.counts.classes == Counter(f"class {i % 3}" for i in range(ROWS) if not 10 <= i < 20)


def test_verify_compares_the_counts(out: Path) -> None:
    assert verify(out).faults == []
    for shard, entry in ((1, "labels"), (2, "splits")):
        edited(out, shard, lambda receipt, entry=entry: receipt[entry].clear())
    assert [fault.what.split(";")[0] for fault in verify(out).faults] == [
        "its labels differs from the receipt", "its splits differs from the receipt"
    ]  # fmt: skip


def test_show_prints_the_same_of_shards_that_are_opened_at_once_or_on_first_use(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_first_use = describe(out)
    monkeypatch.setattr(row_selection, "OPENED_AT_ONCE", 64)
    assert describe(out) == on_first_use
    assert on_first_use["splits"] == {"train": ROWS}
    assert sum(on_first_use["classes"].values()) == ROWS


# Columns of texts, which are read when they are asked for


TEXTS = ["a", "", "b/c.jpg", "ü", "a"]


def column(texts: list[str]) -> TextColumn:
    return TextColumn(len(texts), lambda start, stop: texts[start:stop])


@settings(max_examples=30)
@given(st.lists(st.text("aü/", max_size=2), max_size=8), st.slices(8))
def test_it_is_a_sequence_like_a_list(texts: list[str], index: slice) -> None:
    values = column(texts)
    assert values[index] == texts[index]
    assert (list(values), len(values), list(reversed(values))) == (texts, len(texts), texts[::-1])
    assert [values[i] for i in range(-len(texts), len(texts))] == texts + texts
    assert values == texts
    assert np.array(values).tolist() == texts
    for text in texts:
        assert text in values
        assert values.index(text) == texts.index(text)


def test_a_text_gives_a_mask_and_rows_by_number_or_mask_are_those_of_an_array() -> None:
    values = column(TEXTS)
    assert "z" not in values
    for other in (TEXTS[:-1], [*TEXTS[:-1], "z"], None):
        assert values != other
    assert (values == "a").tolist() == [True, False, False, False, True]
    assert (values != "a").tolist() == [False, True, True, True, False]
    assert (column([]) == "a").shape == (0,)
    assert np.arange(5)[values == "a"].tolist() == [0, 4]
    mask = [True, False, False, True, False]
    chosen: list[Any] = [[3, 0, 3], [-1], [], np.array([4, 2]), np.array(TEXTS) == "a", mask]
    for rows in chosen:
        assert values[rows] == np.array(TEXTS)[np.asarray(rows, None if len(rows) else int)].tolist()
    wrong: list[Any] = [[True, False], [5], 5, -6]
    for rows in wrong:
        with pytest.raises(IndexError):
            values[rows]


def test_many_texts_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract.store.text_column._AT_ONCE", 2)
    reads = []

    def read(start: int, stop: int) -> list[str]:
        reads.append((start, stop))
        return TEXTS[start:stop]

    assert list(TextColumn(5, read)) == TEXTS
    assert reads == [(0, 2), (2, 4), (4, 5)]
