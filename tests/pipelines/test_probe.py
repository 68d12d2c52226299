"""probe and predict as a user meets them, and `probe --similarity`."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

from extract import FeatureReader
from extract.analysis.probe import LinearProbe
from extract.images.decoding import DecodeOptions, decode
from extract.probe import linear_cka
from pipelines.probe import job, probe_figures
from pipelines.terminal.pictures import Pictures
from tests.conftest import make_picture
from tests.extract.images.test_orientation_and_colour import matrix_profile
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds
from tests.pipelines.test_probe_masks import few_strengths, table

__all__ = ["few_strengths"]  # a fixture

COLOURS = {"ant": (200, 60, 60), "bee": (60, 200, 60), "cat": (60, 60, 200)}


def write_pictures(root: Path, each: dict[str, int], noise: float = 60) -> None:
    """Pictures whose class is their colour, more or less; `each` has folder -> how many of a class."""
    generator = np.random.default_rng(0)
    for split, count in each.items():
        for name, colour in COLOURS.items():
            for i in range(count):
                pixels = np.clip(generator.normal(colour, noise, (16, 16, 3)) + generator.normal(0, noise, 3), 0, 255)
                path = root / split / name / f"{i:02d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).resize((40, 40), Image.Resampling.BICUBIC).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `pictures` with train and test, and its data set `out` of two layers and an embedding."""
    root = tmp_path_factory.mktemp("probe")
    write_pictures(root / "pictures", {"train": 14, "test": 8})
    succeeds("embed", root / "pictures", "-o", root / "out", *SMALL, "-l", "layer1", "-l", "layer4",
                      "-l", "embedding")  # fmt: skip
    return root


@pytest.fixture(scope="module")
def paths(made: Path) -> list[str]:
    with FeatureReader(made / "out") as reader:
        return list(reader.paths)


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def quickly_probed(out: Path, folder: Path, *options: object) -> str:
    """What is told of the centroids of a layer; results go into the folder."""
    return layertap("probe", out, "-l", "layer4", "-p", "centroid", "-o", folder, *options).stdout


@pytest.mark.usefixtures("figures")
def test_every_layer_is_probed_and_all_that_was_found_is_written(made, tmp_path):
    result = succeeds("probe", made / "out", "-o", tmp_path / "res")
    assert "out: 66 rows, 3 classes; 42 train, 24 test" in result.stdout
    assert "clip: logistic regression, 96 lambdas" in result.stdout
    assert "features unscaled" in result.stdout
    assert "lambda chosen on 5 folds of the training rows, drawn 4 times" in result.stdout
    assert "best on 5 folds of the training rows, drawn 4 times (" in result.stdout
    assert " if calibrated)" in result.stdout
    assert "p = " in result.stdout
    assert "probing layer4 (2 of 3)" in result.stderr
    content = results(tmp_path / "res")
    assert [one["layer"] for one in content["probes"]] == ["layer1", "layer4", "embedding"]
    assert {path.name for path in (tmp_path / "res").iterdir()} == {
        "results.json", "results.csv", "predictions.csv", "layers.png", "curve.png", "confusion.png",
    }  # fmt: skip
    first = content["probes"][0]
    assert np.sum(first["confusion"]) == 24
    assert first["metrics"]["top1"]["method"] == "Clopper-Pearson"
    assert first["chosen_on"] == "5 folds of the training rows, drawn 4 times"
    assert len(first["curve"]) == 3
    lines = table(tmp_path / "res" / "results.csv")
    assert float(lines[0]["estimate"]) == first["metrics"][lines[0]["metric"]]["value"]
    predictions = table(tmp_path / "res" / "predictions.csv")
    assert len(predictions) == 3 * 24
    right = [one["label"] == one["predicted"] for one in predictions if one["layer"] == "layer1"]
    assert np.mean(right) == pytest.approx(first["metrics"]["top1"]["value"])
    for name in ("layers", "curve", "confusion"):
        with Image.open(tmp_path / "res" / f"{name}.png") as picture:
            assert np.asarray(picture.convert("L")).std() > 5  # something is drawn


