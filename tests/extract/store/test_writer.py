from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from extract import FeatureReader, LayertapError, LockedError, Status
from extract.store.export import export
from extract.store.format import checked_file
from extract.store.format import writer as writing
from extract.store.format.dataset import DataSet
from extract.store.format.layout import StoredFeature
from extract.store.format.shard import Shard, copy_shard
from extract.store.format.writer import ShardWriter
from tests.extract.store.processes import failing, kill_itself, killed, result_of
from tests.extract.store.rows import (
    PATHS,
    VALUES,
    complete_data_set,
    create,
    filled,
    new_shard,
    no_files,
    published,
    write,
)


def test_a_killed_write_leaves_its_rows_pending_and_the_others_stored(data: DataSet) -> None:
    def write_and_die() -> None:
        writer = new_shard(data)
        write(writer, [0, 1, 2])
        writer._put("/features/vector", np.array([3, 4]), np.full((2, 6), 7, "float32"))
        kill_itself()

    killed(write_and_die)
    with ShardWriter(data, 0) as writer:
        assert writer.status.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
        assert writer.check() == 0
        write(writer, list(range(3, 10)))
        final = writer.publish()
    with FeatureReader(final) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"][:10])


def test_rows_that_do_not_agree_with_their_hash_become_pending(data: DataSet) -> None:
    part = create(data, 0)
    with ShardWriter(data, 0) as writer:
        write(writer, list(range(10)))
    with h5py.File(part, "r+") as file:
        file["features/vector"][4, 2] += 1
        file["features/map:none"][7, 0, 0, 0] += 1
    with ShardWriter(data, 0) as writer:
        assert writer.check() == 2
        assert np.flatnonzero(writer.status == Status.PENDING).tolist() == [4, 7]
        with pytest.raises(LayertapError, match="2 rows are still pending"):
            writer.publish()


def test_a_second_writer_of_a_shard_is_refused(data: DataSet) -> None:
    with new_shard(data):
        error = result_of(ShardWriter, data, 0)
    assert isinstance(error, LockedError)
    assert "is open in another process" in str(error)


