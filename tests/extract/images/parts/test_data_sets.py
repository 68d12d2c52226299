"""Data sets whose rows are parts of images: what reads and follows them."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extract import FeatureReader, InputError, UnknownNameError, extract_features
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.row_findings import left_out_probabilities
from extract.images.part_names import windows_of
from extract.images.plan_writing import write_plan
from extract.probe import linear_probe
from extract.store.merge import merge
from extract.store.verify import verify
from pipelines.probe.labelling import drop_leaks, label_rows
from pipelines.terminal.pictures import Pictures
from tests.conftest import make_picture
from tests.extract.images.making import TINY
from tests.pipelines.test_cli import fails, layertap

FILES, BOXES = 16, 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos`, two of each patient; `boxes.csv`, four boxes of each photo; and `out`, their features."""
    root = tmp_path_factory.mktemp("parts")
    (root / "photos").mkdir()
    lines = ["path,x,y,w,h,label,patient"]
    for number in range(FILES):
        make_picture(number, 80, 60).save(root / "photos" / f"{number:02d}.png")
        lines += [f"{number:02d}.png,{20 * box},{5 * box},20,30,{'ab'[box % 2]},{number // 2}" for box in range(BOXES)]
    (root / "boxes.csv").write_text("\n".join(lines))
    asked = TINY | {"boxes": root / "boxes.csv", "keep": "patient", "shard_rows": 10}
    extract_features(root / "photos", out=root / "out", layers=["layer1", "embedding"], **asked).close()
    return root


@pytest.fixture(scope="module")
def reader(world: Path) -> FeatureReader:
    return FeatureReader(world / "out")


def files_on_both_sides(reader: FeatureReader, first: np.ndarray, second: np.ndarray) -> set[str]:
    names = [{reader.paths[row].partition("#")[0] for row in rows.tolist()} for rows in (first, second)]
    return names[0] & names[1]


# Probes


@pytest.mark.usefixtures("few_strengths")
@pytest.mark.parametrize("protocol", ["clip", "dinov2-logreg", "knn", "centroid", "ridge"])
def test_rows_that_tell_their_group_say_nothing_of_targets_drawn_for_each_group(protocol: str) -> None:
    random, n_groups = np.random.default_rng(1), 200
    groups = np.repeat(random.permutation(n_groups), 4)
    y = random.normal(size=n_groups) if protocol == "ridge" else random.integers(0, 2, n_groups)
    x = random.normal(size=(n_groups, 256))[groups] + 0.2 * random.normal(size=(len(groups), 256))
    order = random.permutation(len(groups))
    of = (x[order], y[groups][order], x[:8], y[groups][:8])
    chosen, leaked = (linear_probe(*of, protocol=protocol, groups=each) for each in (groups[order], None))
    left_out = 20 if "tenth" in chosen.chosen_on else n_groups
    chance, error = (0, 0.1) if protocol == "ridge" else (0.5, 0.5 / left_out**0.5)
    assert chosen.validation < chance + 2 * error < leaked.validation
    assert chosen.chosen_on == leaked.chosen_on.partition(", drawn")[0] + ", in whole groups"


@pytest.mark.usefixtures("few_strengths")
def test_a_draw_of_few_shots_has_one_row_of_a_group(reader: FeatureReader) -> None:
    random, y = np.random.default_rng(0), np.arange(60) % 2
    of = (random.normal(size=(60, 8)), y, random.normal(size=(9, 8)), np.arange(9) % 2)
    groups = [f"{label} {number % 6 // 2}" for number, label in enumerate(y.tolist())]  # three of each class
    assert list(linear_probe(*of, protocol="fewshot").shots) == [1, 2, 5, 10, 20]
    assert list(linear_probe(*of, protocol="fewshot", groups=groups).shots) == [1]
    with pytest.raises(InputError, match="a class has 1 training rows, in whole groups"):
        linear_probe(*of, protocol="fewshot", groups=y)


def test_suspect_labels_are_those_of_probes_that_saw_no_part_of_the_file() -> None:
    """The class of each image is that of its own rows alone."""
    random, images = np.random.default_rng(0), np.repeat(np.arange(30), 4)
    rows = FeatureRows.of(random.normal(size=(30, 32))[images].astype(np.float32))
    labels = random.integers(0, 2, 30)[images]
    seen, unseen = (
        left_out_probabilities(rows, labels, each)[np.arange(120), labels].mean() for each in (np.arange(120), images)
    )
    assert unseen < 0.6 < 0.8 < seen


