"""`LayerFeatures` in scikit-learn: pipelines, clones, pickles, its own checks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

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

CODE = """
from torch import nn
from torchvision import transforms

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 16, 2, 2)

    def forward(self, x):
        return self.layer2(self.layer1(x)).mean((2, 3))

def net():
    return Net(), transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a small backbone."""
    file = tmp_path_factory.mktemp("code") / "net.py"
    file.write_text(CODE)
    return {"backbone": f"python/{file}:net", "device": "cpu"}


@pytest.fixture
def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in files_of(folder)]


def test_features_are_those_of_embed(folder: Path, paths: list[str], tmp_path: Path, small: dict[str, Any]) -> None:
    backbone = load_backbone(small["backbone"], device="cpu")
    with extract_features(
        folder, out=tmp_path / "out", backbone=backbone, layers=["layer1:mean_map", "embedding"], workers=0,
        compile="off", progress=False, batch_size=4,
    ) as reader:  # fmt: skip
        expected = np.concatenate([reader["layer1"][:], reader["embedding"][:]], 1)
    transformer = LayerFeatures(**small, layers=["layer1:mean_map", "embedding"], batch_size=4).fit(paths)
    np.testing.assert_array_equal(transformer.transform(paths), expected)
    np.testing.assert_array_equal(transformer.transform(paths[::-1]), expected[::-1])  # in the given order
    pictures = [Image.open(path) for path in paths]
    np.testing.assert_array_equal(transformer.transform(pictures), expected)
    np.testing.assert_array_equal(transformer.transform(np.array(paths)), expected)
    assert transformer.transform([]).shape == (0, expected.shape[1])
    names = transformer.get_feature_names_out()
    assert len(names) == transformer.n_features_out_ == expected.shape[1]
    assert (names[0], names[-1]) == ("layer1_0", f"embedding_{reader['embedding'].shape[1] - 1}")


def test_a_pipeline_and_a_search(paths: list[str], small: dict[str, Any]) -> None:
    y = np.arange(len(paths)) % 2
    pipeline = make_pipeline(LayerFeatures(**small), LogisticRegression(max_iter=200))
    assert pipeline.fit(paths, y).predict(paths).shape == y.shape
    layers = ["layer1:mean_map", "layer2:mean_map"]
    search = GridSearchCV(pipeline, {"layerfeatures__layers": layers}, cv=2).fit(paths, y)
    assert search.best_params_["layerfeatures__layers"] in layers


def test_copies_load_the_backbone_again(paths: list[str], small: dict[str, Any]) -> None:
    transformer = LayerFeatures(**small).fit(paths[:3])
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


def test_wrong_input_is_refused(paths: list[str], tmp_path: Path, small: dict[str, Any]) -> None:
    with pytest.raises(NotFittedError):
        LayerFeatures(**small).transform(paths)
    refused: list[tuple[dict[str, Any], Any, str]] = [
        ({}, [], "there are no images"),
        ({"batch_size": 0}, paths, "batch_size is 0"),
        ({}, paths[0], "X is one path"),
        ({}, [tmp_path / "none.png"], "none.png: No such file"),
        ({"layers": "layr1"}, paths, "layer 'layr1'"),
    ]
    for settings, given, message in refused:
        with pytest.raises((InputError, UnknownNameError), match=message):
            LayerFeatures(**small, **settings).fit(given)
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="bad.png: "):
        LayerFeatures(**small).fit(paths).transform([*paths, tmp_path / "bad.png"])


def test_the_checks_of_scikit_learn_that_need_no_numbers_pass_and_it_leaves_out_the_others(
    small: dict[str, Any],
) -> None:
    for check in ("set_params", "get_params_invariance", "parameters_default_constructible", "mixin_order"):
        getattr(estimator_checks, f"check_{check}")("LayerFeatures", LayerFeatures(**small))
    with pytest.warns(UserWarning, match="Can't test estimator LayerFeatures which requires input"):
        results = estimator_checks.check_estimator(LayerFeatures(**small), on_fail=None)
    assert [result["check_name"] for result in results if result["status"] == "failed"] == []
