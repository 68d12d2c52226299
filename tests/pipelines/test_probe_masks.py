"""Probes with masks as a user meets them: probe -p segmentation, and predict."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from extract.analysis.probe.model import LinearProbe
from pipelines.probe import predict as predicting
from tests.pipelines.test_cli import SMALL, fails, layertap

COLOURS = ((128, 128, 128), (220, 40, 40), (40, 60, 220))
SIZE = (80, 64)  # width, height
COUNT, N_TEST = 30, 6
pytestmark = pytest.mark.usefixtures("few_strengths")


def write_images(root: Path) -> None:
    """Pictures of rectangles on grey, with a mask each: 0, 3 and 7, and 255 along an edge."""
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        mask = np.zeros(SIZE[::-1], np.uint8)
        for kind in (1, 2):
            left, top = generator.integers(0, SIZE[0] - 24), generator.integers(0, SIZE[1] - 24)
            mask[top : top + 24, left : left + 24] = kind
        pixels = np.array(COLOURS)[mask] + generator.normal(0, 25, (*mask.shape, 3))
        split = "test" if number >= COUNT - N_TEST else "train"
        name = f"{split}/{number:02d}"
        for folder, suffix, array in (
            ("pictures", "png", np.clip(pixels, 0, 255).astype(np.uint8)),
            ("masks", "png", np.array([0, 3, 7], np.uint8)[mask]),
        ):
            if folder == "masks":
                array[:, :4] = 255
            path = root / folder / f"{name}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `pictures` and `masks`, and the data set `out` with tokens of two layers and an embedding."""
    root = tmp_path_factory.mktemp("masks")
    write_images(root)
    result = layertap("embed", root / "pictures", "-o", root / "out", *SMALL, "-l", "layer1:tokens", "-l",
                      "layer2:tokens", "-l", "embedding")  # fmt: skip
    assert result.exit_code == 0
    return root


def segment(made: Path, *options: Any, out: Path | None = None, masks: Any = None) -> Any:
    return layertap("probe", out or made / "out", "-p", "segmentation", "--masks", masks or made / "masks", *options)


def masks_probe(made: Path, folder: Path) -> Path:
    """A probe of masks in a folder; it is fitted once."""
    fitted = made / "masks.safetensors"
    if not fitted.exists():
        assert segment(made, "-l", "layer1", "--save", fitted, "-o", made / "res").exit_code == 0
    return shutil.copyfile(fitted, folder / "masks.safetensors")


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return content


def ious(pairs: list[tuple[np.ndarray, np.ndarray]], labels: list[int]) -> list[float]:
    """IoU of each label by sets of pixels; 255 in the truth, or outside the crop, does not count."""
    truth = np.concatenate([truth.ravel() for truth, _ in pairs])
    predicted = np.concatenate([predicted.ravel() for _, predicted in pairs])
    counted = (truth != 255) & (predicted != 255)
    truth, predicted = truth[counted], predicted[counted]
    return [float(((truth == k) & (predicted == k)).sum() / ((truth == k) | (predicted == k)).sum()) for k in labels]


