"""Labels of the items of datasets of PyTorch and torchvision: the label of row i is `dataset[i][1]`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torchvision.datasets import DatasetFolder, ImageFolder

from extract import InputError
from extract.images.datasets import list_dataset
from extract.images.image_list import Images

CLASSES = ["airplane", "bird", "cat", "dog"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four folders of three pictures."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        file = folder / CLASSES[number // 3] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(file)
    return folder


def numbers_of(dataset: Any) -> list[Any]:
    return [None if dataset[row][1] is None else int(dataset[row][1]) for row in range(len(dataset))]


def check(dataset: Any, names: list[str] | None = None) -> Images:
    """Compare the listing with the items; `names`: of the classes, None if they must be the numbers themselves."""
    right, listed = numbers_of(dataset), list_dataset(dataset)
    if names is None:
        assert [int(listed.classes[label]) if label >= 0 else None for label in listed.labels] == right
    else:
        assert listed.labels.tolist() == right
        assert listed.classes == names
    return listed


class Changed(ImageFolder):
    """A folder whose items have other labels than its `targets`."""

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        picture, label = super().__getitem__(row)
        return picture, 3 - label


class Halved(Subset[Any]):
    """A subset with its own items."""

    def __getitem__(self, row: Any) -> Any:
        picture, label = super().__getitem__(row)
        return picture, label // 2

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Wrapped(Dataset[Any]):
    """A dataset with the attributes of another one, and other labels."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":
            raise AttributeError
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        picture, label = self._dataset[row]
        return picture, torch.tensor(label + 1)


def edited(root: Path) -> ImageFolder:
    dataset = ImageFolder(str(root))
    dataset.samples = [(path, (label + 1) % 4) for path, label in dataset.samples]
    return dataset


def renumbered(root: Path) -> ImageFolder:
    """Birds and dogs alone, as classes 0 and 1; the dataset still has four names."""
    dataset = ImageFolder(str(root))
    dataset.samples = [(path, {1: 0, 3: 1}[label]) for path, label in dataset.samples if label in (1, 3)]
    return dataset


def with_targets(root: Path) -> ImageFolder:
    """`targets` do not change the items of a folder."""
    dataset = ImageFolder(str(root))
    dataset.targets = [3] * 12
    return dataset


SAME: dict[str, Callable[[Path], Any]] = {
    "folder": lambda root: ImageFolder(str(root)),
    "same numbers": lambda root: ImageFolder(str(root), target_transform=int),
    "a picture transform": lambda root: ImageFolder(str(root), transform=lambda picture: picture.rotate(90)),
}
OTHER: dict[str, Callable[[Path], Any]] = {
    "gaps": lambda root: ImageFolder(str(root), target_transform={0: 0, 1: 2, 2: 5, 3: 7}.get),
    "coarse": lambda root: ImageFolder(str(root), target_transform=lambda label: int(label > 0)),
    "reversed": lambda root: ImageFolder(str(root), target_transform=lambda label: 3 - label),
    "unlabelled": lambda root: ImageFolder(str(root), target_transform={0: 0, 1: None, 2: 5, 3: 7}.get),
    "edited": edited,
    "renumbered": renumbered,
    "replaced targets": with_targets,
    "own items": lambda root: Changed(str(root)),
    "wrapped": lambda root: Wrapped(ImageFolder(str(root))),
}


@pytest.mark.parametrize("kind", SAME | OTHER)
def test_names_of_classes_are_kept_only_where_items_have_the_numbers_of_the_dataset(photos: Path, kind: str) -> None:
    dataset, names = (SAME | OTHER)[kind](photos), CLASSES if kind in SAME else None
    notes = check(dataset, names).notes
    assert any("class names are not stored" in note for note in notes) == (kind in OTHER)
    check(Subset(dataset, [5, 2, -1]), names)