def test_a_published_shard_always_has_its_receipt(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_shard(data) as writer:
        write(writer, list(range(10)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(errno.EIO))
            with pytest.raises(LayertapError, match="cannot publish .*Input/output error; its rows are safe"):
                writer.publish()
    assert data.path(0, part=True).exists()
    assert not data.path(0).exists()
    with ShardWriter(data, 0) as writer:
        assert data.path(0).with_suffix(".json").exists() or writer.publish()
    assert data.path(0).with_suffix(".json").exists()


def test_a_shard_has_its_receipt_and_name_only_when_its_rows_are_on_the_disk(
    data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(writing, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "flush_to_disk":
                time.sleep(0.05)  # longer than hashing takes
            events.append(name)
            return function(*arguments, **options)

        return call

    for name in ("flush_to_disk", "write_json", "claim"):
        monkeypatch.setattr(writing, name, noted(name))
    published(data)
    assert events == ["flush_to_disk", "write_json", "claim"]


def test_where_there_are_no_hard_links_a_shard_is_renamed(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert published(data) == data.path(0)
    assert sorted(path.name for path in (data.out / "shards").iterdir()) == ["000000.h5", "000000.json"]


def test_the_final_name_is_given_once(complete: Path) -> None:
    data = DataSet.open(complete)
    before = data.path(0).read_bytes()
    with new_shard(data) as writer:
        write(writer, list(range(10)), Status.NOT_FINITE)
        with pytest.raises(LayertapError, match="already exists"):
            writer.publish()
    assert data.path(0).read_bytes() == before


def test_each_float16_that_is_not_finite_gives_its_row_that_status() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 2)  # all there are, two in a row
    status = np.full(len(values), Status.OK, np.uint8)
    rows = writing.stored_rows(np.arange(len(values)), {"x": values}, {"x": values[0]}, status, {})
    assert ((rows.status == Status.OK) == np.isfinite(values).all(axis=1)).all()
    assert rows.reasons.keys() == set(np.flatnonzero(rows.status == Status.NOT_FINITE).tolist())


def test_a_receipt_tells_size_hash_and_counts(complete: Path) -> None:
    shard = complete / "shards" / "000002.h5"
    receipt = json.loads(shard.with_suffix(".json").read_text())
    assert receipt["size"] == shard.stat().st_size
    assert receipt["sha256"] == hashlib.sha256(shard.read_bytes()).hexdigest()
    assert receipt["status"] == {"ok": 3}
    assert not list((complete / "shards").glob("*.part"))


@pytest.mark.parametrize(
    ("features", "message"),
    [({"vector": np.zeros((2, 6), "float32")}, "features"),
     ({"vector": np.zeros((2, 5), "float32"), "map:none": np.zeros((2, 2, 3, 4))}, "vector")],
)  # fmt: skip
def test_wrong_features_are_refused(data: DataSet, features: dict[str, np.ndarray], message: str) -> None:
    with new_shard(data) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write(np.array([0, 1]), features, np.ones(2, "uint8"), no_files(2))
        assert not writer.status.any()


@pytest.mark.parametrize("sync_s", [0, 1e9])
def test_batches_are_forced_to_the_disk_as_often_as_asked(
    data: DataSet, sync_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    create(data, 0)
    with ShardWriter(data, 0, sync_s=sync_s) as writer:
        for row in range(10):
            write(writer, [row])
    # Once before the status and once behind it: no status reaches the disk before its row.
    assert len(synced) == (20 if sync_s == 0 else 0)


def test_nothing_but_row_data_changes_after_creation(data: DataSet) -> None:
    before = create(data, 0).read_bytes()
    with ShardWriter(data, 0) as writer:
        write(writer, list(range(10)))
        after = writer.publish().read_bytes()
    assert len(after) == len(before)
    title, line = before.split(b"\n", 2)[:2]
    assert title == b"layertap shard, format 1; HDF5 begins at byte 1024"
    ranges = json.loads(line)["row_data"]
    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed
    assert all(any(start <= i < stop for start, stop in ranges) for i in changed)


@pytest.mark.parametrize("compress", ["gzip", "lzf", "blosc2"])
def test_compression_is_a_copy_that_plain_h5py_reads(tmp_path: Path, compress: str) -> None:
    data = complete_data_set(tmp_path / "out", compress, failed=(4,))
    import hdf5plugin  # noqa: F401  for blosc2

    with h5py.File(data.path(1)) as file:
        stored = file["features/vector"]
        assert np.array_equal(stored[:], VALUES["vector"][10:20])
        filters = stored.id.get_create_plist()
        assert filters.get_nfilters() >= 2
        assert file["status"][:].tolist() == [1] * 10
    receipt = json.loads(data.path(0).with_suffix(".json").read_text())
    assert receipt["compression"]["filter"] == compress
    assert receipt["compression"]["ratio"] > 0
    assert receipt["reasons"] == {"4": "row 4 failed"}
    assert sorted(path.name for path in (data.out / "shards").iterdir()) == [
        f"00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")
    ]


def test_features_that_compress_are_smaller(tmp_path: Path) -> None:
    count, sizes = 1000, {}

    def values_of(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.repeat(rows[:, None] % 50, 512, 1).astype("float32")}

    for compress in (None, "gzip", "lzf", "blosc2"):
        features = [StoredFeature("x", (512,), "float32")]
        data = filled(tmp_path / str(compress), features, count, values_of, compress=compress)
        sizes[compress] = data.path(0).stat().st_size
        with FeatureReader(data.out) as reader:
            assert (reader["x"][:] == np.arange(count)[:, None] % 50).all()
            assert (reader["x"][[999, 3, 500]] == np.array([[49], [3], [0]])).all()
            packed = reader.compression
        if compress:
            assert packed["x"][0] == compress
            with h5py.File(data.path(0)) as file:
                assert packed["x"][1] == count * 2048 / file["features/x"].id.get_storage_size()
            assert sizes[compress] < sizes[None] / 5


def test_a_compressed_copy_that_is_not_the_same_is_not_published(
    data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_shard(data) as writer:
        write(writer, list(range(10)))
        blocks = Shard.blocks

        def badly(self: Shard, rows: np.ndarray) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
            for start, stop, block in blocks(self, rows):
                yield start, stop, {name: values * (self.path.suffix != ".part") for name, values in block.items()}

        monkeypatch.setattr(Shard, "blocks", badly)
        with pytest.raises(LayertapError, match="10 rows differ after compression with gzip.*run again without"):
            writer.publish("gzip")
    assert [path.name for path in (data.out / "shards").iterdir()] == ["000000.h5.part"]


def test_no_space_for_a_shard_or_its_compressed_copy_is_told_before_anything_is_written(
    data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(LayertapError, match="No space left on device"):
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        create(data, 0)
    assert list((data.out / "shards").iterdir()) == []
    with new_shard(data) as writer:
        write(writer, list(range(10)))
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(LayertapError, match="No space left on device"):
            writer.publish("gzip")
    monkeypatch.undo()
    with ShardWriter(data, 0) as writer:
        assert writer.check() == 0
        writer.publish("gzip")
    with FeatureReader(data.path(0)) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"][:10])


def test_a_signal_while_a_writer_closes_does_not_close_twice(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    create(data, 0)
    closed: list[int] = []
    close = os.close

    def interrupted(file: int) -> None:
        close(file)
        closed.append(file)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ShardWriter(data, 0) as writer:
        monkeypatch.setattr(os, "close", interrupted)
        writer._close()
    assert len(closed) == 1


def test_a_folder_that_vanished_is_told(data: DataSet) -> None:
    with new_shard(data) as writer:
        write(writer, list(range(9)))
        shutil.rmtree(data.out)
        write(writer, [9])
        with pytest.raises(LayertapError, match="cannot publish .*000000.h5: .*was removed.* run again"):
            writer.publish()


def test_status_of_any_integer_type_is_stored_as_a_byte(data: DataSet) -> None:
    with new_shard(data) as writer:
        for rows in ([0, 1, 5], [2, 3, 4, 6, 7, 8, 9]):
            values = {name: values[rows] for name, values in VALUES.items()}
            writer.write(np.array(rows, np.int32), values, np.ones(len(rows), np.int64), no_files(len(rows)))
        assert writer.check() == 0
        assert writer.status.tolist() == [1] * 10
        writer.publish()
    with FeatureReader(data.path(0)) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"][:10])


@pytest.mark.parametrize("rows", [[10], [-1], [3, 3], [4, 3]])
def test_rows_of_another_shard_or_in_disorder_are_refused(data: DataSet, rows: list[int]) -> None:
    with (
        new_shard(data) as writer,
        pytest.raises(ValueError, match="are not ascending rows of this shard"),
    ):
        write(writer, rows)


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, of the given size."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def random_values(rows: np.ndarray) -> dict[str, np.ndarray]:
    """A megabyte of one shard."""
    return {"x": np.random.default_rng(rows[0]).normal(size=(len(rows), 1024)).astype("f4")}


def fill_the_disk(out: Path, compress: str | None) -> None:
    filled(out, [StoredFeature("x", (1024,), "float32")], 1024, random_values, 256, compress=compress)


@pytest.mark.parametrize(("mounted", "compress"), [("3200k", None), ("4500k", "gzip")], indirect=["mounted"])
def test_a_full_file_system_ends_in_an_error_and_no_crash(mounted: Path, compress: str | None) -> None:
    """Too little for three shards of 1 MB: two are published, and stay."""
    error = result_of(fill_the_disk, mounted / "out", compress)
    assert isinstance(error, LayertapError)
    assert "No space left on device" in str(error)
    assert compress is None or "its rows are safe in 000002.h5.part" in str(error)
    published = sorted((mounted / "out" / "shards").glob("*.h5"))
    assert len(published) == 2
    for shard, path in enumerate(published):
        with FeatureReader(path) as reader:
            assert np.array_equal(reader["x"][:], random_values(np.arange(256) + 256 * shard)["x"])


@pytest.mark.parametrize("mounted", ["10m"], indirect=True)
def test_a_read_only_file_system_is_told(mounted: Path) -> None:
    data = complete_data_set(mounted / "out")
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(LayertapError, match="cannot write to .*Read-only file system"), data.locked():
        pass
    with pytest.raises(LayertapError, match="cannot create .*Read-only file system"):
        create(data, 1)
    with FeatureReader(data.out) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])


# Each write of a new HDF5 file fails once: HDF5 itself crashes then, which no exception would show


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
    for number in range(calls.count):
        calls.count, calls.failing, calls.code = 0, number, (errno.EIO, errno.ENOSPC, errno.EROFS)[number % 3]
        yield os.strerror(calls.code)
        assert calls.count > number


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


def test_hdf5_reads_what_it_wrote_and_a_second_file_is_not_written_over_it(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1000, 50))
    with checked_file.hdf5_on_disk(tmp_path / "a.h5", "x", userblock_size=512) as file:
        file.create_dataset("packed", data=values, chunks=(7, 50), compression="gzip")
        file.create_dataset("plain", data=values)
        np.testing.assert_array_equal(file["packed"][3:500], values[3:500])
    with pytest.raises(FileExistsError), checked_file.hdf5_on_disk(tmp_path / "a.h5", "x"):
        pass
    with h5py.File(tmp_path / "a.h5") as file:
        for name in ("packed", "plain"):
            np.testing.assert_array_equal(file[name][()], values)