@pytest.mark.usefixtures("figures")
def test_all_layers_with_tokens_are_probed_and_all_that_was_found_is_written(made: Path, tmp_path: Path) -> None:
    result = segment(made, "-o", tmp_path / "res")
    assert result.exit_code == 0, result.output
    assert "out: 30 rows, 3 classes; 24 train, 6 test" in result.stdout
    assert "segmentation: logistic regression of tokens" in result.stdout
    assert "lie outside the crop" in result.stdout
    content = results(tmp_path / "res")
    assert [one["layer"] for one in content["probes"]] == ["layer1", "layer2"]
    first = content["probes"][0]
    assert first["classes"] == ["0", "3", "7"]
    assert first["metrics"]["mIoU"]["value"] > 0.6
    assert first["metrics"]["mIoU"]["low"] < first["metrics"]["mIoU"]["value"] < first["metrics"]["mIoU"]["high"]
    lines = list(csv.DictReader((tmp_path / "res" / "images.csv").open()))
    assert [line["path"] for line in lines[:N_TEST]] == [f"test/{n}.png" for n in range(COUNT - N_TEST, COUNT)]
    assert sum(int(line["n"]) for line in lines[:N_TEST]) == np.sum(first["confusion"])
    assert {path.name for path in (tmp_path / "res").iterdir()} == {
        "results.json", "results.csv", "images.csv", "layers.png", "curve.png", "confusion.png", "masks.png",
    }  # fmt: skip
    with Image.open(tmp_path / "res" / "masks.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours  # masks of three classes


def test_masks_that_a_saved_probe_predicts_have_the_metrics_of_the_probe(made: Path, tmp_path: Path) -> None:
    saved = masks_probe(made, tmp_path)
    result = layertap("predict", saved, made / "pictures" / "test", "-o", tmp_path / "predicted")
    assert result.exit_code == 0, result.output
    assert f"6 masks predicted; written: {tmp_path / 'predicted'}" in result.stdout
    table = list(csv.DictReader((tmp_path / "predicted" / "masks.csv").open()))
    assert table[0] == {"path": "24.png", "status": "ok", "mask": "24.png"}
    pairs = []
    for line in table:
        with Image.open(tmp_path / "predicted" / line["mask"]) as image:
            assert (image.mode, image.size) == ("L", SIZE)
            predicted = np.asarray(image)
        with Image.open(made / "masks" / "test" / line["mask"]) as image:
            pairs.append((np.asarray(image), predicted))
    assert set(np.unique([predicted for _, predicted in pairs]).tolist()) == {0, 3, 7, 255}  # 255: outside the crop
    (probed,) = results(made / "res")["probes"]
    assert ious(pairs, [0, 3, 7]) == pytest.approx(probed["per_class"]["iou"], abs=2e-3)
    assert np.mean(ious(pairs, [0, 3, 7])) == pytest.approx(probed["metrics"]["mIoU"]["value"], abs=1e-3)


def test_masks_of_a_data_set_and_of_new_images_are_the_same(made: Path, tmp_path: Path) -> None:
    saved = tmp_path / "masks.safetensors"
    assert segment(made, "-l", "layer1+layer2", "--save", saved, "-o", tmp_path / "res").exit_code == 2  # other grids
    assert segment(made, "-l", "layer1", "--save", saved, "-o", tmp_path / "res").exit_code == 0
    for images, name in ((made / "out", "of-data-set"), (made / "pictures", "of-images")):
        assert layertap("predict", saved, images, "-o", tmp_path / name).exit_code == 0
    assert layertap("predict", saved, made / "pictures", "-o", tmp_path / "of-images").exit_code == 0  # once more
    files = sorted(path.relative_to(tmp_path / "of-images") for path in (tmp_path / "of-images").rglob("*.png"))
    assert len(files) == COUNT
    for file in files:
        assert (tmp_path / "of-images" / file).read_bytes() == (tmp_path / "of-data-set" / file).read_bytes()
    # What predict wrote is a table of masks.
    again = segment(made, "-l", "layer1", "-o", tmp_path / "again", masks=tmp_path / "of-images" / "masks.csv")
    assert again.exit_code == 0, again.output
    (probed,) = results(tmp_path / "again")["probes"]
    assert probed["metrics"]["mIoU"]["value"] > 0.9  # it can learn its own predictions


@pytest.mark.parametrize(("orientation", "size"), [("exif", SIZE), ("ignore", SIZE[::-1])])
def test_masks_are_turned_as_the_pictures_that_were_computed(
    made: Path, tmp_path: Path, orientation: str, size: tuple[int, int]
) -> None:
    for path in sorted((made / "pictures").rglob("*.png")):
        target = tmp_path / "turned" / path.relative_to(made / "pictures").with_suffix(".jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 8  # to be turned to the left
        with Image.open(path) as picture:
            picture.transpose(Image.Transpose.ROTATE_270).save(target, exif=exif, quality=95)
    out, saved = tmp_path / "out", tmp_path / "masks.safetensors"
    result = layertap(
        "embed", tmp_path / "turned", "-o", out, *SMALL, "-l", "layer1:tokens", "--orientation", orientation
    )
    assert result.exit_code == 0, result.output
    if orientation == "ignore":
        assert "stored in another orientation" in fails("probe", out, "-p", "segmentation", "--masks", made / "masks")
        for path in (made / "masks").rglob("*.png"):
            target = tmp_path / "masks" / path.relative_to(made / "masks")
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).transpose(Image.Transpose.ROTATE_270).save(target)
    masks = made / "masks" if orientation == "exif" else tmp_path / "masks"
    result = segment(made, "--save", saved, "-o", tmp_path / "res", out=out, masks=masks)
    assert result.exit_code == 0, result.output
    assert results(tmp_path / "res")["probes"][0]["metrics"]["mIoU"]["value"] > 0.6
    assert layertap("predict", saved, tmp_path / "turned" / "test", "-o", tmp_path / "predicted").exit_code == 0
    with Image.open(tmp_path / "predicted" / "24.png") as mask, Image.open(masks / "test" / "24.png") as truth:
        assert mask.size == truth.size == size
        predicted, known = np.asarray(mask), np.asarray(truth)
    inside = (predicted != 255) & (known != 255)
    assert (predicted == known)[inside].mean() > 0.8


def test_predict_refuses_a_place_that_is_not_its_own(made: Path, tmp_path: Path) -> None:
    saved = masks_probe(made, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    assert "holds no predicted masks" in fails("predict", saved, made / "out", "-o", tmp_path / "mine")
    assert "is a file" in fails("predict", saved, made / "out", "-o", tmp_path / "mine" / "thesis.txt")
    shutil.copytree(made / "out", tmp_path / "moved")
    dataset = json.loads((tmp_path / "moved" / "dataset.json").read_text())
    dataset["images"]["root"] = str(tmp_path / "nowhere")
    (tmp_path / "moved" / "dataset.json").write_text(json.dumps(dataset))
    assert "need the sizes" in fails("predict", saved, tmp_path / "moved", "-o", tmp_path / "masks")
    assert not (tmp_path / "masks").exists()


def test_predict_follows_no_link_and_names_files_that_are_also_folders(made: Path, tmp_path: Path) -> None:
    saved = masks_probe(made, tmp_path)
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / "masks.csv").write_text("path,status,mask\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "24.png").write_text("precious")
    (tmp_path / "received" / "test").symlink_to(tmp_path / "outside")
    assert "is a link to" in fails("predict", saved, made / "out", "-o", tmp_path / "received")
    assert (tmp_path / "outside" / "24.png").read_text() == "precious"
    for name in ("x.jpg", "x.png/1.jpg"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE).save(tmp_path / "images" / name)
    assert "two images have the mask x.png, or one is also a folder" in fails(
        "predict", saved, tmp_path / "images", "-o", tmp_path / "predicted"
    )


@pytest.mark.parametrize("content", ["mine", '{"probes": [], "complete": false}'])
def test_files_that_are_not_of_a_probe_stay(made: Path, tmp_path: Path, content: str) -> None:
    for name in ("images.csv", "masks.png", "results.csv", "results.json"):
        (tmp_path / name).write_text(content)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    masks = made / "masks"
    for path in sorted(tmp_path.iterdir(), reverse=True):  # the one that is named is deleted, until none is left
        message = fails("probe", made / "out", "-p", "segmentation", "--masks", masks, "-o", tmp_path)
        assert "exists and is not of a probe" in message
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
        path.unlink()
        del before[path.name]


def test_an_interrupted_predict_can_be_repeated(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "masks.safetensors"
    assert segment(made, "-l", "layer1", "--save", saved, "-o", tmp_path / "res").exit_code == 0
    write, written = predicting._write, []

    def interrupted(folder: Path, name: str, *arguments: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(name)
        write(folder, name, *arguments)

    monkeypatch.setattr(predicting, "_write", interrupted)
    assert layertap("predict", saved, made / "out", "-o", tmp_path / "masks").exit_code != 0
    assert len(list((tmp_path / "masks").rglob("*.png"))) == 3
    monkeypatch.undo()
    assert layertap("predict", saved, made / "out", "-o", tmp_path / "masks").exit_code == 0
    assert len(list((tmp_path / "masks").rglob("*.png"))) == COUNT


def test_classes_have_the_names_of_a_table(made: Path, tmp_path: Path) -> None:
    (tmp_path / "classes.csv").write_text("id,name\n0,ground\n3,brick\n7,lake\n9,tree\n")
    result = segment(made, "-l", "layer2", "--class-names", tmp_path / "classes.csv", "-o", tmp_path / "res")
    assert result.exit_code == 0, result.output
    (probed,) = results(tmp_path / "res")["probes"]
    assert probed["classes"] == ["ground", "brick", "lake", "tree"]
    assert probed["per_class"]["n"][3] == 0
    (tmp_path / "classes.csv").write_text("id,name\n0,ground\n3,brick\n")
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", made / "masks", "--class-names",
                    tmp_path / "classes.csv", "-o", tmp_path / "res2")  # fmt: skip
    assert "has the label 7, which is not a class" in message
    assert "--ignore-label" in message
    ignoring = segment(made, "-l", "layer2", "--class-names", tmp_path / "classes.csv", "--ignore-label", 7,
                       "--ignore-label", 255, "-o", tmp_path / "res2")  # fmt: skip
    assert ignoring.exit_code == 0, ignoring.output
    assert results(tmp_path / "res2")["probes"][0]["classes"] == ["ground", "brick"]
    for table, why in (
        ("name\na\n", "no column 'id'"),
        ("path,name\na,a\n", "no column 'id'"),
        ("id,name\n-1,a\n", "'-1' is not a whole number"),
        ("id,name\n0,a\n0,b\n", "occurs twice"),
        ("id,name\n0,a\n1,a\n", "the same name"),
    ):
        (tmp_path / "classes.csv").write_text(table)
        assert why in fails("probe", made / "out", "-p", "segmentation", "--masks", made / "masks", "--class-names",
                            tmp_path / "classes.csv", "-o", tmp_path / "res3")  # fmt: skip


def changed(made: Path, tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A copy of the masks in which the first mask of the test images is another array."""
    shutil.copytree(made / "masks", tmp_path / "changed")
    path = tmp_path / "changed" / "test" / "24.png"
    Image.fromarray(change(np.asarray(Image.open(path)))).save(path)
    return tmp_path / "changed"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda mask: mask[:, :40], "test/24.png has 40 x 64 pixels, and its image 80 x 64"),
        (lambda mask: mask.T.copy(), "stored in another orientation"),
        (lambda mask: np.stack([mask] * 3, 2), "has 3 channels; expected one"),
        (lambda mask: mask / np.float32(255), "has 2 axes of float32; expected integers"),
        (lambda mask: np.arange(mask.size, dtype=np.uint16).reshape(mask.shape), "more than 1,000 different labels"),
    ],
)
def test_masks_that_are_none_are_refused_by_name(
    made: Path, tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], why: str
) -> None:
    if "float32" in why:
        shutil.copytree(made / "masks", tmp_path / "changed")
        path = tmp_path / "changed" / "test" / "24.png"
        np.save(path.with_suffix(".npy"), change(np.asarray(Image.open(path))))
        path.unlink()
        masks = tmp_path / "changed"
    else:
        masks = changed(made, tmp_path, change)
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", masks, "-o", tmp_path / "res")
    assert why in message
    assert not (tmp_path / "res").exists()


@pytest.mark.parametrize("suffix", [".png", ".npy"])
def test_a_pipe_in_a_folder_of_masks_or_depths_is_refused_by_name(made: Path, tmp_path: Path, suffix: str) -> None:
    shutil.copytree(made / "masks", tmp_path / "changed")
    path = (tmp_path / "changed" / "test" / "24.png").with_suffix(suffix)
    (tmp_path / "changed" / "test" / "24.png").unlink()
    os.mkfifo(path)
    for kind, option in (("segmentation", "--masks"), ("depth", "--depth")):
        message = fails("probe", made / "out", "-p", kind, option, tmp_path / "changed", "-o", tmp_path / "res")
        assert f"test/24{suffix} is not a regular file" in message


def test_masks_may_have_16_bits_or_a_palette_or_half_the_pixels(made: Path, tmp_path: Path) -> None:
    segment(made, "-l", "layer1", "-o", tmp_path / "expected")
    shutil.copytree(made / "masks", tmp_path / "others")
    for number, path in enumerate(sorted((tmp_path / "others").rglob("*.png"))):
        mask = np.asarray(Image.open(path))
        if number % 3 == 0:
            Image.fromarray(mask.astype(np.uint16)).save(path)
        elif number % 3 == 1:
            image = Image.fromarray(mask).convert("P")
            image.putpalette(bytes(range(255, -1, -1)) * 3)
            image.save(path)
        else:
            np.save(path.with_suffix(".npy"), mask.repeat(2, 0).repeat(2, 1))
            path.unlink()
    segment(made, "-l", "layer1", "-o", tmp_path / "found", masks=tmp_path / "others")
    found, expected = (results(tmp_path / name)["probes"][0]["metrics"] for name in ("found", "expected"))
    assert found["mIoU"]["value"] == pytest.approx(expected["mIoU"]["value"], abs=0.02)


def test_two_images_with_one_mask_are_refused(made: Path, tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/1.png", "b/1.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE, (len(name), 2 * len(name), ord(name[0]))).save(tmp_path / "images" / name)
    out = tmp_path / "out"
    assert layertap("embed", tmp_path / "images", "-o", out, *SMALL, "-l", "layer1:tokens").exit_code == 0
    (tmp_path / "masks" / "a").mkdir(parents=True)
    Image.new("L", SIZE).save(tmp_path / "masks" / "a" / "1.png")
    message = fails("probe", out, "-p", "segmentation", "--masks", tmp_path / "masks")
    assert "belongs to two images, a/1.jpg and a/1.png" in message


@pytest.mark.parametrize("content", [b"PK\x03\x04abc", b"\x93NUMPY\x01\x00\x76\x00{'descr", b"", b"no array"])
def test_damaged_arrays_are_refused_by_name(made: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(made / "masks", tmp_path / "damaged")
    (tmp_path / "damaged" / "test" / "24.png").unlink()
    (tmp_path / "damaged" / "test" / "24.npy").write_bytes(content)
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", tmp_path / "damaged")
    assert "test/24.npy cannot be read" in message


@pytest.mark.parametrize("labels", [np.full((64, 80), 70_000), np.full((64, 80), 2**64 - 1, np.uint64)])
def test_labels_that_no_mask_can_have_are_refused(made: Path, tmp_path: Path, labels: np.ndarray) -> None:
    shutil.copytree(made / "masks", tmp_path / "large")
    (tmp_path / "large" / "test" / "24.png").unlink()
    np.save(tmp_path / "large" / "test" / "24.npy", labels)
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", tmp_path / "large")
    assert f"has the label {labels[0, 0]}; expected labels up to 65,534" in message


def test_255_means_no_label_beside_other_labels(made: Path, tmp_path: Path) -> None:
    assert segment(made, "-l", "layer2", "--ignore-label", 0, "-o", tmp_path / "res").exit_code == 0
    assert results(tmp_path / "res")["probes"][0]["classes"] == ["3", "7"]
    alone = ("--ignore-label", 0, "--ignore-label", 3, "-l", "layer2")
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", made / "masks", *alone)
    assert "classes among the tokens of 22 training images: 1;" in message


def test_missing_masks_are_told(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "masks", tmp_path / "few")
    for number in range(4):
        (tmp_path / "few" / "train" / f"{number:02d}.png").unlink()
    result = segment(made, "-l", "layer2", "-o", tmp_path / "res", masks=tmp_path / "few")
    assert "20 train, 6 test; left out: 4 unlabelled" in result.stdout
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", made, "-o", tmp_path / "res2")
    assert f"{made}/test/24.png is expected" in message
    assert "no such folder" in fails("probe", made / "out", "-p", "segmentation", "--masks", tmp_path / "no")
    one = made / "masks" / "test" / "24.png"
    assert "expected a folder, or a table" in fails("probe", made / "out", "-p", "segmentation", "--masks", one)
    Image.new("L", SIZE).save(tmp_path / "few" / "test" / "24.tif")
    assert "belong to the same image" in fails("probe", made / "out", "-p", "segmentation", "--masks", tmp_path / "few")


def test_a_table_names_masks_relative_to_its_folder_and_gives_splits(made: Path, tmp_path: Path) -> None:
    lines = [f"train/{n:02d}.png,../masks/train/{n:02d}.png,{'test' if n < 5 else 'train'}" for n in range(20)]
    (made / "tables").mkdir(exist_ok=True)
    (made / "tables" / "masks.csv").write_text("path,segments,split\n" + "\n".join(lines) + "\n")
    result = segment(made, "-l", "layer2", "-o", tmp_path / "res", masks=f"{made / 'tables' / 'masks.csv'}:segments")
    assert result.exit_code == 0, result.output
    assert "15 train, 5 test; left out: 10 unlabelled" in result.stdout
    (made / "tables" / "masks.csv").write_text("path,mask\ntrain/00.png,none.png\ntrain/01.png,none.png\n")
    message = fails("probe", made / "out", "-p", "segmentation", "--masks", made / "tables" / "masks.csv",
                    "--test-fraction", 0.5)  # fmt: skip
    assert "none.png cannot be read: no such file" in message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "segmentation needs --masks"),
        (["--masks", "masks", "--labels", "a.csv"], "--labels is not for segmentation"),
        (["--masks", "coco.json"], "COCO files are not read"),
        (["-p", "segmentation-dinov3", "--masks", "masks"], "did you mean segmentation-knn or segmentation?"),
        (["-p", "depth-dinov3", "--depth", "depth"], "did you mean depth?"),
        (["--masks", "masks", "--iterations", "5"], "No such option '--iterations'"),
        (["-p", "clip", "--masks", "masks"], "--masks is for -p segmentation"),
        (["--masks", "masks", "-l", "embedding"], "embedding"),
        (
            ["-p", "segmentation-knn", "--masks", "masks", "-l", "layer1", "--save", "a.safetensors"],
            "can be saved",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    monkeypatch.chdir(made)
    message = fails("probe", "out", "-p", "segmentation", *options)
    assert why in message


def write_depths(made: Path, folder: Path) -> Path:
    """Write a depth in millimetres for each class of the masks, as PNG and .npy."""
    for number, path in enumerate(sorted((made / "masks").rglob("*.png"))):
        mask = np.asarray(Image.open(path))
        depth = np.select([mask == 0, mask == 3, mask == 7], [4.0, 1.5, 2.5], 0.0)  # 0: unknown
        target = folder / path.relative_to(made / "masks")
        target.parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            np.save(target.with_suffix(".npy"), 1000 * depth)
        else:
            Image.fromarray((1000 * depth).astype(np.uint16)).save(target)
    return folder


def test_depths_that_a_saved_probe_predicts_have_the_metrics_of_the_probe(made: Path, tmp_path: Path) -> None:
    depths, saved = write_depths(made, tmp_path / "depth"), tmp_path / "depth.safetensors"
    result = layertap("probe", made / "out", "-p", "depth", "--depth", depths, "-l", "layer2", "--save", saved, "-o",
                      tmp_path / "res")  # fmt: skip
    assert result.exit_code == 0, result.output
    result = layertap("predict", saved, made / "pictures" / "test", "-o", tmp_path / "predicted")
    assert result.exit_code == 0, result.output
    assert f"6 depth maps predicted; written: {tmp_path / 'predicted'}" in result.stdout
    errors = []
    for line in csv.DictReader((tmp_path / "predicted" / "depths.csv").open()):
        with Image.open(tmp_path / "predicted" / line["depth"]) as image:
            assert (image.mode, image.size, line["depth"][-4:]) == ("F", SIZE, ".tif")
            predicted = np.asarray(image)
        (file,) = (depths / "test").glob(f"{Path(line['path']).stem}.*")
        truth = np.load(file) if file.suffix == ".npy" else np.asarray(Image.open(file)).astype(float)
        counted = (truth > 0) & ~np.isnan(predicted)
        assert not counted[:, 0].any()  # outside the crop
        errors.append(np.sqrt(((predicted - truth)[counted] ** 2).mean()))
    (probed,) = results(tmp_path / "res")["probes"]
    assert np.mean(errors) == pytest.approx(probed["metrics"]["rmse"]["value"], rel=1e-3)
    # What predict wrote is a table of depths.
    assert layertap("predict", saved, made / "pictures", "-o", tmp_path / "all").exit_code == 0
    result = layertap("probe", made / "out", "-p", "depth", "--depth", tmp_path / "all" / "depths.csv", "-l", "layer2",
                      "-o", tmp_path / "again")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "holds no predicted masks" in fails("predict", masks_probe(made, tmp_path), made / "out", "-o",
                                               tmp_path / "all")  # fmt: skip


BINS = {"depths": [1.0, 2.0, 3.0], "weighting": "softmax", "largest": 3.0}


@pytest.mark.parametrize(
    "described",
    [
        BINS | {"weighting": "other"}, BINS | {"weighting": []}, BINS | {"largest": -1.0}, BINS | {"largest": 10**400},
        BINS | {"depths": [1.0]}, BINS | {"depths": [1.0, 2.0, 1e300]}, BINS | {"depths": [1.0, -2.0, 3.0]},
        BINS | {"depths": None}, None, [],
    ],
)  # fmt: skip
def test_a_probe_with_wrong_bins_of_depth_is_refused(made: Path, tmp_path: Path, described: Any) -> None:
    probe = LinearProbe.load(masks_probe(made, tmp_path))
    replace(probe, about={**probe.about, "depth": described}).save(tmp_path / "wrong.safetensors")
    message = fails("predict", tmp_path / "wrong.safetensors", made / "out", "-o", tmp_path / "p")
    assert "expected the depths of 3 bins" in message
    assert "Traceback" not in message


def test_moved_images_may_be_named(made: Path, tmp_path: Path) -> None:
    saved = masks_probe(made, tmp_path)
    shutil.copytree(made / "out", tmp_path / "moved")
    dataset = json.loads((tmp_path / "moved" / "dataset.json").read_text())
    dataset["images"]["root"] = str(tmp_path / "nowhere")
    (tmp_path / "moved" / "dataset.json").write_text(json.dumps(dataset))
    assert "--images FOLDER" in fails("predict", saved, tmp_path / "moved", "-o", tmp_path / "masks")
    result = layertap("predict", saved, tmp_path / "moved", "-o", tmp_path / "masks", "--images", made / "pictures")
    assert result.exit_code == 0, result.output
    assert "30 masks predicted" in result.stdout


def test_depths_that_hardly_differ_can_be_saved_and_predicted(made: Path, tmp_path: Path) -> None:
    for path in (made / "masks").rglob("*.png"):
        mask = np.asarray(Image.open(path))
        target = tmp_path / "depth" / path.relative_to(made / "masks").with_suffix(".npy")
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, 1e7 + np.where(mask == 255, 0, mask % 5))
    result = layertap("probe", made / "out", "-p", "depth", "--depth", tmp_path / "depth", "-l", "layer2", "--save",
                      tmp_path / "d.safetensors", "-o", tmp_path / "res")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert layertap("predict", tmp_path / "d.safetensors", made / "out", "-o", tmp_path / "p").exit_code == 0


@pytest.mark.usefixtures("figures")
def test_depths_are_predicted(made: Path, tmp_path: Path) -> None:
    write_depths(made, tmp_path / "depth")
    result = layertap("probe", made / "out", "-p", "depth", "--depth", tmp_path / "depth", "-l", "layer2", "-o",
                      tmp_path / "res")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "out: 30 rows, depth maps; 24 train, 6 test" in result.stdout
    assert "pixels of known depth lie outside the crop" in result.stdout
    first = results(tmp_path / "res")["probes"][0]
    assert first["metrics"]["delta1"]["value"] > 0.7
    assert 100 < first["metrics"]["rmse"]["value"] < 1000  # in the unit of the files
    lines = list(csv.DictReader((tmp_path / "res" / "images.csv").open()))
    assert np.mean([float(line["rmse"]) for line in lines[:N_TEST]]) == pytest.approx(first["metrics"]["rmse"]["value"])
    assert {path.name for path in (tmp_path / "res").iterdir()} == {
        "results.json", "results.csv", "images.csv", "layers.png", "curve.png", "depths.png",
    }  # fmt: skip


def test_larger_depths_are_left_out_and_files_that_do_not_fit_are_refused(made: Path, tmp_path: Path) -> None:
    of = ("probe", made / "out", "-p", "depth", "--depth", write_depths(made, tmp_path / "depth"), "-l", "layer2")
    rmse = {}
    for name, most in (("all", []), ("near", ["--max-depth", 3000])):
        result = layertap(*of, *most, "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
        rmse[name] = results(tmp_path / name)["probes"][0]["metrics"]["rmse"]["value"]
    assert rmse["near"] < rmse["all"]
    Image.fromarray(np.ones((64, 40), np.uint16)).save(tmp_path / "depth" / "test" / "24.png")
    message = fails("probe", made / "out", "-p", "depth", "--depth", tmp_path / "depth")
    assert "test/24.png has 40 x 64 pixels" in message
    assert "depth needs --depth" in fails("probe", made / "out", "-p", "depth")
    assert "no such folder" in fails("probe", made / "out", "-p", "depth", "--depth", tmp_path / "none")


def test_a_data_set_without_tokens_is_refused(made: Path, tmp_path: Path) -> None:
    assert layertap("embed", made / "pictures", "-o", tmp_path / "out", *SMALL, "-l", "embedding").exit_code == 0
    message = fails("probe", tmp_path / "out", "-p", "segmentation", "--masks", made / "masks")
    assert "has no tokens: " in message
    assert "LAYER:tokens" in message
