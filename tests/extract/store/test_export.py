from __future__ import annotations

import csv
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError, UnknownNameError
from extract.store import export as export_module
from extract.store.export import _variables, export
from extract.store.format.layout import StoredFeature
from extract.store.format.shard import Shard
from extract.store.format.writer import wrong_rows
from extract.store.hugging_face import _CARD
from extract.system.atomic_files import claim
from tests.extract.store.processes import failing, kill_itself, killed
from tests.extract.store.rows import FAILED, PATHS, ROWS, STATUS, VALUES, change, complete_data_set
from tests.extract.store.rows import with_a_failed_row as expected


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract.store.export.BLOCK_BYTES", 400)
    monkeypatch.setattr("extract.store.export._ROWS_AT_ONCE", 5)
    monkeypatch.setattr("extract.store.format.layout._TEXTS_AT_ONCE", 4)


def test_one_hdf5_file(reader: FeatureReader, tmp_path: Path) -> None:
    counted: list[int] = []
    export(reader, tmp_path / "a.h5", "h5", on_rows=counted.append)
    assert sum(counted) == ROWS
    with h5py.File(tmp_path / "a.h5") as file:
        for name in VALUES:
            assert file["features"][name].chunks is None
            assert np.array_equal(file["features"][name][:], expected(name), equal_nan=True)
        assert file["path"].asstr(errors="surrogateescape")[:].tolist() == PATHS
        offset = file["features/vector"].id.get_offset()
    mapped = np.memmap(tmp_path / "a.h5", "<f4", "r", offset, (ROWS, 6))
    assert np.array_equal(mapped, expected("vector"), equal_nan=True)
    with FeatureReader(tmp_path / "a.h5") as again:
        assert again.paths == reader.paths[:]
        assert np.array_equal(again.labels, reader.labels)
        assert np.array_equal(again.status, reader.status)
        assert again.splits == reader.splits[:]
        for name in ("row_hash", "source_hash"):
            assert np.array_equal(again.column(name), reader.column(name))
        assert again.provenance == reader.provenance
        assert again["vector"].attributes == {"layer": "fc"}
        assert np.array_equal(again["map:none"][[5, 1]], VALUES["map:none"][[5, 1]])
    with Shard(tmp_path / "a.h5") as shard:
        assert len(wrong_rows(shard, np.arange(ROWS))) == 0


