"""`LayerFeatures` in scikit-learn: pipelines, clones, pickles, its own checks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks

from extract import InputError, UnknownNameError, extract_features, load_backbone
from layertap.sklearn import LayerFeatures
from tests.extract.images.test_sources import files_of

SMALL = {"backbone": "timm/test_resnet", "weights": "random", "device": "cpu"}


@pytest.fixture
def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in files_of(folder)]


def test_features_are_those_of_embed(folder: Path, paths: list[str], tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    with extract_features(
        folder, out=tmp_path / "out", backbone=backbone, layers=["layer1:mean_map", "embedding"], workers=0,
        compile="off", progress=False, batch_size=4,
    ) as reader:  # fmt: skip
        expected = np.concatenate([reader["layer1"][:], reader["embedding"][:]], 1)
    transformer = LayerFeatures(**SMALL, layers=["layer1:mean_map", "embedding"], batch_size=4).fit(paths)
    np.testing.assert_array_equal(transformer.transform(paths), expected)
    np.testing.assert_array_equal(transformer.transform(paths[::-1]), expected[::-1])  # in the given order
    pictures = [Image.open(path) for path in paths]
    np.testing.assert_array_equal(transformer.transform(pictures), expected)
    np.testing.assert_array_equal(transformer.transform(np.array(paths)), expected)
    assert transformer.transform([]).shape == (0, expected.shape[1])
    names = transformer.get_feature_names_out()
    assert len(names) == transformer.n_features_out_ == expected.shape[1]
    assert (names[0], names[-1]) == ("layer1_0", f"embedding_{reader['embedding'].shape[1] - 1}")


def test_a_pipeline_and_a_search(paths: list[str]) -> None:
    y = np.arange(len(paths)) % 2
    pipeline = make_pipeline(LayerFeatures(**SMALL), LogisticRegression(max_iter=200))
    assert pipeline.fit(paths, y).predict(paths).shape == y.shape
    layers = ["layer1:mean_map", "layer4:mean_map"]
    search = GridSearchCV(pipeline, {"layerfeatures__layers": layers}, cv=2).fit(paths, y)
    assert search.best_params_["layerfeatures__layers"] in layers


def test_copies_load_the_backbone_again(paths: list[str]) -> None:
    transformer = LayerFeatures(**SMALL).fit(paths[:3])
    expected = transformer.transform(paths)
    pickled = pickle.dumps(transformer)
    assert len(pickled) < 20_000  # without the network
    np.testing.assert_array_equal(pickle.loads(pickled).transform(paths), expected)
    np.testing.assert_array_equal(clone(transformer).fit(paths).transform(paths), expected)
    transformer.set_params(seed=1)
    assert not np.array_equal(transformer.fit(paths).transform(paths), expected)


@pytest.mark.slow
def test_a_missing_library_is_named() -> None:
    code = "import sys; sys.modules['sklearn'] = None; import layertap.sklearn"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "LayerFeatures needs sklearn; to install it: " in process.stderr
    assert "scikit-learn>=1.6" in process.stderr


def test_wrong_input_is_refused(paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        LayerFeatures(**SMALL).transform(paths)
    with pytest.raises(InputError, match="there are no images"):
        LayerFeatures(**SMALL).fit([])
    with pytest.raises(InputError, match="batch_size is 0"):
        LayerFeatures(**SMALL, batch_size=0).fit(paths)
    with pytest.raises(InputError, match="X is one path"):
        LayerFeatures(**SMALL).fit(paths[0])
    with pytest.raises(InputError, match="none.png: No such file"):
        LayerFeatures(**SMALL).fit([tmp_path / "none.png"])
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="bad.png: "):
        LayerFeatures(**SMALL).fit(paths).transform([*paths, tmp_path / "bad.png"])
    with pytest.raises(UnknownNameError, match="layer 'layr1'"):
        LayerFeatures(**SMALL, layers="layr1").fit(paths)


@pytest.mark.parametrize(
    "check",
    [
        "no_attributes_set_in_init", "estimator_cloneable", "estimator_repr", "set_params", "get_params_invariance",
        "parameters_default_constructible", "valid_tag_types",
        "estimator_tags_renamed", "mixin_order",
    ],
)  # fmt: skip
def test_the_checks_of_scikit_learn_that_need_no_numbers_pass(check: str) -> None:
    getattr(estimator_checks, f"check_{check}")("LayerFeatures", LayerFeatures(**SMALL))


def test_scikit_learn_leaves_out_its_checks_on_numbers() -> None:
    with pytest.warns(UserWarning, match="Can't test estimator LayerFeatures which requires input"):
        results = estimator_checks.check_estimator(LayerFeatures(**SMALL), on_fail=None)
    assert [result["check_name"] for result in results if result["status"] == "failed"] == []
