"""Which row of a table belongs to which image, for every command that reads labels, masks or depth."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from extract.errors import InputError
from pipelines.terminal.image_tables import ImageTable, images_of_names, read_image_table, without_fractions
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds

PATHS = ["a/1.05.png", "a/2.JPG", "b/3.png", "b/caf\u00e9.png"]
ROOT = "/data/photos"


def table(path: Path, rows: list[list[str]], **given: Any) -> ImageTable:
    with path.open("w", newline="", encoding=given.pop("encoding", "utf-8")) as file:
        csv.writer(file).writerows(rows)
    given = {"column": "label", "noun": "labels", "paths": PATHS, "ids": None, "root": ROOT} | given
    return read_image_table(str(path), **given)


@pytest.mark.parametrize(
    ("header", "by", "keys"),
    [
        ("path", "by the path", PATHS),
        ("image", "by the path", [f"{ROOT}/{path}" for path in PATHS]),
        ("image", "by the path", [f"photos/{path}" for path in PATHS]),
        ("image", "by the path", [f"./{path}" for path in PATHS]),
        ("path", "by the path", [unicodedata.normalize("NFD", path) for path in PATHS]),
        ("path", "by the path", [path.replace("/", "\\") for path in PATHS]),
        ("path", "by the path", [PATHS[0], f"  {PATHS[1]} ", "b\\3.PNG", unicodedata.normalize("NFD", PATHS[3])]),
        ("image_id", "by the path without suffix", ["a/1.05", "a/2", "b/3", "b/caf\u00e9"]),
        ("image_id", "by the path without suffix", ["photos/a/1.05.svs", "a/2.jpeg", "b/3.tif", "b/caf\u00e9"]),
        ("filename", "by the file name", [path.partition("/")[2] for path in PATHS]),
        ("filename", "by the file name", [f"C:\\scans\\{path.partition('/')[2]}" for path in PATHS]),
        ("slide_id", "by the name without suffix", ["1.05", "2", "3", "caf\u00e9"]),
        ("path", "by the name without suffix", ["1.05", "2.svs", "/old/3.tif", "cafe\u0301"]),
    ],
)
def test_a_table_is_joined_by_what_names_its_images(tmp_path: Path, header: str, by: str, keys: list[str]) -> None:
    rows = [[key, str(number)] for number, key in enumerate(keys)]
    found = table(tmp_path / "t.csv", [[header, "label"], *rows[::-1]], encoding="utf-8-sig")
    assert found.texts == ["0", "1", "2", "3"]
    assert found.notes == [f"labels: column {header}, {by}, 4 of 4 images"]
    assert found.splits is None


def test_rows_and_images_without_each_other_are_both_counted(tmp_path: Path) -> None:
    found = table(tmp_path / "t.csv", [["slide_id", "label"], ["3", "x"], ["A", "y"], ["1", "y"], ["1.06", "y"]])
    assert found.texts == [None, None, "x", None]  # 1 is not 1.05, and .06 is no suffix
    assert found.notes == [
        "labels: column slide_id, by the name without suffix, 1 of 4 images",
        f"3 of the 4 rows of {tmp_path / 't.csv'} have no image",
    ]
    # The first way to join that finds an image is that of the whole table, or a row of another folder, which is not in
    # the data set, would label an image of the same name.
    found = table(tmp_path / "t.csv", [["path", "label"], ["a/2.JPG", "x"], ["c/3.png", "wrong"]])
    assert found.texts == [None, "x", None, None]


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("path,label", ["x.png,1", "x,2"], "line 2 ('x.png') names two images by the file name: a/x.png and b/x.png"),
        ("path,label", ["z,1", "x,2"], "line 3 ('x') names two images by the name without suffix: a/x.png and b/x.png"),
        ("path,label", ["a/x.png,1", "./a/x.png,2"],
         "line 2 ('a/x.png') and line 3 ('./a/x.png') belong to the same image, a/x.png, and differ: '1' and '2'"),
        ("path,label", ["a/x.png,1", "a/x.png,"], "belong to the same image, a/x.png, and differ: '1' and ''"),
        ("path,label", ["x/y.png,a"], "none of its 1 values of 'path' names an image"),
        ("path,kind", ["x/y.png,a"], "expected a column 'label'; it has 'path', 'kind'"),
        ("name,label", ["x/y.png,a"], "none of its 1 values of 'name' names an image"),
        ("id,k,label", ["7,z,a"], "1 values of 'id' or 'k' names an image; the table has '7', 'z'"),
        ("label", ["a"], "no column names images"),
        ("path,label", [], "none of its 0 values"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_an_error_that_names_the_reason(
    tmp_path: Path, header: str, rows: list[str], message: str
) -> None:
    with pytest.raises(InputError) as error:
        table(tmp_path / "t.csv", [row.split(",") for row in [header, *rows]], paths=["a/x.png", "b/x.png"])
    assert message in str(error.value)


def test_rows_of_one_image_that_say_the_same_are_one(tmp_path: Path) -> None:
    found = table(tmp_path / "t.csv", [["path", "label"], ["a/2.JPG", "x"], ["./a/2.JPG", " x"], ["a\\2.jpg", "x"]])
    assert found.texts == [None, "x", None, None]
    assert found.notes == ["labels: column path, by the path, 1 of 4 images"]
    rows = [["path", "label", "split"], ["a/2.JPG", "x", "train"], ["a/2.JPG", "x", "test"]]
    with pytest.raises(InputError, match="belong to the same image"):
        table(tmp_path / "t.csv", rows)


def test_files_that_differ_only_by_spelling_are_told_apart_or_refused(tmp_path: Path) -> None:
    paths = ["a.JPG", "a.jpg", "caf\u00e9.png", "cafe\u0301.png"]
    rows = [[path, str(number)] for number, path in enumerate(paths)]
    assert table(tmp_path / "t.csv", [["path", "label"], *rows], paths=paths).texts == ["0", "1", "2", "3"]
    with pytest.raises(InputError, match=r"line 3 \('a.Jpg'\) names two images by the path: a.JPG and a.jpg"):
        table(tmp_path / "t.csv", [["path", "label"], rows[0], ["a.Jpg", "x"]], paths=paths)


def test_one_column_alone_may_name_the_images(tmp_path: Path) -> None:
    paths = [f"{number}.png" for number in range(4)]
    rows = [[f"{number}.png", str(3 - number), str(number % 2)] for number in range(4)]
    assert table(tmp_path / "t.csv", [["file", "age", "label"], *rows], paths=paths).texts == ["0", "1", "0", "1"]
    numbers = [[str(number), str(3 - number), str(number % 2)] for number in range(4)]
    with pytest.raises(InputError, match="the columns 'file' and 'age' both name images by the path without suffix"):
        table(tmp_path / "t.csv", [["file", "age", "label"], *numbers], paths=paths)
    assert table(tmp_path / "t.csv", [["path", "age", "label"], *numbers], paths=paths).texts == ["0", "1", "0", "1"]
    same = [[str(number), f"{number}.svs", str(number % 2)] for number in range(4)]
    assert table(tmp_path / "t.csv", [["case_id", "slide_id", "label"], *same], paths=paths).texts == list("0101")


def test_ids_name_images_before_paths_do_and_several_images_may_have_one(tmp_path: Path) -> None:
    rows = [["id", "label"], ["7", "x"], ["3", "y"]]
    found = table(tmp_path / "t.csv", rows, ids=["7", "7", "8", "3"])
    assert found.texts == ["x", "x", None, "y"]
    assert found.notes == ["labels: column id, by the id, 3 of 4 images"]
    assert table(tmp_path / "t.csv", rows).texts == [None, None, "y", None]  # b/3.png


def test_a_parquet_table_is_joined_by_any_column_of_text_or_whole_numbers(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "score": [0.5, 0.25, 1.0], "image_id": pa.array([3, 2, 9], pa.int32()), "label": [1.0, float("nan"), 0.0],
        "other": pa.array([["3"], ["2"], ["1"]]),
    }  # fmt: skip
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = read_image_table(str(tmp_path / "t.parquet"), "label", "labels", PATHS, None, ROOT)
    assert found.texts == [None, "", "1", None]
    assert found.notes[0] == "labels: column image_id, by the name without suffix, 2 of 4 images"
    twice = pa.table([["b/3.png"], ["x"], ["y"], [True]], names=["image", "note", "note", "label"])
    parquet.write_table(twice, tmp_path / "t.parquet")
    found = read_image_table(str(tmp_path / "t.parquet"), "label", "labels", PATHS, None, ROOT)
    assert found.texts == [None, None, "True", None]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1", "1.0", "0.", "-1.0", "nan", "", None], ["1", "1", "0", "-1", "", "", None]),
        (["1.0", "1.5", "nan"], ["1.0", "1.5", "nan"]),
        (["1.0", "cat", ""], ["1.0", "cat", ""]),
        (["True", "1"], ["True", "1"]),
    ],
)
def test_whole_numbers_written_with_fractions_are_whole_numbers(texts: list[Any], expected: list[Any]) -> None:
    assert without_fractions(texts) == expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose names are in a table of slides, a data set of them, and masks in a folder of their own."""
    root = tmp_path_factory.mktemp("tables")
    (root / "masks").mkdir()
    lines = ["slide_id,label,mask"]
    for number in range(12):
        picture = root / f"pictures/part{number % 2}/slide_{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((32, 32, 3), 20 * number, np.uint8)
        pixels[0, 0] = 255, 0, number
        Image.fromarray(pixels).save(picture)
        Image.fromarray(np.repeat(np.array([[0], [1]], np.uint8), 16, 0).repeat(32, 1)).save(
            root / f"masks/{number}.png"
        )
        lines.append(f"slide_{number},{number % 3}.0,masks/{number}.png")
    (root / "slides.csv").write_text("\n".join(lines) + "\n")
    succeeds("embed", root / "pictures", "-o", root / "out", *SMALL)
    return root


