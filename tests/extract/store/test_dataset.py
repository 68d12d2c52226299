from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

from extract import FeatureReader, InputError, LockedError, Status
from extract.store.format.dataset import DataSet, fingerprint_of
from extract.store.format.layout import RowNames, StoredFeature, chunk_rows, create_shard
from extract.system.atomic_files import locked
from tests.extract.store.processes import result_of
from tests.extract.store.rows import (
    PATHS,
    PATHS_XXH3,
    VALUES,
    create,
    data_set,
    empty_data_set,
)


def test_a_data_set_is_the_same_when_read_back_and_gives_way_to_another_while_it_has_no_rows(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    assert data.open_or_create() is None
    assert DataSet.open(data.out) == data
    assert data.open_or_create() == data
    other = data_set(tmp_path / "out", depends_on={"weights": "v"})
    assert other.open_or_create() is None
    assert DataSet.open(tmp_path / "out") == other


@pytest.mark.parametrize(
    "left", [[".lock"], ["shards/"], ["dataset.json.77.new"], [".lock", "shards/000000.h5.part.77.new"]]
)
def test_a_folder_that_a_killed_run_had_just_begun_is_taken_over(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("")
    data_set(tmp_path).open_or_create()
    assert DataSet.open(tmp_path) == data_set(tmp_path)
    assert not list(tmp_path.rglob("*.new"))


def test_keys_of_a_later_writer_are_ignored(tmp_path: Path) -> None:
    data = empty_data_set(tmp_path / "out")
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
        "  weights: stored w, now v", "  images.count: stored 23, now 9",
        f"  names of the images (images.paths_xxh3): stored {PATHS_XXH3[:12]}..., now ",
        "  crop: stored nothing, now 224",
    ]  # fmt: skip


def test_a_folder_with_other_files_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty and not a layertap data set"):
        data_set(tmp_path).open_or_create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def enter(data: DataSet) -> None:
    with data.locked():
        pass


def test_one_process_at_a_time(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    with ThreadPoolExecutor(1) as pool:
        with data.locked():
            error = result_of(enter, data)
            assert isinstance(error, LockedError)
            assert f"locked by pid {os.getpid()} on " in str(error)
            with pytest.raises(LockedError, match="by another thread of this process"):
                pool.submit(enter, data).result()
        pool.submit(enter, data).result()
    assert result_of(enter, data) is None


def test_a_folder_into_which_nothing_was_put_is_gone_again(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "new"):
        raise ZeroDivisionError
    (tmp_path / "old").mkdir()
    with locked(tmp_path / "old"), locked(tmp_path / "used"):
        (tmp_path / "used" / "something").touch()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["old", "old/.lock", "used", "used/.lock", "used/something"]


def test_what_a_killed_run_left_is_cleaned(complete: Path) -> None:
    data = DataSet.open(complete)
    os.link(data.path(0), data.path(0, part=True))
    (complete / "shards" / "000009.h5.part.77.new").write_bytes(b"x")
    data.open_or_create()
    assert sorted(path.name for path in (complete / "shards").iterdir()) == [
        f"00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")
    ]


FEATURE = {"name": "a", "shape": [3], "dtype": "float32", "attributes": {}}
WRONG: list[dict[str, object]] = [
    {"images": None}, {"images": {}}, {"images": {"count": 4}}, {"shard_rows": 0}, {"shard_rows": None},
    {"depends_on": None}, {"depends_on": []}, {"features": []}, {"features": {}}, {"fingerprint": "0" * 64},
    {"shard_rows": 1, "images": {"root": "/", "count": 1 << 60, "paths_xxh3": ""}}, {"features": [{"name": "../x"}]},
    {"features": [{**FEATURE, "name": "a/b"}]}, {"features": [{**FEATURE, "shape": [-3]}]},
    {"features": [{**FEATURE, "dtype": "object"}]}, {"features": [{**FEATURE, "attributes": {"x": 1}}]},
]  # fmt: skip
NO_DESCRIPTION = [
    "", "[]", "{}", '{"format": "layertap", "format_version": 2}', "\xff",
    "[" * 100_000, '{"a":' * 50_000, "1" * 10_000, '{"images": ' + "9" * 5000 + "}",  # bombs
]  # fmt: skip


def test_a_damaged_description_is_an_error(complete: Path) -> None:
    path = complete / "dataset.json"
    good = json.loads(path.read_text())
    for content in (*NO_DESCRIPTION, *(json.dumps({**good, **change}) for change in WRONG)):
        path.write_text(content, encoding="latin-1")
        start = time.perf_counter()
        with pytest.raises(InputError, match="dataset.json is damaged|dataset.json.*format"):
            FeatureReader(complete)
        assert time.perf_counter() - start < 1


# Shards, read by h5py and from their bytes


def test_plain_h5py_reads_a_shard(complete: Path) -> None:
    with h5py.File(complete / "shards" / "000001.h5") as file:
        assert dict(file.attrs) == {
            "format": "layertap", "format_version": 1, "shard": 1, "first_row": 10, "n_rows": 10,
            "fingerprint": fingerprint_of({"weights": "w"}), "images": PATHS_XXH3,
        }  # fmt: skip
        assert np.array_equal(file["features/vector"][:], VALUES["vector"][10:20])
        assert np.array_equal(file["features/map:none"][:], VALUES["map:none"][10:20])
        offset = file["features/vector"].id.get_chunk_info(0).byte_offset  # it is one array in the file
        assert np.array_equal(np.memmap(file.filename, "<f4", "r", offset, (10, 6)), VALUES["vector"][10:20])
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


def test_features_are_stored_plain_and_taken_on_disk_at_creation(data: DataSet) -> None:
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


def test_the_user_block_is_as_the_readme_says(complete: Path) -> None:
    """From the bytes alone, without the project's own code."""
    for shard in sorted((complete / "shards").glob("*.h5")):
        content = shard.read_bytes()
        title, line, rest = content.split(b"\n", 2)
        assert title == b"layertap shard, format 1; HDF5 begins at byte 1024"
        assert content[1024:1032] == b"\x89HDF\r\n\x1a\n"
        assert rest[: 1024 - len(title) - len(line) - 2].strip(b"\0") == b""
        about = json.loads(line)
        assert sorted(about) == ["fixed_xxh3", "row_data", "size"]
        assert about["size"] == len(content)
        at, fixed = 1024, b""
        for start, stop in about["row_data"]:
            fixed, at = fixed + content[at:start], stop
        assert about["fixed_xxh3"] == xxhash.xxh3_128_hexdigest(fixed + content[at:])


def test_the_record_hash_is_over_what_stands_beside_the_features(complete: Path) -> None:
    with h5py.File(complete / "shards" / "000001.h5") as file:
        for row in range(10):
            names = ("row_hash", "source_size", "source_mtime_ns", "source_hash", "status")
            record = b"".join(file[name][row].tobytes() for name in names)
            assert len(record) == 8 + 8 + 8 + 16 + 1
            path = os.fsencode(PATHS[10 + row])
            assert file["record_hash"][row] == xxhash.xxh3_64(path + b"\0" + record).intdigest()


def test_paths_that_are_too_long_for_one_file_are_refused(data: DataSet) -> None:
    names = RowNames(["x"] * 10 + ["y" * 200_000_000], np.zeros(11), [""] * 11, ["a"])
    with pytest.raises(
        InputError, match="paths and columns take 2,200 MB, too much for one file; set a smaller shard_rows"
    ):
        create_shard(data.path(0, part=True), data.features, data.identity(0), names, {})
