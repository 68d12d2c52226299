"""Probes with masks and depths as a user meets them: probe -p segmentation, -p depth, and predict."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from extract.analysis.probe import protocols
from extract.analysis.probe.model import LinearProbe
from pipelines.probe import predict as predicting
from pipelines.probe import report
from tests.pipelines.conftest import copy_of
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds

COLOURS = ((128, 128, 128), (220, 40, 40), (40, 60, 220))
SIZE = (80, 64)  # width, height
COUNT, N_TEST = 24, 4
FIRST = f"test/{COUNT - N_TEST}"  # of the test images


@pytest.fixture(scope="module", autouse=True)
def few_strengths() -> Iterator[None]:
    """The strength of a probe is chosen from three, also of those that tests share."""
    compare_all, three = protocols._compare_all, np.logspace(-4, 0, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocols, "_coarse_to_fine", lambda compare: compare_all(compare, three))
        yield


Drawn = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module", autouse=True)
def drawn(drawing: Drawn) -> Iterator[Drawn]:
    """Figures, whose panels take longer than the probes, are made `with drawn():` alone."""
    draw = report.draw

    @contextmanager
    def really() -> Iterator[None]:
        with drawing(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(report, "draw", draw)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda outcome, folder: [])
        yield really


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        Image.fromarray(array).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of pictures (rectangles on grey), `masks` of 0, 3 and 7, with 255 along an edge, and `depth` in
    millimetres, PNG and .npy; and the data set `out` with tokens of two layers and an embedding."""
    root, generator = tmp_path_factory.mktemp("masks"), np.random.default_rng(0)
    for number in range(COUNT):
        classes = np.zeros(SIZE[::-1], np.uint8)
        for kind in (1, 2):
            left, top = generator.integers(0, SIZE[0] - 24), generator.integers(0, SIZE[1] - 24)
            classes[top : top + 24, left : left + 24] = kind
        pixels = np.array(COLOURS)[classes] + generator.normal(0, 25, (*classes.shape, 3))
        depth, mask = np.array([4000, 1500, 2500], np.uint16)[classes], np.array([0, 3, 7], np.uint8)[classes]
        depth[:, :4], mask[:, :4] = 0, 255
        name = f"{'test' if number >= COUNT - N_TEST else 'train'}/{number:02d}"
        save(root / "pictures" / f"{name}.png", np.clip(pixels, 0, 255).astype(np.uint8))
        save(root / "masks" / f"{name}.png", mask)
        save(root / "depth" / f"{name}.{('png', 'npy')[number % 2]}", depth)
    succeeds("embed", root / "pictures", "-o", root / "out", *SMALL, "-l", "layer1:tokens", "-l",
                      "layer2:tokens", "-l", "embedding")  # fmt: skip
    return root


def probed(made: Path, folder: Path, *options: Any, out: Path | None = None, masks: Any = None) -> Any:
    """What is told of probes with masks, those of the fixture unless others are given; results go into the folder."""
    of = ("-p", "segmentation", "--masks", masks or made / "masks", "-o", folder)
    return succeeds("probe", out or made / "out", *of, *options)


def depth_probed(made: Path, folder: Path, *options: Any, depth: Path | None = None) -> Any:
    of = ("-p", "depth", "--depth", depth or made / "depth", "-l", "layer2", "-o", folder)
    return succeeds("probe", made / "out", *of, *options)


@pytest.fixture(scope="module")
def saved(made: Path, drawn: Drawn) -> Path:
    """A probe of masks; its results and figures are in `masks probed` beside it."""
    with drawn():
        probed(made, made / "masks probed", "-l", "layer2", "--save", made / "masks.safetensors")
    return made / "masks.safetensors"


@pytest.fixture(scope="module")
def saved_depth(made: Path, drawn: Drawn) -> Path:
    """A probe of depths; its results and figures are in `depth probed` beside it."""
    with drawn():
        result = depth_probed(made, made / "depth probed", "--save", made / "depth.safetensors")
    assert "out: 24 rows, depth maps; 20 train, 4 test" in result.stdout
    assert "pixels of known depth lie outside the crop" in result.stdout
    return made / "depth.safetensors"


