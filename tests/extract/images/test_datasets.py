"""Images of a program: datasets of torchvision and of Hugging Face, sequences of pictures, and lists of paths."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from torchvision import datasets as torchvision_datasets
from torchvision.transforms import v2

from extract import FeatureReader, InputError, extract_features
from extract.compute.backbone import Backbone
from extract.images import list_images, listed_again
from extract.images.datasets import list_dataset
from extract.images.plan_writing import write_plan
from extract.store.format.dataset import DataSet
from tests.extract.images.making import batch_of, files_of

QUICK: dict[str, Any] = {"workers": 0, "batch_size": 4, "compile": "off", "progress": False}


@pytest.fixture(scope="module")
def from_folder(_twelve: Path, tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> FeatureReader:
    """What a run over the same folder gives."""
    return extract_features(_twelve, out=tmp_path_factory.mktemp("datasets") / "folder", backbone=backbone, **QUICK)


def pictures_of(folder: Path) -> list[Image.Image]:
    return [Image.open(folder / name).convert("RGB") for name in files_of(folder)]


class Pairs(Dataset[Any]):
    """A map-style dataset without anything but items."""

    def __init__(self, folder: Path, labels: list[Any]):
        self.folder, self.names, self.values, self.reads = folder, [*files_of(folder)], labels, 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> tuple[Image.Image, Any]:
        self.reads += 1
        return Image.open(self.folder / self.names[row]).convert("RGB"), self.values[row]


def test_a_folder_of_torchvision(folder: Path, tmp_path: Path, backbone: Backbone, from_folder: FeatureReader) -> None:
    dataset = torchvision_datasets.ImageFolder(str(folder))
    assert [Path(path).relative_to(folder).as_posix() for path, _ in dataset.samples] == from_folder.paths[:]
    with extract_features(dataset, out=tmp_path / "out", backbone=backbone, **QUICK | {"workers": 1}) as reader:
        np.testing.assert_array_equal(reader["embedding"][:], from_folder["embedding"][:])
        np.testing.assert_array_equal(reader.labels, from_folder.labels)
        assert reader.classes == from_folder.classes
        assert reader.paths[:2] == ["00", "01"]
        assert reader.fingerprint == from_folder.fingerprint


@pytest.mark.parametrize(
    "convert",
    [
        lambda picture: picture, np.asarray, v2.functional.pil_to_tensor,
        lambda picture: v2.functional.pil_to_tensor(picture) / 255,
    ],
    ids=["pictures", "arrays", "uint8 tensors", "float tensors"],
)  # fmt: skip
def test_sequences_of_pictures(
    folder: Path, tmp_path: Path, backbone: Backbone, from_folder: FeatureReader, convert: Any
) -> None:
    given = [convert(picture) for picture in pictures_of(folder)]
    with extract_features(given, out=tmp_path / "out", backbone=backbone, **QUICK) as reader:
        np.testing.assert_array_equal(reader["embedding"][:], from_folder["embedding"][:])
        assert set(reader.labels.tolist()) == {-1}


def test_an_array_of_pictures(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 40, 40, 3), np.uint8)
    np.save(tmp_path / "a.npy", pixels)
    memory, file = (
        batch_of(images, list(range(5))) for images in (list_dataset(pixels), list_images(tmp_path / "a.npy"))
    )
    assert memory.images.equal(file.images)


def test_labels_come_from_the_items(folder: Path, tmp_path: Path, backbone: Backbone) -> None:
    dataset = Pairs(folder, [row % 2 for row in range(12)])
    for classes in (["0", "1"], ["even", "odd"]):
        listed = list_dataset(dataset)
        assert (listed.classes, listed.labels.tolist()) == (classes, [row % 2 for row in range(12)])
        assert dataset.reads == 13  # the first one also to check its picture
        dataset.targets = torch.tensor(dataset.values)  # type: ignore[attr-defined]
        dataset.classes, dataset.reads = ["even", "odd"], 0  # type: ignore[attr-defined]
    names = list_dataset(Pairs(folder, ["b", "a"] * 6))
    assert (names.classes, names.labels.tolist()) == (["a", "b"], [1, 0] * 6)
    assert set(list_dataset(Pairs(folder, [{"box": 1}] * 12)).labels.tolist()) == {-1}
    with pytest.warns(UserWarning, match="labels of type dict are not stored"):
        extract_features(Pairs(folder, [{"box": 1}] * 12), out=tmp_path / "out", backbone=backbone, **QUICK).close()
    dataset.targets = dict.fromkeys(range(12), 1)  # type: ignore[attr-defined]
    assert list_dataset(dataset).labels.tolist() == [row % 2 for row in range(12)]


@pytest.mark.parametrize("workers", [0, 1])
def test_whatever_a_dataset_raises_is_a_failed_row(
    folder: Path, tmp_path: Path, backbone: Backbone, workers: int
) -> None:
    class Bad(Pairs):
        def __getitem__(self, row: int) -> tuple[Image.Image, Any]:
            if row in (2, 5):
                raise {2: KeyError("no key"), 5: StopIteration()}[row]
            return super().__getitem__(row)

    of = QUICK | {"workers": workers}
    dataset = Bad(folder, ["a", "b"] * 6)
    (folder / dataset.names[3]).write_bytes(b"no picture")
    with extract_features(dataset, out=tmp_path / "out", backbone=backbone, **of) as reader:
        assert [(row, path, status, reason[:28]) for row, path, status, reason in reader.failures] == [
            (2, "02", "decode error", "KeyError: 'no key'"), (3, "03", "decode error", "cannot identify image file '"),
            (5, "05", "decode error", "StopIteration: StopIteration"),
        ]  # fmt: skip
        assert reader.labels.tolist() == [-1 if row in (2, 3, 5) else row % 2 for row in range(12)]


def test_odd_labels_and_classes(folder: Path) -> None:
    twice = Pairs(folder, [row % 3 for row in range(12)])
    twice.targets, twice.classes = twice.values, ["crane", ("x", "y"), "crane"]  # type: ignore[attr-defined]
    listed = list_dataset(twice)
    assert listed.classes == ["crane (0)", "x, y", "crane (2)"]
    assert listed.labels.tolist() == [row % 3 for row in range(12)]
    for odd in ([0.0, 1.5] * 6, [(), (1,)] * 6, [torch.tensor([1, 0])] * 12):
        listed = list_dataset(Pairs(folder, odd))
        assert listed.classes == []
        assert "are not stored" in listed.notes[0]
    files = Pairs(folder, [row % 2 for row in range(12)])
    files.targets = [f"{row}.xml" for row in range(12)]  # type: ignore[attr-defined]
    assert list_dataset(files).classes == ["0", "1"]


def test_a_second_run_computes_nothing_and_refuses_other_pictures(
    folder: Path, tmp_path: Path, backbone: Backbone
) -> None:
    pictures = pictures_of(folder)
    for _ in range(2):
        extract_features(pictures, out=tmp_path / "out", backbone=backbone, **QUICK).close()
    assert (tmp_path / "out" / "runs.jsonl").read_text().count('"event": "started"') == 1
    with pytest.raises(InputError, match="those in memory:list are others: 00 differs"):
        extract_features(pictures[::-1], out=tmp_path / "out", backbone=backbone, **QUICK)


def test_a_list_and_a_series_of_paths(
    folder: Path, tmp_path: Path, backbone: Backbone, from_folder: FeatureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd

    monkeypatch.chdir(folder)
    paths = [*files_of(folder)][::-1]
    with extract_features(paths, out=tmp_path / "out", backbone=backbone, **QUICK) as reader:
        assert reader.paths[:] == sorted(paths)
        np.testing.assert_array_equal(reader["embedding"][:], from_folder["embedding"][:])
    assert list_dataset(pd.Series(paths, index=range(5, 17))).paths == sorted(paths)
    with pytest.raises(InputError, match="is given twice"):
        list_dataset([paths[0], Path(paths[0])])


def test_other_objects_are_refused(folder: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(pictures_of(folder))

    refused: list[tuple[Any, str]] = [
        ({"a": 1}, "has no length and no items by number"),
        ((picture for picture in pictures_of(folder)), "has no length and no items by number"),
        (Stream(), "Stream has no length"),
        ([], "the list is empty"),
        ([{"a": 1}], "the first item of the list is a dict; expected a PIL picture"),
        ([torch.randn(3, 8, 8)], "not an 8-bit picture scaled"),
        (np.zeros((40, 50, 3), np.uint8), "one colour picture or several grey ones"),
        ([str(folder / "ant/00.png"), Image.new("RGB", (8, 8))], "paths, and an item of type Image"),
    ]
    for given, message in refused:
        with pytest.raises(InputError, match=message):
            list_dataset(given)


# Hugging Face


@pytest.fixture
def hugging_face(folder: Path) -> Any:
    """A dataset of the images of the folder, with their bytes."""
    import datasets

    names = [*files_of(folder)]
    rows = {
        "image": [{"bytes": (folder / name).read_bytes(), "path": name} for name in names],
        "label": [name.split("/")[0] for name in names],
    }
    classes = datasets.ClassLabel(names=sorted(set(rows["label"])))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    return datasets.Dataset.from_dict(rows, features).cast_column("label", classes)


def test_datasets_of_hugging_face_in_memory_and_on_disk(
    hugging_face: Any, folder: Path, tmp_path: Path, backbone: Backbone, from_folder: FeatureReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    hugging_face.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    hugging_face.to_parquet(str(tmp_path / "parquet" / "train-0.parquet"))
    places = (hugging_face, f"hfds://{tmp_path}/saved", f"hfds://{tmp_path}/parquet:train:image")
    for number, images in enumerate(places):
        how = QUICK | {"out": tmp_path / str(number), "backbone": backbone, "workers": int(number == 0)}
        with extract_features(images, **how) as reader:
            np.testing.assert_array_equal(reader["embedding"][:], from_folder["embedding"][:])
            assert np.array_equal(reader.column("source_hash"), from_folder.column("source_hash"))  # the encoded bytes
            names = [[each.classes[label] for label in each.labels] for each in (reader, from_folder)]
            assert names[0] == names[1]
            assert set(reader.splits) == {""}
    for where, other in (("saved:image", "saved"), ("parquet:train", "parquet:train:image")):
        listed, same = (list_images(f"hfds://{tmp_path}/{each}") for each in (where, other))
        assert (listed.paths_xxh3, listed.labels_xxh3) == (same.paths_xxh3, same.labels_xxh3)
        assert listed.source.read(5) == same.source.read(5)


def test_splits_of_hugging_face(hugging_face: Any, tmp_path: Path) -> None:
    import datasets

    both = datasets.DatasetDict(train=hugging_face.select(range(7)), validation=hugging_face.select(range(7, 12)))
    both.save_to_disk(str(tmp_path / "saved"))
    listed = list_images(f"hfds://{tmp_path}/saved").slice(0, 12)
    assert listed.splits == ["train"] * 7 + ["val"] * 5
    assert listed.paths[6:8] == ["train/6", "validation/0"]
    expected = hugging_face.with_format("arrow")[:]["image"].to_pylist()
    assert [listed.source.read(row)[0] for row in range(12)] == [image["bytes"] for image in expected]
    assert len(list_images(f"hfds://{tmp_path}/saved:validation")) == 5


def opened(labels: list[Any], feature: Any) -> Any:
    """Return a dataset of Hugging Face with a picture for each label."""
    import datasets

    bytes_of = io.BytesIO()
    Image.new("RGB", (8, 8)).save(bytes_of, "png")
    rows = {"image": [{"bytes": bytes_of.getvalue(), "path": None}] * len(labels), "label": labels}
    return datasets.Dataset.from_dict(rows, datasets.Features({"image": datasets.Image(), "label": feature}))


def class_label(*names: str) -> Any:
    import datasets

    return datasets.ClassLabel(names=list(names))


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: dataset.rename_column("label", "y"),
        lambda dataset: dataset.select([5, 0, 1]),
        lambda dataset: dataset.shuffle(seed=1),
        lambda dataset: dataset.filter(lambda item: item["label"] != 1),
        lambda dataset: dataset.with_format("torch"),
        lambda dataset: dataset.with_format("numpy", columns=["image"]).select([3, 1]),
        lambda dataset: dataset.map(lambda item: {"label": 2 - item["label"]}),
    ],
)
def test_labels_of_hugging_face_are_those_of_its_items(change: Any) -> None:
    dataset = change(opened([0, 1, 2, 0, 1, 2], class_label("z", "a", "m")))
    listed = list_dataset(dataset)
    column = "y" if "y" in dataset.features else "label"
    assert listed.labels.tolist() == [int(item[column]) for item in dataset.with_format(None)]
    assert (listed.classes, listed.notes) == (["z", "a", "m"], ())


def test_labels_of_hugging_face_follow_a_cast() -> None:
    import datasets

    texts = opened(["b", "a", "b"], datasets.Value("string")).cast_column("label", class_label("b", "c", "a"))
    assert (list_dataset(texts).labels.tolist(), list_dataset(texts).classes) == ([0, 2, 0], ["b", "c", "a"])
    numbers = opened([2, 0], datasets.Value("int64")).cast_column("label", class_label("q", "r", "s"))
    assert (list_dataset(numbers).labels.tolist(), list_dataset(numbers).classes) == ([2, 0], ["q", "r", "s"])
    aligned = texts.align_labels_with_mapping({"a": 0, "b": 1, "c": 2}, "label")
    assert [list_dataset(aligned).classes[label] for label in list_dataset(aligned).labels] == ["b", "a", "b"]
    of_numbers = list_dataset(opened([0, 1, 1], class_label("7", "3")))
    assert [of_numbers.classes[label] for label in of_numbers.labels] == ["7", "3", "3"]


def test_splits_of_hugging_face_whose_classes_differ_agree_by_name() -> None:
    import datasets

    train, test = opened([0, 1, 2], class_label("z", "a", "m")), opened([0, 1, 2], class_label("m", "a", "z"))
    both = datasets.DatasetDict(train=train, test=test)  # sorted: test comes first
    listed = list_dataset(both)
    names = [split.features["label"].int2str(label) for split in (test, train) for label in split["label"]]
    assert [listed.classes[label] for label in listed.labels] == names
    unlabelled = datasets.DatasetDict(train=train, test=test.remove_columns("label"))
    listed = list_dataset(unlabelled)
    assert (listed.labels.tolist(), listed.classes) == ([-1, -1, -1, 0, 1, 2], ["z", "a", "m"])
    words = opened(["a", "other"], datasets.Value("string"))
    listed = list_dataset(datasets.DatasetDict(train=train, test=words))
    assert [listed.classes[label] for label in listed.labels] == ["a", "other", "z", "a", "m"]


def test_a_transform_of_hugging_face_is_not_applied_and_a_note_says_so() -> None:
    dataset = opened([0, 1], class_label("a", "b"))
    changed = dataset.with_transform(lambda batch: {**batch, "label": [7] * len(batch["image"])})
    assert changed[0]["label"] == 7
    for each in (changed, changed.select([0, 1])):
        listed = list_dataset(each)
        assert (listed.labels.tolist(), listed.classes) == ([0, 1], ["a", "b"])
        assert listed.notes == (
            "the transform of the dataset is not applied: pictures and labels are those of its columns",
        )
    assert list_dataset(dataset).notes == ()


def test_missing_and_other_labels_of_hugging_face() -> None:
    import datasets

    for missing in (-1, None):
        listed = list_dataset(opened([2, missing, 0], class_label("z", "a", "m")))
        assert (listed.labels.tolist(), listed.classes) == ([2, -1, 0], ["z", "a", "m"])
        assert list_dataset(opened([2, missing, 0], datasets.Value("int8"))).labels.tolist() == [2, -1, 0]
    for floats in ([0.0, 1.0], [0.0, None]):
        listed = list_dataset(opened(floats, datasets.Value("float32")))
        assert (listed.labels.tolist(), listed.classes) == ([-1, -1], [])
        assert listed.notes == ("no labels: the column label has neither numbers nor text",)
    listed = list_dataset(opened([True, False, True, None], datasets.Value("bool")))
    assert (listed.labels.tolist(), listed.classes) == ([1, 0, 1, -1], ["False", "True"])


def test_images_of_hugging_face_are_found_again(
    hugging_face: Any, folder: Path, tmp_path: Path, backbone: Backbone
) -> None:
    hugging_face.save_to_disk(str(tmp_path / "saved"))
    images = f"hfds://{tmp_path}/saved"
    extract_features(images, out=tmp_path / "out", backbone=backbone, **QUICK).close()
    again = listed_again(DataSet.open(tmp_path / "out").images["root"], ["05", "02"])
    data = [*files_of(folder).values()]
    assert [again.source.read(row)[0] for row in (0, 1)] == [data[5], data[2]]
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: 'http://h/x'}]\n---\n")
    for where, message in (
        ("hfds://someone/photos", "a location that only the data set names"),
        (f"hfds://{tmp_path}/remote", "a location that only the data set names"),
        ("memory:list", "came from the memory of a program"),
    ):
        with pytest.raises(InputError, match=message):
            listed_again(where, ["05"])
    with pytest.raises(InputError, match="a plan is written for a folder or a list only"):
        write_plan(images, tmp_path / "plan")


def test_wrong_datasets_of_hugging_face_are_refused(hugging_face: Any, tmp_path: Path) -> None:
    hugging_face.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match="the column 'label' has no images; those with images: \\['image'\\]"):
        list_images(f"hfds://{tmp_path}/saved:label")
    with pytest.raises(InputError, match="no such folder"):
        list_images(f"hfds://{tmp_path}/none")
    shutil.rmtree(tmp_path / "saved")
    two = hugging_face.add_column("other", hugging_face.with_format("arrow")[:]["image"].to_pylist())
    for dataset, message in (
        (two.cast_column("other", hugging_face.features["image"]), "several columns have images: image, other"),
        (hugging_face.remove_columns("image"), "no column has images"),
        (hugging_face.to_iterable_dataset(), "is a stream"),
    ):
        with pytest.raises(InputError, match=message):
            list_dataset(dataset)
