"""Several backbones on the same images: the same features as one at a time, from images that are decoded once."""

from __future__ import annotations

import errno
import functools
import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract import FeatureReader, InputError, extract_features, load_backbone
from extract.compute.backbone import Backbone
from extract.errors import LockedError, MachineError
from extract.extraction.settings import ExtractionSettings
from extract.extraction.several import Member, extract_several
from extract.images import list_images
from extract.images.sources import Files
from extract.store.format.dataset import DataSet

SPECS = {"resnet": "timm/test_resnet", "efficientnet": "timm/test_efficientnet", "vit": "timm/test_vit"}
# The first two decode alike (bilinear or bicubic of the same size would differ): see `decodings`.
LIMIT = 4 * 3 * 160 * 160  # bytes of four decoded images


def settings(**changes: Any) -> ExtractionSettings:
    return ExtractionSettings(**{"layers": ["embedding"], "batch_size": 2, "workers": 0, "compile": "off"} | changes)


def loader(spec: str, **changes: Any) -> Callable[[], Backbone]:
    return lambda: load_backbone(spec, weights="random", device="cpu", **changes)


@functools.cache
def loaded(spec: str) -> Backbone:
    """A backbone that the tests share."""
    return loader(spec)()


def members(out: Path, **changes: Any) -> list[Member]:
    return [
        Member(name, out / name, functools.partial(loaded, spec), settings(**changes)) for name, spec in SPECS.items()
    ]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each image is read."""
    counts: Counter[int] = Counter()
    read = Files.read

    def counted(self: Files, row: int) -> tuple[bytes, int]:
        counts[row] += 1
        return read(self, row)

    monkeypatch.setattr(Files, "read", counted)
    return counts


def test_features_are_those_of_separate_runs(folder: Path, tmp_path: Path) -> None:
    (folder / "bee" / "bad.jpg").write_bytes(b"no picture")
    runs = extract_several(list_images(folder), members(tmp_path / "together"), tmp_path, kept_bytes=LIMIT)
    assert all(run.complete and run.error is None for run in runs.values())
    for name, spec in SPECS.items():
        out = tmp_path / "alone" / name
        alone = extract_features(
            folder, out=out, backbone=loaded(spec), layers="embedding", batch_size=2, workers=0, compile="off",
            progress=False,
        )  # fmt: skip
        with alone, FeatureReader(tmp_path / "together" / name) as together:
            assert together.fingerprint == alone.fingerprint
            np.testing.assert_array_equal(together["embedding"][:], alone["embedding"][:])
            assert together.failures == alone.failures
            assert len(together.failures) == 1
        assert DataSet.open(tmp_path / "together" / name).n_shards == 4


def test_images_are_decoded_once_for_each_decoding(folder: Path, tmp_path: Path, reads: Counter[int]) -> None:
    decoding = {"size": 64, "crop": 64, "interpolation": "bilinear"}
    three = [
        Member("a", tmp_path / "a", loader(SPECS["resnet"], preprocessing=decoding), settings()),
        Member("b", tmp_path / "b", loader(SPECS["vit"], preprocessing={"size": 160, "crop": 160}), settings()),
        Member("c", tmp_path / "c", loader(SPECS["efficientnet"], preprocessing=decoding | {"mean": [0.1, 0.2, 0.3]}),
               settings()),
    ]  # fmt: skip
    order: list[str] = []
    extract_several(list_images(folder), three, tmp_path, on_member=lambda name, rows: order.append(name))
    assert order == ["a", "c", "b"]
    assert set(reads.values()) == {2}  # two ways to decode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", folder.name]  # nothing kept is left


def test_one_backbone_is_in_memory_at_a_time(folder: Path, tmp_path: Path) -> None:
    alive: list[int] = []
    models: list[weakref.ref[Any]] = []

    def load(spec: str) -> Callable[[], Backbone]:
        def load_one() -> Backbone:
            gc.collect()
            alive.append(sum(model() is not None for model in models))
            backbone = loader(spec)()
            models.append(weakref.ref(backbone.model))
            return backbone

        return load_one

    several = [Member(name, tmp_path / name, load(spec), settings()) for name, spec in SPECS.items()]
    extract_several(list_images(folder), several, tmp_path)
    assert alive == [0] * 6  # each is loaded to look at it, and to compute


def test_a_stopped_run_is_resumed(folder: Path, tmp_path: Path, reads: Counter[int]) -> None:
    images, stored = list_images(folder), 0

    def count(rows: int, resumed: bool) -> None:
        nonlocal stored
        stored += rows

    runs = extract_several(
        images, members(tmp_path), tmp_path, kept_bytes=LIMIT, on_rows=count, stop=lambda: stored >= 5
    )
    assert not any(run.complete for run in runs.values())
    assert 5 <= stored < 36
    new = 0

    def count_new(rows: int, resumed: bool) -> None:
        nonlocal new
        new += 0 if resumed else rows

    runs = extract_several(images, members(tmp_path), tmp_path, kept_bytes=LIMIT, on_rows=count_new)
    assert all(run.complete for run in runs.values())
    assert stored + new == 36
    reads.clear()
    assert all(run.complete for run in extract_several(images, members(tmp_path), tmp_path).values())
    assert not reads  # nothing is left to compute


def test_a_backbone_that_fails_leaves_the_others(folder: Path, tmp_path: Path) -> None:
    bad_layer = Member("layer", tmp_path / "layer", loader(SPECS["vit"]), settings(layers=["nothing"]))
    unknown = Member("unknown", tmp_path / "unknown", loader("timm/nothing"), settings())
    failures: list[str] = []
    runs = extract_several(
        list_images(folder), [unknown, bad_layer, *members(tmp_path)], tmp_path,
        on_failure=lambda name, error: failures.append(name),
    )  # fmt: skip
    assert failures == ["unknown", "layer"]
    assert "nothing" in str(runs["layer"].error)
    assert [name for name, run in runs.items() if run.complete] == list(SPECS)
    assert not (tmp_path / "layer").exists()


def test_a_data_set_of_other_features_is_not_taken(folder: Path, tmp_path: Path) -> None:
    images = list_images(folder)
    extract_several(images, members(tmp_path), tmp_path)
    runs = extract_several(images, members(tmp_path, dtype="float16"), tmp_path)
    assert all(isinstance(run.error, InputError) and not run.complete for run in runs.values())


def test_a_locked_data_set_ends_the_run(folder: Path, tmp_path: Path) -> None:
    images, several = list_images(folder), members(tmp_path)
    stored: list[int] = []
    extract_several(
        images, several[:1], tmp_path, on_rows=lambda rows, resumed: stored.append(rows), stop=lambda: bool(stored)
    )
    with DataSet.open(several[0].out).locked(), pytest.raises(LockedError):
        extract_several(images, several, tmp_path)


def test_data_sets_may_have_shards_of_other_sizes(folder: Path, tmp_path: Path) -> None:
    images = list_images(folder)
    for name, rows in {"resnet": 4, "vit": 6}.items():
        extract_features(
            folder, out=tmp_path / name, backbone=loaded(SPECS[name]), layers="embedding", batch_size=2, workers=0,
            compile="off", shard_rows=rows, progress=False,
        )  # fmt: skip
    new: list[str] = []
    runs = extract_several(images, members(tmp_path), tmp_path, on_member=lambda name, rows: new.append(name))
    assert all(run.complete for run in runs.values())
    assert new == ["efficientnet"] * 3
    assert [DataSet.open(tmp_path / name).n_shards for name in SPECS] == [3, 3, 2]


def test_a_full_disk_ends_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("extract.images.loading.pickle.dump", full)
    with pytest.raises(MachineError, match="decoded images cannot be kept: No space left"):
        extract_several(list_images(folder), members(tmp_path), tmp_path)
    monkeypatch.undo()
    assert all(run.complete for run in extract_several(list_images(folder), members(tmp_path), tmp_path).values())