def test_all_commands_join_a_table_in_the_same_way(made: Path, tmp_path: Path) -> None:
    note = "column slide_id, by the name without suffix, 12 of 12 images"
    labels = ("--labels", made / "slides.csv")
    result = layertap("probe", made / "out", "-p", "centroid", *labels, "-o", tmp_path / "p")
    assert "3 classes" in result.stdout
    assert f"labels: {note}" in result.stdout
    content = json.loads((tmp_path / "p" / "results.json").read_text())
    assert content["probes"][0]["classes"] == ["0", "1", "2"]
    of = ("timm/test_resnet", made / "pictures", "--weights", "random", "-l", "layer4", "--workers", 0, *labels)
    result = layertap("ablate", *of, "--json")
    assert f"note: labels: {note}" in result.stderr
    assert json.loads(result.stdout)["labelled"] == 12
    assert f"note: labels: {note}" in layertap("inspect", *of, "--grad").stderr
    (tmp_path / "one.csv").write_text("slide_id,label\nslide_1,a\n/b/slide_1.svs,b\n")
    for command in (
        ("probe", made / "out"), ("ablate", "timm/test_resnet", made / "pictures", "--weights", "random", "-l", "fc"),
        ("compare", made / "pictures", "-b", "timm/test_resnet", "-o", tmp_path / "compared"),
    ):  # fmt: skip
        message = fails(*command, "--labels", tmp_path / "one.csv")
        assert "line 2 ('slide_1') and line 3 ('/b/slide_1.svs') belong to the same image" in message


@pytest.mark.usefixtures("few_strengths")
def test_masks_of_a_table_are_joined_as_labels_are(made: Path, tmp_path: Path) -> None:
    succeeds("embed", made / "pictures", "-o", tmp_path / "out", *SMALL, "-l", "layer4:tokens")
    result = layertap("probe", tmp_path / "out", "-p", "segmentation-knn", "--masks", made / "slides.csv", "-o",
                      tmp_path / "res")  # fmt: skip
    assert "masks: column slide_id, by the name without suffix, 12 of 12 images" in result.stdout, result.output


def test_the_id_that_parts_of_a_file_share_names_none_of_them() -> None:
    parts, ids = ["a.png#view=flips,0", "a.png#view=flips,1", "b.png#view=flips,0"], ["s1", "s1", "s2"]
    with pytest.raises(InputError, match="'s1' names two images by the id: a.png#view=flips,0 and a.png#view=flips,1"):
        images_of_names("rdm.npz", ["s2", "s1"], parts, ids, "")
    assert images_of_names("rdm.npz", ["s2"], parts, ids, "")[0].tolist() == [2]