@st.composite
def nestings(draw: st.DrawFn, depth: int = 3) -> Callable[[Path], Any]:
    kind = draw(st.sampled_from(["leaf", "subset", "concat", "split", "halved"] if depth else ["leaf"]))
    if kind == "leaf":
        return (SAME | OTHER)[draw(st.sampled_from(sorted(SAME | OTHER)))]
    inner = [draw(nestings(depth=depth - 1)) for _ in range(draw(st.integers(1, 3)) if kind == "concat" else 1)]
    seed = draw(st.integers(0, 99))

    def made(root: Path) -> Any:
        parts: list[Any] = [each(root) for each in inner]
        if kind == "concat":
            return ConcatDataset(parts)
        size, random = len(parts[0]), np.random.default_rng(seed)
        if kind == "split":
            return random_split(parts[0], [size // 2, size - size // 2], torch.Generator().manual_seed(seed))[1]
        rows: Any = random.integers(-size, size, random.integers(1, 8))
        rows = [rows, rows.tolist(), torch.from_numpy(rows)][seed % 3]
        # Labels of other kinds are not halved.
        numbers = all(isinstance(parts[0][int(row)][1], int) for row in rows)
        return (Halved if kind == "halved" and numbers else Subset)(parts[0], rows)

    return made


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(make=nestings())
def test_labels_of_any_nesting_are_those_of_the_items(photos: Path, make: Callable[[Path], Any]) -> None:
    dataset, before = make(photos), make(photos)
    right, listed = numbers_of(dataset), list_dataset(dataset)
    assert numbers_of(dataset) == right == numbers_of(before), "the dataset was changed"
    labels = listed.labels.tolist()
    if listed.classes == CLASSES:
        assert [label if label >= 0 else None for label in labels] == right
        for row, label in enumerate(labels):  # red is 20 times the number of the picture, three of each class
            assert label in (-1, dataset[row][0].getpixel((4, 4))[0] // 60)
    else:
        assert [int(listed.classes[label]) if label >= 0 else None for label in labels] == right


def test_a_concatenation_keeps_names_that_its_parts_share(photos: Path, tmp_path: Path) -> None:
    check(ConcatDataset([SAME["folder"](photos), Subset(SAME["same numbers"](photos), [9, 3])]), CLASSES)
    for name in ("bird", "crane"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    listed = check(ConcatDataset([SAME["folder"](photos), ImageFolder(str(tmp_path))]))
    assert "parts of the dataset have different names" in listed.notes[0]
    pictures = [Image.new("RGB", (8, 8))] * 2  # without labels, so without other names
    listed = list_dataset(ConcatDataset([SAME["folder"](photos), pictures]))  # type: ignore[list-item]
    assert (listed.classes, listed.labels[-3:].tolist()) == (CLASSES, [3, -1, -1])


def test_the_pictures_of_torchvisions_own_items_are_not_read_for_labels(photos: Path) -> None:
    opened = []

    def load(path: str) -> Image.Image:
        opened.append(path)
        return Image.open(path).convert("RGB")

    def calls(label: int) -> int:
        asked.append(label)
        return label

    asked: list[int] = []
    dataset = ImageFolder(str(photos), loader=load, target_transform=calls)
    before = dict(vars(dataset))
    assert list_dataset(dataset).labels.tolist() == dataset.targets
    assert len(opened) == 1  # the first, to see whether it is a picture
    assert asked == [0, *dataset.targets]
    assert vars(dataset) == before
    assert dataset.loader is load


def test_code_that_was_put_in_place_of_torchvisions_is_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = DatasetFolder.__getitem__

    @functools.wraps(read)
    def by_brightness(dataset: DatasetFolder, row: int) -> tuple[Any, Any]:
        picture, _ = read(dataset, row)
        return picture, int(picture.getpixel((0, 0))[0] > 100)

    monkeypatch.setattr(DatasetFolder, "__getitem__", by_brightness)
    assert check(ImageFolder(str(photos))).classes == ["0", "1"]


def test_attributes_that_raise_are_no_attributes(photos: Path) -> None:
    class Lazy(Wrapped):
        @property
        def classes(self) -> Any:
            raise RuntimeError("the index is not open")

        targets = classes

    check(Lazy(ImageFolder(str(photos))))


def test_pairs_of_picture_and_label_of_torchvisions_second_transforms(photos: Path) -> None:
    wrapped = torchvision.datasets.wrap_dataset_for_transforms_v2(ImageFolder(str(photos)))
    check(wrapped, CLASSES)
    wrapped.transforms = lambda picture, label: (picture, 3 - label)
    check(wrapped)


def fill(kind: str, photos: Path, **attributes: Any) -> Any:
    """Return a dataset of torchvision as if its files had been downloaded."""
    dataset: Any = object.__new__(getattr(torchvision.datasets, kind))
    torchvision.datasets.VisionDataset.__init__(dataset, str(photos), target_transform=attributes.pop("change", None))
    files = [str(file) for file in sorted(photos.rglob("*.png"))]
    vars(dataset).update({"loader": lambda path: Image.open(path).convert("RGB"), "classes": CLASSES})
    for name, value in attributes.items():
        setattr(dataset, name, [(file, label) for file, label in zip(files, value, strict=True)]
                if name in ("_samples", "imgs") else value)  # fmt: skip
    dataset._image_files = files
    return dataset


LABELS = [0, 3, 2, 1] * 3
PIXELS = np.zeros((12, 8, 8, 3), np.uint8)
TORCHVISION: dict[str, dict[str, Any]] = {
    "CIFAR10": {"data": PIXELS, "targets": LABELS},
    "SVHN": {"data": PIXELS.transpose(0, 3, 1, 2), "labels": np.array(LABELS)},
    "USPS": {"data": PIXELS[..., 0], "targets": LABELS},
    "Flowers102": {"_labels": LABELS},
    "GTSRB": {"_samples": LABELS},
    "Places365": {"imgs": LABELS, "targets": LABELS},
}


@pytest.mark.parametrize("kind", TORCHVISION)
def test_other_datasets_of_torchvision(photos: Path, kind: str) -> None:
    check(fill(kind, photos, **TORCHVISION[kind]), CLASSES)
    check(fill(kind, photos, **TORCHVISION[kind], change={0: 3, 1: 3, 2: 0, 3: 1}.get))
    joint = fill(kind, photos, **TORCHVISION[kind])
    joint.transforms = lambda picture, label: (picture.rotate(90), 3 - label)  # of both; only some use it
    check(joint, None if kind == "Places365" else CLASSES)


def test_a_picture_that_cannot_be_read_has_its_label_if_it_is_known(photos: Path, tmp_path: Path) -> None:
    for name in ("a/0", "a/1", "b/2", "b/3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    for broken in ("a/0.png", "b/3.png"):
        (tmp_path / broken).write_bytes(b"no picture")
    listed = list_dataset(ImageFolder(str(tmp_path)))
    assert (listed.labels.tolist(), listed.classes) == ([0, 0, 1, 1], ["a", "b"])
    listed = list_dataset(Changed(str(tmp_path)))
    assert [int(listed.classes[label]) for label in listed.labels[1:3]] == [3, 2]
    assert listed.labels.tolist()[::3] == [-1, -1]

    def only_a(label: int) -> int:
        return {0: 0}[label]

    listed = list_dataset(ImageFolder(str(tmp_path), target_transform=only_a))
    assert (listed.labels.tolist(), listed.classes) == ([0, 0, -1, -1], ["a", "b"])
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match="no item of the ImageFolder can be read; the first raises UnidentifiedImage"):
        list_dataset(ImageFolder(str(tmp_path)))


def test_pictures_without_labels_have_those_that_the_dataset_states() -> None:
    class Pictures(list[Any]):
        targets, classes = np.array([1, 0, 1]), ["x", "y"]

    listed = list_dataset(Pictures([Image.new("RGB", (8, 8))] * 3))
    assert (listed.labels.tolist(), listed.classes) == ([1, 0, 1], ["x", "y"])
    listed = list_dataset(Pictures([Image.new("RGB", (8, 8))] * 2))  # not of these items
    assert (listed.labels.tolist(), listed.classes) == ([-1, -1], [])