def test_no_file_is_trained_and_tested_on_and_no_patient_with_a_group(reader: FeatureReader, tmp_path: Path) -> None:
    drawn = label_rows(reader, None)
    assert not files_on_both_sides(reader, drawn.train, drawn.test)
    assert "copies and parts of a file stay together" in " ".join(drawn.notes)
    assert f"the {len(drawn.test)} test rows are of {len(drawn.test) // BOXES} groups" in " ".join(drawn.notes)
    patients = np.array(reader.columns["patient"])
    assert set(patients[drawn.train]) & set(patients[drawn.test])
    table = tmp_path / "patients.csv"
    table.write_text("path,patient\n" + "".join(f"{number:02d}.png,{number // 2}\n" for number in range(FILES)))
    for group in ("patient", f"{table}:patient"):
        by_patient = label_rows(reader, None, group=group)
        assert not set(patients[by_patient.train]) & set(patients[by_patient.test])
        assert not by_patient.leaks
    with pytest.raises(UnknownNameError, match="column 'patints' not found in the data set"):
        label_rows(reader, None, group="patints")


def test_splits_of_the_users_own_that_divide_a_file_are_leaks(reader: FeatureReader, tmp_path: Path) -> None:
    table = tmp_path / "splits.csv"
    splits = ["test" if row == 1 or row >= 40 else "train" for row in range(len(reader))]
    with table.open("w") as file:
        rows = zip(reader.paths, "ab" * 32, splits, strict=True)
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    labelling = label_rows(reader, str(table))
    assert labelling.leaks == {"test in train": 1}
    assert drop_leaks(labelling).train.tolist() == list(range(4, 40))


# Tables of images