def test_numpy_files(reader: FeatureReader, tmp_path: Path) -> None:
    export(reader, tmp_path / "a", "npy")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "labels.npy", "map:none.npy", "rows.csv", "vector.npy"
    ]  # fmt: skip
    for name in VALUES:
        values = np.load(tmp_path / "a" / f"{name}.npy")
        assert values.dtype == VALUES[name].dtype
        assert np.array_equal(values, expected(name), equal_nan=True)
    assert np.load(tmp_path / "a" / "labels.npy").tolist() == [i % 3 for i in range(ROWS)]
    with (tmp_path / "a" / "rows.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as text:
        rows = list(csv.DictReader(text))
    assert [row["path"] for row in rows] == PATHS
    assert [row["status"] for row in rows] == STATUS
    assert rows[4] == {"row": "4", "path": PATHS[4], "label": "1", "class": "class 1", "split": "train", "status": "ok"}


def test_parquet(reader: FeatureReader, tmp_path: Path) -> None:
    from pyarrow import parquet

    export(reader, tmp_path / "a.parquet", "parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.schema.field("vector").type.list_size == 6
    for name, values in VALUES.items():
        stored = np.array(table[name].to_pylist(), "float32").reshape(values.shape)
        assert np.array_equal(stored, expected(name).astype("float32"), equal_nan=True)
    assert table["path"].to_pylist() == [path.replace("\udcff", "\\xff") for path in PATHS]
    assert table.drop_columns(reader.layers).equals(reader.to_arrow().drop_columns(reader.layers))


def test_matlab(reader: FeatureReader, tmp_path: Path) -> None:
    import mat73

    export(reader, tmp_path / "a.mat", "mat")
    variables = mat73.loadmat(str(tmp_path / "a.mat"))
    assert np.array_equal(variables["vector"], expected("vector"), equal_nan=True)
    assert variables["map_none"].shape == (ROWS, 2, 3, 4)
    assert np.array_equal(variables["map_none"], expected("map:none").astype("float32"), equal_nan=True)
    assert variables["labels"].reshape(-1).tolist() == [i % 3 + 1 for i in range(ROWS)]
    head = (tmp_path / "a.mat").read_bytes()[:128]
    assert head.startswith(b"MATLAB 7.3 MAT-file")
    assert head[124:] == b"\x00\x02IM"
    with h5py.File(tmp_path / "a.mat") as file:  # MATLAB's text is a matrix of UTF-16 units, a row for each
        units = file["paths"][:].transpose().astype("<u2")
        assert file["paths"].attrs["MATLAB_class"] == b"char"
    texts = [row.tobytes().decode("utf-16-le", "surrogatepass").rstrip(" ") for row in units]
    assert texts == PATHS


def test_matrices_of_dissimilarity(plain: FeatureReader, tmp_path: Path) -> None:
    import mat73

    export(plain, tmp_path / "a", "rdm")
    files = ["map:none.mat", "map:none.npy", "rows.csv", "vector.mat", "vector.npy"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == files
    good = np.delete(np.arange(ROWS), FAILED)
    for name, values in VALUES.items():
        matrix = np.load(tmp_path / "a" / f"{name}.npy")
        assert (matrix.dtype, matrix.shape) == (np.float64, (ROWS, ROWS))
        expected = 1 - np.corrcoef(values[good].reshape(len(good), -1).astype(np.float64))
        np.testing.assert_allclose(matrix[np.ix_(good, good)], expected, atol=1e-12)
        assert np.isnan(matrix[FAILED]).all()
        assert np.isnan(matrix[:, FAILED]).all()
        variables = mat73.loadmat(str(tmp_path / "a" / f"{name}.mat"))
        np.testing.assert_array_equal(variables["rdm"], matrix)
        assert variables["status"].reshape(-1).tolist() == plain.status.tolist()
    with (tmp_path / "a" / "rows.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as text:
        assert [(row["path"], row["status"]) for row in csv.DictReader(text)] == list(zip(PATHS, STATUS, strict=True))
    with pytest.raises(UnknownNameError, match="layer 'nothing' not found"):
        plain.rdm("nothing")
    export(plain, tmp_path / "b", "rdm", ["vector"], metric="cosine")
    np.testing.assert_array_equal(np.load(tmp_path / "b" / "vector.npy"), plain.rdm("vector", "cosine"))
    with pytest.raises(InputError, match="the format npy has no dissimilarities; leave out the metric, or export rdm"):
        export(plain, tmp_path / "c", "npy", metric="cosine")


def test_hugging_face(plain: FeatureReader, tmp_path: Path) -> None:
    from datasets import ClassLabel, load_dataset

    export(plain, tmp_path / "a", "hf")
    assert sorted(path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*.*")) == [
        "README.md", "data/train-00000.parquet"
    ]  # fmt: skip
    (rows,) = load_dataset(str(tmp_path / "a"), cache_dir=str(tmp_path / "cache")).values()
    assert rows.features["label"] == ClassLabel(names=[f"class {i}" for i in range(3)])
    for name, values in VALUES.items():
        assert rows.features[name].feature.dtype == values.dtype.name
        stored = np.array(rows.with_format("arrow")[:][name].to_pylist(), values.dtype).reshape(values.shape)
        assert np.array_equal(stored, expected(name), equal_nan=True)
    assert rows["label"][:] == [i % 3 for i in range(ROWS)]
    assert rows["status"][:] == STATUS
    card = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert plain.fingerprint in card
    code = card.partition("```python\n")[2].partition("```")[0].replace("path/of/this/folder", str(tmp_path / "a"))
    names: dict[str, Any] = {}
    exec(code, names)  # what the card says works
    assert names["x"].shape == (ROWS - 1, *VALUES[plain.layers[0]].shape[1:])
    assert len(names["y"]) == ROWS - 1


def test_a_hugging_face_folder_names_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance = {
        "backbone": "timm/x", "weights": "/home/me/last.pth", "machine": {"host": "myhost"},
        "configuration": {"images": "/home/me/photos"},
        "depends_on": {"precision": "float32", "architecture": "python//home/me/net.py:make"},
    }  # fmt: skip
    monkeypatch.setattr(FeatureReader, "provenance", provenance)
    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        export(reader, tmp_path / "a", "hf")
    content = b"".join(path.read_bytes() for path in (tmp_path / "a").rglob("*.*"))
    assert b"last.pth" in content
    assert b"timm/x" in content
    assert b"python/net.py:make" in content
    for private in (b"/home/me", b"myhost"):
        assert private not in content


def test_text_of_strangers_stays_text_in_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    markdown_it = pytest.importorskip("markdown_it")

    hostile = "x\x1b]0;PWN\x07 |\n| evil | [here](javascript:1) `\n```\n<img src=x onerror=alert(1)> ![](//evil) #"
    provenance = {
        "backbone": f"timm/{hostile}", "weights": hostile, "versions": {"layertap": hostile},
        "depends_on": {"precision": hostile, "stored_as": hostile, "preprocessing": {hostile: [hostile]}},
    }  # fmt: skip
    monkeypatch.setattr(FeatureReader, "provenance", provenance)
    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        monkeypatch.setitem(reader["vector"].attributes, "layer", hostile)
        export(reader, tmp_path / "a", "hf", ["vector"])
    card = (tmp_path / "a" / "README.md").read_text(encoding="utf-8").partition("\n---\n")[2]
    assert all(character.isprintable() or character == "\n" for character in card)
    page = markdown_it.MarkdownIt("commonmark").enable("table").render(card)
    assert not re.findall(r"<(img|a|h2|script)\b", page)
    assert page.count("<table>") == 2
    assert page.count("<tr>") == 6 + 2  # five properties and a feature, each under a header
    assert page.count("<pre>") == 1
    names: dict[str, Any] = {}
    layer = hostile + '"]; raise SystemExit; ["'
    line = _CARD.partition('rows["label"]')[0].rpartition("x = ")[2].partition("\n")[0]
    rows = type("Rows", (), {"with_format": lambda self, to: {layer: [[1.0]]}})()
    exec("x = " + line.format(name=layer, shape="1"), {"rows": rows, "np": np}, names)  # also where it is pasted
    assert names["x"].tolist() == [[1.0]]


def test_names_of_columns_cannot_run_code_in_a_spreadsheet_or_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"=cmd|'_C calc'!A0": ["1"] * ROWS, "\x1b]0;PWN\x07c": np.arange(ROWS)}
    monkeypatch.setattr(FeatureReader, "columns", columns)
    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        export(reader, tmp_path / "a", "npy")
    with (tmp_path / "a" / "rows.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as text:
        header = next(csv.reader(text))
    assert header[-2:] == ["'=cmd|'_C calc'!A0", r"\x1b]0;PWN\x07c"]


@pytest.mark.parametrize("splits", [["train", "test"], ["val"], [""], ["", "train"]])
def test_splits_are_those_of_hugging_face(tmp_path: Path, splits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import load_dataset

    with FeatureReader(complete_data_set(tmp_path / "out").out) as reader:
        given = [splits[row % len(splits)] for row in range(ROWS)]
        monkeypatch.setattr(FeatureReader, "splits", given)
        export(reader, tmp_path / "a", "hf")
        x = reader["vector"][:]
    found = load_dataset(str(tmp_path / "a"), cache_dir=str(tmp_path / "cache"))
    names = {"train": "train", "val": "validation", "test": "test", "": "train" if splits == [""] else "other"}
    assert set(found) == {names[split] for split in splits}
    for split in splits:
        rows = [row for row in range(ROWS) if given[row] == split]
        assert found[names[split]]["row"][:] == rows
        assert np.array_equal(np.array(found[names[split]]["vector"][:], np.float32), x[rows])


def test_some_layers_only(plain: FeatureReader, tmp_path: Path) -> None:
    export(plain, tmp_path / "a.h5", "h5", ["map:none"])
    with FeatureReader(tmp_path / "a.h5") as again:
        assert again.layers == ["map:none"]
    with Shard(tmp_path / "a.h5") as shard:
        assert len(wrong_rows(shard, np.arange(ROWS))) == 0
    with pytest.raises(UnknownNameError, match="layer 'vctor' not found.*nearest: 'vector'"):
        export(plain, tmp_path / "b.h5", "h5", ["vctor"])
    assert not (tmp_path / "b.h5").exists()


def test_names_that_matlab_does_not_allow() -> None:
    names = ["blocks.1", "blocks_1", "1st", "labels", "x" * 80]
    assert _variables(names) == {
        "blocks.1": "blocks_1", "blocks_1": "blocks_1_2", "1st": "layer_1st", "labels": "labels_2", "x" * 80: "x" * 58,
    }  # fmt: skip


def test_names_of_files_that_are_too_long_or_taken_meanwhile(plain: FeatureReader, tmp_path: Path) -> None:
    with pytest.raises(LayertapError, match="File name too long"):
        export(plain, tmp_path / ("x" * 300), "h5")
    with pytest.raises(InputError, match="was created by another process"):
        export(plain, tmp_path / "a.h5", "h5", on_rows=lambda rows: (tmp_path / "a.h5").write_text("mine"))
    for to in ("h5", "npy"):
        with pytest.raises(InputError, match="a.h5 already exists"):
            export(plain, tmp_path / "a.h5", to)
    assert (tmp_path / "a.h5").read_text() == "mine"
    (tmp_path / "b.new").mkdir()
    export(plain, tmp_path / "b", "npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b", "b.new", "out"]


def test_a_class_that_is_no_text(tmp_path: Path) -> None:
    from pyarrow import parquet

    data = complete_data_set(tmp_path / "out")
    for shard in range(data.n_shards):
        change(data.path(shard), lambda file: file["classes"].__setitem__(0, b"cl\xff"))
    with FeatureReader(data.out) as reader:
        export(reader, tmp_path / "a.parquet", "parquet")
    assert parquet.read_table(tmp_path / "a.parquet")["class"].to_pylist()[0] == "cl\\xff"


@pytest.mark.parametrize("to", ["h5", "npy"])
def test_what_a_killed_export_has_left_is_removed_by_the_next(
    plain: FeatureReader, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_after_claim(path: Path, name: Path) -> None:
        claim(path, name)
        kill_itself()

    def outdate_what_is_left() -> None:
        (left,) = tmp_path.glob(".a.*.new")
        os.utime(left, (0, 0))

    killed(export, plain, tmp_path / "a", to, None, kill_itself)  # after some rows
    outdate_what_is_left()
    with monkeypatch.context() as patch:
        patch.setattr(export_module, "claim", kill_after_claim)
        killed(export, plain, tmp_path / "a", to)  # when it was complete
    outdate_what_is_left()
    with pytest.raises(InputError, match="already exists"):
        export(plain, tmp_path / "a", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"]


def test_a_failure_leaves_nothing_behind(plain: FeatureReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract.store.export._blocks", failing(errno.ENOSPC))
    for to in ("h5", "npy", "parquet", "mat", "hf"):
        with pytest.raises(LayertapError, match="No space left on device"):
            export(plain, tmp_path / "new", to)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(("name", "to"), [("labels", "npy"), ("path", "parquet")])
def test_a_layer_named_as_something_else_is_refused(
    tmp_path: Path, name: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.extract.store import rows

    monkeypatch.setitem(rows.VALUES, name, VALUES["vector"])
    monkeypatch.setattr(rows, "FEATURES", [*rows.FEATURES, StoredFeature(name, (6,), "float32")])
    data = complete_data_set(tmp_path / "out", features=rows.FEATURES)
    with (
        FeatureReader(data.out) as reader,
        pytest.raises(InputError, match=f"the layer '{name}' cannot be (exported|converted)"),
    ):
        export(reader, tmp_path / "x", to)


# Rows as tables of Arrow, pandas, Polars and DuckDB, by these libraries


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
    assert table["split"].to_pylist() == ["train"] * ROWS
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


@pytest.mark.parametrize(("module", "use"), [
    ("pyarrow", lambda reader, out: export(reader, out, "parquet")), ("pyarrow", lambda reader, out: reader.to_arrow()),
    ("pandas", lambda reader, out: reader.to_pandas()), ("polars", lambda reader, out: reader.to_polars()),
])  # fmt: skip
def test_a_missing_library_is_named(
    plain: FeatureReader, tmp_path: Path, module: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LayertapError, match=rf"needs {module}; to install it: .*'{module}>="):
        use(plain, tmp_path / "a.parquet")
