"""`search --at` and `draw tokens OUT`: stored tokens as a user meets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import FeatureReader
from extract.analysis.network.attribution import principal_colours
from pipelines.network import draw_figures
from tests.pipelines.test_cli import SMALL, fails, layertap

SIZE = (96, 64)  # width, height; the crop takes the columns 16 to 80
SQUARE = 16


def square_at(number: int) -> tuple[int, int]:
    return 16 + 16 * (number % 4), 16 * (number // 4 % 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of noise on grey, eight of them with a striped square; and tokens of two layers."""
    root = tmp_path_factory.mktemp("tokens")
    (root / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for number in range(12):
        pixels = generator.normal(128, 12, (SIZE[1], SIZE[0], 3))
        if number < 8:
            left, top = square_at(number)
            pixels[top : top + SQUARE, left : left + SQUARE] = (255, 0, 0)
            pixels[top : top + SQUARE : 4, left : left + SQUARE] = (0, 255, 0)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / "pictures" / f"{number:02d}.png")
    result = layertap("embed", root / "pictures", "-o", root / "out", *SMALL, "-l", "layer1:tokens", "-l",
                      "layer2:tokens", "-l", "embedding")  # fmt: skip
    assert result.exit_code == 0, result.output
    return root


@pytest.fixture(scope="module", autouse=True)
def _many(made: Path) -> None:
    """A data set of 71 small pictures, `many`."""
    (made / "small").mkdir()
    generator = np.random.default_rng(1)
    for number in range(71):
        Image.fromarray(generator.integers(0, 255, (9, 7, 3), np.uint8)).save(made / "small" / f"{number:02d}.png")
    result = layertap("embed", made / "small", "-o", made / "many", *SMALL, "-l", "layer1:tokens")
    assert result.exit_code == 0, result.output


def search(*arguments: Any) -> dict[str, Any]:
    result = layertap("search", *arguments, "--json")
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_the_nearest_patches_are_those_of_the_same_object(made: Path) -> None:
    left, top = square_at(0)
    content = search(made / "out", 0, "--at", f"{left + 8},{top + 8}", "-l", "layer1", "-k", 7)
    assert content["query"]["at"] == [left + 8, top + 8]
    assert content["searched"] == 11
    assert {result["row"] for result in content["results"]} == set(range(1, 8))
    for result in content["results"]:
        x, y = (sum(result["box"][side::2]) / 2 for side in (0, 1))
        left, top = square_at(result["row"])
        assert left < x < left + SQUARE
        assert top < y < top + SQUARE
    with FeatureReader(made / "out") as reader:
        tokens = reader.tokens("layer1")
        query = tokens[tokens.labels(_only(0)).argmax()]
        first = content["results"][0]
        row, column = first["cell"]
        near = tokens[first["row"] * tokens.per_image + row * tokens.grid[1] + column]
    cosine = float(
        query.astype(float) @ near / np.linalg.norm(query.astype(float)) / np.linalg.norm(near.astype(float))
    )
    assert first["cosine"] == pytest.approx(cosine, abs=1e-6)


def _only(number: int) -> np.ndarray:
    """Return a mask with 1 in the cell of 4 x 4 pixels at the middle of a square."""
    mask = np.zeros(SIZE[::-1], np.uint8)
    left, top = square_at(number)
    mask[top + 8 : top + 12, left + 8 : left + 12] = 1
    return mask


def test_a_row_its_path_and_its_file_give_the_same_patches(made: Path) -> None:
    at = ("--at", "20,60", "-l", "layer1", "--itself", "-k", 5)
    of_row, of_path = search(made / "out", 5, *at), search(made / "out", "05.png", *at)
    of_file = search(made / "out", made / "pictures" / "05.png", *at)
    assert of_row["results"] == of_path["results"]
    assert [result["row"] for result in of_row["results"]] == [result["row"] for result in of_file["results"]]
    assert of_row["results"][0]["row"] == 5
    text = layertap("search", made / "out", 5, *at).stdout
    assert "nearest to the patch at 20,60 of row 5 (05.png) by cosine of the patches of layer1" in text
    assert "  1  1.000000  row 5   05.png  at " in text


@pytest.mark.slow
def test_patches_are_drawn(made: Path, tmp_path: Path) -> None:
    left, top = square_at(0)
    result = layertap("search", made / "out", 0, "--at", f"{left + 8},{top + 8}", "-l", "layer1", "-k", 3, "-o",
                      tmp_path / "patches.png")  # fmt: skip
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "patches.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    red = (pixels[..., 0] > 200) & (pixels[..., 1] < 60)  # squares are not darkened
    grey = (np.ptp(pixels, axis=2) < 60) & (pixels.mean(2) > 20) & (pixels.mean(2) < 100)  # the rest is
    assert red.sum() > 1000
    assert grey.sum() > 10_000
    many = layertap("search", made / "many", 0, "--at", "3,3", "-k", 70, "-o", tmp_path / "many.png")
    assert many.exit_code == 0, many.output
    assert len(many.stdout.splitlines()) == 71


@pytest.mark.parametrize("orientation", ["exif", "ignore"])
def test_a_file_is_turned_as_the_pictures_of_the_data_set(tmp_path: Path, orientation: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    (tmp_path / "pictures").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "pictures" / "turned.jpg", exif=exif, quality=95)
    result = layertap("embed", tmp_path / "pictures", "-o", tmp_path / "out", *SMALL, "-l", "layer1:tokens",
                      "--orientation", orientation)  # fmt: skip
    assert result.exit_code == 0, result.output
    x, y = (60, 20) if orientation == "ignore" else (20, 60)
    for query in (0, tmp_path / "pictures" / "turned.jpg"):
        content = search(tmp_path / "out", query, "--at", f"{x},{y}", "--itself")
        left, top, right, bottom = content["results"][0]["box"]
        assert (left <= x < right, top <= y < bottom) == (True, True)
    too_far = (80, 20) if orientation == "exif" else (20, 80)
    assert "is outside" in fails("search", tmp_path / "out", 0, "--at", "{},{}".format(*too_far))


