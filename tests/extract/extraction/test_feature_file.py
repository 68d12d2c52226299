"""Files of features that other programs or strangers have written."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from extract import InputError
from extract.extraction.feature_file import feature_file

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_paths_stand_beside_the_values(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features/embedding"], file["path"] = VALUES, ["a", "b", "c"]
    parquet.write_table(pa.table({"path": ["a", "b", "c"], "embedding": list(VALUES)}), tmp_path / "a.parquet")
    for name in ("a.h5", "a.parquet"):
        values, paths = feature_file(tmp_path / name, "embedding")
        assert np.array_equal(values[:], VALUES)
        assert paths == ["a", "b", "c"]


def test_data_in_other_files_are_not_read(tmp_path: Path) -> None:
    """A stranger's file could name any file of this machine."""
    (tmp_path / "secret").write_bytes(VALUES.tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = VALUES
    layout = h5py.VirtualLayout((3, 4), "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (3, 4))
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("x", (3, 4), "f4", external=[(str(tmp_path / "secret"), 0, 48)])
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
    for name, expected in (("external", "in other files"), ("virtual", "in other files"), ("link", "found none")):
        with pytest.raises(InputError, match=f"{name}.h5.*{expected}"):
            feature_file(tmp_path / f"{name}.h5")


@pytest.mark.parametrize("rows", [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0]], [[1.0, 2.0], None], [[1.0], [None]]])
def test_rows_of_several_lengths_are_not_taken_for_others(rows: list[list[float] | None], tmp_path: Path) -> None:
    """The first has as many values as two rows of four."""
    table = pa.table({"x": pa.array(rows, pa.list_(pa.float32()))})
    parquet.write_table(table, tmp_path / "ragged.parquet")
    with pytest.raises(InputError, match="the rows of x are not all of one length, without empty values"):
        feature_file(tmp_path / "ragged.parquet")


@pytest.mark.parametrize("name", ["damaged.npy", "damaged.h5", "damaged.parquet"])
def test_a_damaged_file_is_named_without_advice_to_unpickle_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match=f"{name} cannot be") as caught:
        feature_file(tmp_path / name)
    assert "pickle" not in str(caught.value)


def test_a_large_file_is_not_read_into_memory(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_dataset("x", (10**9, 4096), "f4", chunks=(1000, 4096))  # 16 TB of zeros
    values, _ = feature_file(tmp_path / "large.h5")
    assert values.shape == (10**9, 4096)
