from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError, LockedError, Status
from extract.store.format import layout
from extract.store.format.dataset import DataSet
from extract.store.format.layout import ROW_DATA, StoredFeature
from extract.store.format.shard import Shard, copy_shard
from extract.store.format.writer import ShardWriter
from extract.store.verify import Fault, Remedy, repair, verify
from tests.extract.store.rows import (
    PATHS,
    ROWS,
    VALUES,
    change,
    complete_data_set,
    created,
    data_set,
    empty_data_set,
    filled,
    flip,
    new_shard,
    no_files,
    published,
    sign,
    write,
)


def faults(out: Path) -> list[tuple[str, int | None, str]]:
    """What verify says: (file, row, words)."""
    return [(fault.file, fault.row, fault.what) for fault in verify(out).faults]


def edit(path: Path, name: str, row: int, value: object) -> None:
    """Change row data of a shard in place, which the user block does not cover."""
    with h5py.File(path, "r+") as file:
        file[name][row] = value


def refill(data: DataSet) -> None:
    """What `embed` does after a repair: compute what is pending."""
    for shard, where in enumerate(data.shard_files()):
        if where.published is None:
            if where.part is None:
                created(data, shard)
            with ShardWriter(data, shard, where.part or 0) as writer:
                write(writer, (np.flatnonzero(writer.status != Status.OK) + writer.first_row).tolist())
                writer.publish()


@pytest.mark.parametrize("compress", [None, "gzip", "lzf", "blosc2"])
def test_a_whole_data_set_has_no_fault(tmp_path: Path, compress: str | None) -> None:
    data = complete_data_set(tmp_path / "out", compress, failed=(3, 11))
    counted: list[int] = []
    verification = verify(data.out, counted.append)
    assert verification.faults == []
    assert verification.rows == {"ok": ROWS - 2, "decode error": 2}
    assert sum(counted) == ROWS


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_a_changed_feature_is_named_and_filled_again(tmp_path: Path, compress: str | None) -> None:
    data = complete_data_set(tmp_path / "out", compress)
    edit(data.path(1), "features/vector", 4, 77)
    edit(data.path(1), "features/map:none", 6, 77)
    if compress:  # HDF5 puts the chunk that it packed anew elsewhere; the user block does not know of it
        sign(data.path(1))
    verification = verify(data.out)
    rows = [fault for fault in verification.faults if fault.row is not None]
    if not compress:
        assert [(fault.row, fault.path, fault.what) for fault in rows] == [
            (14, PATHS[14], "does not match its hashes"),
            (16, PATHS[16], "does not match its hashes"),
        ]
        assert {fault.remedy for fault in verification.faults} == {Remedy.ROW, Remedy.NONE}  # the sha256, too
    assert repair(verification) == (10 if compress else 2)
    with pytest.raises(LayertapError, match=r"000001(-r1.h5.part is unfinished|.h5 is missing)"):
        FeatureReader(data.out)  # wrong features are not given out any more
    assert (data.out / "shards" / "000001.h5.damaged").exists()
    refill(data)
    assert verify(data.out).faults == []
    with FeatureReader(data.out) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])


EDITS: list[tuple[str, object]] = [
    ("status", 0), ("status", 9), ("status", 2), ("row_hash", 1), ("record_hash", 1), ("source_size", 1),
    ("source_mtime_ns", 1), ("source_hash", 1), ("features/vector", 77),
]  # fmt: skip


def test_whatever_is_changed_in_a_row_is_found_and_computed_again(complete: Path) -> None:
    for row, (name, value) in enumerate(EDITS):
        edit(complete / "shards" / "000000.h5", name, row, value)
    found = {row: what for _, row, what in faults(complete) if row is not None}
    assert found == {0: "is pending in a finished file", **dict.fromkeys(range(1, 9), "does not match its hashes")}
    verification = verify(complete)
    with verification.dataset.locked(), pytest.raises(LockedError):  # while another writes
        repair(verification)
    assert repair(verification) == len(EDITS)
    with ShardWriter(data := DataSet.open(complete), 0, 1) as writer:  # no damage was laundered
        assert np.flatnonzero(writer.status == Status.PENDING).tolist() == list(range(len(EDITS)))
    refill(data)
    assert verify(complete).faults == []


