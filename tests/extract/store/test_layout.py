from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

from extract import Status
from extract.store.dataset import fingerprint_of
from extract.store.layout import StoredFeature, chunk_rows
from tests.extract.store.rows import (
    PATHS,
    PATHS_XXH3,
    VALUES,
    create,
    data_set,
)


def test_plain_h5py_reads_a_shard(complete: Path) -> None:
    with h5py.File(complete / "shards" / "000001.h5") as file:
        assert dict(file.attrs) == {
            "format": "layertap", "format_version": 1, "shard": 1, "first_row": 10, "n_rows": 10,
            "fingerprint": fingerprint_of({"weights": "w"}), "images": PATHS_XXH3,
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
