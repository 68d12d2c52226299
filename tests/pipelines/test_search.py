"""layertap search, on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from extract import FeatureReader
from pipelines.data_sets import search_gallery
from tests.conftest import make_picture
from tests.extract.store.rows import change_a_value
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds
from tests.pipelines.test_sync import SMALL as SYNC
from tests.pipelines.test_sync import write


@pytest.fixture(scope="module")
def pictures(_twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures in three classes, a copy of one, one that is named like a row, and one that is none."""
    folder = tmp_path_factory.mktemp("search") / "pictures"
    shutil.copytree(_twelve, folder)
    (folder / "bee" / "zz bad.jpg").write_bytes(b"no picture")
    shutil.copy(folder / "ant" / "00.png", folder / "cat" / "copy.png")
    (folder / "7").write_bytes((folder / "bee" / "07.jpg").read_bytes())
    return folder


@pytest.fixture(scope="module")
def out(pictures: Path) -> Path:
    out = pictures.parent / "out"
    succeeds("embed", pictures, "-o", out, *SMALL, "--shard-rows", 5)
    return out


def found(*arguments: object) -> dict:
    result = succeeds("search", *arguments, "--json")
    return json.loads(result.stdout)


def expected(out: Path, query: np.ndarray) -> list[int]:
    """Rows by cosine in float64, the nearest first."""
    with FeatureReader(out) as reader:
        x = reader["embedding"][:].astype(np.float64)
    cosines = np.round(x @ query / np.linalg.norm(x, axis=1) / np.linalg.norm(query), 12)
    order = np.lexsort((np.arange(len(x)), -cosines))
    return [int(row) for row in order if np.isfinite(cosines[row])]


def test_a_row_finds_its_copies_and_neighbours_and_not_itself(out: Path) -> None:
    with FeatureReader(out) as reader:
        query, paths = reader["embedding"][0].astype(np.float64), reader.paths[:]
    content = found(out, 0, "-k", 4)
    assert content["query"] == {"row": 0, "path": "ant/00.png", "text": None, "class": "ant"}
    assert [one["row"] for one in content["results"]] == expected(out, query)[1:5]
    first = content["results"][0]
    assert (first["path"], first["cosine"], first["class"]) == ("cat/copy.png", 1.0, "cat")
    assert content["searched"] == len(paths) - 2  # itself, and the one without features
    assert [one["row"] for one in found(out, 0, "-k", 4, "--itself")["results"]] == expected(out, query)[:4]
    assert len(found(out, 0, "-k", 100)["results"]) == len(paths) - 2
    text = layertap("search", out, 0, "-k", 1).stdout
    assert "nearest to row 0 (ant/00.png) by cosine of embedding, among 12 rows; class of the query: [ant]" in text
    assert "  1  1.000000  row 13  cat/copy.png  [cat]" in text


