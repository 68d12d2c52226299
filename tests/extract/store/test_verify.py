from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from extract import FeatureReader, LayertapError, LockedError, Status
from extract.store.dataset import DataSet
from extract.store.verify import Fault, repair, verify
from extract.store.writer import ShardWriter
from tests.extract.store.rows import PATHS, ROWS, VALUES, change, complete_data_set, created, data_set, write


def faults(out: Path) -> list[tuple[str, int | None, str]]:
    """What verify says: (file, row, words)."""
    return [(fault.file, fault.row, fault.what) for fault in verify(out).faults]


def edit(path: Path, name: str, row: int, value: object) -> None:
    """Change row data of a shard in place, which the user block does not cover."""
    with h5py.File(path, "r+") as file:
        file[name][row] = value


def refill(data: DataSet) -> None:
    """What `embed` does after a repair: compute what is pending."""
    for shard, where in enumerate(data.whereabouts()):
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
    found = verify(data.out, counted.append)
    assert found.faults == []
    assert found.rows == {"ok": ROWS - 2, "decode error": 2}
    assert sum(counted) == ROWS


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_a_changed_feature_is_named_and_filled_again(tmp_path: Path, compress: str | None) -> None:
    data = complete_data_set(tmp_path / "out", compress)
    edit(data.path(1), "features/vector", 4, 77)
    edit(data.path(1), "features/map:none", 6, 77)
    if compress:  # HDF5 puts the chunk that it packed anew elsewhere; the user block does not know of it
        from tests.extract.store.rows import sign

        sign(data.path(1))
    found = verify(data.out)
    rows = [fault for fault in found.faults if fault.row is not None]
    if not compress:
        assert [(fault.row, fault.path, fault.what) for fault in rows] == [
            (14, PATHS[14], "its features do not agree with their hash"),
            (16, PATHS[16], "its features do not agree with their hash"),
        ]
        assert {fault.kind for fault in found.faults} == {"rows"}
    assert repair(found) == (10 if compress else 2)
    with pytest.raises(LayertapError, match=r"000001.h5 is (unfinished|missing)"):
        FeatureReader(data.out)  # wrong features are not given out any more
    assert (data.out / "shards" / "000001.h5.damaged").exists()
    refill(data)
    assert verify(data.out).faults == []
    with FeatureReader(data.out) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"])


@pytest.mark.parametrize(
    ("name", "row", "value", "expected"),
    [("status", 3, 0, "is damaged: it is published, 1 of 10 rows are pending"),
     ("status", 3, 9, "has rows of a status that does not exist (9)"),
     ("status", 3, 2, "the status of its rows is not that of its receipt"),
     ("row_hash", 3, 1, "its features do not agree with their hash"),
     ("source_hash", 3, 1, "its sha256 is not that of its receipt")],
)  # fmt: skip
def test_whatever_is_changed_beside_the_features_is_found(
    complete: Path, name: str, row: int, value: int, expected: str
) -> None:
    edit(complete / "shards" / "000000.h5", name, row, value)
    assert expected in [what for _, _, what in faults(complete)]
    data = DataSet.open(complete)
    assert repair(verify(complete)) == (1 if name == "row_hash" else 10)
    refill(data)
    assert verify(complete).faults == []


@pytest.mark.parametrize(
    ("status", "value", "what"),
    [(Status.OK, np.nan, "its features are not as its status says"),
     (Status.DECODE_ERROR, 1.0, "its features are not as its status says"),
     (Status.NOT_FINITE, 1.0, "its features are not as its status says"), (Status.NOT_FINITE, np.inf, None)],
)  # fmt: skip
def test_features_must_be_as_their_status_says(tmp_path: Path, status: Status, value: float, what: str | None) -> None:
    data = data_set(tmp_path / "out", images={"root": "/", "count": 10, "paths_xxh3": "x"})
    data.open_or_create()
    with ShardWriter(*created(data, 0)) as writer:
        write(writer, [*range(4), *range(5, 10)])
        values = {name: np.full((1, *rows.shape[1:]), value, rows.dtype) for name, rows in VALUES.items()}
        writer.write(np.array([4]), values, np.array([status], "uint8"), {})
        writer.publish()
    found = [(fault.row, fault.what) for fault in verify(data.out).faults if fault.shard is not None]
    assert found == ([(4, what)] if what else [])


