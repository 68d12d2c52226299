from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extract.errors import InputError
from extract.images import list_images
from extract.images.decoding import decode
from extract.images.plan_writing import write_plan
from extract.row_status import Status
from tests.conftest import make_picture
from tests.extract.images.making import batch_of, encoded, touch

# Listing


def test_the_order_is_that_of_the_bytes_of_the_path(tmp_path: Path) -> None:
    names = ["b/1.jpg", "a-b/2.jpg", "a/3.JPG", "Z/4.png", "ä/5.png", "a/10.jpg", "a/b/1.jpg", "0.webp"]
    touch(tmp_path, *names)
    assert list_images(tmp_path).paths == sorted(names, key=lambda name: name.encode())


def test_hidden_files_and_litter_are_left_out_and_other_files_counted(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", ".b.jpg", ".git/c.jpg", "Thumbs.db", "notes.txt", "more.txt", "README")
    found = list_images(tmp_path)
    assert found.paths == ["a.jpg"]
    assert found.left_out == {".txt": 2, "no suffix": 1}


@pytest.mark.parametrize(
    "expected",
    [
        {"bus/1.jpg": ("", "bus"), "bus/deep/2.jpg": ("", "bus"), "ant/3.jpg": ("", "ant"), "loose.jpg": ("", "")},
        {"train/a/1.jpg": ("train", "a"), "Validation/a/2.jpg": ("val", "a"), "test/b/3.jpg": ("test", "b"),
         "test/4.jpg": ("test", ""), "5.jpg": ("", "")},
        {"airplane/1.jpg": ("", "airplane"), "train/2.jpg": ("", "train"), "train/express/3.jpg": ("", "train")},
    ],
    ids=["classes", "splits above classes", "a class called train"],
)  # fmt: skip
def test_folders_are_classes_and_splits_in_lists_and_plans(
    tmp_path: Path, expected: dict[str, tuple[str, str]]
) -> None:
    root = touch(tmp_path / "images", *expected)
    names = sorted({name for _, name in expected.values() if name})
    for images in (list_images(root), write_plan(root, tmp_path / "plan")):
        found = images.slice(0, len(images))
        classes = [found.classes[label] if label >= 0 else "" for label in found.labels]
        assert found.classes == names
        assert dict(zip(found.paths, zip(found.splits, classes, strict=True), strict=True)) == expected


def test_links_are_followed_without_going_round(tmp_path: Path) -> None:
    root, other = tmp_path / "root", touch(tmp_path / "other", "1.jpg")
    touch(root, "a/2.jpg")
    (root / "a" / "loop").symlink_to(root)
    (root / "twice").symlink_to(other)
    (root / "gone.jpg").symlink_to(tmp_path / "nothing")
    assert list_images(root).paths == ["a/2.jpg", "gone.jpg", "twice/1.jpg"]


def test_a_link_to_itself_a_pipe_and_what_became_a_folder_are_rows_that_failed(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "folder.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe.jpg")
    found = list_images(tmp_path)
    assert found.paths == ["a.jpg", "folder.jpg", "loop.jpg", "pipe.jpg"]
    (tmp_path / "folder.jpg").unlink()
    (tmp_path / "folder.jpg").mkdir()
    batch = batch_of(found, [0, 1, 2, 3])
    assert batch.status.tolist() == [Status.DECODE_ERROR] * 4
    assert batch.reasons == {
        0: "not an image in a known format", 1: "Is a directory", 2: "Too many levels of symbolic links",
        3: "not a file",
    }  # fmt: skip


def test_a_limit_does_not_change_what_a_folder_means(tmp_path: Path) -> None:
    found = list_images(touch(tmp_path, "test/1.jpg", "zebra/2.jpg"), limit=1)
    assert (found.paths, found.classes, found.splits) == (["test/1.jpg"], ["test", "zebra"], [""])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("empty", "no images; the folder is empty"),
        ("texts", r"none of its 3 files is an image \(.txt 2, .csv 1\)"),
        ("nothing", "no such folder"),
        ("a.doc", "not an image, folder"),
    ],
)
def test_what_holds_no_images_is_an_error(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    touch(tmp_path, "a.doc", "texts/a.txt", "texts/b.txt", "texts/c.csv")
    with pytest.raises(InputError, match=message):
        list_images(tmp_path / place)


def test_an_image_is_a_folder_of_one(tmp_path: Path) -> None:
    images = list_images(touch(tmp_path, "b/a.jpg", "b/c.jpg") / "b" / "a.jpg")
    assert (images.root, images.paths, images.labels.tolist()) == (str(tmp_path.resolve() / "b"), ["a.jpg"], [-1])


# Decoding


def test_an_orientation_that_cannot_be_read_asks_for_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for damaged in (b"Exif\0\0garbage", exif.tobytes().replace(b"\x00\x03", b"\x00\x02", 1), exif.tobytes()[:-6]):
        assert np.array_equal(decode(encoded(make_picture(3), "PNG", exif=damaged)), make_picture(3)), damaged


# Loading


def test_a_batch_tells_size_time_and_hash_of_the_files(folder: Path) -> None:
    import xxhash

    found = list_images(folder)
    batch = batch_of(found, [2, 5])
    for i, row in enumerate((2, 5)):
        path = folder / found.paths[row]
        assert batch.source_size[i] == path.stat().st_size
        assert batch.source_mtime_ns[i] == path.stat().st_mtime_ns
        assert batch.source_hash[i].tobytes().hex() == xxhash.xxh3_128(path.read_bytes()).hexdigest()