def refused(made: Path, *options: Any, masks: Any = None) -> str:
    return fails("probe", made / "out", "-p", "segmentation", "--masks", masks or made / "masks", *options)


def predict(saved: Path, images: Path, folder: Path, *options: Any) -> Any:
    return succeeds("predict", saved, images, "-o", folder, *options)


def results(folder: Path) -> list[dict[str, Any]]:
    probes: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["probes"]
    return probes


def table(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def ious(pairs: list[tuple[np.ndarray, np.ndarray]], labels: list[int]) -> list[float]:
    """IoU of each label by sets of pixels; 255 in the truth, or outside the crop, does not count."""
    truth = np.concatenate([truth.ravel() for truth, _ in pairs])
    predicted = np.concatenate([predicted.ravel() for _, predicted in pairs])
    counted = (truth != 255) & (predicted != 255)
    truth, predicted = truth[counted], predicted[counted]
    return [float(((truth == k) & (predicted == k)).sum() / ((truth == k) | (predicted == k)).sum()) for k in labels]


def test_all_layers_with_tokens_are_probed(made: Path, tmp_path: Path) -> None:
    result = probed(made, tmp_path)
    assert "out: 24 rows, 3 classes; 20 train, 4 test" in result.stdout
    assert "segmentation: logistic regression of tokens" in result.stdout
    assert "lie outside the crop" in result.stdout
    first, second = results(tmp_path)
    assert [first["layer"], second["layer"]] == ["layer1", "layer2"]
    assert first["classes"] == ["0", "3", "7"]
    assert first["metrics"]["mIoU"]["value"] > 0.6


def test_all_that_was_found_is_written(made: Path, saved: Path) -> None:
    folder = made / "masks probed"
    (probe,) = results(folder)
    assert probe["metrics"]["mIoU"]["low"] < probe["metrics"]["mIoU"]["value"] < probe["metrics"]["mIoU"]["high"]
    lines = table(folder / "images.csv")
    assert [line["path"] for line in lines] == [f"test/{n}.png" for n in range(COUNT - N_TEST, COUNT)]
    assert sum(int(line["n"]) for line in lines) == np.sum(probe["confusion"])
    assert {path.name for path in folder.iterdir()} == {
        "results.json", "results.csv", "images.csv", "layers.png", "curve.png", "confusion.png", "masks.png",
    }  # fmt: skip
    with Image.open(folder / "masks.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours  # masks of three classes


def test_masks_of_a_saved_probe_have_the_metrics_of_the_probe(made: Path, saved: Path, tmp_path: Path) -> None:
    result = predict(saved, made / "pictures" / "test", tmp_path)
    assert f"4 masks predicted; written: {tmp_path}" in result.stdout
    assert table(tmp_path / "masks.csv")[0] == {"path": "20.png", "status": "ok", "mask": "20.png"}
    pairs = []
    for line in table(tmp_path / "masks.csv"):
        with Image.open(tmp_path / line["mask"]) as image:
            assert (image.mode, image.size) == ("L", SIZE)
            predicted = np.asarray(image)
        with Image.open(made / "masks" / "test" / line["mask"]) as image:
            pairs.append((np.asarray(image), predicted))
    assert set(np.unique([predicted for _, predicted in pairs]).tolist()) == {0, 3, 7, 255}  # 255: outside the crop
    (probe,) = results(made / "masks probed")
    assert ious(pairs, [0, 3, 7]) == pytest.approx(probe["per_class"]["iou"], abs=2e-3)
    assert np.mean(ious(pairs, [0, 3, 7])) == pytest.approx(probe["metrics"]["mIoU"]["value"], abs=1e-3)


def test_masks_of_a_data_set_are_those_of_new_images_and_can_be_learned(
    made: Path, saved: Path, tmp_path: Path
) -> None:
    assert "tokens" in refused(made, "-l", "layer1+layer2", "-o", tmp_path / "res")  # other grids
    predict(saved, made / "out", tmp_path / "of-data-set")
    for _ in range(2):  # it writes over what it wrote
        predict(saved, made / "pictures", tmp_path / "of-images")
    files = sorted(path.relative_to(tmp_path / "of-images") for path in (tmp_path / "of-images").rglob("*.png"))
    assert len(files) == COUNT
    for file in files:
        assert (tmp_path / "of-images" / file).read_bytes() == (tmp_path / "of-data-set" / file).read_bytes()
    probed(made, tmp_path / "again", "-l", "layer2", masks=tmp_path / "of-images" / "masks.csv")
    (probe,) = results(tmp_path / "again")
    assert probe["metrics"]["mIoU"]["value"] > 0.9


@pytest.mark.parametrize("orientation", ["exif", "ignore"])
def test_masks_are_turned_as_the_pictures_that_were_computed(made: Path, tmp_path: Path, orientation: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 8  # to be turned to the left
    for path in (made / "pictures").rglob("*.png"):
        target = tmp_path / "turned" / path.relative_to(made / "pictures").with_suffix(".jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            picture.transpose(Image.Transpose.ROTATE_270).save(target, exif=exif, quality=95)
    out, saved, masks = tmp_path / "out", tmp_path / "masks.safetensors", made / "masks"
    how = ("-l", "layer1:tokens", "--orientation", orientation)
    succeeds("embed", tmp_path / "turned", "-o", out, *SMALL, *how)
    if orientation == "ignore":
        assert "stored in another orientation" in fails("probe", out, "-p", "segmentation", "--masks", masks)
        masks = tmp_path / "masks"
        for path in (made / "masks").rglob("*.png"):
            save(masks / path.relative_to(made / "masks"), np.rot90(np.asarray(Image.open(path)), -1))
    probed(made, tmp_path / "res", "--save", saved, out=out, masks=masks)
    assert results(tmp_path / "res")[0]["metrics"]["mIoU"]["value"] > 0.6
    predict(saved, tmp_path / "turned" / "test", tmp_path / "predicted")
    predicted = np.asarray(Image.open(tmp_path / "predicted" / f"{Path(FIRST).name}.png"))
    truth = np.asarray(Image.open(masks / f"{FIRST}.png"))
    assert predicted.shape == truth.shape == (SIZE[::-1] if orientation == "exif" else SIZE)
    inside = (predicted != 255) & (truth != 255)
    assert (predicted == truth)[inside].mean() > 0.8


def test_predict_refuses_a_place_that_is_not_its_own(made: Path, saved: Path, tmp_path: Path) -> None:
    of = ("predict", saved, made / "out", "-o")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    assert "holds no predicted masks" in fails(*of, tmp_path / "mine")
    assert "is a file" in fails(*of, tmp_path / "mine" / "thesis.txt")
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / "masks.csv").write_text("path,status,mask\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "20.png").write_text("precious")
    (tmp_path / "received" / "test").symlink_to(tmp_path / "outside")
    assert "is a link to" in fails(*of, tmp_path / "received")
    assert (tmp_path / "outside" / "20.png").read_text() == "precious"


def test_predict_takes_moved_images_where_they_are_named(made: Path, saved: Path, tmp_path: Path) -> None:
    moved, masks = copy_of(made / "out", tmp_path / "moved", tmp_path / "nowhere"), tmp_path / "masks"
    message = fails("predict", saved, moved, "-o", masks)
    assert "need the sizes" in message
    assert "--images FOLDER" in message
    assert not masks.exists()
    assert "24 masks predicted" in predict(saved, moved, masks, "--images", made / "pictures").stdout


@pytest.mark.parametrize("content", ["mine", '{"probes": [], "complete": false}'])
def test_files_that_are_not_of_a_probe_stay(made: Path, tmp_path: Path, content: str) -> None:
    for name in ("images.csv", "masks.png", "results.csv", "results.json"):
        (tmp_path / name).write_text(content)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    for path in sorted(tmp_path.iterdir(), reverse=True):  # the one that is named is deleted, until none is left
        assert "exists and is not of a probe" in refused(made, "-o", tmp_path)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
        path.unlink()
        del before[path.name]


def test_an_interrupted_predict_can_be_repeated(
    made: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = predicting._write

    def interrupted(folder: Path, *arguments: Any) -> None:
        if len(list(folder.rglob("*.png"))) == 3:
            raise KeyboardInterrupt
        write(folder, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(predicting, "_write", interrupted)
        assert layertap("predict", saved, made / "out", "-o", tmp_path).exit_code != 0
    assert len(list(tmp_path.rglob("*.png"))) == 3
    predict(saved, made / "out", tmp_path)
    assert len(list(tmp_path.rglob("*.png"))) == COUNT


def test_classes_have_the_names_of_a_table(made: Path, tmp_path: Path) -> None:
    names = tmp_path / "classes.csv"
    options = ("-l", "layer2", "--class-names", names)
    names.write_text("id,name\n0,ground\n3,brick\n7,lake\n9,tree\n")
    probed(made, tmp_path / "four", *options)
    (probe,) = results(tmp_path / "four")
    assert probe["classes"] == ["ground", "brick", "lake", "tree"]
    assert probe["per_class"]["n"][3] == 0
    names.write_text("id,name\n0,ground\n3,brick\n")
    message = refused(made, *options)
    assert "has the label 7, which is not a class" in message
    assert "--ignore-label" in message
    probed(made, tmp_path / "two", *options, "--ignore-label", 7, "--ignore-label", 255)
    assert results(tmp_path / "two")[0]["classes"] == ["ground", "brick"]
    for content, why in (
        ("name\na\n", "no column 'id'"),
        ("path,name\na,a\n", "no column 'id'"),
        ("id,name\n-1,a\n", "'-1' is not a whole number"),
        ("id,name\n0,a\n0,b\n", "occurs twice"),
        ("id,name\n0,a\n1,a\n", "the same name"),
    ):
        names.write_text(content)
        assert why in refused(made, *options)


@pytest.mark.parametrize(
    ("suffix", "content", "why"),
    [
        (".png", lambda mask: mask[:, :40], f"{FIRST}.png has 40 x 64 pixels, and its image 80 x 64"),
        (".png", lambda mask: mask.T.copy(), "stored in another orientation"),
        (".png", lambda mask: np.stack([mask] * 3, 2), "has 3 channels; expected one"),
        (".npy", lambda mask: mask / np.float32(255), "has 2 axes of float32; expected integers"),
        (".npy", lambda mask: np.arange(mask.size).reshape(mask.shape), "more than 1,000 different labels"),
        (".npy", lambda mask: np.full(mask.shape, 70_000), "has the label 70000; expected labels up to 65,534"),
        (".npy", lambda mask: np.full(mask.shape, 2**64 - 1, np.uint64), f"has the label {2**64 - 1}; expected labels"),
        (".npy", b"PK\x03\x04abc", f"{FIRST}.npy cannot be read"),
        (".npy", b"\x93NUMPY\x01\x00\x76\x00{'descr", f"{FIRST}.npy cannot be read"),
        (".npy", b"", f"{FIRST}.npy cannot be read"),
        (".npy", b"no array", f"{FIRST}.npy cannot be read"),
        (".png", None, f"{FIRST}.png is not a regular file"),
        (".npy", None, f"{FIRST}.npy is not a regular file"),
    ],
)
def test_masks_that_are_none_are_refused_by_name(
    made: Path, tmp_path: Path, suffix: str, content: Callable[[np.ndarray], np.ndarray] | bytes | None, why: str
) -> None:
    masks = shutil.copytree(made / "masks", tmp_path / "masks")
    mask = np.asarray(Image.open(masks / f"{FIRST}.png"))
    (masks / f"{FIRST}.png").unlink()
    path = masks / f"{FIRST}{suffix}"
    if content is None:
        os.mkfifo(path)
        assert why in fails("probe", made / "out", "-p", "depth", "--depth", masks, "-o", tmp_path / "res")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save(path, content(mask))
    assert why in refused(made, "-o", tmp_path / "res", masks=masks)
    assert not (tmp_path / "res").exists()


def test_masks_may_have_16_bits_or_a_palette_or_half_the_pixels(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "masks", tmp_path / "others")
    for number, path in enumerate(sorted((tmp_path / "others").rglob("*.png"))):
        mask = np.asarray(Image.open(path))
        if number % 3 == 0:
            save(path, mask.astype(np.uint16))
        elif number % 3 == 1:
            image = Image.fromarray(mask).convert("P")
            image.putpalette(bytes(range(255, -1, -1)) * 3)
            image.save(path)
        else:
            save(path.with_suffix(".npy"), mask.repeat(2, 0).repeat(2, 1))
            path.unlink()
    probed(made, tmp_path / "found", "-l", "layer1", masks=tmp_path / "others")
    probed(made, tmp_path / "expected", "-l", "layer1")
    found, expected = (results(tmp_path / name)[0]["metrics"] for name in ("found", "expected"))
    assert found["mIoU"]["value"] == pytest.approx(expected["mIoU"]["value"], abs=0.02)


def test_two_images_with_one_mask_are_refused(saved: Path, tmp_path: Path) -> None:
    for name in ("x.jpg", "x.png/1.jpg"):
        save(tmp_path / "new" / name, np.zeros((*SIZE, 3), np.uint8))
    message = fails("predict", saved, tmp_path / "new", "-o", tmp_path / "predicted")
    assert "two images have the mask x.png, or one is also a folder" in message
    for number, name in enumerate(("a/1.jpg", "a/1.png", "b/1.png")):
        save(tmp_path / "images" / name, np.full((*SIZE, 3), 50 * number, np.uint8))
    out = tmp_path / "out"
    succeeds("embed", tmp_path / "images", "-o", out, *SMALL, "-l", "layer1:tokens")
    save(tmp_path / "masks" / "a" / "1.png", np.zeros(SIZE, np.uint8))
    message = fails("probe", out, "-p", "segmentation", "--masks", tmp_path / "masks")
    assert "belongs to two images, a/1.jpg and a/1.png" in message


def test_255_means_no_label_beside_other_labels(made: Path, tmp_path: Path) -> None:
    probed(made, tmp_path, "-l", "layer2", "--ignore-label", 0)
    assert results(tmp_path)[0]["classes"] == ["3", "7"]
    message = refused(made, "--ignore-label", 0, "--ignore-label", 3, "-l", "layer2")
    assert "classes among the tokens of 18 training images: 1;" in message


def test_missing_masks_are_told(made: Path, tmp_path: Path) -> None:
    few = shutil.copytree(made / "masks", tmp_path / "few")
    for number in range(4):
        (few / "train" / f"{number:02d}.png").unlink()
    result = probed(made, tmp_path / "res", "-l", "layer2", masks=few)
    assert "16 train, 4 test; left out: 4 unlabelled" in result.stdout
    assert f"{made}/{FIRST}.png is expected" in refused(made, masks=made)
    assert "no such folder" in refused(made, masks=tmp_path / "no")
    assert "expected a folder, or a table" in refused(made, masks=made / "masks" / f"{FIRST}.png")
    save(few / f"{FIRST}.tif", np.zeros(SIZE, np.uint8))
    assert "belong to the same image" in refused(made, masks=few)


def test_a_table_names_masks_relative_to_its_folder_and_gives_splits(made: Path, tmp_path: Path) -> None:
    file = made / "tables" / "masks.csv"
    file.parent.mkdir()
    lines = [f"train/{n:02d}.png,../masks/train/{n:02d}.png,{'test' if n < 5 else 'train'}" for n in range(18)]
    file.write_text("path,segments,split\n" + "\n".join(lines) + "\n")
    result = probed(made, tmp_path, "-l", "layer2", masks=f"{file}:segments")
    assert "13 train, 5 test; left out: 6 unlabelled" in result.stdout
    file.write_text("path,mask\ntrain/00.png,none.png\ntrain/01.png,none.png\n")
    assert "none.png cannot be read: no such file" in refused(made, "--test-fraction", 0.5, masks=file)


def test_options_that_do_not_fit_and_a_data_set_without_tokens_are_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    for options, why in (
        (["--masks", "coco.json"], "COCO files are not read"),
        (["-p", "depth", "--depth", "none"], "no such folder"),
        (["--masks", "masks", "-l", "embedding"], "embedding"),
    ):
        assert why in fails("probe", "out", "-p", "segmentation", *options)
    succeeds("embed", "pictures", "-o", tmp_path / "out", *SMALL, "--limit", 4)
    message = fails("probe", tmp_path / "out", "-p", "segmentation", "--masks", "masks")
    assert "has no tokens: " in message
    assert "LAYER:tokens" in message


def test_all_that_was_found_of_depths_is_written(made: Path, saved_depth: Path) -> None:
    folder = made / "depth probed"
    metrics = results(folder)[0]["metrics"]
    assert metrics["delta1"]["value"] > 0.7
    assert 100 < metrics["rmse"]["value"] < 1000  # in the unit of the files
    lines = table(folder / "images.csv")
    assert np.mean([float(line["rmse"]) for line in lines]) == pytest.approx(metrics["rmse"]["value"])
    assert {path.name for path in folder.iterdir()} == {
        "results.json", "results.csv", "images.csv", "layers.png", "curve.png", "depths.png",
    }  # fmt: skip


def test_depths_that_a_saved_probe_predicts_have_the_metrics_of_the_probe_and_can_be_learned(
    made: Path, saved: Path, saved_depth: Path, tmp_path: Path
) -> None:
    result, errors = predict(saved_depth, made / "pictures", tmp_path), []
    assert f"24 depth maps predicted; written: {tmp_path}" in result.stdout
    for line in table(tmp_path / "depths.csv")[:N_TEST]:
        with Image.open(tmp_path / line["depth"]) as image:
            assert (image.mode, image.size, line["depth"][-4:]) == ("F", SIZE, ".tif")
            predicted = np.asarray(image)
        (file,) = (made / "depth" / "test").glob(f"{Path(line['path']).stem}.*")
        truth = (np.load(file) if file.suffix == ".npy" else np.asarray(Image.open(file))).astype(float)
        counted = (truth > 0) & ~np.isnan(predicted)
        assert not counted[:, 0].any()  # outside the crop
        errors.append(np.sqrt(((predicted - truth)[counted] ** 2).mean()))
    (probe,) = results(made / "depth probed")
    assert np.mean(errors) == pytest.approx(probe["metrics"]["rmse"]["value"], rel=1e-3)
    depth_probed(made, tmp_path / "again", depth=tmp_path / "depths.csv")
    assert "holds no predicted masks" in fails("predict", saved, made / "out", "-o", tmp_path)


def test_a_probe_with_wrong_bins_of_depth_is_refused(made: Path, saved: Path, tmp_path: Path) -> None:
    probe, bins = LinearProbe.load(saved), {"depths": [1.0, 2.0, 3.0], "weighting": "softmax", "largest": 3.0}
    for described in (
        *(bins | {"weighting": wrong} for wrong in ("other", [])),
        *(bins | {"largest": wrong} for wrong in (-1.0, 10**400)),
        *(bins | {"depths": wrong} for wrong in ([1.0], [1.0, 2.0, 1e300], [1.0, -2.0, 3.0], None)),
        None,
        [],
    ):
        replace(probe, about={**probe.about, "depth": described}).save(tmp_path / "wrong.safetensors")
        message = fails("predict", tmp_path / "wrong.safetensors", made / "out", "-o", tmp_path / "p")
        assert "expected the depths of 3 bins" in message, described


def test_depths_that_hardly_differ_can_be_saved_and_predicted(made: Path, tmp_path: Path) -> None:
    for path in (made / "masks").rglob("*.png"):
        mask = np.asarray(Image.open(path))
        target = tmp_path / "depth" / path.relative_to(made / "masks").with_suffix(".npy")
        save(target, 1e7 + np.where(mask == 255, 0, mask % 5))
    depth_probed(made, tmp_path / "res", "--save", tmp_path / "d.safetensors", depth=tmp_path / "depth")
    predict(tmp_path / "d.safetensors", made / "out", tmp_path / "p")


def test_larger_depths_are_left_out_and_wrong_files_refused(made: Path, saved_depth: Path, tmp_path: Path) -> None:
    depth_probed(made, tmp_path / "near", "--max-depth", 3000)
    near, every = (results(folder)[0]["metrics"]["rmse"] for folder in (tmp_path / "near", made / "depth probed"))
    assert near["value"] < every["value"]
    depth = shutil.copytree(made / "depth", tmp_path / "depth")
    save(depth / f"{FIRST}.png", np.ones((64, 40), np.uint16))
    message = fails("probe", made / "out", "-p", "depth", "--depth", depth)
    assert f"{FIRST}.png has 40 x 64 pixels" in message
