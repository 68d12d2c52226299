from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from extract import FeatureReader, InputError, LayertapError, LockedError, Status, UnknownNameError
from extract.store.dataset import DataSet, fingerprint_of
from extract.store.layout import StoredFeature, chunk_rows, create_shard
from extract.store.writer import ShardWriter, runs

ROWS, SHARD_ROWS = 23, 10
FEATURES = [StoredFeature("vector", (6,), "float32", {"layer": "fc"}), StoredFeature("map:none", (2, 3, 4), "float16")]
VALUES = {
    "vector": np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32"),
    "map:none": np.random.default_rng(1).normal(size=(ROWS, 2, 3, 4)).astype("float16"),
}
PATHS = [f"class {i % 3}/ü{i}.jpg" for i in range(ROWS)]
PATHS[4] = os.fsdecode(b"class 1/\xff\n.jpg")


def data_set(out: Path, **changes: object) -> DataSet:
    images = {"root": "/photos", "count": ROWS, "paths_xxh3": "0" * 32}
    content = {"depends_on": {"weights": "w"}, "features": FEATURES, "images": images, "shard_rows": SHARD_ROWS}
    return DataSet(out=out, **{**content, **changes})


def create(data: DataSet, shard: int) -> Path:
    rows = data.shard_range(shard)
    create_shard(
        data.part_path(shard), FEATURES, shard=shard, first_row=rows.start, fingerprint=data.fingerprint,
        images=data.images["paths_xxh3"],
        paths=[PATHS[i] for i in rows], labels=np.array([i % 3 for i in rows]), splits=["train"] * len(rows),
        classes=["class 0", "class 1", "class 2"], provenance={"weights": "w"},
    )  # fmt: skip
    return data.part_path(shard)


def created(data: DataSet, shard: int) -> tuple[DataSet, int]:
    create(data, shard)
    return data, shard


def write(writer: ShardWriter, rows: list[int], status: Status = Status.OK) -> None:
    source = {
        "source_size": np.array(rows), "source_mtime_ns": np.array(rows) * 2,
        "source_hash": np.zeros((len(rows), 16), "uint8"),
    }  # fmt: skip
    values = {name: values[rows] for name, values in VALUES.items()}
    writer.write(np.array(rows, np.int64), values, np.full(len(rows), status, "uint8"), source, {})


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    for shard in range(data.n_shards):
        with ShardWriter(*created(data, shard)) as writer:
            rows = list(data.shard_range(shard))
            write(writer, rows[:4])
            write(writer, rows[4:])
            writer.publish()
    return data.out


# The file


def test_plain_h5py_reads_a_shard(complete: Path) -> None:
    with h5py.File(complete / "shards" / "000001.h5") as file:
        assert dict(file.attrs) == {
            "format": "layertap", "format_version": 1, "shard": 1, "first_row": 10, "n_rows": 10,
            "fingerprint": fingerprint_of({"weights": "w"}), "images": "0" * 32,
        }  # fmt: skip
        assert np.array_equal(file["features/vector"][:], VALUES["vector"][10:20])
        assert np.array_equal(file["features/map:none"][:], VALUES["map:none"][10:20])
        assert dict(file["features/vector"].attrs) == {"layer": "fc"}
        assert file["path"].asstr()[3] == PATHS[13]
        assert file["label"][:].tolist() == [i % 3 for i in range(10, 20)]
        assert file["classes"].asstr()[:].tolist() == ["class 0", "class 1", "class 2"]
        assert file["split"].asstr()[0] == "train"
        assert file["status"][:].tolist() == [1] * 10
        assert file["source_mtime_ns"][:].tolist() == list(range(20, 40, 2))
        assert json.loads(file["provenance"][()]) == {"weights": "w"}
        for row in range(10):  # name order: "map:none" before "vector"
            content = VALUES["map:none"][10 + row].tobytes() + VALUES["vector"][10 + row].tobytes()
            assert file["row_hash"][row] == xxhash.xxh3_64(content).intdigest()


