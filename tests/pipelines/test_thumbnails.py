"""Thumbnails in exports."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from extract import FeatureReader
from tests.extract.sync.tiny import one_pass, picture, planner
from tests.pipelines.test_cli import SMALL, fails, layertap


@pytest.fixture
def data_set(folder: Path, tmp_path: Path) -> Path:
    assert layertap("embed", folder, *SMALL, "-o", tmp_path / "out").exit_code == 0
    return tmp_path / "out"


def test_thumbnails_are_small_pictures_of_the_rows(folder: Path, data_set: Path, tmp_path: Path) -> None:
    with FeatureReader(data_set) as reader:
        paths = reader.paths[:]
    (folder / paths[2]).unlink()
    (folder / paths[4]).write_bytes((folder / paths[5]).read_bytes())  # another picture
    result = layertap("export", data_set, "--to", "parquet", "--thumbnails", 32, "-o", tmp_path / "a.parquet")
    assert result.exit_code == 0, result.output
    images = parquet.read_table(tmp_path / "a.parquet")["image"].to_pylist()
    assert [row for row, image in enumerate(images) if image is None] == [2, 4]
    for path, image in zip(paths, images, strict=True):
        if image is None:
            continue
        assert image["path"] == path
        with Image.open(io.BytesIO(image["bytes"])) as thumbnail, Image.open(folder / path) as picture:
            assert max(thumbnail.size) == min(32, max(picture.size))
            expected = np.asarray(picture.convert("RGB").resize(thumbnail.size), float).mean((0, 1))
            np.testing.assert_allclose(np.asarray(thumbnail, float).mean((0, 1)), expected, atol=6)


def test_exports_without_pictures_are_refused(folder: Path, data_set: Path, tmp_path: Path) -> None:
    message = "the format npy has no pictures; formats with pictures: parquet, hf"
    assert message in fails("export", data_set, "--to", "npy", "--thumbnails", 32)
    assert "--images is for thumbnails" in fails("export", data_set, "--to", "parquet", "--images", folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("")
    of = ("export", data_set, "--to", "parquet", "--thumbnails", 32, "--images", tmp_path / "other")
    assert "none of the first 12 images can be read: no such file" in fails(*of)
    folder.rename(tmp_path / "moved")
    of = ("export", data_set, "--to", "parquet", "--thumbnails", 32, "-o", tmp_path / "a.parquet")
    assert "no thumbnails: the images are not in" in fails(*of)
    assert not (tmp_path / "a.parquet").exists()
    assert layertap(*of, "--images", tmp_path / "moved").exit_code == 0


def test_a_data_set_whose_images_are_all_gone_has_no_thumbnails_to_export(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    root.mkdir()
    (root / "0.ppm").write_bytes(picture(0))
    (root / "notes.txt").touch()
    one_pass(root, out, planner())
    (root / "0.ppm").unlink()
    one_pass(root, out, planner(), force=True)
    assert "there are no rows to export" in fails("export", out, "--to", "parquet", "--thumbnails", 32)
