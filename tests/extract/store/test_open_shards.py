"""Readers of data sets with many shards, which are opened on first use; the limits are lowered for three shards."""

from __future__ import annotations

import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError
from extract.store import row_selection
from extract.store.batches import Shuffle
from extract.store.format.shard import Shard
from extract.store.row_selection import OpenShards, ShardFile

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


def test_only_the_shard_that_is_read_is_opened(complete: Path, opened: list[str]) -> None:
    with FeatureReader(complete) as reader:
        assert opened == []
        row = len(reader) - 1
        np.testing.assert_array_equal(reader["vector"][row], in_files(complete, "features/vector")[row])
    assert opened == ["000002.h5"]


def test_everything_is_as_in_the_files(complete: Path) -> None:
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


def test_a_range_of_a_column_has_no_step(complete: Path) -> None:
    with FeatureReader(complete) as reader, pytest.raises(ValueError, match="step 2"):
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


def test_a_damaged_shard_is_named_when_it_is_read(complete: Path) -> None:
    with (complete / "shards/000001.h5").open("r+b") as file:
        file.truncate(1000)
    with FeatureReader(complete) as reader:
        assert reader["vector"][0].shape == (6,)
        with pytest.raises(InputError, match=r"000001\.h5 is damaged: it has 1,000 bytes.*verify OUT --repair"):
            reader["vector"][:]


def test_a_shard_that_was_removed_is_named_when_it_is_read(complete: Path) -> None:
    with FeatureReader(complete) as reader:
        (complete / "shards/000002.h5").unlink()
        with pytest.raises(InputError, match=r"000002\.h5 no longer exists: .* open the data set again"):
            reader["vector"][:]


def test_a_shard_of_another_data_set_is_refused_when_it_is_read(complete: Path) -> None:
    shutil.copy(complete / "shards/000000.h5", complete / "shards/000001.h5")
    with FeatureReader(complete) as reader, pytest.raises(InputError, match="is not shard 1 of this data set"):
        reader["vector"][:]


def test_a_closed_reader_opens_nothing(complete: Path) -> None:
    with FeatureReader(complete) as reader:
        reader["vector"][0]
    for use in (lambda: reader["vector"][0], lambda: reader["vector"][len(reader) - 1], lambda: reader.paths[-1]):
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
    assert [first.is_open, second.is_open] == [False, True]
