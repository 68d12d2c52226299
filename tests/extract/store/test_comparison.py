"""What `diff` tells, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from extract.analysis.dataset_diff import compare
from extract.compute.agreement import cosines, deviations
from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from tests.extract.store.rows import empty_data_set, no_files


def made(
    out: Path, pictures: Sequence[int], layers: dict[str, np.ndarray], failed: int | None = None, **depends_on: object
) -> Path:
    """A data set; row i is of the picture with the number that is given for it."""
    count, features = len(pictures), [StoredFeature(name, rows.shape[1:], "float32") for name, rows in layers.items()]
    images = {"root": "/p", "count": count, "paths_xxh3": ""}
    data = empty_data_set(out, features=features, images=images, shard_rows=count, depends_on=depends_on)
    names = RowNames([f"{i}.png" for i in range(count)], np.zeros(count), [""] * count, ["a"])
    create_shard(data.path(0, part=True), features, data.identity(0), names, {})
    status = np.where(np.arange(count) == failed, Status.DECODE_ERROR, Status.OK).astype("u1")
    hashes = np.repeat(np.array(pictures, "u1")[:, None], 16, 1)
    with ShardWriter(data, 0) as writer:
        writer.write(np.arange(count), layers, status, {**no_files(count), "source_hash": hashes})
        writer.publish()
    return out


def test_features_of_two_settings_are_compared_image_by_image(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 4, 5)).astype(np.float32)
    y = x + 0.1 * random.normal(size=x.shape).astype(np.float32)
    first = made(tmp_path / "a", range(12), {"x": x}, weights="w", preprocessing={"interpolation": "bicubic"})
    order = random.permutation(12)
    second = made(tmp_path / "b", order, {"x": y[order]}, weights="w", preprocessing={"interpolation": "bilinear"})
    comparison = compare(first, second)
    assert comparison["changes"] == {"preprocessing.interpolation": ["bicubic", "bilinear"]}
    assert comparison["images"] == {"in_both": 12, "only_in_first": 0, "only_in_second": 0}
    pairs = [(a.ravel().astype(float), b.ravel().astype(float)) for a, b in zip(x, y, strict=True)]
    expected = np.array([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
    similarity = comparison["features"]["x"]
    assert similarity["least"] == pytest.approx(expected.min(), abs=1e-6)
    assert similarity["median"] == pytest.approx(np.median(expected), abs=1e-6)
    assert similarity["path"] == f"{expected.argmin()}.png"
    apart = [np.abs(a - b).max() / np.abs(a).max() for a, b in pairs]
    assert similarity["deviation"] == pytest.approx(max(apart), abs=1e-6)


def test_images_are_known_by_their_bytes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    first = made(tmp_path / "a", range(12), {"x": x[:12]})
    pictures = [7, 3, 19, 19, 5, 0]  # one is there twice, and the last one could not be decoded
    second = made(tmp_path / "b", pictures, {"x": x[pictures]}, failed=5)
    comparison = compare(first, second)
    assert (comparison["same_fingerprint"], list(comparison["images"].values())) == (True, [3, 9, 1])
    assert comparison["features"]["x"]["least"] == pytest.approx(1, abs=1e-6)


def test_features_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    maps, vectors = np.ones((2, 3, 2, 2), np.float32), np.ones((2, 3), np.float32)
    first = made(tmp_path / "a", [1, 2], {"layer1": maps, "layer2": vectors})
    second = made(tmp_path / "b", [1, 2], {"layer1": vectors, "layer3": vectors})
    features = {name: found["not_compared"] for name, found in compare(first, second)["features"].items()}
    assert features["layer2"] == f"only in {first}"
    assert features["layer3"] == f"only in {second}"
    assert "different shapes, (3, 2, 2) and (3,)" in features["layer1"]
    other = made(tmp_path / "c", [3, 4], {"layer1": maps, "layer2": vectors})
    assert [found["not_compared"] for found in compare(first, other)["features"].values()] == ["no shared images"] * 2
    with pytest.raises(InputError, match="does not exist"):
        compare(first, tmp_path / "none")


def test_cosines_of_rows_without_a_direction() -> None:
    rows = np.array([[0, 0], [0, 0], [1, 0], [3, 4]], np.float16)
    others = np.array([[0, 0], [1, 0], [-2, 0], [4, 3]], np.float16)
    assert cosines(rows, others).tolist() == [1, 0, -1, pytest.approx(0.96)]
    assert deviations(rows, others).tolist() == [0, 1, 1.5, 0.25]
    assert np.isnan(deviations(rows[:1] * np.float16("nan"), others[:1])).all()