def test_the_numbers_are_those_of_scikit_learn_on_the_stored_arrays(made, tmp_path):
    layertap("probe", made / "out", "-l", "layer4", "-p", "dinov2-logreg", "-o", tmp_path)
    (found,) = results(tmp_path)["probes"]
    with FeatureReader(made / "out") as reader:
        train, test = (np.array(reader.splits) == split for split in ("train", "test"))
        x, y = reader["layer4"][:].astype(np.float64), reader.labels
    model = LogisticRegression(C=found["chosen"]["C"], solver="newton-cholesky", tol=1e-8).fit(x[train], y[train])
    assert found["metrics"]["top1"]["value"] == pytest.approx(model.score(x[test], y[test]))
    loss = -model.predict_log_proba(x[train])[np.arange(train.sum()), y[train]].sum()
    objective = found["chosen"]["C"] * loss + (model.coef_**2).sum() / 2
    assert found["objective"] == pytest.approx(objective, rel=1e-4)


def test_results_go_into_the_data_set_and_those_of_other_settings_are_not_written_over(made, tmp_path):
    out = shutil.copytree(made / "out", tmp_path / "out")
    (out / "probe" / "centroid-2").mkdir(parents=True)  # another run has just taken it
    for layer, folder in (("layer4", "centroid"), ("layer1", "centroid-3"), ("layer4", "centroid")):
        result = layertap("probe", out, "-p", "centroid", "-l", layer)
        assert str(out / "probe" / folder / "results.json") in result.stderr
    succeeds("verify", out)
    layers = ("-l", "layer1", "-l", "layer4", "-l", "embedding")
    assert "is complete" in layertap("embed", made / "pictures", "-o", out, *SMALL, *layers).stdout


def test_a_layer_may_be_two_side_by_side(made, tmp_path):
    layertap("probe", made / "out", "-l", "layer1+layer4", "-p", "knn", "-o", tmp_path)
    (one,) = results(tmp_path)["probes"]
    with FeatureReader(made / "out") as reader:
        assert one["width"] == reader["layer1"].shape[1] + reader["layer4"].shape[1]
    assert "matches 2 layers" in fails("probe", made / "out", "-l", "layer?+embedding", "-o", tmp_path)
    assert "layer 'layer9' not found" in fails("probe", made / "out", "-l", "layer9", "-o", tmp_path)


def test_two_data_sets_are_compared_on_the_images_they_share(made, tmp_path):
    layertap("embed", made / "pictures", "-o", tmp_path / "other", *SMALL, "--seed", 1, "-l", "layer4")
    assert "other: 66 rows" in quickly_probed(made / "out", tmp_path / "res", tmp_path / "other")
    content = results(tmp_path / "res")
    assert [(one["data_set"], one["layer"]) for one in content["probes"]] == [("out", "layer4"), ("other", "layer4")]
    (pair,) = content["mcnemar"]
    predictions = table(tmp_path / "res" / "predictions.csv")
    right = {name: {one["path"]: one["label"] == one["predicted"] for one in predictions if one["data_set"] == name}
             for name in ("out", "other")}  # fmt: skip
    better, other = pair["better"][0], pair["other"][0]
    assert pair["only_better"] == sum(right[better][path] and not right[other][path] for path in right[better])
    assert pair["only_other"] == sum(right[other][path] and not right[better][path] for path in right[better])


def test_images_without_splits_are_drawn_by_class_and_copies_stay_together(tmp_path):
    write_pictures(tmp_path / "pictures", {"": 10})
    for i in range(5):  # five copies of one picture
        shutil.copy(tmp_path / "pictures/ant/00.png", tmp_path / f"pictures/ant/copy{i}.png")
    layertap("embed", tmp_path / "pictures", "-o", tmp_path / "out", *SMALL)
    of = ("probe", tmp_path / "out", "-p", "centroid", "-o", tmp_path / "res")
    for seed in range(3):
        assert f"20% of each class drawn for testing, with seed {seed}" in layertap(*of, "--seed", seed).stdout
        content = results(tmp_path / "res")["data_sets"]["out"]
        assert content["leaks"] == {}
        assert content["rows"]["test"] in (6, 11)  # two of ten a class; the five copies all or none
    assert "50% of each class" in layertap(*of, "--test-fraction", 0.5).stdout


