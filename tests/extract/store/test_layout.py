from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

from extract import InputError, Status
from extract.store.format.dataset import DataSet, fingerprint_of
from extract.store.format.layout import RowNames, create_shard
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


def test_paths_that_are_too_long_for_one_file_are_refused(data: DataSet) -> None:
    names = RowNames(["x"] * 10 + ["y" * 200_000_000], np.zeros(11), [""] * 11, ["a"])
    with pytest.raises(
        InputError, match="paths and columns take 2,200 MB, too much for one file; set a smaller shard_rows"
    ):
        create_shard(data.path(0, part=True), data.features, data.identity(0), names, {})