def test_a_table_may_name_parts_or_their_files(world: Path, reader: FeatureReader, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    stems = [file.removesuffix(".png") for file in reader.files]
    for of_rows in (reader.paths[:], reader.files[:], stems):
        label_of = {name: "ab"[number % 3 % 2] for number, name in enumerate(dict.fromkeys(of_rows))}
        with table.open("w") as file:
            csv.writer(file).writerows([("path", "label"), *label_of.items()])
        labelling = label_rows(reader, str(table))
        assert labelling.classes[labelling.targets].tolist() == [label_of[name] for name in of_rows]
    notes: list[str] = []
    some = reader.without([reader.paths[5], "03.png", "nowhere.png"], notes.append)
    assert some.rows.tolist() == [row for row in range(64) if row != 5 and not 12 <= row < 16]
    assert notes[0].startswith("images left out by the table: 5; paths in it without an image: 1 of 3")
    with pytest.raises(InputError, match=r"--masks .*: the rows are parts of images, such as 00.png#xywh=0,0,20,30"):
        label_rows(reader, str(world / "photos"), "segmentation")


# Readers


def test_a_reader_tells_files_and_windows_and_the_means_of_files(reader: FeatureReader) -> None:
    assert reader.files == [f"{row // BOXES:02d}.png" for row in range(64)]
    x = np.array([20 * (row % BOXES) for row in range(64)])
    assert reader.windows.dtype == np.int64
    assert reader.windows.tolist() == np.stack([x, x // 4, [20] * 64, [30] * 64], 1).tolist()
    for name in "xywh":
        assert reader.windows[:, "xywh".index(name)].tolist() == reader.columns[name].tolist()
    fractions = windows_of(["a.png#xywh=percent:12.5,0,50,99.999999"])
    assert fractions.dtype == np.float64
    assert fractions[0].tolist() == pytest.approx([0.125, 0, 0.5, 0.99999999], abs=1e-12)
    some = reader.without([reader.paths[0], *reader.paths[8:12]])
    for layer in some.layers:
        files, means, n_rows = some.per_file(layer)
        assert files == [f"{number:02d}.png" for number in range(FILES) if number != 2]
        assert n_rows.tolist() == [3] + [4] * 14
        expected = [some[layer][np.array(some.files) == file].astype(np.float64).mean(0) for file in files]
        np.testing.assert_allclose(means, expected, rtol=1e-12)
        assert means.dtype == np.float64
    for names, message in {
        ("a.png#xywh=1,2,3,4", "b.png"): "b.png is not a window of a picture",
        ("a.png#xywh=1,2,3,4", "a.png#xywh=percent:1,2,3,4"): "some windows are in pixels, and others in fractions",
    }.items():
        with pytest.raises(InputError, match=message):
            windows_of(names)


def test_a_tile_has_the_pixels_of_its_box_and_shows_where_they_are(world: Path, reader: FeatureReader) -> None:
    row = reader.paths[:].index("07.png#xywh=40,10,20,30&shape=square")
    pictures = Pictures(reader, str(world / "photos"), [row, 0])
    with Image.open(world / "photos" / "07.png") as photo:
        box, whole = photo.crop((35, 10, 65, 40)), photo.copy()
    assert pictures.size(row) == (30, 30)
    assert pictures.picture(row)[0] == box
    tile, _ = pictures.tile(row, 120)
    assert tile is not None
    assert tile.size == (120, 120)
    scaled = np.array(box.resize((120, 120), Image.Resampling.BICUBIC))
    shown, small = np.array(tile), np.array(whole.resize((46, 34), Image.Resampling.BICUBIC))
    assert np.array_equal(shown[:84], scaled[:84])
    inset = shown[-35:-1, -47:-1]  # within a white frame
    assert (shown[-36, -48:] == 255).all()
    inside = np.zeros((34, 46), bool)
    inside[round(10 * 34 / 60) - 1 : round(40 * 34 / 60) + 1, round(35 * 46 / 80) - 1 : round(65 * 46 / 80) + 1] = True
    assert np.array_equal(inset[~inside], small[~inside])
    assert (inset[round(10 * 46 / 80), round(35 * 46 / 80) : round(65 * 46 / 80) - 1] == 255).all()


# What is done with a data set


def test_parts_are_listed_planned_merged_and_computed_again_as_files_are(
    world: Path, reader: FeatureReader, tmp_path: Path
) -> None:
    listed = world / "photos" / "parts.csv"
    listed.write_text("path\n" + "\n".join(f'"{path}"' for path in reversed(reader.paths[:])))
    write_plan(listed, tmp_path / "plan")
    for where in (listed, tmp_path / "plan"):
        with extract_features(where, out=tmp_path / f"of-{where.name}", **TINY | {"layers": "embedding"}) as again:
            assert again.paths == reader.paths
            assert np.array_equal(again["embedding"][:], reader["embedding"][:])
            assert np.array_equal(again.column("source_hash"), reader.column("source_hash"))
    shutil.copytree(world / "photos", photos := tmp_path / "photos")
    asked = TINY | {"boxes": world / "boxes.csv", "layers": "embedding"}
    halves = [[f"{number:02d}.png" for number in numbers] for numbers in (range(8), range(8, FILES))]
    for name, half in zip("ab", halves, strict=True):
        with pytest.warns(UserWarning, match="images left out by the table: 32"):
            extract_features(photos, out=tmp_path / name, without=half, **asked).close()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    with FeatureReader(tmp_path / "merged") as merged:
        assert merged.paths == reader.paths
        assert merged["embedding"][:].tolist() == reader["embedding"][:].tolist()
        assert merged.windows.tolist() == reader.windows.tolist()
    (photos / "05.png").write_bytes(b"damaged")
    with extract_features(photos, out=tmp_path / "c", **asked) as damaged:
        assert [row for row, *_ in damaged.failures] == [20, 21, 22, 23]
    shutil.copy(world / "photos" / "05.png", photos)
    asked["layers"] = ["embedding", "layer1"]
    extract_features(photos, out=tmp_path / "c", retry_failed=True, **asked | {"layers": "embedding"}).close()
    with extract_features(photos, out=tmp_path / "c", add_layers=True, **asked) as whole:
        for layer in reader.layers:
            assert np.array_equal(whole[layer][:], reader[layer][:])
    assert not verify(tmp_path / "c").faults
    found = layertap("search", world / "out", "07.png#xywh=40,10,20,30&shape=square", "-k", 1, "-l", "embedding")
    assert "nearest to row 30 (07.png#xywh=40,10,20,30&shape=square)" in found.stdout


def test_a_part_of_another_file_may_be_searched_for(world: Path, reader: FeatureReader, tmp_path: Path) -> None:
    shutil.copy(world / "photos" / "07.png", other := tmp_path / "other.png")
    query = f"{other}#xywh=40,10,20,30&shape=square"
    found = layertap("search", world / "out", query, "-k", 1, "-l", "embedding", "-o", tmp_path / "hits.png")
    assert "1.000000  row 30  07.png#xywh=40,10,20,30&shape=square" in found.stdout
    assert (tmp_path / "hits.png").stat().st_size > 10_000
    assert "is not a row number, a path in it, or a file" in fails("search", world / "out", "no.png#xywh=40,10,20,30")


def test_sync_says_that_it_follows_no_boxes(world: Path, tmp_path: Path) -> None:
    (tmp_path / "sync.yaml").write_text(f"images: {world / 'photos'}\nout: {tmp_path / 'out'}\nboxes: boxes.csv\n")
    refused = fails("sync", tmp_path / "sync.yaml")
    assert "boxes: sync follows files, and boxes change without them" in refused