def test_images_that_failed_or_are_in_two_sets_are_counted_and_left_out(made, tmp_path):
    pictures = shutil.copytree(made / "pictures", tmp_path / "pictures")
    for i in range(4):
        shutil.copy(pictures / f"test/ant/0{i}.png", pictures / f"train/ant/leak{i}.png")
    shutil.copy(pictures / "test/bee/00.png", pictures / "train/ant/wrong.png")
    shutil.copy(pictures / "test/cat/00.png", pictures / "test/cat/copy.png")  # no leak
    (pictures / "train/ant/00.png").write_bytes(b"broken")
    (pictures / "test/bee/01.png").write_bytes(b"broken, too")
    layertap("embed", pictures, "-o", tmp_path / "out", *SMALL)
    of = ("probe", tmp_path / "out", "-p", "centroid", "-o", tmp_path / "res")
    leaky = layertap(*of).stdout
    assert "46 train, 24 test; left out: 2 failed" in leaky
    assert (
        "leakage: the same bytes, file or group in two sets: 5 images of test are also in train; --drop-leaks" in leaky
    )
    assert results(tmp_path / "res")["data_sets"]["out"]["leaks"] == {"test in train": 5}
    clean = layertap(*of, "--drop-leaks").stdout
    assert "5 rows of train and val left out" in clean
    assert "leakage" not in clean
    assert results(tmp_path / "res")["probes"][0]["rows"] == {"train": 41, "val": 0, "test": 24}
    (tmp_path / "bad.txt").write_text("train/ant/wrong.png\ntest/bee/01.png\n")
    ran = succeeds(*of, "--without", tmp_path / "bad.txt")
    assert "bad.txt: 2" in ran.stderr
    assert "45 train, 24 test; left out: 1 failed" in ran.stdout
    assert "leakage: the same bytes, file or group in two sets: 4 images" in ran.stdout


# labels


