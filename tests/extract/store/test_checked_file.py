"""Each write of a new HDF5 file fails once: HDF5 itself crashes then, which no exception would show."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from extract import FeatureReader, LayertapError
from extract.store.export import export
from extract.store.format import checked_file
from extract.store.format.dataset import DataSet
from extract.store.format.shard import Shard, copy_shard
from tests.extract.store.rows import PATHS, create


class Calls:
    """The system calls of the file object; call number `failing` has an error."""

    def __init__(self) -> None:
        self.count, self.failing, self.code = 0, -1, errno.EIO

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name not in ("pwrite", "ftruncate", "close"):
            return original

        def call(*arguments: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if number == self.failing:
                if name == "close":
                    original(*arguments)
                raise OSError(self.code, os.strerror(self.code))
            return original(*arguments)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(checked_file, "os", calls)
    return calls


def each_failing(calls: Calls, run: Callable[[], Any]) -> Iterator[str]:
    """Run once without a fault, then once for each call that can fail; yield the error code's text before each run."""
    run()
    assert calls.count > 5
    for failing in range(calls.count):
        calls.count, calls.failing, calls.code = 0, failing, (errno.EIO, errno.ENOSPC, errno.EROFS)[failing % 3]
        yield os.strerror(calls.code)
        assert calls.count > failing


def test_each_failed_write_of_a_new_shard_is_an_error(data: DataSet, calls: Calls) -> None:
    part = data.path(0, part=True)

    def run() -> None:
        part.unlink(missing_ok=True)
        create(data, 0)

    for reason in each_failing(calls, run):
        with pytest.raises(LayertapError, match=f"cannot create .*000000.h5.part: {reason}"):
            run()
        assert list(part.parent.iterdir()) == []
    calls.failing = -1
    run()
    with Shard(part) as shard:
        assert shard.text("path") == PATHS[:10]


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_each_failed_write_of_a_copied_shard_is_an_error(
    complete: Path, tmp_path: Path, calls: Calls, compress: str | None
) -> None:
    copy = tmp_path / "copy" / "000000.h5"
    copy.parent.mkdir()
    with Shard(complete / "shards/000000.h5") as shard:
        expected = shard.read("vector", 0, 10)
        for reason in each_failing(calls, lambda: copy_shard(shard, copy, compress=compress)):
            copy.unlink(missing_ok=True)
            with pytest.raises(LayertapError, match=reason):
                copy_shard(shard, copy, compress=compress)
            assert list(copy.parent.iterdir()) == []
        calls.failing = -1
        copy_shard(shard, copy, compress=compress)
    with Shard(copy) as copied:
        np.testing.assert_array_equal(copied.read("vector", 0, 10), expected)


@pytest.mark.parametrize("to", ["h5", "mat"])
def test_each_failed_write_of_an_export_is_an_error(complete: Path, tmp_path: Path, calls: Calls, to: str) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    target = folder / f"features.{to}"
    with FeatureReader(complete) as reader:

        def run() -> None:
            target.unlink(missing_ok=True)
            export(reader, target, to)

        for reason in each_failing(calls, run):
            with pytest.raises(LayertapError, match=reason):
                run()
            assert list(folder.iterdir()) == []
        calls.failing = -1
        run()
        with h5py.File(target) as file:
            rows = file["features/vector"][()] if to == "h5" else file["vector"][()].T
            np.testing.assert_array_equal(rows, reader["vector"][:])


def test_an_error_is_that_of_the_write_and_not_of_its_consequence(tmp_path: Path, calls: Calls) -> None:
    calls.failing = 0
    with (
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
        checked_file.hdf5_on_disk(tmp_path / "a.h5", "x") as file,
    ):
        file["values"] = np.arange(10)
        raise ValueError("read back wrongly")


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"kept")
    with pytest.raises(FileExistsError), checked_file.hdf5_on_disk(tmp_path / "a.h5", "x"):
        pass
    assert (tmp_path / "a.h5").read_bytes() == b"kept"


def test_hdf5_reads_what_it_wrote(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1000, 50))
    with checked_file.hdf5_on_disk(tmp_path / "a.h5", "x", userblock_size=512) as file:
        file.create_dataset("packed", data=values, chunks=(7, 50), compression="gzip")
        file.create_dataset("plain", data=values)
        np.testing.assert_array_equal(file["packed"][3:500], values[3:500])
    with h5py.File(tmp_path / "a.h5") as file:
        for name in ("packed", "plain"):
            np.testing.assert_array_equal(file[name][()], values)
