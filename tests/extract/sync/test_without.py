"""A data set that follows a folder has no rows of the files that a table names, for as long as it names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract import FeatureReader, InputError
from extract.sync.difference import Guards, Report
from extract.sync.passes import VanishedError
from tests.extract.sync.tiny import one_pass, picture, planner, same_as_fresh
from tests.pipelines.test_cli import layertap

NAMES = [f"{i}.ppm" for i in range(10)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    for i, name in enumerate(NAMES):
        (tmp_path / "root" / name).write_bytes(picture(i))
    return tmp_path


def sync(home: Path, without: Any) -> Report:
    return one_pass(home / "root", home / "out", planner(), without=without, guards=Guards(0, 0.2))


def rows_of(out: Path) -> dict[str, np.ndarray]:
    with FeatureReader(out) as reader:
        return dict(zip(reader.paths, reader["fc"][:], strict=True))


def test_a_row_goes_when_its_file_is_named_and_comes_back_when_it_no_longer_is(home: Path) -> None:
    assert sync(home, NAMES[:2]).computed == 8
    assert sorted(rows_of(home / "out")) == NAMES[2:]
    before = rows_of(home / "out")
    report = sync(home, NAMES[:6])  # more than `max_vanish`, but all are there
    assert (report.deleted, report.computed, report.unchanged) == (4, 0, 4)
    assert report.notes == ["images left out by the table: 6"]
    assert sorted(rows_of(home / "out")) == NAMES[6:]
    report = sync(home, NAMES[:1])
    assert (report.added, report.computed) == (5, 1)
    assert np.array_equal(rows_of(home / "out")["3.ppm"], before["3.ppm"])
    assert sync(home, None).added == 1
    same_as_fresh(home / "root", home / "out")


def test_files_that_are_gone_count_as_vanished_although_others_are_left_out(home: Path) -> None:
    sync(home, None)
    for name in NAMES[5:8]:
        (home / "root" / name).unlink()
    with pytest.raises(VanishedError, match="3 of 10 images are gone"):
        sync(home, NAMES[:6])  # one that it names is gone, too
    assert sorted(rows_of(home / "out")) == NAMES


def test_a_first_pass_refuses_a_table_of_other_images_and_a_later_one_says_so(home: Path) -> None:
    with pytest.raises(InputError, match="the table names no image: its first path is 'x.ppm', .* such as '0.ppm'"):
        sync(home, ["x.ppm"])
    assert not (home / "out/dataset.json").exists()
    sync(home, [NAMES[0]])
    (home / "root" / NAMES[0]).unlink()
    report = sync(home, [NAMES[0]])
    assert report.notes == [
        "images left out by the table: 0; paths in it without an image: 1 of 1, the first is '0.ppm'"
    ]
    with pytest.raises(InputError, match="names all images"):
        sync(home, NAMES)
    with pytest.raises(InputError, match="no such file"):
        sync(home, home / "gone.csv")
    assert sorted(rows_of(home / "out")) == NAMES[1:]


def test_it_is_a_key_of_the_config_file(home: Path) -> None:
    keys = {"images": home / "root", "out": home / "out", "settle": 0, "backbone": "timm/test_resnet"}
    config, names = home / "a.yaml", home / "a.txt"
    names.write_text("1.ppm\n2.ppm\n")
    for without, n_rows in ({"without": names}, 8), ({}, 10):
        lines = keys | {"weights": "random", "workers": 0, "device": "cpu"} | without
        config.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        assert layertap("sync", config).exit_code == 0
        with FeatureReader(home / "out") as reader:
            assert len(reader) == n_rows
