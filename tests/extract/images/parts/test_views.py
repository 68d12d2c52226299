"""Views: the crops of torchvision's FiveCrop and TenCrop, of each image resized once; mirror images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2 as transforms

from extract import InputError, extract_features
from extract.backbones.preprocessing import Preprocessing
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, list_images, load_batches
from tests.conftest import make_picture
from tests.extract.images.making import TINY

PREPROCESSING = Preprocessing(48, (33, 40), "bicubic", (0.5,) * 3, (0.5,) * 3)
CROPS: dict[str, Any] = {"five": transforms.FiveCrop, "ten": transforms.TenCrop}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        make_picture(number, 90 + 31 * number, 80).save(folder / f"{number}.jpg")
    return folder


def views(photos: Path, kind: str, how: Preprocessing) -> torch.Tensor:
    images = list_images(photos, parts=ExtractionSettings(views=kind))
    rows = [list(range(start, min(start + 7, len(images)))) for start in range(0, len(images), 7)]
    batches = list(load_batches(images, rows, Decoding.for_preprocessing(how, 10**6)))
    assert not any(batch.reasons for batch in batches)
    return torch.cat([batch.images for batch in batches])


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", ["five", "ten"])
def test_views_are_the_crops_of_torchvision_of_a_picture_that_is_resized_once(
    kind: str, fast: bool, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized, resize = [], Preprocessing._resized
    monkeypatch.setattr(Preprocessing, "_resized", lambda self, *args: resized.append(1) or resize(self, *args))
    found = views(photos, kind, replace(PREPROCESSING, fast=fast))
    assert len(resized) == 3
    expected: list[np.ndarray] = []
    cut = transforms.Compose(
        [transforms.Resize(48, transforms.InterpolationMode.BICUBIC, antialias=True), CROPS[kind]((33, 40))]
    )
    for path in sorted(photos.iterdir()):
        picture = Image.open(path)
        if fast:
            expected += [crop.movedim(0, 2).numpy() for crop in cut(transforms.PILToTensor()(picture))]
        else:
            expected += map(np.array, cut(picture))
    assert np.array_equal(found, np.stack(expected))


def test_flips_are_the_picture_and_its_mirror_image_also_for_a_transform_of_a_library(photos: Path) -> None:
    pictures = [Image.open(path) for path in sorted(photos.iterdir())]
    both = [each for picture in pictures for each in (picture, ImageOps.mirror(picture))]
    library = transforms.Compose(
        [transforms.Resize((9, 9)), transforms.PILToTensor(), transforms.ToDtype(torch.float32)]
    )
    own = replace(PREPROCESSING, library_transform=library)
    for how in (PREPROCESSING, own):
        assert torch.equal(views(photos, "flips", how), torch.stack([how.cpu_transform(each) for each in both]))
    with pytest.raises(InputError, match="views ten are crops of the resized picture, .* use --views flips"):
        own.cpu_transform(pictures[0], ("ten", 3))


def test_rows_are_named_by_file_and_view_on_a_gpu_too(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "3.jpg").write_bytes(b"damaged")
    options = TINY | {"preprocessing": {"size": 80, "crop": 64}}
    found = extract_features(photos, out=tmp_path / "out", views="five", **options)
    assert found.paths == [f"{file}.jpg#view=five,{number}" for file in range(4) for number in range(5)]
    assert [row for row, *_ in found.failures] == [15, 16, 17, 18, 19]
    values = found["embedding"][:15]
    assert len(np.unique(values, axis=0)) == 15
    # A GPU decodes JPEG files whole, so that it must not take those of views. This CPU stands in for it.
    monkeypatch.setattr(Preprocessing, "on_gpu", lambda self, device: replace(self, device="cpu"))
    by_gpu = extract_features(photos, out=tmp_path / "gpu", views="five", decode="gpu", **options)
    assert np.array_equal(by_gpu["embedding"][:15], values)


def test_kinds_of_parts_exclude_each_other(photos: Path) -> None:
    with pytest.raises(InputError, match="tiles and views exclude each other: a row is one kind of part"):
        list_images(photos, parts=ExtractionSettings(views="ten", tiles=20))
    listed = photos / "list.csv"
    listed.write_text('path\n"0.jpg#xywh=0,0,9,9"\n')
    with pytest.raises(InputError, match="its rows are parts of images already; leave out --views"):
        list_images(listed, parts=ExtractionSettings(views="ten"))


def test_a_transform_that_changes_its_picture_does_not_change_the_next_view(tmp_path: Path) -> None:
    picture = make_picture(0, 90, 80)
    picture.save(tmp_path / "a.png")

    def smaller(picture: Image.Image) -> torch.Tensor:
        picture.thumbnail((8, 8))
        return torch.from_numpy(np.array(picture.resize((4, 4)))).movedim(2, 0).float()

    how = Preprocessing((4, 4), (4, 4), "", (0.0,) * 3, (1.0,) * 3, smaller, "smaller")
    expected = [smaller(picture.copy()), smaller(ImageOps.mirror(picture))]
    assert torch.equal(views(tmp_path, "flips", how), torch.stack(expected))
