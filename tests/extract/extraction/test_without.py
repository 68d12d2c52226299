"""Images that a table names are left out of a run; a wrong table is refused before anything is written."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from extract import Finding, InputError, extract_features
from extract.images import list_images
from extract.images.plan_writing import write_plan
from pipelines.data_sets.findings import _WRITERS
from tests.extract.sync.tiny import tiny_backbone
from tests.pipelines.test_cli import SMALL, fails, layertap

ALL = ["ant/00.png", "ant/03.jpg", "ant/06.png", "ant/09.jpg", "bee/01.jpg", "bee/04.png", "bee/07.jpg", "bee/10.png"]
ALL += ["cat/02.png", "cat/05.jpg", "cat/08.png", "cat/11.jpg"]
TABLE = [
    Finding("copy", 0, "ant/00.png", "bee/04.png", group=0, keep=True),
    Finding("copy", 5, "bee/04.png", "ant/00.png", group=0, keep=False),
    Finding("near-duplicate", 5, "bee/04.png", group=1, keep=True),  # as a copy, it goes
    Finding("suspect label", 11, "cat/11.jpg"),
]
OTHERS = [path for path in ALL if path not in ("bee/04.png", "cat/11.jpg")]
FORMS: dict[str, Callable[[Any], Any]] = {
    "findings": list,
    "pandas": pd.DataFrame,
    "polars": lambda table: pl.DataFrame([dataclasses.asdict(found) for found in table]),
    "paths": lambda table: ["bee/04.png", Path("cat/11.jpg")],
}


@pytest.mark.parametrize("form", [*FORMS, ".csv", ".json", ".parquet", ".txt", ".edited.csv"])
def test_every_form_of_a_table_leaves_out_the_same_images(folder: Path, tmp_path: Path, form: str) -> None:
    table: Any = tmp_path / f"table{form}"
    if form in _WRITERS:
        table.write_bytes(_WRITERS[form](TABLE))
    elif form == ".txt":
        table.write_text("./bee/04.png\r\n\ncat//11.jpg\ncat/11.jpg")
    elif form == ".edited.csv":  # a spreadsheet's
        table.write_text("KEEP;Path\nTRUE;ant/00.png\nFALSE;bee/04.png\n;cat/11.jpg\n", encoding="utf-8-sig")
    else:
        table = FORMS[form](TABLE)
    images = list_images(folder, without=table)
    assert images.paths == OTHERS
    assert [images.classes[label] for label in images.labels] == [path[:3] for path in OTHERS]
    assert [images.source.read(row)[0] for row in range(10)] == [(folder / path).read_bytes() for path in OTHERS]
    assert list_images(folder, 5, without=table).paths == OTHERS[:5]  # the limit counts those that stay


def test_names_that_a_csv_file_escapes_and_names_that_are_not_utf_8(folder: Path, tmp_path: Path) -> None:
    names = ["=1+1.png", "\x1b[31m.png", "caf\udce9.png"]
    for name in names:
        (folder / name).write_bytes((folder / "ant/00.png").read_bytes())
    for suffix in (".csv", ".json"):
        table = tmp_path / f"table{suffix}"
        table.write_bytes(_WRITERS[suffix]([Finding("copy", 0, name) for name in names]))
        assert list_images(folder, without=table).paths == ALL
    assert list_images(folder, without=[]).paths == sorted([*ALL, *names], key=os.fsencode)
    write_plan(str(folder), tmp_path / "plan")
    assert list_images(tmp_path / "plan", without=names).paths == ALL


def test_a_run_has_the_rows_of_the_others_and_goes_on_with_the_same_images_only(folder: Path, tmp_path: Path) -> None:
    made: dict[str, Any] = {"backbone": tiny_backbone(), "layers": "fc", "workers": 0, "progress": False}
    whole = extract_features(folder, out=tmp_path / "whole", **made)
    with pytest.warns(UserWarning, match="left out by the table: 2; .* without an image: 1 of 3, the first is 'x.png'"):
        reader = extract_features(folder, out=tmp_path / "out", without=["x.png", *FORMS["paths"](0)], **made)
    assert reader.paths == OTHERS
    rows = [ALL.index(path) for path in OTHERS]
    np.testing.assert_allclose(reader["fc"][:], whole["fc"][:][rows], rtol=1e-5, atol=1e-6)
    (tmp_path / "same.txt").write_text("cat/11.jpg\nbee/04.png\n")
    with pytest.warns(UserWarning, match=r"left out by .*\.txt: 2$"):
        extract_features(folder, out=tmp_path / "out", without=tmp_path / "same.txt", **made)
    with pytest.raises(InputError, match="images.count: stored 10, now 11"), pytest.warns(UserWarning, match=": 1$"):
        extract_features(folder, out=tmp_path / "out", without=["bee/04.png"], **made)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.csv", None, "gone.csv: no such file"),
        ("a.csv", "name\nant/00.png\n", "a.csv: expected a column 'path'; it has 'name'"),
        ("a.csv", "path,keep\n", "a.csv has no rows; expected paths of images to leave out"),
        ("a.json", "", "a.json has no rows; expected paths of images to leave out"),
        ("a.json", '["ant/00.png"]', "a.json is damaged: 'rows'[0] is \"ant/00.png\", expected an object"),
        ("a.txt", "ant\\00.png\n", "its first path is 'ant\\\\00.png', expected a path such as 'ant/00"),
        ("a.txt", "/ant/00.png\n", "names no image: its first path is '/ant/00.png', expected a path such as 'ant/00"),
        ("a.csv", "path,keep\nant/00.png,JA\n", "a.csv: line 2: keep is 'JA'; expected true, false or no value"),
        ("a.csv", "path,keep\n,true\n", "a.csv: line 2: the path is ''; expected text"),
        ("a.xlsx", "PK\0\0", "a.xlsx is not text; expected a path on each line, or a .csv, .json or .parquet table"),
        ("a.txt", "\n".join(ALL), "a.txt names all images; none is left"),
    ],
)
def test_a_wrong_table_is_one_line_and_nothing_is_written(
    folder: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    said = fails("embed", folder, "-o", tmp_path / "out", "--without", tmp_path / name, *SMALL)
    assert message in said
    assert "\n" not in said.strip()
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_leaves_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("bee/04.png\ncat/11.jpg\n")
    (tmp_path / "a.yaml").write_text(f"without: {tmp_path / 'a.txt'}\n")
    done = layertap("embed", folder, "-o", tmp_path / "out", "--config", tmp_path / "a.yaml", "--json", *SMALL)
    assert f"note: images left out by {tmp_path / 'a.txt'}: 2\n" in done.stderr
    assert json.loads(done.stdout)["rows"] == 10
    assert "--without has no effect with --plan" in fails("embed", folder, "--plan", "--without", tmp_path / "a.txt")
