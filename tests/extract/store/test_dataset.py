from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from extract import FeatureReader, InputError, LockedError
from extract.store.format.dataset import DataSet
from extract.system.atomic_files import locked
from tests.extract.store.rows import (
    PATHS_XXH3,
    create,
    data_set,
)


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
    data = data_set(tmp_path / "out")
    data.open_or_create()
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


def test_one_process_at_a_time(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    with data.locked():
        child = os.fork()
        if not child:
            try:
                with data.locked():
                    os._exit(0)
            except LockedError as error:
                os._exit(7 if f"locked by pid {os.getppid()} on " in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with data.locked():
        pass


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
    data, raised = data_set(tmp_path / "out"), []

    def second() -> None:
        with pytest.raises(LockedError, match="by another thread of this process"), data.locked():
            pass
        raised.append(True)

    with data.locked():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert raised
    with data.locked():
        pass


def test_what_a_killed_run_left_is_cleaned(complete: Path) -> None:
    data = DataSet.open(complete)
    os.link(data.path(0), data.path(0, part=True))
    (complete / "shards" / "000009.h5.part.77.new").write_bytes(b"x")
    data.open_or_create()
    assert sorted(path.name for path in (complete / "shards").iterdir()) == [
        f"00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")
    ]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "layertap", "format_version": 2}', "\xff"])
def test_a_damaged_description_is_an_error(complete: Path, content: str) -> None:
    (complete / "dataset.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match="dataset.json"):
        FeatureReader(complete)