@pytest.mark.parametrize(
    "command",
    [
        ["search", 0], ["probe", "--test-fraction", 0.3], ["report", "-o", "page.html"],
        ["export", "--to", "h5", "-o", "rows.h5"],
    ],
)  # fmt: skip
def test_a_value_that_was_changed_on_the_disk_is_not_used(
    out: Path, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied = shutil.copytree(out, tmp_path / "out")
    change_a_value(copied, 1, "embedding", 2)
    message = fails(command[0], copied, *command[1:])
    assert message.startswith("error: row 7 (")
    assert "is damaged: it does not match its hashes" in message
    assert not any((tmp_path / name).exists() for name in ("page.html", "rows.h5"))


def test_a_file_is_searched_with_features_computed_as_those_stored(out: Path, pictures: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.png"
    shutil.copy(pictures / "ant" / "06.png", moved)
    content = found(out, moved, "-k", 3)
    assert content["query"] == {"row": None, "path": str(moved), "text": None, "class": None}
    assert content["results"][0]["path"] == "ant/06.png"
    assert content["results"][0]["cosine"] == pytest.approx(1, abs=1e-6)
    with FeatureReader(out) as reader:
        row = reader.paths.index("ant/06.png")
        assert [one["row"] for one in content["results"]] == expected(out, reader["embedding"][row])[:3]


def test_a_number_or_a_path_of_the_data_set_is_a_row_and_not_a_file(
    out: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pictures)
    assert found(out, "7")["query"]["row"] == 7
    assert found(out, "./7")["results"][0]["path"] == "bee/07.jpg"
    with FeatureReader(out) as reader:
        assert found(out, "bee/04.png")["query"]["row"] == reader.paths.index("bee/04.png")


def test_what_cannot_be_searched_for_is_told(out: Path, pictures: Path, tmp_path: Path) -> None:
    with FeatureReader(out) as reader:
        bad = reader.paths.index("bee/zz bad.jpg")
    (tmp_path / "text.png").write_text("text")
    for query, why in (
        ((pictures,), "is a folder; name one image"),
        ((bad,), "(bee/zz bad.jpg) has no features: decode error: not an image"),
        ((tmp_path / "text.png",), "text.png: decode error: not an image in a known format"),
        ((0, "-l", "embeding"), "layer 'embeding' not found"),
        ((0, "-o", tmp_path / "none" / "x.png"), "no such folder"),
        ((0, "-o", "/proc/x.png"), "cannot be written to /proc: "),
        ((pictures / "ant" / "00.png", "-b", "timm/other"), "backbone 'timm/other' not found"),
    ):
        assert why in fails("search", out, *query)


def test_without_an_embedding_a_layer_must_be_named(folder: Path, tmp_path: Path) -> None:
    layers = ["-l", "layer1:none", "-l", "layer4"]
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL, *layers, "--dtype", "float16")
    assert "has 2 layers but no embedding; name a layer: -l layer1, -l layer4" in fails("search", tmp_path / "out", 0)
    content = found(tmp_path / "out", 3, "-l", "layer1", "-k", 2)  # a map, as one vector
    assert len(content["results"]) == 2


@pytest.mark.parametrize("kind", ["png", pytest.param("pdf", marks=pytest.mark.slow)])
def test_a_gallery_is_drawn_and_missing_pictures_have_a_place(folder: Path, tmp_path: Path, kind: str) -> None:
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL)
    (folder / "cat" / "02.png").unlink()
    make_picture(77).save(folder / "ant" / "06.png")  # another picture now
    file = tmp_path / f"gallery.{kind}"
    assert f"written: {file}" in layertap("search", tmp_path / "out", 0, "-o", file).stderr
    assert file.read_bytes().startswith({"png": b"\x89PNG", "pdf": b"%PDF"}[kind])
    if kind == "png":
        with Image.open(file) as picture:
            assert picture.width > 1000
    shutil.rmtree(folder)
    succeeds("search", tmp_path / "out", 0, "-k", 2, "-o", file)


def test_the_gallery_names_the_class_of_the_query(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(search_gallery, "save_figure", lambda figure, path: figures.append(figure))
    layertap("search", out, 0, "-k", 1, "-o", tmp_path / "gallery.png")
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles[:2] == ["query\n00.png\n[ant]", "1.0000\ncopy.png\n[cat]"]


def test_a_data_set_of_sync_is_searched_in_its_version(folder: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "sync.yaml", images=str(folder), out=str(tmp_path / "out"), max_vanish=1, **SYNC)
    succeeds("sync", config)
    shutil.copy(folder / "ant" / "00.png", folder / "cat" / "copy.png")
    (folder / "bee" / "01.jpg").rename(folder / "bee" / "renamed.jpg")
    succeeds("sync", config)
    with FeatureReader(tmp_path / "out") as reader:
        row = reader.paths.index("cat/copy.png")
    content = found(tmp_path / "out", row, "-k", 20)
    assert (content["results"][0]["path"], content["results"][0]["cosine"]) == ("ant/00.png", 1.0)
    paths = [one["path"] for one in content["results"]]
    assert "bee/renamed.jpg" in paths
    assert "bee/01.jpg" not in paths
    assert found(tmp_path / "out", folder / "bee" / "renamed.jpg")["results"][0]["path"] == "bee/renamed.jpg"
