"""Findings about the images of a data set, against other computations."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from extract import FeatureReader, Status, findings
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.protocols import stratified_folds
from extract.analysis.row_findings import confident_classes, left_out_probabilities
from extract.errors import UnknownNameError
from extract.store.format.layout import StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from tests.extract.store.rows import RowNames, data_set, no_files
from tests.pipelines.test_cli import fails, layertap

NOISE = np.random.default_rng(0)


def stored(
    out: Path, values: np.ndarray, classes: list[str], labels: list[int], images: list[int] | None = None,
    split_of: dict[int, str] | None = None,
) -> FeatureReader:  # fmt: skip
    """A data set of features; `images` are the numbers of images, equal for copies; a negative number is a failure. The
    file of row 12 is the largest, and the path of row 5 is a formula."""
    features = [StoredFeature("embedding", (values.shape[1],), "float32", {"layer": "x", "pooling": "none"})]
    count = len(values)
    data = data_set(out, features=features, images={"root": "/nowhere", "count": count, "paths_xxh3": ""},
                    shard_rows=count)  # fmt: skip
    data.open_or_create()
    paths = ["=1+1.png" if row == 5 else f"{row:03d}.png" for row in range(count)]
    splits = [(split_of or {}).get(row, "train") for row in range(count)]
    create_shard(data.path(0, part=True), features, data.identity(0), RowNames(paths, labels, splits, classes), {})
    numbers = np.arange(count) if images is None else np.array(images)
    files = no_files(count)
    files["source_size"][12:13] = 1
    files["source_hash"][:] = np.array([[*(abs(int(n)) + 1).to_bytes(4, "big"), *[7] * 12] for n in numbers], np.uint8)
    status = np.where(numbers < 0, Status.DECODE_ERROR, Status.OK).astype(np.uint8)
    values = np.where((numbers >= 0)[:, None], values, np.nan).astype(np.float32)
    reasons = dict.fromkeys(np.flatnonzero(numbers < 0).tolist(), "made to fail")
    with ShardWriter(data, 0) as writer:
        writer.write(np.arange(count), {"embedding": values}, status, files, reasons)
        writer.publish()
    return FeatureReader(out)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    """Two classes of 60 images; row 5 is a copy of 4, 61 of 60 in another split; 10, 11, 12 are nearly the same; 20 has
    the label of the others; 30 is like no other; 119 has no features."""
    means = np.repeat(NOISE.normal(size=(2, 32)) * 2, 60, 0)
    x = means + NOISE.normal(size=(120, 32)) * 0.9
    x[5], x[61] = x[4], x[60]
    x[11], x[12] = x[10] + 0.05 * NOISE.normal(size=32), x[10] + 0.06 * NOISE.normal(size=32)
    x[20] = means[100] + NOISE.normal(size=32) * 0.5
    x[30] = -3 * (means[0] + means[119])
    images = [*range(119), -1]
    images[5], images[61] = 4, 60
    out = tmp_path_factory.mktemp("planted") / "out"
    return stored(out, x, ["ant", "bee"], [0] * 60 + [1] * 60, images, {61: "test"})


def test_planted_faults_are_found_and_nothing_else(planted: FeatureReader) -> None:
    table = findings(planted)
    found = {kind: [row.row for row in table if row.kind == kind] for kind in dict.fromkeys(row.kind for row in table)}
    assert found == {
        "failed": [119], "copy across splits": [60, 61], "copy": [4, 5], "near-duplicate": [12, 10, 11],
        "suspect label": [20], "outlier": [30],
    }  # fmt: skip
    by_row = {row.row: row for row in table}
    assert (by_row[119].score, by_row[119].meaning) == (None, "decode error: made to fail")
    assert (by_row[5].path, by_row[5].other_path, by_row[5].keep, by_row[4].keep) == (
        "=1+1.png",
        "004.png",
        False,
        True,
    )
    assert by_row[4].group == by_row[5].group != by_row[60].group
    assert (by_row[20].label, by_row[20].suggested) == ("ant", "bee")
    assert [by_row[row].keep for row in (10, 11, 12)] == [False, False, True]


def test_scores_are_those_of_numpy(planted: FeatureReader) -> None:
    rows = np.setdiff1d(np.arange(119), [5, 61])  # of copies, the first is compared
    x = planted["embedding"][rows].astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    cosines = x @ x.T
    np.fill_diagonal(cosines, -2)
    ordered = -np.sort(-cosines, 1)
    for found in findings(planted, kinds=["near-duplicate", "outlier"]):
        place, column = np.flatnonzero(rows == found.row)[0], 0 if found.kind == "near-duplicate" else 9
        assert found.score == pytest.approx(ordered[place, column], abs=1e-6)
    distances = np.log(1 - ordered[:, 9])
    deviation = np.median(np.abs(distances - np.median(distances))) / 0.6745
    far = rows[(distances - np.median(distances)) / deviation > 3.5]
    assert far.tolist() == [found.row for found in findings(planted, kinds=["outlier"])]


def test_groups_of_near_duplicates_stand_from_the_nearest(tmp_path: Path) -> None:
    x = NOISE.normal(size=(60, 64))
    for row, (of, far) in {10: (0, 0.3), 11: (10, 0.02), 20: (1, 0.1)}.items():  # a chain 0, 10, 11; and a pair 1, 20
        x[row] = x[of] + far * NOISE.normal(size=64)
    reader = stored(tmp_path / "out", x, [], [-1] * 60)
    table = [(found.group, found.row, found.keep) for found in findings(reader, kinds=["near-duplicate"])]
    assert table == [(0, 0, True), (0, 10, False), (0, 11, False), (1, 1, True), (1, 20, False)]


def test_the_largest_picture_of_a_group_is_the_one_to_keep_else_the_largest_file(planted: FeatureReader) -> None:
    sizes = {10: (30, 30), 11: (20, 60), 12: (31, 30)}
    kept = [found for found in findings(planted, kinds=["near-duplicate"], picture_size=sizes.get) if found.keep]
    assert [found.row for found in kept] == [11]
    del sizes[12]  # not all sizes are known: the largest file
    kept = [found for found in findings(planted, kinds=["near-duplicate"], picture_size=sizes.get) if found.keep]
    assert [found.row for found in kept] == [12]


def test_the_image_to_keep_is_one_whose_label_is_not_suspect(tmp_path: Path) -> None:
    """Rows 3 and 40 are copies, 8 and 50 nearly the same; all four look like the second class."""
    noise = np.random.default_rng(1)
    x = np.repeat(noise.normal(size=(2, 32)) * 2, 30, 0) + noise.normal(size=(60, 32)) * 0.9
    x[3], x[8] = x[40], x[50] + 0.05 * noise.normal(size=32)
    images = [40 if i == 3 else i for i in range(60)]
    reader = stored(tmp_path / "out", x, ["ant", "bee"], [0] * 30 + [1] * 30, images)
    groups = [found for found in findings(reader) if found.group is not None]
    assert [(found.kind, found.row, found.keep) for found in groups] == [
        ("copy", 40, True), ("copy", 3, False), ("near-duplicate", 50, True), ("near-duplicate", 8, False)
    ]  # fmt: skip
    assert all(found.meaning.endswith("; the labels differ") for found in groups)
    assert "040.png  group 0, to keep, labels differ: [bee]" in layertap("findings", tmp_path / "out").stdout
    assert [found.row for found in findings(reader, kinds=["copy"])] == [3, 40]  # suspect labels are not looked for


def test_images_without_any_relation_have_no_outliers(tmp_path: Path) -> None:
    x = NOISE.normal(size=(200, 300))
    reader = stored(tmp_path / "out", x, [f"{i:03d}" for i in range(200)], list(range(200)))
    assert findings(reader) == []  # nor suspect labels: each class has one image
    with pytest.raises(UnknownNameError, match="kind 'copies' not found"):
        findings(reader, kinds=["copies"])


def test_probabilities_are_those_of_scikit_learn_fitted_without_the_fold() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    labels = np.append(np.arange(90) % 3, [3, 3])
    x = (NOISE.normal(size=(4, 6))[labels] + NOISE.normal(size=(92, 6))).astype(np.float32)
    x[90:] = x[:2]  # copies with a label that is too rare to be judged
    images = np.append(np.arange(90), [0, 1])
    given = left_out_probabilities(FeatureRows.of(x), labels, images)
    assert np.isnan(given[90:]).all()
    folds = stratified_folds(labels[:90], 0)[images, 0]
    assert folds[0] != folds[1]  # each probe has seen all classes
    best = (np.inf, np.empty(0))
    for penalty in 10 ** np.arange(4, -4.5, -0.5):
        expected = np.zeros((92, 4))
        for fold in range(5):
            model = linear_model.LogisticRegression(C=1 / penalty, max_iter=10_000, tol=1e-8)
            expected[folds == fold] = model.fit(x[folds != fold], labels[folds != fold]).predict_proba(x[folds == fold])
        loss = -np.log(expected[np.arange(90), labels[:90]]).mean()
        best = min(best, (loss, expected), key=lambda pair: pair[0])
    np.testing.assert_allclose(given[:90], best[1][:90], atol=2e-3)


def test_copies_are_left_out_together_and_small_classes_are_not_judged() -> None:
    labels = np.array([0] * 10 + [1] * 10 + [2] * 4 + [0] * 10)
    x = NOISE.normal(size=(34, 200)).astype(np.float32)  # noise: only a copy can tell the class of a row
    x[24:] = x[:10]
    labels[24:] = 1  # copies with the other label
    images = np.concatenate([np.arange(24), np.arange(10)])
    together = left_out_probabilities(FeatureRows.of(x), labels, images)
    assert np.isnan(together[20:24]).all()
    assert np.isfinite(np.delete(together, np.s_[20:24], 0)).all()
    np.testing.assert_allclose(together[24:], together[:10], atol=1e-5)  # by the same probe


def test_confident_classes_follow_the_paper() -> None:
    labels = NOISE.integers(0, 4, 300)
    p = NOISE.dirichlet([0.5] * 4, 300)
    p[7] = np.nan  # not judged
    judged = [i for i in range(300) if i != 7]
    thresholds = [np.mean([p[i, k] for i in judged if labels[i] == k]) for k in range(4)]
    for i, confident in enumerate(confident_classes(p, labels)):
        above = [k for k in range(4) if i != 7 and p[i, k] >= thresholds[k] - 1e-6]
        expected = max(above, key=lambda k: p[i, k]) if above and p[i, labels[i]] < p[i].max() else labels[i]
        assert confident == expected


def test_files_of_findings_open_in_other_tools(planted: FeatureReader, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    out = planted.place_of(0)[0].parents[1]
    table = findings(planted)
    for suffix in ("csv", "json", "parquet"):
        result = layertap("findings", out, "-o", tmp_path / f"f.{suffix}")
        assert result.exit_code == 0, result.output
    assert "near-duplicate: 3 images in 1 group" in result.stdout
    assert "3 of 3 pictures of near-duplicates cannot be read" in result.stderr  # their keep is by the size of the file
    assert "the images are not in /nowhere any more; name their place: --images FOLDER" in result.stderr
    assert "the images are not in nowhere" in fails("findings", out, "--images", "nowhere")
    with (tmp_path / "f.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["kind"] for line in lines] == [row.kind for row in table]
    assert "'=1+1.png" in [line["path"] for line in lines]  # a spreadsheet does not compute it
    assert [float(line["score"]) for line in lines if line["score"]] == [
        row.score for row in table if row.score is not None
    ]
    assert json.loads((tmp_path / "f.json").read_text()) == [asdict(row) for row in table]
    frame = pandas.read_parquet(tmp_path / "f.parquet")
    assert frame["path"].tolist() == [row.path for row in table]
    assert frame["group"].dropna().tolist() == [row.group for row in table if row.group is not None]
    shown = layertap("findings", out, "--kind", "copy", "--json")
    assert [row["row"] for row in json.loads(shown.stdout)] == [4, 5]
    assert "expected a file that ends in .csv, .json, .parquet" in fails("findings", out, "-o", tmp_path / "f.xls")
