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
from tests.pipelines.test_cli import SMALL, layertap, succeeds

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


def read(out: Path) -> dict[str, NDArray[Any]]:
    """What a data set has, under the names of `expected.npz`."""
    with FeatureReader(out) as reader:
        found = {"paths": np.array(reader.paths), "splits": np.array(reader.splits), "status": reader.status,
                 "classes": np.array(reader.classes), "labels": reader.labels}  # fmt: skip
        if reader.ids:
            found["ids"] = np.array(reader.ids)
        return found | {f"features/{name}": reader[name][:] for name in reader.layers}


def expected_of(name: str) -> dict[str, NDArray[Any]]:
    """What the first reader of a data set gave."""
    with np.load(GOLDEN / "expected.npz") as arrays:
        return {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}


def check_values(name: str, out: Path, tolerance: float = 0.0) -> None:
    found, expected = read(out), expected_of(name)
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        if key.startswith("features/"):
            assert found[key].dtype == wanted.dtype
            most = tolerance * float(np.nanmax(np.abs(wanted)))
            np.testing.assert_allclose(found[key], wanted, rtol=0, atol=most)
        else:
            assert found[key].tolist() == wanted.tolist()


@pytest.mark.parametrize("name", SETS)
def test_values_are_those_that_were_stored_and_commands_that_read_change_nothing(
    golden: Path, tmp_path: Path, name: str
) -> None:
    out, new = golden / name, tmp_path / "new"
    check_values(name, out)
    check_documented_reader(out, expected_of(name))
    new.mkdir()
    before = content_of(golden)
    more = (
        ["report", out, "-o", new / "r.html", "--thumbnails", 3, "--map", "pca"],
        ["probe", out, "-l", "embedding", "--protocol", "knn", "-o", new / "probe"],
    )
    for arguments in (
        ["show", out], ["status", out], ["verify", out], ["diff", out, out], ["search", out, 1],
        ["export", out, "--to", "npy", "-o", new / "npy"], ["export", out, "--to", "h5", "-o", new / "export.h5"],
        ["merge", out, "-o", new / "merged"], *(more if name in ("plain", "synced") else ()),
    ):  # fmt: skip
        result = layertap(*arguments)
        assert result.exit_code == 0, (arguments, result.output)
    assert content_of(golden) == before
    with FeatureReader(new / "merged") as merged, FeatureReader(out) as reader:
        order = [reader.paths.index(path) for path in merged.paths]  # a merged data set is sorted
        assert sorted(order) == list(range(len(reader)))
        np.testing.assert_array_equal(merged["embedding"][:], reader["embedding"][:][order])


def test_rows_computed_again_agree_and_change_nothing(golden: Path) -> None:
    before = content_of(golden)
    of = ("--sample", 4, "--images", golden / "photos", "--device", "cpu")
    assert json.loads(succeeds("verify", golden / "plain", *of, "--json").stdout)["sampled"] == 4
    assert content_of(golden) == before


def test_an_interrupted_copy_is_resumed(golden: Path) -> None:
    out = golden / "plain"
    for path in (out / "shards").glob("000001.*"):
        path.unlink()
    before = content_of(out / "shards")
    layers = ["-l", "embedding", "-l", "blocks.2", "-l", "conv_stem:max_map"]
    result = succeeds("embed", golden / "photos", "-o", out, *layers, "--workers", 0, "--device", "cpu", "--json")
    assert json.loads(result.stdout)["computed"] == 10
    check_values("plain", out, tolerance=1e-4)  # on another machine
    succeeds("verify", out)
    after = content_of(out / "shards")
    assert {name: after[name] for name in before} == before


def test_sync_continues_an_older_data_set_elsewhere(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden)
    live, out = golden / "live", golden / "synced"
    for path in live.rglob("*.jpg"):  # as the copy was made, but settled
        os.utime(path, ns=(10**18, 10**18))
    (done,) = synced_again()
    assert (done["computed"], done["added"], done["deleted"], done["rows"]) == (0, 0, 0, 25)
    check_values("synced", out)
    succeeds("verify", out)
    (gone,) = live.rglob("renamed.jpg")
    gone.rename(gone.with_name("again.jpg"))
    synced_again()
    check_continued(out)
    write_as_changes(out)  # as another earlier version has written it
    assert layertap("show", out).exit_code == 2  # `layertap sync` is named as the way
    next(live.rglob("0001.jpg")).unlink()
    synced_again()
    check_continued(out)
    assert json.loads((out / "dataset.json").read_text())["format_version"] == 1


def synced_again() -> list[dict[str, Any]]:
    result = succeeds("sync", "nightly.yaml", "--force", "--json")
    jobs: list[dict[str, Any]] = json.loads(result.stdout)
    return jobs


def check_continued(out: Path) -> None:
    succeeds("verify", out)
    found, stored = read(out), expected_of("synced")
    assert any("again.jpg" in path for path in found["paths"])
    check_documented_reader(out, found)
    before = dict(zip(stored["paths"].tolist(), stored["features/embedding"], strict=True))
    for path, row in zip(found["paths"].tolist(), found["features/embedding"], strict=True):
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


def test_the_reader_of_the_documentation_reads_what_is_written_now(folder: Path, tmp_path: Path) -> None:
    (folder / "bee" / "07.jpg").write_bytes(b"no picture")
    layers = ["-l", "embedding", "-l", "layer4:none"]
    arguments = ["embed", folder, "-o", tmp_path / "out", *SMALL, *layers, "--shard-rows", 5]
    succeeds(*arguments)
    make_picture(7).save(folder / "bee" / "07.jpg")
    assert layertap(*arguments, "--retry-failed").exit_code == 0  # a shard has a second revision
    check_documented_reader(tmp_path / "out", read(tmp_path / "out"))
