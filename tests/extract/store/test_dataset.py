from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from extract import FeatureReader, InputError, LockedError
from extract.store.format.dataset import DataSet
from extract.system.atomic_files import locked
from tests.extract.store.processes import result_of
from tests.extract.store.rows import PATHS_XXH3, create, data_set, empty_data_set


def test_a_data_set_is_the_same_when_read_back(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    assert data.open_or_create() is None
    assert DataSet.open(data.out) == data
    assert data.open_or_create() == data


def test_a_data_set_without_rows_gives_way_to_another(tmp_path: Path) -> None:
    data_set(tmp_path / "out").open_or_create()
    other = data_set(tmp_path / "out", depends_on={"weights": "v"})
    assert other.open_or_create() is None
    assert DataSet.open(tmp_path / "out") == other


@pytest.mark.parametrize(
    "left", [[".lock"], ["shards/"], ["dataset.json.77.new"], [".lock", "shards/000000.h5.part.77.new"]]
)
def test_a_folder_that_a_killed_run_had_just_begun_is_taken_over(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("")
    data_set(tmp_path).open_or_create()
    assert DataSet.open(tmp_path) == data_set(tmp_path)
    assert not list(tmp_path.rglob("*.new"))


def test_keys_of_a_later_writer_are_ignored(tmp_path: Path) -> None:
    data = empty_data_set(tmp_path / "out")
    content = json.loads((data.out / "dataset.json").read_text())
    content["features"][0]["unit"] = content["mood"] = "new"
    (data.out / "dataset.json").write_text(json.dumps(content))
    assert DataSet.open(data.out) == data


def test_another_fingerprint_is_refused_and_what_differs_is_said(tmp_path: Path) -> None:
    data_set(tmp_path / "out").open_or_create()
    create(data_set(tmp_path / "out"), 0)
    images = {"root": "/photos", "count": 9, "paths_xxh3": ""}
    other = data_set(tmp_path / "out", depends_on={"weights": "v", "crop": 224}, images=images)
    with pytest.raises(InputError) as raised:
        other.open_or_create()
    assert str(raised.value).splitlines()[1:-1] == [
        "  weights: stored w, now v", "  images.count: stored 23, now 9",
        f"  names of the images (images.paths_xxh3): stored {PATHS_XXH3[:12]}..., now ",
        "  crop: stored nothing, now 224",
    ]  # fmt: skip


def test_a_folder_with_other_files_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty and not a layertap data set"):
        data_set(tmp_path).open_or_create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def enter(data: DataSet) -> None:
    with data.locked():
        pass


def test_one_process_at_a_time(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    with data.locked():
        error = result_of(enter, data)
        assert isinstance(error, LockedError)
        assert f"locked by pid {os.getpid()} on " in str(error)
    assert result_of(enter, data) is None


def test_a_folder_into_which_nothing_was_put_is_gone_again(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "new"):
        raise ZeroDivisionError
    (tmp_path / "old").mkdir()
    with locked(tmp_path / "old"), locked(tmp_path / "used"):
        (tmp_path / "used" / "something").touch()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["old", "old/.lock", "used", "used/.lock", "used/something"]


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    with ThreadPoolExecutor(1) as pool:
        with data.locked(), pytest.raises(LockedError, match="by another thread of this process"):
            pool.submit(enter, data).result()
        pool.submit(enter, data).result()


def test_what_a_killed_run_left_is_cleaned(complete: Path) -> None:
    data = DataSet.open(complete)
    os.link(data.path(0), data.path(0, part=True))
    (complete / "shards" / "000009.h5.part.77.new").write_bytes(b"x")
    data.open_or_create()
    assert sorted(path.name for path in (complete / "shards").iterdir()) == [
        f"00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")
    ]


FEATURE = {"name": "a", "shape": [3], "dtype": "float32", "attributes": {}}
WRONG: list[dict[str, object]] = [
    {"images": None}, {"images": {}}, {"images": {"count": 4}}, {"shard_rows": 0}, {"shard_rows": None},
    {"depends_on": None}, {"depends_on": []}, {"features": []}, {"features": {}}, {"fingerprint": "0" * 64},
    {"shard_rows": 1, "images": {"root": "/", "count": 1 << 60, "paths_xxh3": ""}}, {"features": [{"name": "../x"}]},
    {"features": [{**FEATURE, "name": "a/b"}]}, {"features": [{**FEATURE, "shape": [-3]}]},
    {"features": [{**FEATURE, "dtype": "object"}]}, {"features": [{**FEATURE, "attributes": {"x": 1}}]},
]  # fmt: skip
NO_DESCRIPTION = [
    "", "[]", "{}", '{"format": "layertap", "format_version": 2}', "\xff",
    "[" * 100_000, '{"a":' * 50_000, "1" * 10_000, '{"images": ' + "9" * 5000 + "}",  # bombs
]  # fmt: skip


def test_a_damaged_description_is_an_error(complete: Path) -> None:
    path = complete / "dataset.json"
    good = json.loads(path.read_text())
    for content in (*NO_DESCRIPTION, *(json.dumps({**good, **change}) for change in WRONG)):
        path.write_text(content, encoding="latin-1")
        start = time.perf_counter()
        with pytest.raises(InputError, match="dataset.json is damaged|dataset.json.*format"):
            FeatureReader(complete)
        assert time.perf_counter() - start < 1
