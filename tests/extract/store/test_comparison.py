"""What `diff` tells, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extract import FeatureReader, extract_features
from extract.analysis.dataset_diff import Similarity, compare
from extract.compute.agreement import cosines, deviation
from extract.errors import InputError
from tests.conftest import TINY_INPUT, make_picture

NET = {"backbone": "timm/test_resnet", "weights": "random", "device": "cpu", "workers": 0, "progress": False,
       "preprocessing": TINY_INPUT}  # fmt: skip


def expected_cosines(first: Path, second: Path, paths: list[str], name: str = "embedding") -> np.ndarray:
    with FeatureReader(first) as a, FeatureReader(second) as b:
        rows = [(a[name][a.paths.index(path)].ravel(), b[name][b.paths.index(path)].ravel()) for path in paths]
    return np.array([x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in rows])


def test_two_interpolations(folder: Path, tmp_path: Path) -> None:
    for name in ("bicubic", "bilinear"):
        net = {**NET, "preprocessing": {**TINY_INPUT, "interpolation": name}}
        extract_features(folder, out=tmp_path / name, **net).close()
    comparison = compare(tmp_path / "bicubic", tmp_path / "bilinear")
    assert comparison.changes == [("preprocessing.interpolation", "bicubic", "bilinear")]
    assert (comparison.same, comparison.only) == (12, (0, 0))
    with FeatureReader(tmp_path / "bicubic") as reader:
        paths = reader.paths[:]
    expected = expected_cosines(tmp_path / "bicubic", tmp_path / "bilinear", paths)
    similarity = comparison.features["embedding"]
    assert isinstance(similarity, Similarity)
    assert similarity.least == pytest.approx(expected.min(), abs=1e-6)
    assert similarity.median == pytest.approx(np.median(expected), abs=1e-6)
    assert similarity.path == paths[int(expected.argmin())]
    assert 0 < 1 - similarity.least < 1e-3  # smooth pictures


def test_two_weights_of_one_architecture(folder: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        extract_features(folder, out=tmp_path / str(seed), seed=seed, **NET).close()
    comparison = compare(tmp_path / "1", tmp_path / "2")
    assert [key for key, *_ in comparison.changes] == ["weights_sha256"]
    assert comparison.features["embedding"].least < 0.99


def test_float32_and_bfloat16(folder: Path, tmp_path: Path) -> None:
    extract_features(folder, out=tmp_path / "32", **NET).close()
    extract_features(folder, out=tmp_path / "16", precision="bfloat16", compile="off", min_cosine=0.9, **NET).close()
    comparison = compare(tmp_path / "32", tmp_path / "16")
    assert comparison.changes == [("precision", "float32", "bfloat16 autocast")]
    similarity = comparison.features["embedding"]
    assert 0.9 < similarity.least < 1
    assert 1e-4 < similarity.deviation < 0.1


def test_images_are_known_by_their_bytes(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        (other / f"{i}.png").write_bytes(path.read_bytes())
    make_picture(77).save(other / "new.png")
    (other / "copy.png").write_bytes((other / "new.png").read_bytes())
    (other / "broken.png").write_bytes(b"")
    extract_features(folder, out=tmp_path / "a", **NET).close()
    extract_features(other, out=tmp_path / "b", **NET).close()
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert (comparison.changes, comparison.same, comparison.only) == ([], 6, (6, 1))
    assert comparison.features["embedding"].least == pytest.approx(1, abs=1e-6)


def test_features_that_cannot_be_compared_say_why(folder: Path, tmp_path: Path) -> None:
    extract_features(folder, out=tmp_path / "a", layers=["layer1:none", "layer2"], **NET).close()
    extract_features(folder, out=tmp_path / "b", layers=["layer1", "layer3"], **NET).close()
    extract_features(folder, out=tmp_path / "c", layers=["layer1"], limit=1, **NET).close()
    features = compare(tmp_path / "a", tmp_path / "b").features
    assert features["layer2"] == f"only in {tmp_path / 'a'}"
    assert features["layer3"] == f"only in {tmp_path / 'b'}"
    assert "different shapes, (32, 16, 16) and (32,)" in features["layer1"]
    Image.open(next(folder.rglob("00.png"))).rotate(90).save(folder / "ant" / "00.png")
    extract_features(folder, out=tmp_path / "d", layers=["layer1"], limit=1, **NET).close()
    assert compare(tmp_path / "c", tmp_path / "d").features == {"layer1": "no shared images"}
    with pytest.raises(InputError, match="does not exist"):
        compare(tmp_path / "a", tmp_path / "none")


def test_cosines_of_rows_without_a_direction() -> None:
    rows = np.array([[0, 0], [0, 0], [1, 0], [3, 4]], np.float16)
    others = np.array([[0, 0], [1, 0], [-2, 0], [4, 3]], np.float16)
    assert cosines(rows, others).tolist() == [1, 0, -1, pytest.approx(0.96)]
    assert deviation(rows, others) == pytest.approx(3 / 4)
    assert deviation(rows[:1], others[:1]) == 0
