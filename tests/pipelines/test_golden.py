"""Data sets of format version 1 that an earlier commit has written stay readable, and are not changed by being read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from extract import FeatureReader
from tests.conftest import SHARED, make_picture
from tests.extract.sync.changes import write_as_changes
from tests.pipelines.test_cli import SMALL, layertap

GOLDEN = SHARED / "golden-v1"
SETS = ("plain", "gzip", "ids", "synced")


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy, which may be written to."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no data sets in {GOLDEN}")
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "golden"))
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


def content_of(folder: Path) -> dict[str, str]:
    """Name of each file and folder -> its sha256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def check_values(name: str, out: Path, tolerance: float = 0.0) -> None:
    """The rows of a data set are those that its first reader gave."""
    with np.load(GOLDEN / "expected.npz") as expected, FeatureReader(out) as reader:
        assert reader.paths == expected[f"{name}/paths"].tolist()
        assert reader.classes == expected[f"{name}/classes"].tolist()
        assert reader.splits == expected[f"{name}/splits"].tolist()
        assert np.array_equal(reader.labels, expected[f"{name}/labels"])
        assert np.array_equal(reader.status, expected[f"{name}/status"])
        if f"{name}/ids" in expected:
            assert reader.ids == expected[f"{name}/ids"].tolist()
        layers = [key.removeprefix(f"{name}/features/") for key in expected if key.startswith(f"{name}/features/")]
        assert sorted(reader.layers) == sorted(layers)
        for layer in layers:
            stored, wanted = reader[layer][:], expected[f"{name}/features/{layer}"]
            assert stored.dtype == wanted.dtype
            np.testing.assert_allclose(stored, wanted, rtol=0, atol=tolerance * float(np.nanmax(np.abs(wanted))))


@pytest.mark.parametrize("name", SETS)
def test_values_are_those_that_were_stored(golden: Path, name: str) -> None:
    check_values(name, golden / name)


@pytest.mark.parametrize("name", SETS)
def test_commands_that_read_change_nothing(golden: Path, tmp_path: Path, name: str) -> None:
    out, new = golden / name, tmp_path / "new"
    new.mkdir()
    before = content_of(golden)
    for arguments in (
        ["show", out], ["status", out], ["verify", out], ["diff", out, out], ["search", out, 1],
        ["export", out, "--to", "npy", "-o", new / "npy"], ["export", out, "--to", "h5", "-o", new / "export.h5"],
        ["merge", out, "-o", new / "merged"],
        # A t-SNE map reads the same features, and takes seconds.
        ["report", out, "-o", new / "report.html", "--thumbnails", 3, *([] if name == "plain" else ["--map", "pca"])],
        ["probe", out, "-l", "embedding", "--protocol", "knn", "-o", new / "probe"],
    ):  # fmt: skip
        result = layertap(*arguments)
        too_small = (name, arguments[0]) == ("ids", "probe")
        assert result.exit_code == (2 if too_small else 0), (arguments, result.output)
        assert content_of(golden) == before, arguments
    with FeatureReader(new / "merged") as merged, FeatureReader(out) as reader:
        order = [reader.paths.index(path) for path in merged.paths]  # a merged data set is sorted
        assert sorted(order) == list(range(len(reader)))
        np.testing.assert_array_equal(merged["embedding"][:], reader["embedding"][:][order])


