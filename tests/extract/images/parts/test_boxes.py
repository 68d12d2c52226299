"""Rows that are boxes: the pixels are those that Pillow crops, whatever file the boxes come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from extract import InputError, extract_features
from extract.extraction.settings import PartSettings
from extract.images import Images, list_images, listed_again, sources
from extract.images.decoding import decode
from extract.images.loading import _pieces
from extract.images.part_names import Window, file_of, fragment_of, part_of, window_name
from extract.images.plan_writing import write_plan
from extract.images.plans import PLAN_FILE
from extract.images.sources import BrokenListError
from extract.row_status import Status
from tests.conftest import make_picture
from tests.extract.images.making import TINY, as_tensor, batch_of, turned

WIDTH, HEIGHT = 60, 40
# Of a.png (x, y, w, h): inside, at the lower right corner, one pixel; of b/c.jpg, which is turned: one.
BOXES = {"a.png": [(10, 5, 30, 20), (40, 30, 20, 10), (59, 39, 1, 1)], "b/c.jpg": [(2, 3, 20, 30)]}


def _coco_of_ids(images: tuple[int, int], categories: tuple[int, int]) -> str:
    of_images = [{"id": id, "file_name": name} for id, name in zip(images, ("a.png", "b.png"), strict=True)]
    of_categories = [{"id": id, "name": name} for id, name in zip(categories, ("cat", "dog"), strict=True)]
    return json.dumps({"images": of_images, "categories": of_categories, "annotations": []})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "photos"
    (folder / "b").mkdir(parents=True)
    make_picture(0, WIDTH, HEIGHT).save(folder / "a.png")
    (folder / "b" / "c.jpg").write_bytes(turned(make_picture(1, HEIGHT, WIDTH), 6, quality=95))  # upright: 60 x 40
    make_picture(2, WIDTH, HEIGHT).save(folder / "without.png")
    return folder


def upright(photos: Path, file: str) -> Image.Image:
    picture = Image.open(photos / file)
    return (picture.transpose(Image.Transpose.ROTATE_270) if file.endswith(".jpg") else picture).convert("RGB")


def asked(boxes: Path, context: float = 0.0, shape: Any = "exact") -> PartSettings:
    return PartSettings(boxes=str(boxes), context=context, box_shape=shape)


def parts(photos: Path, boxes: Path, *keep: str, **how: Any) -> Images:
    return list_images(photos, keep=keep, parts=asked(boxes, **how))


def table(folder: Path, rows: str, header: str = "path,x,y,w,h") -> Path:
    file = folder / "boxes.csv"
    file.write_text(f"{header}\n{rows}\n")
    return file


def in_pixels(folder: Path) -> Path:
    rows = [f"{file},{x - 0.4},{y + 0.3},{w},{h}" for file, each in BOXES.items() for x, y, w, h in each]
    return table(folder, "\n".join(rows))


def in_fractions(folder: Path) -> Path:
    size = WIDTH, HEIGHT, WIDTH, HEIGHT
    rows = [
        ",".join([file, *(f"{side / full:.9f}" for side, full in zip(box, size, strict=True))])
        for file, each in BOXES.items()
        for box in each
    ]
    return table(folder, "\n".join(rows))


def of_coco(folder: Path) -> Path:
    images = [{"id": f"i{number}", "file_name": file} for number, file in enumerate(BOXES)]
    annotations = [
        {"image_id": f"i{number}", "bbox": list(box)} for number, each in enumerate(BOXES.values()) for box in each
    ]
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return folder / "coco.json"


def of_yolo(folder: Path) -> Path:
    for file, each in BOXES.items():
        label = (folder / "labels" / file).with_suffix(".txt")
        label.parent.mkdir(parents=True, exist_ok=True)
        centres = [((x + w / 2) / WIDTH, (y + h / 2) / HEIGHT, w / WIDTH, h / HEIGHT) for x, y, w, h in each]
        label.write_text("".join(f"1 {x:.9f} {y:.9f} {w:.9f} {h:.9f}\n" for x, y, w, h in centres))
    (folder / "labels" / "classes.txt").write_text("cat\ndog\n")
    return folder / "labels"


def of_voc(folder: Path) -> Path:
    for file, each in BOXES.items():
        described = (folder / "xml" / file).with_suffix(".xml")
        described.parent.mkdir(parents=True, exist_ok=True)
        objects = (
            f"<object><name>\n dog </name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax>"
            f"<ymax>{y + h}</ymax></bndbox></object>"
            for x, y, w, h in each
        )
        described.write_text(f"<annotation>{''.join(objects)}</annotation>")
    return folder / "xml"


@pytest.mark.parametrize("write", [in_pixels, in_fractions, of_coco, of_yolo, of_voc])
def test_boxes_of_each_format_are_the_crops_of_pillow(photos: Path, tmp_path: Path, write: Any) -> None:
    images = parts(photos, write(tmp_path))
    expected = {
        tuple(as_tensor(upright(photos, file).crop((x, y, x + w, y + h))).flatten().tolist())
        for file, each in BOXES.items()
        for x, y, w, h in each
    }
    batch = batch_of(images, list(range(len(images))))
    assert (batch.status == Status.OK).all()
    assert [file_of(path) for path in images.paths] == ["a.png"] * 3 + ["b/c.jpg"]
    assert {tuple(image.flatten().tolist()) for image in batch.images} == expected
    if write in (of_yolo, of_voc):
        assert [images.classes[label] for label in images.labels] == ["dog"] * 4
    if write is not in_fractions and write is not of_yolo:
        sides = np.stack([images.columns[name] for name in "xywh"], 1)
        assert sides.dtype == np.int64
        assert {*map(tuple, sides.tolist())} == {box for each in BOXES.values() for box in each}


@pytest.mark.parametrize(
    ("box", "context", "shape", "crop"),
    [
        ((10, 10, 20, 10), 0.1, "exact", (8, 9, 32, 21)),
        ((10, 10, 20, 10), 0.0, "square", (10, 5, 30, 25)),
        ((10, 0, 20, 10), 0.0, "square", (10, 0, 30, 20)),  # moved down, into the picture
        ((45, 35, 15, 5), 0.2, "square", (39, 19, 60, 40)),  # 21 x 7, moved to the left and up
        ((0, 10, 60, 10), 0.0, "square", (0, 0, 60, 40)),  # as high as the picture
        ((50, 30, 20, 20), 0.0, "exact", (50, 30, 60, 40)),  # over the border
    ],
)
def test_context_and_shape(photos: Path, tmp_path: Path, box: Any, context: float, shape: str, crop: Any) -> None:
    images = parts(photos, table(tmp_path, ",".join(map(str, ("a.png", *box)))), context=context, shape=shape)
    batch = batch_of(images, [0])
    assert torch.equal(batch.images[0], as_tensor(upright(photos, "a.png").crop(crop)))
    assert (0 in batch.notes) == (box[0] + box[2] > WIDTH)


def test_rows_without_pixels_fail_alone(photos: Path, tmp_path: Path) -> None:
    rows = [
        "a.png,0,0,5,5",
        "a.png,10,10,0,5",
        "a.png,-9,3,5,5",
        "a.png,70,3,5,5",
        "a.png,-3,3,5,5",
        "gone.png,1,1,5,5",
    ]
    images = parts(photos, table(tmp_path, "\n".join(rows)))
    batch = batch_of(images, list(range(6)))
    found = {images.paths[row]: batch.reasons.get(row, "") for row in range(6)}
    outside = "the box 70,3,5,5 lies outside the picture of 60 x 40 pixels"
    assert found == {
        "a.png#xywh=0,0,5,5": "", "a.png#xywh=0,3,2,5": "", "a.png#xywh=0,3,0,5": "the box 0,3,0,5 has no area",
        "a.png#xywh=10,10,0,5": "the box 10,10,0,5 has no area", "a.png#xywh=70,3,5,5": outside,
        "gone.png#xywh=1,1,5,5": "no such file",
    }  # fmt: skip
    assert [note.partition(":")[0] for note in images.notes] == [
        f"pictures of {tmp_path / 'boxes.csv'} that are not there, whose rows fail", "images without a box",
        "boxes that begin left of or above their picture, of which the part inside is used",
    ]  # fmt: skip
    assert images.notes[-1].endswith(": 2, the first is a.png#xywh=0,3,0,5")


def test_a_box_of_a_missing_picture_never_shows_another(photos: Path, tmp_path: Path) -> None:
    images = parts(photos, table(tmp_path, "a.png,0,0,5,5\ngone.png,0,0,5,5"))
    assert images.paths[1] == "gone.png#xywh=0,0,5,5"
    assert images.source.local_path(1) is None
    with pytest.raises(FileNotFoundError):
        images.source.read(1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.csv", "path,x,y,w\na.png,1,2,3\n", "no column 'h'"),
        ("b.csv", "path,x,y,w,h\na.png,1,2,3,far\n", "line 2: expected four numbers for x, y, w and h"),
        ("b.csv", "path,x,y,w,h\na.png,1,2,3,nan\n", "line 2: expected four numbers"),
        ("b.csv", "path,x,y,w,h\na.png,1,2,30,40\na.png,0.1,0.2,0.5,0.5\n", "line 3: 0.1,0.2,0.5,0.5 looks like frac"),
        ("b.csv", "path,x,y,w,h\nc.png,1,2,3,4\n", "none of its 1 pictures is in"),
        ("b.csv", "path,x,y,w,h\n", "no parts of its images"),
        ("b.json", '{"images": [], "annotations": [{"image_id": 3, "bbox": [1, 2, 3, 4]}]}', "no image has the id 3"),
        ("b.json", '{"annotations": []}', "images"),
        ("d/a.txt", "0 0.5 0.5 20 0.1\n", "line 1: 0.5 0.5 20 0.1; expected fractions"),
        ("d/a.txt", "0 0.5 0.5 0.1\n", "line 1 has 4 values; expected class, x, y, width and height"),
        ("d/a.xml", "<annotation><object><name>x</name></object></annotation>", "object 0: expected a bndbox"),
        ("d/a.xml", "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>&b;</annotation>", "it declares entities"),
        ("d/a.md", "", "no .txt or .xml file; expected those of YOLO (.txt) or of Pascal VOC (.xml)"),
        (
            "b.csv",
            "path,x,y,w,h\na.png,1e12,2,3,4\n",
            "line 2: expected four numbers for x, y, w and h, below 1,000,000,000",
        ),
        ("b.json", _coco_of_ids((1, 1), (1, 2)), "the images 'a.png' and 'b.png' have the same id 1"),
        ("b.json", _coco_of_ids((1, 2), (1, 1)), "the categories 'cat' and 'dog' have the same id 1"),
        (
            "b.json",
            '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "bbox": [0, 0.5, 1, 0.5]}]}',
            "its boxes look like fractions of pictures; those of COCO are in pixels",
        ),
        ("d/a.txt", b"0 0.5 0.5 0.1 0.1\xe9", "a.txt is not a file of text in UTF-8"),
        ("b.pdf", "", "expected a table, a .json file of COCO, or a folder of YOLO or Pascal VOC files"),
    ],
)
def test_wrong_boxes_are_refused_by_place(photos: Path, tmp_path: Path, name: str, content: Any, message: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        parts(photos, file.parent if file.parent.name == "d" else file)
    assert message in str(caught.value)


def test_a_missing_picture_is_not_read_from_another_file(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extract.images.part_source.is_read_in_regions", lambda path: True)  # as for slides
    images = parts(photos, table(tmp_path, "a.png,0,0,5,5\ngone.png,0,0,5,5"))
    assert batch_of(images, [1]).reasons == {1: "no such file"}


def test_a_name_without_suffix_is_that_of_one_picture(tmp_path: Path) -> None:
    make_picture(0, WIDTH, HEIGHT).save(tmp_path / "a.png")
    make_picture(1, WIDTH, HEIGHT).save(tmp_path / "a.jpg")
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "a.txt").write_text("0 0.5 0.5 0.1 0.1")
    with pytest.raises(InputError, match="a is the name of several images"):
        parts(tmp_path, labels)


def test_yolo_files_of_windows_have_their_classes(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf0 0.5 0.5 0.1 0.1\r\n")
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfcat \r\ndog\r\n")
    assert parts(photos, tmp_path).classes == ["cat"]
    (tmp_path / "a.txt").write_text("2 0.5 0.5 0.1 0.1")
    with pytest.raises(InputError, match="line 1: no class has the number 2"):
        parts(photos, tmp_path)


@pytest.mark.parametrize("row", ["a.png,0,0,1,1", "a.png,-0.0,0,1.0,1"])
def test_numbers_up_to_one_are_fractions(photos: Path, tmp_path: Path, row: str) -> None:
    batch = batch_of(parts(photos, table(tmp_path, row + "\na.png,0,-0.0,.5,.5")), [0, 1])
    half = upright(photos, "a.png").crop((0, 0, WIDTH // 2, HEIGHT // 2))
    expected = [as_tensor(upright(photos, "a.png")), as_tensor(half)]
    assert torch.equal(batch.images, torch.stack(expected))


def test_fractions_that_begin_outside_are_told_but_not_their_rounding(photos: Path, tmp_path: Path) -> None:
    images = parts(photos, table(tmp_path, "a.png,-0.00001,0,1,1\na.png,0,-0.1,1,1"))
    assert images.notes[-1].endswith(" is used: 1, the first is a.png#xywh=percent:0,0,100,90")


def test_a_picture_is_decoded_once_for_its_boxes(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(sources, "decode", lambda *how: (decoded.append(1), decode(*how))[1])
    images = parts(photos, table(tmp_path, "\n".join(f"a.png,{x},1,9,9" for x in range(20))))
    batch = batch_of(images, list(range(20)))
    assert len(batch.images) == 20
    assert len(decoded) == 1
    assert [*_pieces(list(range(20)), 4, images.source)] == [(0, 20)], "one worker has the boxes of a picture"


def test_names_say_what_a_row_is() -> None:
    window = Window(1.25, 2, 30, 40.5, percent=True, level=2, context=0.1, square=True)
    name = window_name("a#1/b.jpg", window)
    assert name == "a#1/b.jpg#xywh=percent:1.25,2,30,40.5&level=2&context=0.1&shape=square"
    found = part_of(name)
    assert found is not None
    assert found.window == window
    assert file_of(name) == "a#1/b.jpg"
    others = ("a.jpg", "a#b.jpg", "#xywh=1,2,3,4", "a.jpg#xywh=1,2,3", "a.jpg#xywh=-1,2,3,4", "a.jpg#t=12")
    assert [fragment_of(other) for other in others] == [""] * len(others)
    frame = part_of("a.mp4#t=01:00:12.040000")
    assert frame is not None
    assert frame.seconds == 3612.04


def test_a_list_may_name_parts_and_a_plan_too(photos: Path, tmp_path: Path) -> None:
    names = ["a.png#xywh=10,5,30,20", "b/c.jpg#xywh=2,3,20,30", "without.png"]
    (photos / "list.csv").write_text("path\n" + "\n".join(f'"{name}"' for name in names) + "\n")
    listed = list_images(photos / "list.csv")
    planned = write_plan(photos / "list.csv", tmp_path / "plan")
    again = listed_again(str(photos), names)
    expected = batch_of(listed, [0, 1, 2])
    crop = as_tensor(upright(photos, "a.png").crop((10, 5, 40, 25)))
    assert torch.equal(expected.images[0], crop)
    assert list(planned.paths) == names == list(listed.paths)
    for images in (planned, again):
        batch = batch_of(images, [0, 1, 2])
        assert torch.equal(batch.images, expected.images)
        assert (batch.source_hash == expected.source_hash).all()


def test_a_plan_of_parts_that_is_gone_ends_a_run_in_one_line(photos: Path, tmp_path: Path) -> None:
    (photos / "gone.csv").write_text('path\n"a.png#xywh=10,5,30,20"\nwithout.png\n')
    planned = write_plan(photos / "gone.csv", tmp_path / "plan")
    (tmp_path / "plan" / PLAN_FILE).unlink()
    with pytest.raises(BrokenListError, match="cannot be read"):
        batch_of(planned, [0])


def test_a_data_set_of_boxes(photos: Path, tmp_path: Path) -> None:
    """Labels, ids, kept columns and rows that are alike, as h5py reads them; a second run computes nothing."""
    rows = ["a.png,1,2,9,9,cat,i1,7", "a.png,1,2,9,9,dog,i2,8", "b/c.jpg,1,2,9,9,cat,i3,9"]
    boxes = table(tmp_path, "\n".join(rows), "path,x,y,w,h,label,id,who")
    how: dict[str, Any] = TINY | {"boxes": boxes, "keep": "who", "out": tmp_path / "out", "progress": False}
    with pytest.warns(UserWarning, match="images without a box: 1"):
        reader = extract_features(photos, **how)
    with h5py.File(tmp_path / "out" / "shards" / "000000.h5") as file:
        assert [path.decode() for path in file["path"]] == [
            "a.png#xywh=1,2,9,9&shape=square", "a.png#xywh=1,2,9,9&shape=square&n=2",
            "b/c.jpg#xywh=1,2,9,9&shape=square",
        ]  # fmt: skip
        assert [file["classes"][label].decode() for label in file["label"]] == ["cat", "dog", "cat"]
        assert file["id"][:].tolist() == [b"i1", b"i2", b"i3"]
        assert file["columns/who"][:].tolist() == [b"7", b"8", b"9"]
        assert file["columns/x"][:].tolist() == [1, 1, 1]
        values = file["features"][reader.layers[0]][:]
    assert (values[0] == values[1]).all()
    assert not (values[0] == values[2]).all()
    before = (tmp_path / "out" / "shards" / "000000.h5").stat().st_mtime_ns
    with pytest.warns(UserWarning, match="without a box"):
        extract_features(photos, **how)
    assert (tmp_path / "out" / "shards" / "000000.h5").stat().st_mtime_ns == before


def test_columns_of_the_boxes_of_pictures_in_memory_are_kept(tmp_path: Path) -> None:
    boxes = table(tmp_path, "0,1,2,5,5,3", "path,x,y,w,h,area")
    pictures = [make_picture(0, WIDTH, HEIGHT)]
    reader = extract_features(pictures, boxes=boxes, keep="area", out=tmp_path / "out", **TINY)
    assert list(reader.columns["area"]) == ["3"]


def test_a_missing_file_of_boxes_is_named(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"boxes .*gone.json: no such file"):
        parts(photos, tmp_path / "gone.json")