def test_features_are_stored_plain_and_taken_on_disk_at_creation(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    part = create(data, 0)
    assert part.stat().st_blocks * 512 >= part.stat().st_size > 10 * (6 * 4 + 24 * 2)
    with h5py.File(part) as file:
        assert file["features/vector"].compression is None
        assert file["features/vector"].chunks == (10, 6)
        assert file["features/vector"].id.get_num_chunks() == 1
        assert file["status"][:].tolist() == [Status.PENDING] * 10


@pytest.mark.parametrize(
    ("shape", "dtype", "n_rows", "expected"),
    [((1280,), "float16", 80_000, 256), ((1280,), "float32", 80_000, 128), ((64, 224, 224), "float32", 100, 1),
     ((6,), "float32", 10, 10), ((1 << 18,), "float32", 9, 1), ((), "float32", 10**7, 262144)],
)  # fmt: skip
def test_chunks_are_half_a_megabyte_to_one(shape: tuple[int, ...], dtype: str, n_rows: int, expected: int) -> None:
    feature = StoredFeature("f", shape, dtype)
    rows = chunk_rows(feature, n_rows)
    assert rows == expected
    assert rows in (1, n_rows) or 2**19 < rows * feature.row_bytes <= 2**20


# Writing


def test_a_killed_write_leaves_its_rows_pending_and_the_others_stored(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    create(data, 0)
    child = os.fork()
    if not child:  # dies as by SIGKILL, with the file open
        writer = ShardWriter(data, 0)
        write(writer, [0, 1, 2])
        writer._file["features/vector"][3:5] = 7
        os._exit(9)
    os.waitpid(child, 0)
    with ShardWriter(data, 0) as writer:
        assert writer.status.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
        assert writer.check() == 0
        write(writer, list(range(3, 10)))
        final = writer.publish()
    with FeatureReader(final) as reader:
        assert np.array_equal(reader["vector"][:], VALUES["vector"][:10])


def test_rows_that_do_not_agree_with_their_hash_become_pending(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
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


def test_a_second_writer_of_a_shard_is_refused(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    create(data, 0)
    with ShardWriter(data, 0):
        code = (
            "from pathlib import Path; from extract.store.dataset import DataSet\n"
            f"from extract.store.writer import ShardWriter; ShardWriter(DataSet.open(Path({str(data.out)!r})), 0)"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LockedError" in other.stderr
    assert "is open in another process" in other.stderr


def test_a_published_shard_always_has_its_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    with ShardWriter(*created(data, 0)) as writer:
        write(writer, list(range(10)))
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
            )
            with pytest.raises(LayertapError, match="cannot publish .*Input/output error; its rows are safe"):
                writer.publish()
    assert data.part_path(0).exists()
    assert not data.shard_path(0).exists()
    with ShardWriter(data, 0) as writer:
        assert data.shard_path(0).with_suffix(".json").exists() or writer.publish()
    assert data.shard_path(0).with_suffix(".json").exists()


def test_where_there_are_no_hard_links_a_shard_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    data = data_set(tmp_path / "out")
    data.open_or_create()
    with ShardWriter(*created(data, 0)) as writer:
        write(writer, list(range(10)))
        assert writer.publish() == data.shard_path(0)
    assert sorted(path.name for path in (data.out / "shards").iterdir()) == ["000000.h5", "000000.json"]


def test_the_final_name_is_given_once(complete: Path) -> None:
    data = DataSet.open(complete)
    before = data.shard_path(0).read_bytes()
    with ShardWriter(*created(data, 0)) as writer:
        write(writer, list(range(10)), Status.NOT_FINITE)
        with pytest.raises(LayertapError, match="exists already"):
            writer.publish()
    assert data.shard_path(0).read_bytes() == before


def test_a_receipt_tells_size_hash_and_counts(complete: Path) -> None:
    import hashlib

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
def test_wrong_features_are_refused(tmp_path: Path, features: dict[str, np.ndarray], message: str) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    with ShardWriter(*created(data, 0)) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write(np.array([0, 1]), features, np.ones(2, "uint8"), {})
        assert not writer.status.any()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = data_set(tmp_path / "out")
    data.open_or_create()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LayertapError, match="No space left on device"):
        create(data, 0)
    assert list((data.out / "shards").iterdir()) == []


@given(st.lists(st.integers(0, 60), unique=True), st.integers(1, 5))
def test_runs_cover_the_rows_in_order(rows: list[int], at_most: int) -> None:
    rows.sort()
    pieces = list(runs(np.array(rows, np.int64), at_most))
    assert [row for start, stop in pieces for row in range(start, stop)] == rows
    assert all(0 < stop - start <= at_most for start, stop in pieces)


# The folder


def test_a_data_set_is_the_same_when_read_back(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    assert data.open_or_create() is None
    assert DataSet.open(data.out) == data
    assert data.open_or_create() == data


def test_a_data_set_without_rows_gives_way_to_another(tmp_path: Path) -> None:
    data_set(tmp_path / "out").open_or_create()
    other = data_set(tmp_path / "out", depends_on={"weights": "v"})
    assert other.open_or_create() is None
    assert DataSet.open(tmp_path / "out") == other


@pytest.mark.parametrize(
    "left", [[".lock"], ["shards/"], ["dataset.json.77.new"], [".lock", "shards/0.h5.part.77.new"]]
)
def test_a_folder_that_a_killed_run_had_just_begun_is_taken_over(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("")
    data_set(tmp_path).open_or_create()
    assert DataSet.open(tmp_path) == data_set(tmp_path)
    assert not list(tmp_path.rglob("*.new"))


def test_keys_of_a_later_writer_are_ignored(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    content = json.loads((data.out / "dataset.json").read_text())
    content["features"][0]["unit"] = content["mood"] = "new"
    (data.out / "dataset.json").write_text(json.dumps(content))
    assert DataSet.open(data.out) == data


def test_another_fingerprint_is_refused_and_what_differs_is_said(tmp_path: Path) -> None:
    data_set(tmp_path / "out").open_or_create()
    create(data_set(tmp_path / "out"), 0)
    images = {"root": "/photos", "count": 9, "paths_xxh3": ""}
    other = data_set(tmp_path / "out", depends_on={"weights": "v", "crop": 224}, images=images)
    with pytest.raises(InputError) as raised:
        other.open_or_create()
    assert str(raised.value).splitlines()[1:-1] == [
        "  weights: w there, v now", "  images.count: 23 there, 9 now",
        "  images.paths_xxh3: 000000000000... there,  now", "  crop: nothing there, 224 now",
    ]  # fmt: skip


def test_a_folder_with_other_files_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty and no layertap data set"):
        data_set(tmp_path).open_or_create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    with data.locked():
        child = os.fork()
        if not child:
            try:
                with data.locked():
                    os._exit(0)
            except LockedError as error:
                os._exit(7 if f"locked by pid {os.getppid()} on " in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with data.locked():
        pass


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    data, raised = data_set(tmp_path / "out"), []

    def second() -> None:
        with pytest.raises(LockedError, match="by another thread of this process"), data.locked():
            pass
        raised.append(True)

    with data.locked():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert raised
    with data.locked():
        pass


def test_what_a_killed_run_left_is_cleaned(complete: Path) -> None:
    data = DataSet.open(complete)
    os.link(data.shard_path(0), data.part_path(0))
    (complete / "shards" / "000009.h5.part.77.new").write_bytes(b"x")
    data.open_or_create()
    assert sorted(path.name for path in (complete / "shards").iterdir()) == [
        f"00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")
    ]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "layertap", "format_version": 2}', "\xff"])
def test_a_damaged_description_is_an_error(complete: Path, content: str) -> None:
    (complete / "dataset.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match="dataset.json"):
        FeatureReader(complete)


# Reading


def test_the_reader_goes_over_all_shards(complete: Path) -> None:
    with FeatureReader(complete) as reader:
        assert len(reader) == ROWS
        assert reader.layers == ["vector", "map:none"]
        assert reader["vector"].shape == (ROWS, 6)
        assert reader["map:none"].dtype == np.float16
        assert reader["vector"].attributes == {"layer": "fc"}
        assert reader.paths == PATHS
        assert reader.labels.tolist() == [i % 3 for i in range(ROWS)]
        assert reader.classes == ["class 0", "class 1", "class 2"]
        assert reader.splits == ["train"] * ROWS
        assert reader.status.tolist() == [1] * ROWS
        assert reader.provenance == {"weights": "w"}
        assert reader.failures == []
        assert np.array_equal(np.asarray(reader["vector"]), VALUES["vector"])
        assert "vector" in reader


indices = st.one_of(
    st.integers(-ROWS, ROWS - 1),
    st.slices(ROWS),
    st.lists(st.integers(-ROWS, ROWS - 1), max_size=40),
    st.lists(st.integers(-ROWS, ROWS - 1), max_size=40).map(lambda rows: np.array(rows, np.int32)),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    data = data_set(tmp_path_factory.mktemp("read") / "out")
    data.open_or_create()
    for shard in range(data.n_shards):
        with ShardWriter(*created(data, shard)) as writer:
            write(writer, list(data.shard_range(shard)))
            writer.publish()
    return FeatureReader(data.out)


@settings(max_examples=300, deadline=None)
@given(index=indices, layer=st.sampled_from(list(VALUES)))
def test_indexing_equals_numpy(shared: FeatureReader, index: object, layer: str) -> None:
    expected = VALUES[layer][np.array(index, int) if isinstance(index, list) else index]
    found = shared[layer][index]
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, [0, ROWS], np.array([True]), 1.5, "a", [[1]], (1, 2)])
def test_an_index_that_means_no_rows_raises(shared: FeatureReader, index: object) -> None:
    with pytest.raises(IndexError):
        shared["vector"][index]


def test_an_unknown_layer_names_the_nearest(shared: FeatureReader) -> None:
    with pytest.raises(UnknownNameError, match="'vectr' not found.*nearest: 'vector'"):
        shared["vectr"]


def test_a_missing_or_unfinished_shard_is_named(complete: Path) -> None:
    shard = complete / "shards" / "000001.h5"
    part = shard.rename(shard.with_name(shard.name + ".part"))
    with pytest.raises(LayertapError, match="000001.h5 is unfinished"):
        FeatureReader(complete)
    part.unlink()
    with pytest.raises(LayertapError, match=r"000001.h5 is missing \(shard 1 of 3\)"):
        FeatureReader(complete)


@pytest.mark.parametrize(
    ("attribute", "value"), [("fingerprint", "f" * 64), ("images", "1" * 32), ("n_rows", 9), ("first_row", 3)]
)
def test_a_shard_of_another_data_set_is_neither_read_nor_written(complete: Path, attribute: str, value: object) -> None:
    data = DataSet.open(complete)
    with h5py.File(data.shard_path(0), "r+") as file:
        file.attrs[attribute] = value
    with pytest.raises(LayertapError, match=f"000000.h5 is no shard 0 of this data set: its {attribute} is"):
        FeatureReader(complete)
    data.shard_path(0).rename(data.part_path(0))
    with pytest.raises(LayertapError, match=f"its {attribute} is .*; delete it, and its rows will be computed again"):
        ShardWriter(data, 0)


@pytest.mark.parametrize("name", ["features/vector", "status", "path", "row_hash", "features"])
def test_a_shard_without_all_its_data_sets_is_damaged(complete: Path, name: str) -> None:
    with h5py.File(complete / "shards" / "000001.h5", "r+") as file:
        del file[name]
    with pytest.raises(LayertapError, match="000001.h5 is damaged: it has no data set"):
        FeatureReader(complete)


def test_pending_rows_are_not_read(complete: Path) -> None:
    shard = complete / "shards" / "000002.h5"
    with h5py.File(shard, "r+") as file:
        file["status"][1] = Status.PENDING
    for path in (complete, shard):
        with pytest.raises(LayertapError, match="000002.h5 is unfinished: 1 rows are pending"):
            FeatureReader(path)


@pytest.mark.parametrize("change", [
    {"images": None}, {"images": {}}, {"images": {"count": 4}}, {"shard_rows": 0}, {"shard_rows": None},
    {"depends_on": None}, {"depends_on": []}, {"features": []}, {"features": {}}, {"fingerprint": "0" * 64},
])  # fmt: skip
def test_a_description_with_wrong_values_is_damaged(complete: Path, change: dict[str, object]) -> None:
    path = complete / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match="dataset.json is damaged"):
        FeatureReader(complete)


def test_a_disk_that_is_nearly_full_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """With a limit on the size of files, which HDF5 would meet in the middle of its work."""
    data = data_set(tmp_path / "out")
    data.open_or_create()
    code = f"""
import resource
from pathlib import Path
from extract.store.dataset import DataSet
from tests.extract.store.test_store import create
data = DataSet.open(Path({str(data.out)!r}))
for limit in range(1000, 30000, 3000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        create(data, 0)
    except Exception as error:
        print(type(error).__name__, error)
"""
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr
    assert {line.split()[0] for line in run.stdout.splitlines()} == {"LayertapError"}
    assert "File too large" in run.stdout
    assert list((data.out / "shards").iterdir()) == []


def test_shards_in_each_others_place_are_found_out(complete: Path) -> None:
    a, b = complete / "shards" / "000000.h5", complete / "shards" / "000001.h5"
    a.rename(complete / "x")
    b.rename(a)
    (complete / "x").rename(b)
    with pytest.raises(LayertapError, match="000000.h5 is no shard 0 of this data set: its shard is 1"):
        FeatureReader(complete)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        FeatureReader(tmp_path / "nothing")
    with pytest.raises(InputError, match="is no layertap data set"):
        FeatureReader(tmp_path)
    (tmp_path / "a.h5").write_bytes(b"no HDF5")
    with pytest.raises(InputError, match="cannot be opened as HDF5"):
        FeatureReader(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(InputError, match="expected layertap 1"):
        FeatureReader(tmp_path / "b.h5")
