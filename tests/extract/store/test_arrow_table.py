"""Rows as tables of Arrow, pandas, Polars and DuckDB, by these libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError, UnknownNameError
from extract.store.export import export
from tests.extract.store.rows import FAILED, PATHS, ROWS, STATUS, VALUES, change, complete_data_set
from tests.extract.store.rows import with_a_failed_row as expected


def test_arrow(reader: FeatureReader) -> None:
    table = reader.to_arrow()
    assert table.num_rows == ROWS
    assert table.column_names == [
        "row", "path", "label", "class", "split", "status", "path_bytes", *reader.layers
    ]  # fmt: skip
    for name in VALUES:
        kind = table.schema.field(name)
        assert kind.type.value_type.to_pandas_dtype() == VALUES[name].dtype  # float16 stays float16
        assert tuple(json.loads(kind.metadata[b"shape"])) == VALUES[name].shape[1:]
        values = np.concatenate([chunk.flatten().to_numpy() for chunk in table[name].chunks])
        np.testing.assert_array_equal(values.reshape(VALUES[name].shape), expected(name))
    assert table["row"].to_pylist() == list(range(ROWS))
    assert table["label"].to_pylist() == [i % 3 for i in range(ROWS)]
    assert table["class"].to_pylist() == [f"class {i % 3}" for i in range(ROWS)]
    assert table["status"].to_pylist() == STATUS
    assert [os.fsdecode(path) for path in table["path_bytes"].to_pylist()] == PATHS
    assert json.loads(table.schema.metadata[b"layertap"]) == {"weights": "w"}
    assert reader.to_arrow("vector").column_names[-1] == "vector"
    with pytest.raises(UnknownNameError, match="nearest: 'vector'"):
        reader.to_arrow("vctor")


LANCE = """
import sys, lance, numpy as np
from extract import FeatureReader

with FeatureReader(sys.argv[1]) as reader:
    table = reader.to_arrow()
    lance.write_dataset(table, sys.argv[2])
written = lance.dataset(sys.argv[2]).to_table()
assert written.schema.equals(table.schema)
for name in table.column_names:
    if name in reader.layers:
        values, expected = (np.stack(each[name].to_numpy()) for each in (written, table))
        np.testing.assert_array_equal(values, expected, strict=True)
    else:
        assert written[name].equals(table[name])
print(table.num_rows)
"""


@pytest.mark.slow
def test_lance(plain: FeatureReader, tmp_path: Path) -> None:
    """In a process of its own, since Lance is not safe in one that forks."""
    run = subprocess.run(
        [sys.executable, "-c", LANCE, tmp_path / "out", tmp_path / "lance"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(ROWS)


def test_features_are_not_copied(tmp_path: Path) -> None:
    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        table = reader.to_arrow("vector")
        chunks = table["vector"].chunks
        mapped = [view for _, _, view in reader["vector"].parts()]
    assert len(chunks) == len(mapped) > 1
    for chunk, view in zip(chunks, mapped, strict=True):
        assert chunk.flatten().buffers()[1].address == view.ctypes.data
    del mapped
    values = np.concatenate([chunk.flatten().to_numpy() for chunk in chunks])  # after the reader was closed
    np.testing.assert_array_equal(values.reshape(-1, 6), VALUES["vector"])


def test_pandas(plain: FeatureReader) -> None:
    frame = plain.to_pandas()
    assert len(frame) == ROWS
    for name in VALUES:
        values = np.stack(frame[name].to_numpy())
        assert values.dtype == VALUES[name].dtype
        np.testing.assert_array_equal(values.reshape(VALUES[name].shape), expected(name))
    assert frame["status"].tolist() == STATUS
    assert frame.groupby("class").size().to_dict() == {f"class {i}": len(range(i, ROWS, 3)) for i in range(3)}


def test_polars(plain: FeatureReader) -> None:
    import polars

    frame = plain.to_polars(["vector", "map:none"])
    assert frame.schema["vector"] == polars.Array(polars.Float32, 6)
    np.testing.assert_array_equal(frame["vector"].to_numpy(), expected("vector"))
    np.testing.assert_array_equal(
        frame["map:none"].to_numpy().reshape(VALUES["map:none"].shape), expected("map:none")
    )  # fmt: skip
    assert frame.filter(polars.col("status") == "ok").height == ROWS - 1


def test_duckdb_queries_the_export(plain: FeatureReader, tmp_path: Path) -> None:
    import duckdb

    export(plain, tmp_path / "a.parquet", "parquet")
    query = VALUES["vector"][0].tolist()
    found = duckdb.sql(
        f"SELECT row, list_cosine_similarity(vector, {query}::FLOAT[]) AS cosine FROM '{tmp_path}/a.parquet' "
        "WHERE status = 'ok' ORDER BY cosine DESC LIMIT 3"
    ).fetchall()
    good = np.array([row for row in range(ROWS) if row != FAILED])
    x = VALUES["vector"][good].astype(np.float64)
    cosines = x @ x[0] / np.linalg.norm(x, axis=1) / np.linalg.norm(x[0])
    best = good[np.argsort(-cosines)[:3]]
    assert [row for row, _ in found] == best.tolist()
    np.testing.assert_allclose([cosine for _, cosine in found], np.sort(cosines)[::-1][:3], rtol=1e-5)


def test_a_changed_row_is_refused_if_rows_are_checked(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out")
    change(data.path(0), lambda file: file["features/vector"].__setitem__((1, 0), 99.0))
    with FeatureReader(data.out, check=True) as reader, pytest.raises(InputError, match="row 1 .* is damaged"):
        reader.to_arrow()


@pytest.mark.parametrize(("module", "method"), [("pyarrow", "arrow"), ("pandas", "pandas"), ("polars", "polars")])
def test_a_missing_library_is_named(tmp_path: Path, module: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with (
        FeatureReader(complete_data_set(tmp_path / "out").out) as reader,
        pytest.raises(LayertapError, match=rf"needs {module}; to install it: .*'{module}>="),
    ):
        getattr(reader, f"to_{method}")()
