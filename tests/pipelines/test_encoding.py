"""`layertap probe -p encoding` as a user meets it: rows belong to their images, results are written, or refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from extract import FeatureReader, FeatureWriter
from extract.probe import encoding
from pipelines.data_sets.report.probe_results import probes
from tests.pipelines.test_cli import fails, succeeds

N = 40
PATHS = [f"{('day', 'night')[i % 2]}/{i:03d}.jpg" for i in range(N)]


def subject_of(path: str) -> str:
    return path[-6]  # of four


def write_features(out: Path, paths: list[str], features: np.ndarray) -> None:
    """A data set of layers `a` and `b`; row 5 failed."""
    with FeatureWriter(
        out, ids=paths, layers={"a": ((6,), "float32"), "b": ((9,), "float32")}, identity={"of": "tests"},
        columns={"subject": [subject_of(path) for path in paths]},
    ) as writer:  # fmt: skip
        good = [i for i in range(len(paths)) if i != 5]
        writer.write([paths[i] for i in good], {"a": features[good, :6], "b": features[good, 6:]})
        writer.fail([paths[5]], "no picture")


@pytest.fixture(autouse=True)
def _figures_are_made_but_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("pipelines.probe.layer_table.save_figure", lambda figure, path: path)


@pytest.fixture(scope="module")
def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 15)).astype(np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, features: np.ndarray) -> Path:
    root = tmp_path_factory.mktemp("encoding")
    write_features(root / "out", PATHS, features)
    return root


@pytest.fixture(scope="module")
def responses(features: np.ndarray) -> np.ndarray:
    """Three targets: of the layer `a`, of `b`, and a constant one."""
    noise = 0.3 * np.random.default_rng(1).normal(size=(N, 2))
    return np.column_stack([features[:, 0] + noise[:, 0], features[:, 8] + noise[:, 1], np.full(N, 2.0)])


def write_table(path: Path, head: list[str], rows: list) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def encoded(out: Path, folder: Path, *options: object) -> tuple[dict, np.ndarray]:
    """The summary as JSON, and r (layers, targets)."""
    result = succeeds("probe", out, "-p", "encoding", "-o", folder, "--draws", 0, "--json", *options)
    return json.loads(result.stdout), np.load(folder / "r.npy")


@pytest.fixture(scope="module")
def expected(features: np.ndarray, responses: np.ndarray) -> np.ndarray:
    rows = np.where(np.arange(N) == 5, -1, np.arange(N))
    found = encoding({"a": features[:, :6], "b": features[:, 6:]}, responses, images=rows, draws=0)
    assert found.layers[0].r[0] > 0.8 > 0.5 > found.layers[1].r[0]
    return np.stack([layer.r for layer in found.layers])


@pytest.mark.parametrize("form", ["npy", "npz", "h5", "mat", "hdf5 mat", "csv", "parquet", "row"])
def test_responses_are_those_of_their_images_in_every_form(form, made, responses, expected, tmp_path):
    order = np.random.default_rng(2).permutation(N)
    shuffled = responses[order]
    stimuli = write_table(tmp_path / "stimuli.csv", ["image", "run"], [[f"{i:03d}", 1] for i in order])
    options: list[object] = ["--stimuli", f"{stimuli}:image"]
    file, name = tmp_path / f"responses.{form.split()[-1]}", ""
    if form == "npy":
        np.save(file, responses)
        options = []  # row by row
    elif form == "npz":
        np.savez(file, other=np.zeros(3), betas=shuffled)
        name = ":betas"
    elif form == "mat":
        savemat(file, {"betas": shuffled})
    elif form in ("h5", "hdf5 mat"):
        with h5py.File(file, "w", userblock_size=512) as content:
            content["betas"] = shuffled.T if form == "hdf5 mat" else shuffled
        if form == "hdf5 mat":
            with file.open("r+b") as raw:
                raw.write(b"MATLAB 7.3 MAT-file")
    else:
        key, names = ("row", order) if form == "row" else ("path", [f"photos/{PATHS[i]}" for i in order])
        file, options = tmp_path / "responses.csv", []
        names = [f"{i}.0" for i in order] if form == "row" else names  # as pandas writes numbers with gaps
        rows = [[where, *values] for where, values in zip(names, shuffled, strict=True)]
        write_table(file, [key, "of a", "of b", "constant"], rows)
        if form == "parquet":
            pandas = pytest.importorskip("pandas")
            pandas.read_csv(file).to_parquet(file := tmp_path / "responses.parquet")
    if form == "row":  # numbers of rows are those of the data set, also if images are left out
        (left_out := tmp_path / "without.txt").write_text(PATHS[5])
        summary, r = encoded(made / "out", tmp_path / "res", "--targets", file, "--without", left_out)
        np.testing.assert_allclose(r, expected, atol=1e-6)
        assert any("39 of 40 images matched by the path with the 39 of out" in note for note in summary["notes"])
    summary, r = encoded(made / "out", tmp_path / "res", "--targets", f"{file}{name}", *options)
    np.testing.assert_allclose(r, expected, atol=1e-6)
    assert summary["images"] == N - 1
    assert any("40 of 40 images matched" in note and "of which 1 failed" in note for note in summary["notes"])
    assert np.load(tmp_path / "res" / "best_layer.npy").tolist() == [0, 1, -1]


@pytest.mark.usefixtures("figures")
def test_all_that_was_found_is_written_and_said(made, responses, tmp_path):
    trials = np.concatenate([responses, responses + 0.2 * np.random.default_rng(3).normal(size=responses.shape)])
    table = write_table(
        tmp_path / "trials.csv", ["Unnamed: 0", "path", "of a", "of b"],
        [*([1, path, *values[:2]] for path, values in zip(PATHS * 2, trials, strict=True)), [2, "night/999.jpg", 1, 2]],
    )  # fmt: skip
    options = ("-p", "encoding", "--targets", table, "--partition", "--draws", 99)
    result = succeeds("probe", made / "out", *options, "-o", tmp_path / "res")
    assert "39 images, 78 trials, 2 targets: of a, of b" in result.stdout
    assert "3 of the 81 rows of targets left out: no image with features" in result.stdout
    assert "trials.csv: 40 of 41 images matched by the path with the 40 of out, of which 1 failed" in result.stdout
    assert "a + b" in result.stdout
    assert "best_r 0.9" in result.stdout
    assert "ceiling 0.9" in result.stdout
    folder = tmp_path / "res"
    tables = {name: list(csv.DictReader((folder / name).open())) for name in ("scores.csv", "images.csv")}
    assert [line["best_layer"] for line in tables["scores.csv"]] == ["a", "b"]
    assert len({line["fold"] for line in tables["images.csv"]}) == 5
    assert np.load(folder / "q.npy").shape == (3, 2)
    assert (np.load(folder / "low.npy") <= np.load(folder / "r.npy")).all()
    metrics = json.loads((folder / "results.json").read_text())["probes"][0]["metrics"]
    assert metrics["r"]["value"] == pytest.approx(np.median(np.load(folder / "r.npy")[0]))
    assert float(tables["scores.csv"][0]["unique_first"]) > 0.5
    results, notes = probes(made / "nowhere", [folder])  # of a report
    assert not notes
    assert results[folder]["name"] == f"{folder}, {table}"
    assert [layer["layer"] for layer in results[folder]["layers"]] == ["a", "b", "a + b"]
    for name in ("layers.png", "partition.png"):
        with Image.open(folder / name) as picture:
            assert np.asarray(picture.convert("L")).std() > 5


def test_two_data_sets_are_joined_by_path_whatever_their_order(made, features, responses, tmp_path):
    np.save(tmp_path / "y.npy", responses)
    order = [7, 5, *range(10, 30), *range(5)]
    order[1], order[5] = order[5], order[1]  # the row that failed is the sixth
    write_features(tmp_path / "other", [PATHS[i] for i in order], features[order])
    summary, r = encoded(made / "out", tmp_path / "res", tmp_path / "other", "--targets", tmp_path / "y.npy")
    assert summary["images"] == 26
    np.testing.assert_allclose(r[:2], r[2:], atol=1e-6)
    assert [(probe["data_set"], probe["layer"]) for probe in summary["probes"]] == [
        ("out", "a"), ("out", "b"), ("other", "a"), ("other", "b"),
    ]  # fmt: skip


def test_paths_are_not_taken_for_the_ids_of_other_images(made, responses, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(FeatureReader, "ids", property(lambda reader: [f"{N - 1 - i:03d}" for i in range(N)]))
    for key, name in (("path", lambda i: f"{i:03d}"), ("id", lambda i: f"{N - 1 - i:03d}")):
        table = write_table(tmp_path / "y.csv", [key, *"abc"], [[name(i), *responses[i]] for i in range(N)])
        _, r = encoded(made / "out", tmp_path / "res", "--targets", table)
        np.testing.assert_allclose(r, expected, atol=1e-6)


def folds_of(folder: Path) -> dict[str, str]:
    return {line["path"]: line["fold"] for line in csv.DictReader((folder / "images.csv").open())}


def test_images_of_a_group_and_copies_stay_in_one_fold(made, responses, tmp_path, monkeypatch):
    np.save(tmp_path / "y.npy", responses)
    options = ("--targets", tmp_path / "y.npy", "--group", "subject", "--folds", 4)
    summary, _ = encoded(made / "out", tmp_path / "res", *options)
    assert summary["images"] == N - 1
    folds = folds_of(tmp_path / "res")
    assert len({(subject_of(path), fold) for path, fold in folds.items()}) == len(set(folds.values())) == 4
    monkeypatch.setattr("pipelines.probe.encoding.row_groups", lambda reader, values: np.arange(N) % 20)
    encoded(made / "out", tmp_path / "copies", "--targets", tmp_path / "y.npy")
    folds = folds_of(tmp_path / "copies")
    assert len(set(folds.values())) == 5
    assert all(folds[PATHS[i]] == folds[PATHS[i + 20]] for i in range(20) if i != 5)


def test_what_cannot_be_joined_or_read_is_refused_by_name(made, responses, tmp_path):
    def refused(*options: object) -> str:
        return fails("probe", made / "out", "-p", "encoding", "-o", tmp_path / "res", "--draws", 0, *options)

    np.save(tmp_path / "few.npy", responses[:30])
    few = ("--targets", tmp_path / "few.npy")
    assert "few.npy has 30 images, and out 40; name them in their order: --stimuli" in refused(*few)
    other = write_table(tmp_path / "other.csv", ["path", "y"], [["x.png", 1], ["y.png", 2]])
    assert "none of its 2 values of 'path' names an image" in refused("--targets", other)
    assert "few.npy has 30 images, and " in refused(*few, "--stimuli", other)
    numbered = write_table(tmp_path / "rows.csv", ["row", "y"], [[40, 1], [-1, 2]])
    assert "rows.csv: no number in the column 'row' is that of a row of out" in refused("--targets", numbered)
    words = write_table(tmp_path / "words.csv", ["path", "y"], [[PATHS[0], "high"], [PATHS[1], "low"]])
    assert "words.csv: column 'y': row 0, from 0, is 'high'" in refused("--targets", words)
    mixed = write_table(tmp_path / "mixed.csv", ["path", "y"], [[PATHS[0], "1.5"], [PATHS[1], "1,5"]])
    assert "mixed.csv: column 'y': row 1, from 0, is '1,5'; expected a number" in refused("--targets", mixed)
    twice = write_table(tmp_path / "twice.csv", ["path", "y", "y"], [[PATHS[0], 1, 2]])
    assert "twice.csv: two columns have the name 'y'" in refused("--targets", twice)
    assert "column 'z' not found" in refused("--targets", f"{other}:z")
    unnamed = write_table(tmp_path / "unnamed.csv", ["image", "y"], [[path, 1] for path in PATHS])
    assert "unnamed.csv names no images; add a column 'path', 'id' or 'row'" in refused("--targets", f"{unnamed}:y")
    alone = write_table(tmp_path / "alone.csv", ["path"], [[PATHS[0]]])
    assert "alone.csv has no targets" in refused("--targets", alone)
    np.savez(tmp_path / "two.npz", x=responses, y=responses)
    assert "two.npz has x, y" in refused("--targets", tmp_path / "two.npz")
    with h5py.File(tmp_path / "empty.h5", "w") as content:
        content.create_dataset("betas", dtype="f4")
    assert "one array of numbers is expected" in refused("--targets", tmp_path / "empty.h5")
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    assert "broken.npy cannot be read as an array" in refused("--targets", tmp_path / "broken.npy")
    assert "none.npy: no such file" in refused("--targets", tmp_path / "none.npy")
    np.save(tmp_path / "y.npy", responses)
    assert "column 'age' not found" in refused("--targets", tmp_path / "y.npy", "--group", "age")
    assert "5 folds of 39 images in 4 groups that stay together, at least 0 in each; expected at least 3" in refused(
        "--targets", tmp_path / "y.npy", "--group", "subject"
    )
    assert "encoding needs --targets" in refused()
    assert "--labels is not for encoding" in refused("--targets", other, "--labels", other)
    assert "--scaling is not for encoding" in refused("--targets", other, "--scaling", "l2")
    (tmp_path / "mine").mkdir()
    np.save(tmp_path / "mine" / "r.npy", responses)
    assert "r.npy exists and is not of a probe" in fails(
        "probe", made / "out", "-p", "encoding", "--targets", tmp_path / "y.npy", "-o", tmp_path / "mine"
    )
    for option in (("--targets", other), ("--folds", 3), ("--partition",), ("--draws", 0)):
        found = fails("probe", made / "out", "-p", "knn", *option, "-o", tmp_path / "res")
        assert f"{option[0]} is for -p encoding, not for knn" in found
    assert not (tmp_path / "res").exists()