def test_rows_computed_again_agree_and_change_nothing(golden: Path) -> None:
    before = content_of(golden)
    result = layertap(
        "verify", golden / "plain", "--sample", 4, "--images", golden / "photos", "--device", "cpu", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sampled"] == 4
    assert content_of(golden) == before


def test_an_interrupted_copy_is_resumed(golden: Path) -> None:
    out = golden / "plain"
    for path in (out / "shards").glob("000001.*"):
        path.unlink()
    before = content_of(out / "shards")
    layers = ["-l", "embedding", "-l", "blocks.2", "-l", "conv_stem:max_map"]
    result = layertap("embed", golden / "photos", "-o", out, *layers, "--workers", 0, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["computed"] == 10
    check_values("plain", out, tolerance=1e-4)  # on another machine
    assert layertap("verify", out).exit_code == 0
    after = content_of(out / "shards")
    assert {name: after[name] for name in before} == before


def test_sync_of_the_same_folder_elsewhere_computes_nothing(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden)
    for path in (golden / "live").rglob("*.jpg"):  # as the copy was made, but settled
        os.utime(path, ns=(10**18, 10**18))
    result = layertap("sync", "nightly.yaml", "--force", "--json")
    assert result.exit_code == 0, result.output
    (done,) = json.loads(result.stdout)
    assert (done["computed"], done["added"], done["deleted"], done["rows"]) == (0, 0, 0, 25)
    check_values("synced", golden / "synced")
    assert layertap("verify", golden / "synced").exit_code == 0


def test_sync_of_changes_continues_an_older_data_set(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden)
    for path in (golden / "live").rglob("*.jpg"):
        os.utime(path, ns=(10**18, 10**18))
    assert layertap("sync", "nightly.yaml", "--force").exit_code == 0
    (gone,) = (golden / "live").rglob("renamed.jpg")
    gone.rename(gone.with_name("again.jpg"))
    for of_changes in (False, True):  # the second time, the data set is as another earlier version has written it
        if of_changes:
            write_as_changes(golden / "synced")
            assert layertap("show", golden / "synced").exit_code == 2  # `layertap sync` is named as the way
            next((golden / "live").rglob("0001.jpg")).unlink()
        result = layertap("sync", "nightly.yaml", "--force", "--json")
        assert result.exit_code == 0, result.output
        check_continued(golden / "synced")
    assert json.loads((golden / "synced" / "dataset.json").read_text())["format_version"] == 1


def check_continued(out: Path) -> None:
    assert layertap("verify", out).exit_code == 0
    with FeatureReader(out) as reader:
        assert any("again.jpg" in path for path in reader.paths)
        expected = {"paths": np.array(reader.paths), "splits": np.array(reader.splits), "status": reader.status,
                    "classes": np.array(reader.classes), "labels": reader.labels}  # fmt: skip
        expected |= {f"features/{name}": reader[name][:] for name in reader.layers}
    check_documented_reader(out, expected)
    with np.load(GOLDEN / "expected.npz") as stored:
        before = dict(zip(stored["synced/paths"].tolist(), stored["synced/features/embedding"], strict=True))
        for path, row in zip(expected["paths"].tolist(), expected["features/embedding"], strict=True):
            np.testing.assert_array_equal(row, before[path.replace("again.jpg", "renamed.jpg")])


def documented_reader() -> Callable[[Path], tuple[dict[str, NDArray[Any]], list[str]]]:
    """The function `read` of the documentation of the format."""
    page = (Path(__file__).parents[2] / "docs" / "file-format.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    names: dict[str, Any] = {}
    exec(code, names)
    reader: Callable[[Path], tuple[dict[str, NDArray[Any]], list[str]]] = names["read"]
    return reader


def check_documented_reader(out: Path, expected: Mapping[str, NDArray[Any]]) -> None:
    columns, classes = documented_reader()(out)
    assert [os.fsdecode(path) for path in columns["path"]] == expected["paths"].tolist()
    assert [split.decode() for split in columns["split"]] == expected["splits"].tolist()
    assert classes == expected["classes"].tolist()
    assert np.array_equal(columns["label"], expected["labels"])
    assert np.array_equal(columns["status"], expected["status"])
    for name in (name for name in expected if name.startswith("features/")):
        np.testing.assert_array_equal(columns[name], expected[name])


@pytest.mark.parametrize("name", SETS)
def test_the_reader_of_the_documentation_reads_format_version_1(golden: Path, name: str) -> None:
    with np.load(GOLDEN / "expected.npz") as arrays:
        mine = {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}
        check_documented_reader(golden / name, mine)


def test_the_reader_of_the_documentation_reads_what_is_written_now(folder: Path, tmp_path: Path) -> None:
    (folder / "bee" / "07.jpg").write_bytes(b"no picture")
    arguments = [
        "embed",
        folder,
        "-o",
        tmp_path / "out",
        *SMALL,
        "-l",
        "embedding",
        "-l",
        "layer4:none",
        "--shard-rows",
        5,
    ]
    assert layertap(*arguments).exit_code == 0
    make_picture(7).save(folder / "bee" / "07.jpg")
    assert layertap(*arguments, "--retry-failed").exit_code == 0  # a shard has a second revision
    with FeatureReader(tmp_path / "out") as reader:
        expected = {"paths": np.array(reader.paths), "splits": np.array(reader.splits), "status": reader.status,
                    "classes": np.array(reader.classes), "labels": reader.labels}  # fmt: skip
        expected |= {f"features/{name}": reader[name][:] for name in reader.layers}
    check_documented_reader(tmp_path / "out", expected)
