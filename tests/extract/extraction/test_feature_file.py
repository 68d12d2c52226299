"""`check` of files of features that other programs or strangers have written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from extract import InputError
from extract.extraction.check import _stored

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def opened(path: Path, name: str = "") -> Any:
    return _stored(f"{path}:{name}" if name else path, None, contextlib.ExitStack()).values


def test_an_array_of_several_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features/embedding"], file["path"], file["other"] = VALUES, ["a", "b", "c"], VALUES[:, :2]
    assert np.array_equal(opened(tmp_path / "a.h5", "features/embedding")[:], VALUES)
    for name in ("", "x"):
        with pytest.raises(InputError, match=f"no data set '{name}'; it has .*a.h5:other"):
            opened(tmp_path / "a.h5", name)
    with pytest.raises(InputError, match=r"expected numbers \(N, ...\)"):
        opened(tmp_path / "a.h5", "path")


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
    for name in ("external", "virtual", "link"):
        with pytest.raises(InputError, match=f"{name}.h5.*in other files"):
            opened(tmp_path / f"{name}.h5", "x")


def test_a_column_of_parquet_is_named_and_has_rows_of_one_length(tmp_path: Path) -> None:
    kinds = {"x": list(VALUES), "path": ["a", "b", "c"],
             "ragged": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0], [1.0] * 4], "empty": [[1.0, 2.0], None, [1.0, 2.0]],
             "null": [[1.0], [None], [2.0]]}  # fmt: skip
    parquet.write_table(pa.table(kinds), tmp_path / "a.parquet")
    assert np.array_equal(opened(tmp_path / "a.parquet", "x"), VALUES)
    for name in ("ragged", "empty", "null"):  # three and five are as many values as two rows of four
        with pytest.raises(InputError, match=f"the rows of {name} are not all of one length, without empty values"):
            opened(tmp_path / "a.parquet", name)
    for name, expected in (("", "no column ''; it has x, path"), ("path", "cannot be read")):
        with pytest.raises(InputError, match=f"a.parquet.*{expected}"):
            opened(tmp_path / "a.parquet", name)


@pytest.mark.parametrize("name", ["damaged.npy", "damaged.h5", "damaged.parquet"])
def test_a_damaged_file_is_named_without_advice_to_unpickle_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match=f"{name} cannot be") as caught:
        opened(tmp_path / name, "" if name.endswith("npy") else "x")
    assert "pickle" not in str(caught.value)


def test_a_large_file_is_not_read_into_memory(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_dataset("x", (10**9, 4096), "f4", chunks=(1000, 4096))  # 16 TB of zeros
    assert opened(tmp_path / "large.h5", "x").shape == (10**9, 4096)
