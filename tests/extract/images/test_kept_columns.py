"""Further columns of lists and datasets, kept with the features: as they were listed, however they are read."""

from __future__ import annotations

import csv
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from extract import FeatureReader, InputError, UnknownNameError, extract_features
from extract.compute.backbone import Backbone
from extract.images import list_images
from extract.images.datasets import list_dataset
from extract.images.plan_writing import write_plan
from extract.store.export import FORMATS, export
from extract.store.merge import merge
from extract.store.verify import verify
from tests.extract.images.making import files_of
from tests.extract.store.rows import change

QUICK: dict[str, Any] = {"workers": 0, "batch_size": 4, "compile": "off", "progress": False}
COLUMNS = ["Caption", "age", "count", "indoors", "taken"]


def write_table(folder: Path) -> pd.DataFrame:
    """The twelve images in no order, with text, numbers, numbers that are missing, truth values and times."""
    names = [*files_of(folder)]
    table = pd.DataFrame({"path": [names[i * 5 % 12] for i in range(12)]})
    table["Caption"] = [f"„{name}“ 🐈, " + "x" * i for i, name in enumerate(table["path"])]
    table.loc[3, "Caption"] = ""
    table["age"] = [None if i == 2 else i * 1.5 for i in range(12)]
    table["count"] = [2**53 + i for i in range(12)]
    table["indoors"] = [i % 2 == 0 for i in range(12)]
    table["taken"] = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(12), unit="h")
    table["id"] = [f"id {i}" for i in range(12)]
    table.to_parquet(folder / "list.parquet")
    return table.sort_values("path", ignore_index=True)


@pytest.fixture
def table(folder: Path) -> pd.DataFrame:
    """The table in `list.parquet` of the folder, in the order of the rows."""
    return write_table(folder)