def labels_file(path: Path, *lines: list[str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def test_labels_come_from_a_file_by_path_and_what_is_left_out_is_counted(made, paths, tmp_path):
    lines = [[path, "warm" if "ant" in path else "cold"] for path in paths[:-3]]
    file = labels_file(tmp_path / "l.csv", ["path", "Label"], *lines, [paths[-3], ""], ["nowhere.png", "warm"])
    told = quickly_probed(made / "out", tmp_path / "res", "--labels", file)
    assert "66 rows, 2 classes; 39 train, 24 test; left out: 3 unlabelled" in told
    assert f"1 of the 65 rows of {file} have no image" in told


def test_labels_of_a_file_may_be_several_or_numbers_and_have_splits(made, paths, tmp_path):
    generator = np.random.default_rng(0)
    lines = []
    for path in paths:
        tags = ["warm"] * ("ant" in path) + ["living"] * (generator.random() < 0.5)
        lines.append([path, "|".join(tags), str(generator.normal()), generator.choice(["train", "valid", "test"])])
    file = labels_file(tmp_path / "labels.csv", ["path", "tags", "size", "split"], *lines)
    layertap("probe", made / "out", "-l", "layer4", "--labels", f"{file}:tags", "--multilabel", "-o", tmp_path / "a")
    content = results(tmp_path / "a")
    assert content["data_sets"]["out"]["task"] == "multilabel"
    assert content["data_sets"]["out"]["counts"]["unlabelled"] == 0  # none of the labels is an answer, too
    assert content["probes"][0]["classes"] == ["living", "warm"]
    assert content["probes"][0]["per_class"]["average_precision"][1] > 0.9
    assert content["data_sets"]["out"]["rows"]["val"] > 5
    result = layertap("probe", made / "out", "-l", "layer4", "-p", "ridge", "--labels", f"{file}:size",
                      "-o", tmp_path / "b")  # fmt: skip
    assert "numbers" in result.stdout
    assert results(tmp_path / "b")["probes"][0]["metrics"]["r2"]["value"] < 0.3  # they are random
    assert "is not a number" in fails("probe", made / "out", "-p", "ridge", "--labels", f"{file}:tags")


def test_classes_that_differ_by_case_or_spaces_or_that_training_lacks_are_told(made, paths, tmp_path):
    names = {path: "ant" if "ant" in path else "bee" if "bee" in path else "red cat" for path in paths}
    names |= {paths[-1]: "Red  cat", "train/ant/00.png": "Ant", "train/ant/01.png": "ANT"}
    names |= {"test/ant/00.png": "zebra", "test/ant/01.png": "yak"}
    file = labels_file(tmp_path / "labels.csv", ["path", "label"], *map(list, names.items()))
    told = quickly_probed(made / "out", tmp_path / "res", "--labels", file)
    for alike in ("'ANT' and 'Ant' and 'ant'", "'Red  cat' and 'red cat'"):
        assert f"the classes {alike} differ only by case or spaces; if they mean the same, give them one" in told
    assert "2 test rows have a class that no training row has" in told  # and keep their names
    assert all(names[one["path"]] == one["label"] for one in table(tmp_path / "res/predictions.csv"))
    assert "differ only by case" not in quickly_probed(made / "out", tmp_path / "res")


def test_figures_hold_their_curves_with_intervals_also_of_one_layer_and_say_n(made, tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(probe_figures, "save_figure", lambda figure, path: figures.setdefault(path.name, figure))
    layertap("probe", made / "out", "-l", "layer4", "-o", tmp_path)
    (probed,) = results(tmp_path)["probes"]
    low, high = figures["curve.png"].axes[0].get_ylim()
    values = np.array([value for _, value in probed["curve"]])
    errors = np.sqrt(values * (1 - values) / 42)
    assert low < 100 * (values - errors).min() < 100 * (values + errors).max() < high
    (band,) = figures["curve.png"].axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert np.isclose(heights, 100 * (values + errors).max()).any()
    estimate = probed["metrics"]["top1"]
    low, high = figures["layers.png"].axes[0].get_ylim()
    assert low < 100 * estimate["low"] < 100 * estimate["high"] < high
    (bars,) = figures["layers.png"].axes[0].collections
    np.testing.assert_allclose(bars.get_segments()[0][:, 1], [100 * estimate["low"], 100 * estimate["high"]])
    names = [label.get_text() for label in figures["confusion.png"].axes[0].get_yticklabels()]
    assert names == ["ant  n = 8", "bee  n = 8", "cat  n = 8"]
    assert figures["curve.png"].get_suptitle() == "Validation top-1 by lambda\nclip, data set out"


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
@pytest.mark.usefixtures("figures")
def test_figures_of_vectors_have_text(made, tmp_path, suffix):
    quickly_probed(made / "out", tmp_path, "-l", "layer1", "--format", suffix)
    drawn = {path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".svg", ".pdf")}
    assert drawn == {f"layers.{suffix}", f"confusion.{suffix}"}
    content = (tmp_path / f"layers.{suffix}").read_bytes()
    if suffix == "svg":
        assert "layer4" in re.findall(r"<text[^>]*>([^<]*)</text>", content.decode())
    else:
        assert b"/Subtype /Type0" in content or b"/Subtype /TrueType" in content
        assert b"/Subtype /Type3" not in content


def test_numbers_and_names_of_images_are_not_taken_for_classes(made, paths, tmp_path, monkeypatch):
    ages = ([path, str(i / 7)] for i, path in enumerate(paths))
    file = labels_file(tmp_path / "many.csv", ["path", "age"], *ages)
    monkeypatch.setattr("pipelines.probe.labelling._MOST_CLASSES", 10)
    assert "gives 66 classes to 66 rows" in fails("probe", made / "out", "--labels", f"{file}:age")


def test_labels_of_lists_are_read_as_embed_reads_them(made, paths, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    numbers = [None if i % 10 == 0 else -1.0 if i % 10 == 1 else float("ant" in path) for i, path in enumerate(paths)]
    parquet.write_table(pa.table({"path": paths, "label": numbers}), tmp_path / "labels.parquet")
    quickly_probed(made / "out", tmp_path / "res", "--labels", tmp_path / "labels.parquet")
    content = results(tmp_path / "res")
    assert content["probes"][0]["classes"] == ["0", "1"]
    assert content["data_sets"]["out"]["counts"]["unlabelled"] == 14


def test_unlabelled_test_images_leave_val_to_test_on(tmp_path):
    write_pictures(tmp_path / "pictures", {"train": 8, "val": 4})
    (tmp_path / "pictures/test").mkdir()
    shutil.copy(tmp_path / "pictures/val/ant/00.png", tmp_path / "pictures/test/new.png")
    layertap("embed", tmp_path / "pictures", "-o", tmp_path / "out", *SMALL)
    told = layertap("probe", tmp_path / "out", "-p", "knn", "-o", tmp_path / "res").stdout
    assert "24 train, 12 test; left out: 1 unlabelled" in told
    assert "no labelled test images: val is used for testing, and nothing is chosen on it" in told
    assert results(tmp_path / "res")["probes"][0]["rows"] == {"train": 24, "val": 2, "test": 12}


# results


def test_an_interruption_leaves_the_layers_that_are_done_or_the_results_of_before(made, tmp_path, monkeypatch):
    layertap("probe", made / "out", "-p", "knn", "-o", tmp_path)
    assert results(tmp_path)["complete"]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls = job.probe, iter(range(9))

    def interrupted(*args, **settings):
        if next(calls) in (0, 2):
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(job, "probe", interrupted)
    of = ("probe", made / "out", "-p", "centroid", "-o", tmp_path)
    assert layertap(*of).exit_code == 130
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert layertap(*of).exit_code == 130
    content = results(tmp_path)
    assert not content["complete"]
    assert [one["layer"] for one in content["probes"]] == ["layer1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json"]


def test_where_nothing_is_written_nothing_is_left(made, tmp_path):
    shutil.copytree(made / "out", tmp_path / "out")
    fails("probe", tmp_path / "out", "-p", "ridge")
    fails("probe", tmp_path / "out", "-l", "layer4", "--save", tmp_path / "probe.txt")
    assert not list((tmp_path / "out" / "probe").iterdir())
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    fails("probe", made / "out", "-p", "ridge", "-o", tmp_path / "mine" / "empty")
    assert (tmp_path / "mine" / "empty").is_dir()
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fails("probe", made / "out", "-o", tmp_path / "file" / "res")
    for name in (tmp_path, tmp_path / "probe.txt"):
        error = fails("probe", made / "out", "-l", "layer4", "-o", tmp_path / "res", "--save", name)
        assert "ends in .safetensors" in error


@pytest.mark.slow
def test_only_files_of_the_same_kind_are_written_over(made, kept, tmp_path):
    other = tmp_path / "labels.safetensors"
    other.write_text("path,label")
    error = fails("probe", made / "out", "-l", "layer4", "-o", tmp_path / "res", "--save", other)
    assert "cannot be read as a probe" in error
    table = tmp_path / "list.csv"
    table.write_text("path\nx.png\n")
    for taken in (table, kept, made / "out" / "dataset.json"):
        before = taken.read_bytes()
        assert "name another file" in fails("predict", kept, made / "out", "-o", taken)
        assert taken.read_bytes() == before
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    assert "not a regular file" in fails("predict", kept, made / "out", "-o", fifo)
    for _ in range(2):  # its own is
        succeeds("predict", kept, made / "out", "-o", tmp_path / "mine.csv")
    (tmp_path / "link.csv").symlink_to("mine.csv")
    succeeds("predict", kept, made / "out", "-o", tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()


@pytest.mark.usefixtures("figures")
def test_names_that_are_formulas_elsewhere_are_drawn_as_they_are(tmp_path):
    write_pictures(tmp_path / "pictures", {"": 6})
    for name, odd in (("ant", "$\\frac{a}$"), ("bee", "_<img>")):
        (tmp_path / "pictures" / name).rename(tmp_path / "pictures" / odd)
    layertap("embed", tmp_path / "pictures", "-o", tmp_path / "$x_$", *SMALL, "-l", "layer4", "-l", "layer1")
    assert "confusion.png" in succeeds("probe", tmp_path / "$x_$", "-p", "knn", "-o", tmp_path / "res").stderr


# what is wrong is said


def test_a_config_file_has_the_words_of_the_flags(made, tmp_path):
    config = tmp_path / "probe.yaml"
    config.write_text(f"out: {made / 'out'}\nlayers: layer4\nprotocol: knn\nresults: {tmp_path / 'res'}\n")
    succeeds("probe", "--config", config, "-p", "centroid")
    assert results(tmp_path / "res")["probes"][0]["protocol"] == "centroid"
    config.write_text("out: x\nlayer: layer4\n")
    assert "key 'layer' not found" in fails("probe", "--config", config)


# predict


@pytest.fixture(scope="module")
def _kept(made, tmp_path_factory):
    place = tmp_path_factory.mktemp("kept")
    file = place / "probe.safetensors"
    result = layertap("probe", made / "out", "-l", "layer4", "-p", "linear", "-o", place / "res", "--save", file)
    assert str(file) in result.stderr
    content = results(place / "res")  # linear is the usual probe
    assert content["configuration"]["protocol"] == content["probes"][0]["protocol"] == "clip"
    return place


@pytest.fixture
def kept(_kept, tmp_path):
    shutil.copytree(_kept, tmp_path, dirs_exist_ok=True)
    return tmp_path / "probe.safetensors"


def predictions(file: Path) -> dict[str, str]:
    return {one["path"]: one["predicted"] for one in table(file)}


def test_new_images_get_the_classes_that_their_stored_features_get(made, kept, tmp_path):
    stored = layertap("predict", kept, made / "out", "-o", tmp_path / "stored.csv")
    assert "66 images predicted" in stored.stdout
    succeeds("predict", kept, made / "pictures", "-o", tmp_path / "fresh.csv")
    assert predictions(tmp_path / "stored.csv") == predictions(tmp_path / "fresh.csv")
    fresh = {one["path"]: one for one in table(tmp_path / "fresh.csv")}
    assert sum(float(fresh["test/ant/00.png"][f"p({name})"]) for name in COLOURS) == pytest.approx(1, abs=1e-4)
    for line in table(tmp_path / "res/predictions.csv"):
        now = fresh[line["path"]]
        assert now["predicted"] == line["predicted"]
        assert float(now[f"p({line['predicted']})"]) == pytest.approx(float(line["probability"]), abs=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.csv", "probe.safetensors", "res", "stored.csv"]


def test_new_images_are_decoded_as_those_that_the_probe_was_fitted_on(tmp_path):
    write_pictures(tmp_path / "pictures", {"train": 6, "test": 4})
    for path in (tmp_path / "pictures").rglob("*.png"):
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.open(path).crop((0, 0, 40, 20)).save(path, exif=exif, icc_profile=matrix_profile())
    how = ("--orientation", "ignore", "--icc", "srgb")
    layertap("embed", tmp_path / "pictures", "-o", tmp_path / "out", *SMALL, *how)
    with FeatureReader(tmp_path / "out") as reader:
        shown, _ = Pictures(reader, str(tmp_path / "pictures"), [0]).picture(0)
        data = (tmp_path / "pictures" / reader.paths[0]).read_bytes()
    assert shown == decode(data, DecodeOptions(orientation="ignore", icc="srgb"))
    layertap("probe", tmp_path / "out", "-o", tmp_path / "res", "--save", tmp_path / "probe.safetensors")
    for images, file in (("out", "stored.csv"), ("pictures", "fresh.csv")):
        succeeds("predict", tmp_path / "probe.safetensors", tmp_path / images, "-o", tmp_path / file)
    assert predictions(tmp_path / "stored.csv") == predictions(tmp_path / "fresh.csv")
    layertap("embed", tmp_path / "pictures", "-o", tmp_path / "upright", *SMALL)
    error = fails("predict", tmp_path / "probe.safetensors", tmp_path / "upright", "-o", tmp_path / "x.csv")
    assert "EXIF orientation ignored" in error


def test_a_data_set_with_other_layers_too_will_do_but_not_one_made_otherwise(made, kept, tmp_path):
    layertap("embed", made / "pictures", "-o", tmp_path / "one", *SMALL, "-l", "layer4", "--limit", 2)
    succeeds("predict", kept, tmp_path / "one", "-o", tmp_path / "a.csv")
    layertap("embed", made / "pictures", "-o", tmp_path / "seed", *SMALL, "-l", "layer4", "--seed", 3, "--limit", 2)
    error = fails("predict", kept, tmp_path / "seed", "-o", tmp_path / "b.csv")
    assert "other settings" in error
    assert re.search(
        rf"weights_sha256: the probe has \w+\.\.\., {re.escape(str(tmp_path / 'seed'))} has \w+\.\.\.", error
    )
    layertap("embed", made / "pictures", "-o", tmp_path / "max", *SMALL, "-l", "layer4:max_map", "--limit", 2)
    error = fails("predict", kept, tmp_path / "max", "-o", tmp_path / "b.csv")
    assert "has no such feature, but layer4 (layer4 max_map [96])" in error
    assert not (tmp_path / "b.csv").exists()


def test_images_that_fail_have_a_line_without_a_class(made, kept, tmp_path):
    write_pictures(tmp_path / "new", {"": 2})
    (tmp_path / "new/ant/00.png").write_bytes(b"broken")
    result = layertap("predict", kept, tmp_path / "new", "-o", tmp_path / "new.csv")
    assert "5 images predicted, 1 without features" in result.stdout
    lines = {one["path"]: one for one in table(tmp_path / "new.csv")}
    assert (lines["ant/00.png"]["status"], lines["ant/00.png"]["predicted"]) == ("decode error", "")
    assert lines["ant/01.png"]["status"] == "ok"


@pytest.mark.slow
def test_probes_of_the_embedding_of_a_pooling_and_of_two_layers_predict_of_pictures_and_stored_features(made, tmp_path):
    two, one, file = tmp_path / "two", tmp_path / "one", tmp_path / "probe.safetensors"
    layertap("embed", made / "pictures", "-o", two, *SMALL, "-l", "layer4", "-l", "layer4:max_map")
    layertap("embed", made / "pictures", "-o", one, *SMALL, "-l", "layer4:max_map")
    for layers, *data_sets in (
        ("layer1+lay*4", made / "out"), ("embedding", made / "out"), ("layer4:max_map", two, one),
    ):  # fmt: skip
        succeeds("probe", data_sets[0], "-l", layers, "-o", tmp_path / "res", "--save", file)
        for number, given in enumerate((made / "pictures", *data_sets)):
            succeeds("predict", file, given, "-o", tmp_path / f"{number}.csv")
            assert predictions(tmp_path / f"{number}.csv") == predictions(tmp_path / "0.csv"), (layers, given)


def test_images_without_any_label_are_no_failures(made, paths, tmp_path):
    lines = [[path, "warm|hot" if "ant" in path else ""] for path in paths]
    file = labels_file(tmp_path / "labels.csv", ["path", "label"], *lines)
    of = ("probe", made / "out", "-l", "layer4", "--labels", file, "--multilabel", "-o", tmp_path / "res")
    for options in (("--save", tmp_path / "p.safetensors"), ("-p", "knn")):
        layertap(*of, *options)
        found = table(tmp_path / "res" / "predictions.csv")
        assert {one["label"] for one in found} == {"", "hot|warm"}
    assert np.mean([one["predicted"] == one["label"] for one in found]) > 0.85
    result = layertap("predict", tmp_path / "p.safetensors", made / "out", "-o", tmp_path / "x.csv")
    assert "66 images predicted;" in result.stdout


def test_a_kept_probe_says_what_it_is_for(made, kept):
    about = LinearProbe.load(kept).about
    assert (about["layers"], about["protocol"]) == (["layer4"], "clip")
    assert about["provenance"]["backbone"] == "timm/test_resnet"
    with FeatureReader(made / "out") as reader:
        assert about["depends_on"]["weights_sha256"] == reader.provenance["depends_on"]["weights_sha256"]
    with safe_open(kept, "np") as file:
        assert file.metadata()["format"] == "layertap probe"


def test_what_is_no_data_set_no_probe_no_device_or_no_place_is_refused(made, kept, tmp_path):
    out, given = made / "out", tmp_path / "given"
    assert "no out given; name OUT" in fails("probe")
    assert "nowhere is not a folder" in fails("probe", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    given.mkdir()
    assert str(given) in fails("probe", given)
    (given / "dataset.json").write_text("{}")
    assert str(given) in fails("probe", given)
    of = ("probe", out, "-o", tmp_path / "results")
    assert "--save keeps the probe of one layer, and there are 3" in fails(*of, "--save", "x.safetensors")
    assert "device 'cuda:7' cannot be used" in fails(*of, "--device", "cuda:7", code=1)
    for probe, images, to, why in (
        (out / "dataset.json", out, tmp_path / "x.csv", "cannot be read as a probe"),
        (out / "dataset.json", out, tmp_path / "x.csv", "`layertap probe --save`"),
        (kept, out, tmp_path / "no" / "x.csv", "no such folder"),
        (kept, out, "/proc/x.csv", "cannot be written to /proc: "),
        (kept, tmp_path / "nowhere", tmp_path / "x.csv", "nowhere"),
    ):
        assert why in fails("predict", probe, images, "-o", to)


# --similarity: layers against each other, without labels


@pytest.fixture(scope="module")
def stimuli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten pictures without classes, and a broken one, with three layers."""
    root = tmp_path_factory.mktemp("stimuli")
    folder = root / "pictures"
    folder.mkdir()
    for number in range(10):
        make_picture(number, 40, 40).save(folder / f"{number:02d}.png")
    (folder / "broken.png").write_bytes(b"no picture")
    layers = ["-l", "layer1", "-l", "layer4", "-l", "embedding"]
    succeeds("embed", folder, "-o", root / "out", *SMALL, *layers)
    return root


def test_layers_of_ten_images_without_labels_are_compared(stimuli: Path, tmp_path: Path) -> None:
    assert "similarity on 10 images" in succeeds("probe", stimuli / "out", "--similarity").stdout
    folder = stimuli / "out" / "probe" / "similarity"  # beside results of probes
    assert sorted(path.name for path in folder.iterdir()) == ["similarity.csv", "similarity.png"]
    with FeatureReader(stimuli / "out") as reader:
        each = [reader[name][:10].reshape(10, -1).astype(np.float64) for name in ("layer1", "layer4")]
    lines = list(csv.DictReader((folder / "similarity.csv").open()))
    assert len(lines) == 3
    [line] = [line for line in lines if (line["layer"], line["other_layer"]) == ("layer1", "layer4")]
    expected = spearmanr(*(pdist(values, "correlation") for values in each)).statistic
    assert float(line["rsa"]) == pytest.approx(expected, abs=1e-4)
    assert float(line["linear_cka"]) == pytest.approx(linear_cka(*each), abs=1e-5)
    assert line["data_set"] == line["other_data_set"] == "out"
    before = (folder / "similarity.csv").read_bytes()
    for _ in range(2):  # other layers have another folder, and take it again
        succeeds("probe", stimuli / "out", "--similarity", "-l", "layer1", "-l", "layer4")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["similarity", "similarity-2"]
    assert len((folder.parent / "similarity-2" / "similarity.csv").read_text().splitlines()) == 2
    assert (folder / "similarity.csv").read_bytes() == before
    (tmp_path / "two.txt").write_text("00.png\n01.png\n")
    fewer = succeeds("probe", stimuli / "out", "--similarity", "--without", tmp_path / "two.txt")
    assert "similarity on 8 images" in fewer.stdout
    assert (folder.parent / "similarity-without" / "similarity.csv").exists()
    assert (folder / "similarity.csv").read_bytes() == before  # results of all images


def test_an_export_of_dissimilarities_takes_a_metric_and_tells_of_failed_images(stimuli: Path) -> None:
    with FeatureReader(stimuli / "out") as reader:
        values = reader["layer4"][:10].reshape(10, -1).astype(np.float64)
    exported = layertap("export", stimuli / "out", "--to", "rdm", "-l", "layer4")
    assert "11 rows of layer4" in exported.stdout
    assert "1 of them failed and are NaN" in exported.stdout
    layertap("export", stimuli / "out", "--to", "rdm", "-l", "layer4", "--metric", "cosine")
    cosine = np.load(stimuli / "out-rdm-cosine" / "layer4.npy")
    np.testing.assert_allclose(cosine[:10, :10], squareform(pdist(values, "cosine")), atol=1e-12)


@pytest.mark.usefixtures("figures")
def test_layers_of_two_data_sets_are_compared_on_the_images_that_both_have(stimuli: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"  # in another order, and without two of the images
    others.mkdir()
    for number in range(8):
        (others / f"{7 - number}.png").write_bytes((stimuli / "pictures" / f"{number:02d}.png").read_bytes())
    succeeds("embed", others, "-o", tmp_path / "other", *SMALL, "-l", "layer4")
    command = ["probe", stimuli / "out", tmp_path / "other", "-l", "layer4", "--similarity", "-o", tmp_path / "res"]
    answer = json.loads(layertap(*command, "--json", "--format", "svg").stdout)
    assert answer["images"] == 8
    assert [feature["data_set"] for feature in answer["features"]] == ["out", "other"]
    np.testing.assert_allclose([answer["linear_cka"][0][1], answer["rsa"][0][1]], 1, atol=1e-6)
    assert "</svg>" in (tmp_path / "res" / "similarity.svg").read_text()


def test_what_cannot_be_compared_is_named(stimuli: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, options = stimuli / "out", ("--similarity", "-o", tmp_path / "res")
    assert "there is one" in fails("probe", out, *options, "-l", "layer4")
    assert "layer 'layer9' not found" in fails("probe", out, *options, "-l", "layer9")
    assert "has both features and a label" in fails("probe", out, "-o", tmp_path / "res")
    write_pictures(tmp_path / "pictures", {"": 2}, noise=10)
    layertap("embed", tmp_path / "pictures", "-o", tmp_path / "other", *SMALL, "-l", "layer4")
    assert "0 images in common" in fails("probe", out, tmp_path / "other", *options)
    monkeypatch.setattr("pipelines.probe.layer_similarity.is_too_wide", lambda count, width: True)
    message = fails("probe", out, *options)
    assert "layer1 of out has " in message
    assert "values for an image; of so many images, --similarity takes at most 16,384; name" in message
    assert not (tmp_path / "res").exists()


def test_files_of_others_stay_and_a_place_that_cannot_be_written_is_named(stimuli: Path, tmp_path: Path) -> None:
    command = ("probe", stimuli / "out", "--similarity", "-o")
    for name in ("similarity.csv", "similarity.png"):
        (tmp_path / name).write_text("mine")
        assert f"{tmp_path / name} exists and is not of --similarity" in fails(*command, tmp_path)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    for _ in range(2):  # its own are written over
        succeeds(*command, tmp_path)
    copy = shutil.copytree(stimuli / "out", tmp_path / "copy", ignore=shutil.ignore_patterns("probe"))
    (copy / "probe").mkdir()
    (copy / "probe" / "similarity").symlink_to(tmp_path)
    assert "is a link to" in fails("probe", copy, "--similarity")
    (tmp_path / "file").write_text("mine")
    assert f"results cannot be written to {tmp_path / 'file'}" in fails(*command, tmp_path / "file")