@pytest.mark.parametrize(
    ("status", "value", "what"),
    [(Status.OK, np.nan, "features contradict the status"),
     (Status.DECODE_ERROR, 1.0, "features contradict the status"),
     (Status.NOT_FINITE, 1.0, "features contradict the status"), (Status.NOT_FINITE, np.inf, None)],
)  # fmt: skip
def test_features_must_be_as_their_status_says(tmp_path: Path, status: Status, value: float, what: str | None) -> None:
    data = empty_data_set(tmp_path / "out", images={"root": "/", "count": 10, "paths_xxh3": "x"})
    with new_shard(data) as writer:
        write(writer, [*range(4), *range(5, 10)])
        values = {name: np.full((1, *rows.shape[1:]), value, rows.dtype) for name, rows in VALUES.items()}
        writer.write(np.array([4]), values, np.array([status], "uint8"), no_files(1))
        writer.publish()
    row_faults = [(fault.row, fault.what) for fault in verify(data.out).faults if fault.shard is not None]
    assert row_faults == ([(4, what)] if what else [])


def test_lost_and_changed_receipts_are_found_and_a_lost_one_is_written_again(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", failed=(2,))
    receipts = [data.path(shard).with_suffix(".json") for shard in range(3)]
    lost, _, content = (json.loads(receipt.read_text()) for receipt in receipts)
    receipts[0].unlink()
    receipts[1].write_text("{")
    receipts[2].write_text(json.dumps({**content, "sha256": "0" * 64, "size": 5}))
    all_faults = faults(data.out)
    assert all_faults[0] == ("shards/000000.json", None, "is missing")
    assert all_faults[1][0] == "shards/000001.json"
    assert "is damaged" in all_faults[1][2]
    assert {description.split(";")[0] for file, _, description in all_faults if file == "shards/000002.h5"} == {
        "its sha256 differs from the receipt", "its size differs from the receipt"
    }  # fmt: skip
    before = receipts[2].read_text()
    assert repair(verify(data.out)) == 0
    assert receipts[2].read_text() == before  # it may be the only witness of something
    again = json.loads(receipts[0].read_text())
    assert again.pop("reasons") == {"2": "unknown, because the receipt was lost"}
    assert lost.pop("reasons") == {"2": "row 2 failed"}
    assert again == lost


def test_missing_and_unfinished_shards_are_faults_and_a_torn_row_becomes_pending(complete: Path) -> None:
    data = DataSet.open(complete)
    data.path(0).unlink()
    data.path(1).unlink()
    data.path(1).with_suffix(".json").unlink()
    with new_shard(data, 1) as writer:
        write(writer, [10, 11])
    found = [
        ("shards/000000.h5", None, "is missing, but its receipt exists"),
        ("shards/000001.h5.part", None, "is unfinished: 8 of 10 rows are pending"),
    ]
    assert faults(complete) == found
    assert verify(complete).rows == {"pending": 18, "ok": 5}
    with ShardWriter(data, 1) as writer:
        writer._put("/features/vector", np.array([1]), np.zeros((1, 6), "float32"))
    assert {*faults(complete)} == {*found, ("shards/000001.h5.part", 11, "does not match its hashes")}
    repair(verify(complete))
    with ShardWriter(data, 1) as writer:
        assert writer.status.tolist() == [1] + [0] * 9


@pytest.mark.parametrize("how", [
    lambda path: path.write_bytes(b"nothing"), lambda path: path.write_bytes(path.read_bytes()[:5000]),
    lambda path: edit(path, "path", 0, b"another"), lambda path: edit(path, "label", 0, 1),
])  # fmt: skip
def test_a_shard_that_cannot_be_trusted_is_put_aside_and_made_again(
    complete: Path, how: Callable[[Path], object]
) -> None:
    data = DataSet.open(complete)
    how(data.path(2))
    verification = verify(complete)
    assert [(fault.file, fault.row, fault.remedy) for fault in verification.faults] == [
        ("shards/000002.h5", None, Remedy.FILE)
    ]
    assert repair(verification) == 3
    assert (complete / "shards" / "000002.h5.damaged").exists()
    refill(data)
    assert verify(complete).faults == []
    with FeatureReader(complete) as reader:
        assert np.array_equal(reader["map:none"][:], VALUES["map:none"])


def test_whole_shards_that_do_not_fit_the_description_are_left_alone(complete: Path) -> None:
    """It may be the description that is wrong: a person must look."""
    description = complete / "dataset.json"
    content = json.loads(description.read_text())
    content["images"]["paths_xxh3"] = "f" * 32
    description.write_text(json.dumps(content))
    verification = verify(complete)
    assert [fault.remedy for fault in verification.faults] == [Remedy.NONE] * 3
    assert all("its 'images' is" in fault.what for fault in verification.faults)
    before = sorted((complete / "shards").iterdir())
    assert repair(verification) == 0
    assert sorted((complete / "shards").iterdir()) == before


def test_paths_of_other_images_are_found(tmp_path: Path) -> None:
    """A shard that is whole, but of another listing than the data set's."""
    images = {"root": "/photos", "count": ROWS, "paths_xxh3": "0" * 32}
    data = complete_data_set(tmp_path / "out", images=images)
    assert verify(data.out).faults == [Fault("the paths of the shards do not match dataset.json", Remedy.NONE)]


@pytest.mark.parametrize(("how", "fault"), [
    (lambda file: file["label"].__setitem__(3, 12), "has labels outside its 3 classes"),
    (lambda file: file["classes"].__setitem__(0, b"other"), "has other classes than the preceding shards"),
])  # fmt: skip
def test_labels_and_classes_that_contradict_each_other_are_found(
    complete: Path, how: Callable[[h5py.File], object], fault: str
) -> None:
    change(complete / "shards" / "000001.h5", how)
    assert ("shards/000001.h5", None, fault) in faults(complete)


@pytest.mark.parametrize("compress", ["gzip", "lzf", "blosc2"])
def test_a_compressed_chunk_that_cannot_be_unpacked_takes_only_its_rows(
    tmp_path: Path, compress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_CHUNK_BYTES", 8192)  # of a row
    values = np.random.default_rng(0).normal(size=(6, 2048)).astype("float32")
    features = [StoredFeature("x", (2048,), "float32")]
    data = filled(tmp_path / "out", features, 6, lambda rows: {"x": values[rows]}, compress=compress)
    with h5py.File(data.path(0)) as file:
        chunk = file["features/x"].id.get_chunk_info(3)
    flip(data.path(0), chunk.byte_offset + chunk.size // 2, 4)
    verification = verify(data.out)
    assert [(fault.row, fault.what) for fault in verification.faults if fault.row is not None] == [
        (3, "does not match its hashes")
    ]
    assert repair(verification) == 1
    with ShardWriter(data, 0, 1) as writer:
        assert writer.status.tolist() == [1, 1, 1, 0, 1, 1]
        writer.write(np.array([3]), {"x": values[3:4]}, np.ones(1, "u1"), no_files(1))
        writer.publish(compress)
    assert verify(data.out).faults == []
    with FeatureReader(data.out) as reader:
        assert np.array_equal(reader["x"][:], values)


def test_a_sector_that_cannot_be_read_is_a_fault_of_its_rows(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    class BadDisk(io.FileIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

    def with_bad_disk(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        is_bad = path.name == "000001.h5" and buffering == 0
        return BadDisk(path) if is_bad else opened(path, mode, buffering, **options)

    monkeypatch.setattr(Path, "open", with_bad_disk)
    verification = verify(complete)
    assert {(fault.file, fault.row) for fault in verification.faults} == {
        ("shards/000001.h5", row) for row in range(10, 20)
    }
    assert repair(verification) == 10
    monkeypatch.undo()
    refill(DataSet.open(complete))
    assert verify(complete).faults == []


def test_what_is_published_while_it_is_looked_at_is_no_fault(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataSet.open(complete)
    data.path(1).unlink()
    writer = new_shard(data, 1)
    write(writer, list(range(10, 20)))
    opened = DataSet.open_shard

    def published_meanwhile(self: DataSet, shard: int, path: Path) -> Shard:
        if path.suffix == ".part" and shard == 1 and not data.path(1).exists():
            monkeypatch.undo()
            writer.publish()
        return opened(self, shard, path)

    monkeypatch.setattr(DataSet, "open_shard", published_meanwhile)
    assert verify(complete).faults == []
    assert data.path(1).exists()


def test_a_repair_looks_again_before_it_acts(complete: Path) -> None:
    """What was found wrong may be right by now."""
    data = DataSet.open(complete)
    good = data.path(1).read_bytes()
    edit(data.path(1), "features/vector", 3, 77)
    data.path(0).unlink()
    verification = verify(complete)
    data.path(1).write_bytes(good)
    published(data)
    # Rows that a former look has named are made pending as long as their file is the same; others are left.
    verification.faults = [fault for fault in verification.faults if fault.row is None]
    assert repair(verification) == 0
    assert verify(complete).faults == []


def test_a_newer_file_that_is_no_shard_costs_nothing(complete: Path) -> None:
    data = DataSet.open(complete)
    (complete / "shards" / "000000-r5.h5").write_bytes(b"")
    (complete / "folder.new").mkdir()
    data.open_or_create()
    assert data.path(0).exists()
    assert data.path(0).with_suffix(".json").exists()
    assert ("shards/000000-r5.h5", None, "is not a layertap shard") in faults(complete)
    assert repair(verify(complete)) == 10
    with FeatureReader(complete) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])


def test_rows_that_changed_places_with_all_that_belongs_to_them_are_found(complete: Path) -> None:
    with h5py.File(complete / "shards" / "000001.h5", "r+") as file:
        for name in ("features/vector", "features/map:none", *(name for name, *_ in ROW_DATA)):
            file[name][[2, 7]] = file[name][:][[7, 2]]
    assert [(row, description) for _, row, description in faults(complete) if row is not None] == [
        (12, "does not match its hashes"), (17, "does not match its hashes")
    ]  # fmt: skip
    assert repair(verify(complete)) == 2


def test_a_damaged_successor_is_refused_when_it_is_resumed_and_the_finished_file_stays(complete: Path) -> None:
    data = DataSet.open(complete)
    with data.open_shard(1, data.path(1)) as shard:
        copy_shard(shard, data.path(1, 1, part=True), pending=np.array([3]))
    flip(data.path(1, 1, part=True), 1100)
    assert verify(complete).faults == []
    with pytest.raises(LayertapError, match="is damaged") as caught:
        ShardWriter(data, 1, 1)
    assert "delete the file" in caught.value.hint
    assert data.path(1).exists()


def test_a_link_to_a_disk_that_is_not_there_is_left_alone(complete: Path) -> None:
    shard = complete / "shards" / "000001.h5"
    elsewhere = shard.rename(complete / "elsewhere.h5")
    shard.symlink_to("/nonexistent/000001.h5")
    verification = verify(complete)
    assert [(fault.file, fault.what, fault.remedy) for fault in verification.faults] == [
        ("shards/000001.h5", "does not exist", Remedy.NONE)
    ]
    assert repair(verification) == 0
    assert shard.with_suffix(".json").exists()
    shard.unlink()
    shard.symlink_to(elsewhere)
    assert verify(complete).faults == []


def test_a_file_with_two_names_is_put_aside_once(complete: Path) -> None:
    """As a kill between the link and the unlink leaves it, and damaged then."""
    data = DataSet.open(complete)
    os.link(data.path(1), data.path(1, part=True))
    flip(data.path(1), 1100, 64)
    assert repair(verify(complete)) == 10
    assert not data.path(1, part=True).exists()
    refill(data)
    assert verify(complete).faults == []


def test_other_features_do_not_take_over_a_repaired_folder(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", shard_rows=ROWS)
    data.path(0).write_bytes(b"nothing")
    assert repair(verify(data.out)) == ROWS
    with pytest.raises(InputError, match="holds other features"):
        data_set(tmp_path / "out", depends_on={"weights": "v"}).open_or_create()