@pytest.fixture(scope="module")
def out(_twelve: Path, tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Path:
    """The data set of such a table, to be read only."""
    root = tmp_path_factory.mktemp("kept")
    shutil.copytree(_twelve, root / "pictures")
    write_table(root / "pictures")
    where = root / "pictures" / "list.parquet"
    extract_features(where, out=root / "out", backbone=backbone, keep=COLUMNS, shard_rows=5, **QUICK).close()
    return root / "out"


def check(reader: FeatureReader, table: pd.DataFrame) -> None:
    assert reader.ids == table["id"].tolist()
    assert list(reader.columns) == sorted(COLUMNS)
    assert reader.columns["Caption"] == table["Caption"].tolist()
    assert reader.columns["taken"] == [f"{time}.000000" for time in table["taken"].astype(str)]
    for name, dtype in (("age", "float64"), ("count", "int64"), ("indoors", "int64")):
        assert reader.columns[name].dtype == dtype  # type: ignore[union-attr]
        np.testing.assert_array_equal(reader.columns[name], table[name].astype(dtype))


def test_columns_are_in_the_order_of_the_rows(out: Path, table: pd.DataFrame) -> None:
    with FeatureReader(out) as reader:
        assert reader.paths == table["path"].tolist()
        check(reader, table)
        assert reader.columns["Caption"][2:4] == table["Caption"][2:4].tolist()
        again = pickle.loads(pickle.dumps(reader))
    check(again, table)
    again.close()
    parts = [h5py.File(path) for path in sorted((out / "shards").glob("*.h5"))]
    assert [text.decode() for part in parts for text in part["columns/Caption"]] == table["Caption"].tolist()
    assert [text.decode() for part in parts for text in part["id"]] == table["id"].tolist()
    assert np.concatenate([part["columns/count"][:] for part in parts]).tolist() == table["count"].tolist()
    assert verify(out).faults == []


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_a_second_try_of_failed_rows_keeps_the_columns(
    folder: Path, tmp_path: Path, table: pd.DataFrame, backbone: Backbone, compress: Any
) -> None:
    broken = folder / table["path"][7]
    good = broken.read_bytes()
    broken.write_bytes(good[:40])
    asked = QUICK | {"out": tmp_path / "out", "backbone": backbone, "keep": COLUMNS, "shard_rows": 5}
    with extract_features(folder / "list.parquet", compress=compress, **asked) as reader:
        assert [row for row, *_ in reader.failures] == [7]
        check(reader, table)
    broken.write_bytes(good)
    with extract_features(folder / "list.parquet", retry_failed=True, compress=compress, **asked) as reader:
        assert reader.failures == []
        check(reader, table)


def test_columns_of_csv_are_text(folder: Path, tmp_path: Path, table: pd.DataFrame, backbone: Backbone) -> None:
    table["zip"] = [f"0{i}" for i in range(12)]
    table["url"] = "https://me:secret@host/cat.jpg?id=7&token=abc"
    table.to_csv(folder / "list.csv", index=False)
    with extract_features(
        folder / "list.csv", out=tmp_path / "csv", backbone=backbone, keep=["caption", " ZIP", "url", "age", "zip"],
        **QUICK,
    ) as reader:  # fmt: skip
        assert list(reader.columns) == ["ZIP", "age", "caption", "url", "zip"]
        assert reader.columns["caption"] == table["Caption"].tolist()
        assert reader.columns["ZIP"] == reader.columns["zip"] == [f"0{i}" for i in range(12)]
        assert set(reader.columns["url"]) == {"https://host/cat.jpg?id=7"}
        assert reader.columns["age"] == ["" if np.isnan(age) else str(age) for age in table["age"]]
        assert reader.columns.get("split") is None
        with pytest.raises(KeyError, match="captions"):
            reader.columns["captions"]


def test_columns_of_a_dataset_of_hugging_face(folder: Path, tmp_path: Path, backbone: Backbone) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({
        "image": datasets.Image(), "sex": datasets.ClassLabel(names=["f", "m"]), "age": datasets.Value("float32"),
        "Caption": datasets.Value("string"), "box": [datasets.Value("int64")], "id": datasets.Value("int32"),
    })  # fmt: skip
    rows = [
        {"image": str(folder / name), "sex": i % 2, "age": i / 2, "Caption": name, "box": [i], "id": 7 * i}
        for i, name in enumerate(files_of(folder))
    ]
    whole = datasets.Dataset.from_list(rows, features=features)
    parts = datasets.DatasetDict({"train": whole.select(range(7)), "test": whole.select(range(7, 12))})
    keep = ["age", "caption", "sex"]
    parts.save_to_disk(tmp_path / "saved")
    listed = list_images(f"hfds://{tmp_path}/saved", keep=keep)
    order = [*range(7, 12), *range(7)]  # test before train
    assert list(listed.columns["age"]) == [rows[i]["age"] for i in order]
    assert listed.columns["caption"] == [rows[i]["Caption"] for i in order]
    assert listed.ids == [str(7 * i) for i in order]
    assert listed.columns["sex"] == ["fm"[i % 2] for i in order]
    with extract_features(whole, out=tmp_path / "out", backbone=backbone, keep="caption", **QUICK) as reader:
        assert reader.columns["caption"] == [row["Caption"] for row in rows]
    with pytest.raises(InputError, match="column 'box' is list<.*; expected text, int64 or float64"):
        list_images(f"hfds://{tmp_path}/saved", keep=["box"])
    mixed = {"train": parts["train"].cast_column("age", datasets.Value("string")), "test": parts["test"]}
    with pytest.raises(InputError, match="column 'age' has text in one split, and numbers in another"):
        list_dataset(datasets.DatasetDict(mixed), ["age"])


@pytest.mark.parametrize("to", FORMATS)
def test_columns_are_exported(out: Path, tmp_path: Path, table: pd.DataFrame, to: str) -> None:
    path = tmp_path / f"exported.{to}"
    with FeatureReader(out) as reader:
        export(reader, path, to)
    times = [f"{time}.000000" for time in table["taken"].astype(str)]
    if to == "h5":
        with FeatureReader(path) as exported:
            check(exported, table)
    elif to in ("npy", "rdm"):
        with (path / "rows.csv").open(newline="") as text:
            rows = list(csv.DictReader(text))
        assert [row["Caption"] for row in rows] == table["Caption"].tolist()
        assert [int(row["count"]) for row in rows] == table["count"].tolist()
        assert [row["id"] for row in rows] == table["id"].tolist()
    elif to == "mat":
        with h5py.File(path) as file:
            text = file["Caption"][:].transpose()
            padded = [row.tobytes().decode("utf-16-le").rstrip() for row in text]
            assert padded == table["Caption"].str.rstrip().tolist()
            np.testing.assert_array_equal(file["age"][0], table["age"])
            assert ["".join(map(chr, column)).strip() for column in file["ids"][:].T] == table["id"].tolist()
    else:
        frame = pd.read_parquet(path / "data" if to == "hf" else path)
        assert frame["Caption"].tolist() == table["Caption"].tolist()
        assert frame["taken"].tolist() == times
        np.testing.assert_array_equal(frame["age"], table["age"])
        assert frame["count"].dtype == frame["indoors"].dtype == np.int64
        assert frame["count"].tolist() == table["count"].tolist()
        assert frame["id"].tolist() == table["id"].tolist()


def test_several_data_sets(folder: Path, tmp_path: Path, table: pd.DataFrame, backbone: Backbone) -> None:
    parts = {"a": table[:5].copy(), "b": table[5:].copy()}
    parts["b"]["count"] = parts["b"]["count"].astype(str)
    for name, part in parts.items():
        (folder / name).mkdir()
        part["path"] = [f"{folder}/{path}" for path in part["path"]]
        part.to_parquet(folder / name / "list.parquet")
        keep = ["Caption", "age", "count", *(["indoors"] if name == "a" else [])]
        where = folder / name / "list.parquet"
        extract_features(where, out=tmp_path / name, backbone=backbone, keep=keep, **QUICK).close()
    sources = [tmp_path / "a", tmp_path / "b"]
    merge(sources, tmp_path / "merged", shard_rows=4)
    assert verify(tmp_path / "merged").faults == []
    for path in (sources, tmp_path / "merged"):
        with FeatureReader(path) as reader:  # only what both have, of one kind
            assert list(reader.columns) == ["Caption", "age"]
            assert reader.columns["Caption"] == table["Caption"].tolist()
            assert reader.ids == table["id"].tolist()
            np.testing.assert_array_equal(reader.columns["age"], table["age"])


def test_other_columns_are_noticed(tmp_path: Path, out: Path, backbone: Any) -> None:
    pictures = shutil.copytree(out.parent, tmp_path / "copy") / "pictures"
    asked = QUICK | {"out": pictures.parent / "out", "backbone": backbone, "shard_rows": 5}
    for keep in ([], ["Caption"]):
        with pytest.raises(InputError, match=r"kept columns of the images \(images.labels_xxh3\): stored"):
            extract_features(pictures / "list.parquet", keep=keep, **asked)
    table = pd.read_parquet(pictures / "list.parquet")
    table["age"] += 1
    table.to_parquet(pictures / "list.parquet")
    with pytest.raises(InputError, match="kept columns of the images"):
        extract_features(pictures / "list.parquet", keep=COLUMNS, **asked)


def test_columns_that_cannot_be_kept(folder: Path, tmp_path: Path, table: pd.DataFrame, backbone: Backbone) -> None:
    where = folder / "list.parquet"
    table[["path", "age"]].rename(columns={"age": "a/b"}).to_parquet(folder / "slash.parquet")
    table[["path", "age"]].rename(columns={"age": ".x"}).to_parquet(folder / "dot.parquet")
    for place, name, message in (
        (where, "cpation", r"column 'cpation' not found in .*list.parquet; nearest: 'Caption'"),
        (where, "Path", "keep 'Path': a data set has a column of this name in any case"),
        (folder, "age", "keep 'age': .* has no columns"),
        (folder / "slash.parquet", "a/b", "keep 'a/b': a kept column cannot have this name"),
        (folder / "dot.parquet", ".x", "keep '.x': a kept column cannot have this name"),
    ):
        with pytest.raises((InputError, UnknownNameError), match=message):
            list_images(place, keep=[name])
    write_plan(where, tmp_path / "plan")
    with pytest.raises(InputError, match="has no columns") as raised:
        list_images(tmp_path / "plan", keep=["age"])
    assert raised.value.hint == "name the list from which the plan was made"
    with pytest.raises(InputError, match="keep: list has no columns"):
        extract_features([folder / table["path"][0]], out=tmp_path / "x", backbone=backbone, keep=["age"], **QUICK)
    table.rename(columns={"age": "embedding"}).to_parquet(where)
    with pytest.raises(InputError, match="keep 'embedding': a feature has this name"):
        extract_features(where, out=tmp_path / "x", backbone=backbone, keep=["embedding"], **QUICK)
    assert not (tmp_path / "x").exists()


def test_lists_with_bad_columns(folder: Path) -> None:
    for content, message in (
        (b"path,age\nant/00.png,a\xff\n", "line 2: the age is not UTF-8"),
        (b"path,age\nant/00.png,a\0b\n", "line 2: the age contains a null character"),
        (b"path,age,AGE\nant/00.png,1,2\n", "two columns have the name 'age'"),
    ):
        (folder / "list.csv").write_bytes(content)
        with pytest.raises(InputError, match=message):
            list_images(folder / "list.csv", keep=["age"])


@pytest.mark.parametrize("bad", ["path", "label", "age"])
def test_a_parquet_list_whose_text_is_not_utf8_is_refused(folder: Path, tmp_path: Path, bad: str) -> None:
    bits = [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    columns = {"path": ["ant/00.png"], "label": ["x"], "age": ["y"], bad: pa.Array.from_buffers(pa.string(), 1, bits)}
    parquet.write_table(pa.table(columns), folder / "list.parquet")
    with pytest.raises(InputError, match=r"list\.parquet: a text is not UTF-8"):
        list_images(folder / "list.parquet", keep=["age"])
    if bad != "age":
        with pytest.raises(InputError, match=r"list\.parquet: a text is not UTF-8"):
            write_plan(folder / "list.parquet", tmp_path / "plan")


def test_columns_that_another_program_wrote(out: Path, tmp_path: Path) -> None:
    shard = tmp_path / "other.h5"
    with FeatureReader(out) as reader:
        export(reader, shard, "h5")

    def text(file: h5py.File) -> None:
        file["columns/Caption"][0] = b"a\xff"

    change(shard, text)
    with FeatureReader(shard) as reader:
        assert reader.to_arrow()["Caption"][0].as_py() == "a\\xff"
        for number, to in enumerate(FORMATS):
            export(reader, tmp_path / f"again-{number}", to)
    change(shard, lambda file: file.create_dataset("columns/path", data=np.zeros(12)))
    with FeatureReader(shard) as reader, pytest.raises(InputError, match="the column 'path' cannot be converted"):
        reader.to_arrow()
