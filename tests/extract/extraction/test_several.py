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
from tests.extract.compute.small_network import small_network

pytestmark = pytest.mark.usefixtures("frozen")

# The first two decode alike, and the third otherwise: see `decodings`.
NETWORKS: dict[str, dict[str, Any]] = {
    "first": {"seed": 1}, "second": {"seed": 2, "mean": (0.1, 0.2, 0.3)}, "third": {"interpolation": "bicubic"},
}  # fmt: skip
LIMIT = 4 * 3 * 32 * 32  # bytes of four decoded images


def settings(**changes: Any) -> ExtractionSettings:
    given: dict[str, Any] = {"layers": ["embedding"], "batch_size": 2, "workers": 0, "compile": "off"}
    return ExtractionSettings(**(given | changes))


@functools.cache
def loaded(name: str) -> Backbone:
    """A backbone that the tests share."""
    return small_network(**NETWORKS[name])


def members(out: Path, **changes: Any) -> list[Member]:
    return [Member(name, out / name, functools.partial(loaded, name), settings(**changes)) for name in NETWORKS]


def alone(folder: Path, out: Path, name: str, **options: Any) -> FeatureReader:
    """The features of one of the backbones, computed without the others."""
    given: dict[str, Any] = {"layers": "embedding", "batch_size": 2, "workers": 0, "compile": "off", "progress": False}
    return extract_features(folder, out=out, backbone=loaded(name), **(given | options))


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


def test_features_are_those_of_separate_runs(folder: Path, tmp_path: Path, reads: Counter[int]) -> None:
    (folder / "bee" / "bad.jpg").write_bytes(b"no picture")
    order: list[str] = []
    runs = extract_several(
        list_images(folder), members(tmp_path / "together"), tmp_path, kept_bytes=LIMIT,
        on_member=lambda name, rows: order.append(name),
    )  # fmt: skip
    assert all(run.complete and run.error is None for run in runs.values())
    assert order == ["first", "second"] * 4 + ["third"] * 4
    assert set(reads.values()) == {2}  # two ways to decode
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "together"]  # nothing kept is left
    for name in NETWORKS:
        with alone(folder, tmp_path / name, name) as own, FeatureReader(tmp_path / "together" / name) as together:
            assert together.fingerprint == own.fingerprint
            np.testing.assert_array_equal(together["embedding"][:], own["embedding"][:])
            assert together.failures == own.failures
            assert len(together.failures) == 1
        assert DataSet.open(tmp_path / "together" / name).n_shards == 4


def test_one_backbone_is_in_memory_at_a_time(folder: Path, tmp_path: Path) -> None:
    alive: list[int] = []
    models: list[weakref.ref[Any]] = []

    def load(name: str) -> Callable[[], Backbone]:
        def load_one() -> Backbone:
            gc.collect()
            alive.append(sum(model() is not None for model in models))
            backbone = small_network(**NETWORKS[name])
            models.append(weakref.ref(backbone.model))
            return backbone

        return load_one

    several = [Member(name, tmp_path / name, load(name), settings()) for name in NETWORKS]
    extract_several(list_images(folder), several, tmp_path)
    assert alive == [0] * 6  # each is loaded to look at it, and to compute


def test_a_stopped_run_is_resumed(folder: Path, tmp_path: Path, reads: Counter[int]) -> None:
    images, stored, new = list_images(folder), [0], [0]

    def count(rows: int, resumed: bool) -> None:
        stored[0] += rows

    def count_new(rows: int, resumed: bool) -> None:
        new[0] += 0 if resumed else rows

    runs = extract_several(
        images, members(tmp_path), tmp_path, kept_bytes=LIMIT, on_rows=count, stop=lambda: stored[0] >= 5
    )
    assert not any(run.complete for run in runs.values())
    assert 5 <= stored[0] < 36
    runs = extract_several(images, members(tmp_path), tmp_path, kept_bytes=LIMIT, on_rows=count_new)
    assert all(run.complete for run in runs.values())
    assert stored[0] + new[0] == 36
    reads.clear()
    assert all(run.complete for run in extract_several(images, members(tmp_path), tmp_path).values())
    assert not reads  # nothing is left to compute
    # A data set of other features is not taken.
    runs = extract_several(images, members(tmp_path, dtype="float16"), tmp_path)
    assert all(isinstance(run.error, InputError) and not run.complete for run in runs.values())


def test_a_backbone_that_fails_leaves_the_others(folder: Path, tmp_path: Path) -> None:
    bad_layer = Member("layer", tmp_path / "layer", functools.partial(loaded, "third"), settings(layers=["nothing"]))
    unknown = Member("unknown", tmp_path / "unknown", lambda: load_backbone("timm/nothing"), settings())
    failures: list[str] = []
    runs = extract_several(
        list_images(folder), [unknown, bad_layer, *members(tmp_path)], tmp_path,
        on_failure=lambda name, error: failures.append(name),
    )  # fmt: skip
    assert failures == ["unknown", "layer"]
    assert "nothing" in str(runs["layer"].error)
    assert [name for name, run in runs.items() if run.complete] == list(NETWORKS)
    assert not (tmp_path / "layer").exists()


def test_data_sets_may_have_shards_of_other_sizes(folder: Path, tmp_path: Path) -> None:
    for name, rows in {"first": 4, "third": 6}.items():
        alone(folder, tmp_path / name, name, shard_rows=rows).close()
    new: list[str] = []
    runs = extract_several(
        list_images(folder), members(tmp_path), tmp_path, on_member=lambda name, rows: new.append(name)
    )
    assert all(run.complete for run in runs.values())
    assert new == ["second"] * 3
    assert [DataSet.open(tmp_path / name).n_shards for name in NETWORKS] == [3, 3, 2]


def test_a_locked_data_set_and_a_full_disk_end_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    images, several = list_images(folder), members(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("extract.images.loading.pickle.dump", full)
        with pytest.raises(MachineError, match="decoded images cannot be kept: No space left"):
            extract_several(images, several, tmp_path)
    with DataSet.open(several[0].out).locked(), pytest.raises(LockedError):
        extract_several(images, several, tmp_path)
    assert all(run.complete for run in extract_several(images, several, tmp_path).values())
