from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

from extract import InputError, Status
from extract.store.format.dataset import DataSet, fingerprint_of
from extract.store.format.layout import RowNames, StoredFeature, chunk_rows, create_shard
from tests.extract.store.rows import (
    PATHS,
    PATHS_XXH3,
    VALUES,
    create,
)


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
