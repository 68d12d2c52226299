"""`layertap probe --similarity`: layers against each other, without labels."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr

from extract import FeatureReader
from extract.probe import linear_cka
from tests.conftest import make_picture
from tests.pipelines.test_cli import SMALL, fails, layertap
from tests.pipelines.test_probe import write_pictures


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
    assert layertap("embed", folder, "-o", root / "out", *SMALL, *layers).exit_code == 0
    return root


def test_layers_of_ten_images_without_labels_are_compared(stimuli: Path) -> None:
    result = layertap("probe", stimuli / "out", "--similarity")
    assert result.exit_code == 0, result.output
    assert "similarity on 10 images" in result.stdout
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
        assert layertap("probe", stimuli / "out", "--similarity", "-l", "layer1", "-l", "layer4").exit_code == 0
    assert sorted(path.name for path in folder.parent.iterdir()) == ["similarity", "similarity-2"]
    assert len((folder.parent / "similarity-2" / "similarity.csv").read_text().splitlines()) == 2
    assert (folder / "similarity.csv").read_bytes() == before


def test_dissimilarities_are_those_of_scipy_and_failed_images_have_none(stimuli: Path) -> None:
    with FeatureReader(stimuli / "out") as reader:
        values, matrix = reader["layer4"][:10].reshape(10, -1).astype(np.float64), reader.rdm("layer4")
    np.testing.assert_allclose(matrix[:10, :10], squareform(pdist(values, "correlation")), atol=1e-12)
    assert np.isnan(matrix[10]).all()
    exported = layertap("export", stimuli / "out", "--to", "rdm", "-l", "layer4")
    assert "11 rows of layer4" in exported.stdout
    assert "1 of them failed and are NaN" in exported.stdout
    assert np.isnan(np.load(stimuli / "out-rdm" / "layer4.npy")[10]).all()
    layertap("export", stimuli / "out", "--to", "rdm", "-l", "layer4", "--metric", "cosine")
    cosine = np.load(stimuli / "out-rdm-cosine" / "layer4.npy")
    np.testing.assert_allclose(cosine[:10, :10], squareform(pdist(values, "cosine")), atol=1e-12)


def test_layers_of_two_data_sets_are_compared_on_the_images_that_both_have(stimuli: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"  # in another order, and without two of the images
    others.mkdir()
    for number in range(8):
        (others / f"{7 - number}.png").write_bytes((stimuli / "pictures" / f"{number:02d}.png").read_bytes())
    assert layertap("embed", others, "-o", tmp_path / "other", *SMALL, "-l", "layer4").exit_code == 0
    command = ["probe", stimuli / "out", tmp_path / "other", "-l", "layer4", "--similarity", "-o", tmp_path / "res"]
    answer = json.loads(layertap(*command, "--json", "--format", "svg").stdout)
    assert answer["images"] == 8
    assert [feature["data_set"] for feature in answer["features"]] == ["out", "other"]
    np.testing.assert_allclose([answer["linear_cka"][0][1], answer["rsa"][0][1]], 1, atol=1e-6)
    assert (tmp_path / "res" / "similarity.svg").exists()


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
    assert layertap(*command, tmp_path).exit_code == layertap(*command, tmp_path).exit_code == 0
    (tmp_path / "file").write_text("mine")
    assert f"results cannot be written to {tmp_path / 'file'}" in fails(*command, tmp_path / "file")


@pytest.mark.parametrize(
    "options", [["--save", "x.safetensors"], ["-p", "knn"], ["--labels", "l.csv"], ["--drop-leaks"]]
)
def test_options_of_probes_are_refused_beside_similarity(stimuli: Path, tmp_path: Path, options: list[str]) -> None:
    message = fails("probe", stimuli / "out", "--similarity", "-o", tmp_path / "res", *options)
    assert "is for probes, and --similarity compares layers in place of probing them" in message
    assert not (tmp_path / "res").exists()