def test_lost_and_changed_receipts_are_found(complete: Path) -> None:
    receipts = [complete / "shards" / f"00000{shard}.json" for shard in range(3)]
    receipts[0].unlink()
    receipts[1].write_text("{")
    content = json.loads(receipts[2].read_text())
    receipts[2].write_text(json.dumps({**content, "sha256": "0" * 64, "size": 5}))
    found = faults(complete)
    assert found[0] == ("shards/000000.json", None, "is missing")
    assert found[1][0] == "shards/000001.json"
    assert "is damaged" in found[1][2]
    assert {what for file, _, what in found if file == "shards/000002.h5"} == {
        "its sha256 is not that of its receipt", "its size is not that of its receipt"
    }  # fmt: skip


def test_a_lost_receipt_is_written_again(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", failed=(2,))
    receipt = data.path(0).with_suffix(".json")
    before = json.loads(receipt.read_text())
    receipt.unlink()
    assert repair(verify(data.out)) == 0
    after = json.loads(receipt.read_text())
    assert after.pop("reasons") == {"2": "the receipt that said why was lost"}
    assert before.pop("reasons") == {"2": "row 2 failed"}
    assert after == before
    assert verify(data.out).faults == []


def test_missing_and_unfinished_shards_are_faults(complete: Path) -> None:
    data = DataSet.open(complete)
    data.path(0).unlink()
    data.path(1).unlink()
    data.path(1).with_suffix(".json").unlink()
    with ShardWriter(*created(data, 1)) as writer:
        write(writer, [10, 11])
    assert faults(complete) == [
        ("shards/000000.h5", None, "is missing, though its receipt is there"),
        ("shards/000001.h5.part", None, "is unfinished, 8 of 10 rows are pending"),
    ]
    assert verify(complete).rows == {"pending": 18, "ok": 5}


def test_a_torn_row_of_an_unfinished_shard_becomes_pending(complete: Path) -> None:
    data = DataSet.open(complete)
    data.path(1).unlink()
    with ShardWriter(*created(data, 1)) as writer:
        write(writer, [10, 11])
        writer._put("/features/vector", 1, np.zeros((1, 6), "float32"))
    found = verify(complete)
    assert ("shards/000001.h5.part", 11, "its features do not agree with their hash") in faults(complete)
    assert repair(found) == 1
    with ShardWriter(data, 1) as writer:
        assert writer.status.tolist() == [1] + [0] * 9


@pytest.mark.parametrize("how", [
    lambda path: path.write_bytes(b"nothing"), lambda path: path.write_bytes(path.read_bytes()[:5000]),
    lambda path: change(path, lambda file: file.__delitem__("features/vector")),
    lambda path: edit(path, "path", 0, b"another"), lambda path: edit(path, "label", 0, 1),
])  # fmt: skip
def test_a_shard_that_cannot_be_trusted_is_put_aside_and_made_again(
    complete: Path, how: Callable[[Path], object]
) -> None:
    data = DataSet.open(complete)
    how(data.path(2))
    found = verify(complete)
    assert [(fault.file, fault.row, fault.kind) for fault in found.faults] == [("shards/000002.h5", None, "file")]
    assert repair(found) == 3
    assert (complete / "shards" / "000002.h5.damaged").exists()
    refill(data)
    assert verify(complete).faults == []
    with FeatureReader(complete) as reader:
        assert np.array_equal(reader["map:none"][:], VALUES["map:none"])


def test_paths_of_other_images_are_found(tmp_path: Path) -> None:
    """A shard that is whole, but of another listing than the data set's."""
    images = {"root": "/photos", "count": ROWS, "paths_xxh3": "0" * 32}
    data = complete_data_set(tmp_path / "out", images=images)
    assert verify(data.out).faults == [Fault("the paths of the shards are not those of dataset.json")]


def test_labels_beyond_the_classes_are_found(complete: Path) -> None:
    change(complete / "shards" / "000001.h5", lambda file: file["label"].__setitem__(3, 12))
    assert ("shards/000001.h5", None, "has labels beyond its 3 classes") in faults(complete)


def test_shards_with_different_classes_are_found(complete: Path) -> None:
    change(complete / "shards" / "000001.h5", lambda file: file["classes"].__setitem__(0, b"other"))
    assert "has other classes than the shards before it" in [what for _, _, what in faults(complete)]


def test_nothing_is_repaired_while_another_writes(complete: Path) -> None:
    edit(complete / "shards" / "000000.h5", "row_hash", 3, 1)
    found = verify(complete)
    with found.dataset.locked(), pytest.raises(LockedError):
        repair(found)
