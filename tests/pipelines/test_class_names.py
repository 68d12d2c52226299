"""Data sets whose classes differ: classes are joined by name, never by number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from extract import FeatureReader
from extract.analysis.probe import LinearProbe
from pipelines.compare import job
from pipelines.data_sets.report.probe_results import predictions_of, probes
from pipelines.probe.job import ProbeRun
from pipelines.probe.labelling import Labelling
from tests.pipelines.test_cli import SMALL, layertap, succeeds
from tests.pipelines.test_probe_masks import table

pytestmark = pytest.mark.usefixtures("few_strengths")
COLOURS = {"ant": (220, 40, 40), "bee": (40, 220, 40), "cat": (40, 40, 220), "aye": (220, 220, 40)}


def draw(folder: Path, name: str, count: int, seed: int) -> None:
    random = np.random.default_rng([seed, *name.encode()])
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = np.clip(random.normal(COLOURS[name], 25, (32, 32, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data set `a` of ant, bee and cat; `b` of bee and cat, with the numbers 0 and 1; `c` with train and test, of
    which train lacks bee and test lacks aye."""
    root = tmp_path_factory.mktemp("sets")
    for name in ("ant", "bee", "cat"):
        draw(root / "photos" / "a" / name, name, 8, 0)
    for name in ("cat", "bee"):
        draw(root / "photos" / "b" / name, name, 4, 1)
    for split, names in (("train", ("aye", "cat")), ("test", ("bee", "cat"))):
        for name in names:
            draw(root / "photos" / "c" / split / name, name, 4, {"train": 2, "test": 3}[split])
    for name in "abc":
        succeeds("embed", root / "photos" / name, "-o", root / name, *SMALL, "-l", "layer1")
    return root


def called(path: str) -> str:
    """The class of an image, by its path alone."""
    return path.split("/")[-2]


def test_splits_of_which_one_lacks_a_class_join_the_others_by_name(sets: Path, tmp_path: Path) -> None:
    with FeatureReader(sets / "c") as reader:
        assert reader.classes == ["aye", "bee", "cat"]
        assert [reader.classes[label] for label in reader.labels] == [called(path) for path in reader.paths]
    succeeds("probe", sets / "c", "-o", tmp_path / "res")
    rows = table(tmp_path / "res" / "predictions.csv")
    assert [row["label"] for row in rows] == [called(row["path"]) for row in rows]
    assert {row["predicted"] for row in rows if row["label"] == "cat"} == {"cat"}  # 1 of aye, cat; 2 of all
    assert {row["predicted"] for row in rows} <= {"aye", "cat"}


def test_a_probe_predicts_names_on_a_data_set_with_other_classes(sets: Path, tmp_path: Path) -> None:
    succeeds("probe", sets / "a", "--save", tmp_path / "a.safetensors", "-o", tmp_path / "res")
    succeeds("predict", tmp_path / "a.safetensors", sets / "b", "-o", tmp_path / "b.csv")
    rows = table(tmp_path / "b.csv")
    assert [row["predicted"] for row in rows] == [called(row["path"]) for row in rows]  # bee is 0 in b, 1 in the probe
    probe = LinearProbe.load(tmp_path / "a.safetensors")
    with FeatureReader(sets / "b") as reader:
        likely = probe.predict_proba(reader["layer1"][:])
    assert list(rows[0])[3:] == ["p(ant)", "p(bee)", "p(cat)"]
    stated = [[float(row[f"p({name})"]) for name in probe.classes_] for row in rows]
    np.testing.assert_allclose(stated, likely, atol=1e-5)


def test_two_data_sets_are_probed_by_the_names_of_their_classes(sets: Path, tmp_path: Path) -> None:
    succeeds("probe", sets / "a", sets / "b", "-o", tmp_path / "res")
    rows = table(tmp_path / "res" / "predictions.csv")
    assert {row["data_set"] for row in rows} == {"a", "b"}
    assert [row["label"] for row in rows] == [row["predicted"] for row in rows] == [called(row["path"]) for row in rows]


def test_images_in_other_classes_are_the_same_images_in_diff(sets: Path, tmp_path: Path) -> None:
    for name, other in (("ant", "zoo"), ("bee", "bee"), ("cat", "aye")):
        shutil.copytree(sets / "photos" / "a" / name, tmp_path / "photos" / other)
    succeeds("embed", tmp_path / "photos", "-o", tmp_path / "renamed", *SMALL, "-l", "layer1")
    content = json.loads(layertap("diff", sets / "a", tmp_path / "renamed", "--json").stdout)
    assert content["images"] == {"in_both": 24, "only_in_first": 0, "only_in_second": 0}
    assert content["features"]["layer1"]["least"] == pytest.approx(1, abs=1e-6)


def test_a_report_shows_the_predictions_of_a_probe_by_name(sets: Path, tmp_path: Path) -> None:
    with FeatureReader(sets / "a") as reader:
        paths, fingerprint = reader.paths[:], reader.fingerprint
    file = tmp_path / "renamed.csv"  # ant, bee, cat -> zoo, bee, aye: their order is reversed
    names = {"ant": "zoo", "bee": "bee", "cat": "aye"}
    file.write_text("path,label\n" + "".join(f"{path},{names[called(path)]}\n" for path in paths))
    succeeds("probe", sets / "a", "--labels", file, "-o", tmp_path / "res")
    results, _ = probes(sets / "a", [tmp_path / "res"])
    _, shown, _ = predictions_of(results, fingerprint, "layer1", paths)
    assert shown
    assert all(one.label == one.predicted == names[called(paths[row])] for row, one in shown.items())


def test_backbones_that_know_other_classes_are_compared_by_name() -> None:
    """The second backbone has no features of `ant` for training: its numbers of `bee` and `cat` are one less."""

    def labelling(classes: list[str], unseen: tuple[str, ...], targets: list[int]) -> Labelling:
        none, rows = np.empty(0, np.int64), np.arange(4)
        return Labelling(
            "classification", np.array(classes), np.array(targets), none, none, rows, rows, {}, {}, [], unseen
        )

    outcome = SimpleNamespace(
        labellings={
            "one": labelling(["ant", "bee", "cat"], ("dog", "eel"), [0, 1, 2, -2]),
            "two": labelling(["bee", "cat"], ("dog", "eel", "ant"), [-3, 0, 1, -2]),
        },
        test_paths={name: ["ant.png", "bee.png", "cat.png", "eel.png"] for name in ("one", "two")},
    )
    predictions = {"one": [0, 1, 2, 2], "two": [0, 0, 1, 0]}
    best = {name: SimpleNamespace(result=SimpleNamespace(predictions=np.array(p))) for name, p in predictions.items()}
    rows, predicted = job._on_common_images(cast(ProbeRun, outcome), cast(Any, best))
    assert predicted.tolist() == [["ant", "bee", "cat", "cat"], ["bee", "bee", "cat", "bee"]]
    disputed = job._disputed(cast(ProbeRun, outcome), ["one", "two"], rows, predicted, 9)
    assert [(one.path, one.label, one.predictions) for one in disputed] == [
        ("ant.png", "ant", [("one", "ant"), ("two", "bee")]), ("eel.png", "eel", [("one", "cat"), ("two", "bee")]),
    ]  # fmt: skip