def test_the_printed_place_is_in_the_patch(made: Path) -> None:
    for out, at in ((made / "out", "20,20"), (made / "many", "3,4")):
        for result in search(out, 0, "--at", at, "-l", "layer1", "-k", 8)["results"]:
            (x, y), (left, top, right, bottom) = result["at"], result["box"]
            if right - left >= 1:
                assert left <= x + 0.5 < right + 1e-9
                assert top <= y + 0.5 < bottom + 1e-9


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("0", "--at", "8"), "expected X,Y in pixels"),
        (("0", "--at", "96,3", "-l", "layer1"), "outside 00.png, which has 96 x 64 pixels"),
        (("0", "--at", "2,3", "-l", "layer1"), "are those of the pixels from 16,0 to 79,63"),
        (("0", "--at", "20,3"), "name one: -l layer1, -l layer2"),
        (("0", "--at", "20,3", "-l", "embedding"), "embedding has no tokens"),
        (("--at", "20,3"), "expected a row number"),
        (("--text", "a dog", "--at", "20,3"), "expected a row number"),
        (("99", "--at", "20,3", "-l", "layer1"), "has no row 99"),
    ],
)  # fmt: skip
def test_bad_patches_are_refused(made: Path, options: tuple[str, ...], why: str) -> None:
    assert why in fails("search", made / "out", *options)


def test_files_that_cannot_be_decoded_are_named(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("notes")
    for name, why in (("empty.jpg", "empty file"), ("notes.txt", "not an image")):
        message = fails("search", made / "out", tmp_path / name, "--at", "1,1", "-l", "layer1")
        assert f"{name} cannot be read: {why}" in message


def test_globs_match_the_layers_with_tokens(made: Path, tmp_path: Path) -> None:
    result = layertap("draw", "tokens", made / "out", "-l", "*", "--sample", 2, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split()) == 2


def test_without_pictures_cells_are_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    shutil.rmtree(made_copy := tmp_path / "copy" / "pictures")
    out = tmp_path / "copy" / "out"
    dataset = json.loads((out / "dataset.json").read_text())
    dataset["images"]["root"] = str(made_copy)
    (out / "dataset.json").write_text(json.dumps(dataset))
    left, top = square_at(0)
    query = made / "pictures" / "00.png"
    result = layertap("search", out, query, "--at", f"{left + 8},{top + 8}", "-l", "layer1", "-k", 2)
    assert result.exit_code == 0, result.output
    assert "in cell " in result.stdout
    assert "note: no pictures" in result.stdout
    assert "the size of 00.png is not available" in fails("search", out, 0, "--at", "20,3", "-l", "layer1")
    found = search(out, 0, "--at", "20,3", "-l", "layer1", "--images", made / "pictures", "-k", 1)
    assert found["results"][0]["box"] is not None
    drawn = layertap("draw", "tokens", out, "-l", "layer1", "-o", tmp_path / "figures")
    assert drawn.exit_code == 0, drawn.output
    assert "9 of 9 pictures are not available" in drawn.stderr


def test_stored_tokens_are_drawn_with_the_colours_of_all_chosen_images(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def side_by_side(pixels: Any, colours: Any, names: Any, title: str) -> Any:
        drawn.append((pixels, colours, names))
        return original(pixels, colours, names, title)

    original = draw_figures.side_by_side
    monkeypatch.setattr(draw_figures, "side_by_side", side_by_side)
    result = layertap("draw", "tokens", made / "out", "--sample", "3", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(tmp_path / "tokens-layer1.png"), str(tmp_path / "tokens-layer2.png")]
    pixels, colours, names = drawn[0]
    assert names == ["00.png", "06.png", "11.png"]
    with FeatureReader(made / "out") as reader:
        values = reader["layer1"][[0, 6, 11]]
        grid = reader.tokens("layer1").grid
    expected = principal_colours(torch.from_numpy(values.reshape(3, *grid, -1)))
    np.testing.assert_allclose(colours, expected, atol=1e-6)
    # Pictures are cut to the crop: the square is at its place in the cut picture.
    left, top = square_at(6)
    scale = len(pixels[1]) / 64
    blue = pixels[1][..., 2].astype(int)
    rows, columns = (slice(round(start * scale), round((start + SQUARE) * scale)) for start in (top, left - 16))
    assert blue[rows, columns].mean() < 30
    assert blue[rows].mean() > 80


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("maps", (), "draw maps expects a backbone"),
        ("tokens", ("--device", "cpu"), "--device is for a backbone"),
        ("tokens", ("--batch-size", "2"), "--batch-size is for a backbone"),
        ("tokens", ("-l", "layer9"), "layer9"),
        ("tokens", ("-l", "embedding"), "has no tokens"),
        ("tokens", ("--sample", "0"), "expected a number of images, or all"),
    ],
)
def test_wrong_options_of_stored_tokens_are_named(made: Path, kind: str, options: tuple[str, ...], why: str) -> None:
    assert why in fails("draw", kind, made / "out", *options)


def test_a_folder_that_is_not_a_data_set_is_named(made: Path) -> None:
    assert "pictures was taken as BACKBONE, since it is not a data set" in fails("draw", "tokens", made / "pictures")
