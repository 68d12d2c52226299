"""verify, export, merge and the store's part of embed, on the command line; thumbnails in exports."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from extract import FeatureReader
from extract.store.format.receipt import size_and_hash
from extract.store.format.writer import ShardWriter, hash_records
from extract.system.csv_cells import exact_text
from pipelines.probe.labelling import label_rows
from tests.conftest import make_picture
from tests.extract.store.rows import ROWS, created, data_set, write
from tests.extract.sync.tiny import one_pass, picture, planner
from tests.pipelines.conftest import copy_of
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds

LAYERS = ["-l", "layer4", "-l", "layer2:none"]


@pytest.fixture(scope="module")
def made(_twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`broken`, a data set in three shards in which the picture bee/07.jpg is broken, and `whole`, in which none is."""
    place = tmp_path_factory.mktemp("made")
    images = shutil.copytree(_twelve, place / "images")
    (images / "bee" / "07.jpg").rename(place / "07.jpg")
    (images / "bee" / "07.jpg").write_bytes(b"no picture")
    for pictures, name in ((images, "broken"), (_twelve, "whole")):
        arguments = ["embed", pictures, "-o", place / name, *SMALL, *LAYERS, "--shard-rows", 5]
        succeeds(*arguments)
    return place


@pytest.fixture
def embedded(made: Path, folder: Path, tmp_path: Path) -> Path:
    """The broken one and its pictures, for a test to change."""
    (folder / "bee" / "07.jpg").write_bytes(b"no picture")
    return copy_of(made / "broken", tmp_path / "out", folder)


def row_of(out: Path, path: str) -> int:
    with FeatureReader(out) as reader:
        return reader.paths.index(path)


# embed --retry-failed, --compress


def test_failed_images_are_tried_again_when_asked(made: Path, embedded: Path, folder: Path) -> None:
    arguments = ["embed", folder, "-o", embedded, *SMALL, *LAYERS]
    before = {path.name: path.read_bytes() for path in (embedded / "shards").glob("*.h5")}
    again = layertap(*arguments, "--retry-failed", "--strict")
    assert again.exit_code == 3
    assert "bee/07.jpg: decode error: not an image" in again.stdout  # it has failed again

    shutil.copyfile(made / "07.jpg", folder / "bee" / "07.jpg")
    told = layertap(*arguments).stdout  # not unless asked
    assert "is complete: all 12 rows were done before, 1 of them without features" in told
    assert "--retry-failed" in told
    again = succeeds(*arguments, "--retry-failed", "--json")
    summary = json.loads(again.stdout)
    assert (summary["computed"], summary["found_done"], summary["failures"]) == (1, 11, [])
    assert "resuming: 11 of 12 rows done" in again.stderr
    after = {path.name: path.read_bytes() for path in (embedded / "shards").glob("*.h5")}
    shard = row_of(embedded, "bee/07.jpg") // 5
    kept = {name for name in before if name != f"{shard:06d}.h5"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    (changed,) = after.keys() - kept
    assert changed.startswith(f"{shard:06d}-r")
    with FeatureReader(embedded) as one, FeatureReader(made / "whole") as fresh:
        assert np.array_equal(one["layer4"][:], fresh["layer4"][:])
        assert np.array_equal(one["layer2"][:], fresh["layer2"][:])
    succeeds("verify", embedded)


def test_compression_is_told_and_shown_and_kept_when_a_row_is_tried_again(
    made: Path, embedded: Path, folder: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    arguments = ["embed", folder, "-o", packed, *SMALL, *LAYERS]
    ratio = json.loads(layertap(*arguments, "--compress", "gzip", "--json").stdout)["compression"]["layer2"]
    with h5py.File(packed / "shards" / "000000.h5") as file:
        stored = file["features/layer2"]
        assert stored.compression == "gzip"
        assert ratio == {"filter": "gzip", "ratio": round(stored.nbytes / stored.id.get_storage_size(), 3)}
    assert f"gzip compression ratio {ratio['ratio']:.2f}" in layertap("show", packed).stdout
    with FeatureReader(embedded) as one, FeatureReader(packed) as other:
        assert np.array_equal(one["layer2"][:], other["layer2"][:], equal_nan=True)
        assert one.fingerprint == other.fingerprint
    make_picture(7).save(folder / "bee" / "07.jpg")
    layertap(*arguments, "--retry-failed")
    with FeatureReader(packed) as reader:
        assert (reader.failures, reader.compression["layer4"][0]) == ([], "gzip")


# verify


def test_a_whole_data_set_is_confirmed_and_a_changed_row_named_repaired_and_filled_again(
    embedded: Path, folder: Path
) -> None:
    result = succeeds("verify", embedded, "--sample", 5)
    assert "out: no faults; rows: 11 ok, 1 decode error" in result.stdout
    assert "5 rows computed again differ by" in result.stdout
    content = json.loads(layertap("verify", embedded, "--json").stdout)
    assert (content["ok"], content["rows"], content["faults"]) == (True, {"ok": 11, "decode error": 1}, [])
    with FeatureReader(embedded) as reader:
        before, path = reader["layer4"][:], reader.paths[8]
    with h5py.File(embedded / "shards" / "000001.h5", "r+") as file:
        file["features/layer4"][3, 3] += 1
    result = layertap("verify", embedded)
    assert result.exit_code == 1
    assert f"shards/000001.h5 row 8 ({path}): does not match its hashes" in result.stdout
    content = json.loads(layertap("verify", embedded, "--json").stdout)
    assert {"file": "shards/000001.h5", "shard": 1, "row": 8, "path": path,
            "fault": "does not match its hashes"} in content["faults"]  # fmt: skip
    repaired = layertap("verify", embedded, "--repair")
    assert repaired.exit_code == 1
    assert "1 rows set to pending; to compute them again, run the command that created the data set" in repaired.stdout
    again = layertap("embed", folder, "-o", embedded, *SMALL, *LAYERS, "--json")
    # The broken picture is tried again, if it lies in the shard that is written anew.
    assert json.loads(again.stdout)["computed"] in (1, 2)
    succeeds("verify", embedded)
    with FeatureReader(embedded) as reader:
        assert np.array_equal(reader["layer4"][:], before, equal_nan=True)


def test_features_of_other_images_are_found_out(embedded: Path, folder: Path) -> None:
    make_picture(99, 90, 90).save(folder / "ant" / "00.png")
    result = layertap("verify", embedded, "--sample", 100)
    assert result.exit_code == 1
    row = row_of(embedded, "ant/00.png")
    assert f"row {row} (ant/00.png): features computed again differ by" in result.stdout
    assert "its image has changed since" in result.stdout
    assert f"of their largest value; why: layertap check {embedded}" in result.stdout
    assert result.stdout.count("computed again differ by") == 2  # this one, and the summary


def test_features_in_each_others_place_are_found_out_though_every_hash_agrees(embedded: Path) -> None:
    """What no checksum can see: two rows exchanged, and all hashes and receipts made anew."""
    shard = embedded / "shards" / "000000.h5"
    with h5py.File(shard, "r+") as file:
        for name in ("features/layer4", "features/layer2", "row_hash"):
            file[name][[0, 1]] = file[name][:][[1, 0]]
        names = ("row_hash", "source_size", "source_mtime_ns", "source_hash", "status")
        columns = {name: file[name][:] for name in names}
        file["record_hash"][...] = hash_records([bytes(path) for path in file["path"][:]], columns)
    receipt = json.loads(shard.with_suffix(".json").read_text())
    shard.with_suffix(".json").write_text(json.dumps({**receipt, **size_and_hash(shard)}))
    succeeds("verify", embedded)
    result = layertap("verify", embedded, "--sample", 100)
    assert result.exit_code == 1
    assert result.stdout.count("its image is the same") == 2


def test_weights_from_a_file_are_found_from_any_folder_and_others_are_found_out(
    embedded: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm
    from safetensors.torch import save_file

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_file(timm.create_model("test_resnet").state_dict(), "own.safetensors")
    result = layertap("verify", embedded, "--sample", 3, "--weights", "own.safetensors")
    assert result.exit_code == 1
    assert "computed with another weights_sha256" in result.stdout
    layertap("embed", folder, "-o", tmp_path / "own", *SMALL, "--weights", "own.safetensors")
    monkeypatch.chdir(tmp_path)
    assert "timm/test_resnet, weights own.safetensors" in layertap("show", tmp_path / "own").stdout
    succeeds("verify", tmp_path / "own", "--sample", 3, "--device", "cpu")


def test_moved_images_must_be_pointed_to(embedded: Path, folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "moved")
    assert "name their place: --images FOLDER" in fails("verify", embedded, "--sample", 3)
    succeeds("verify", embedded, "--sample", 3, "--images", moved)
    next(moved.glob("ant/*")).unlink()
    result = layertap("verify", embedded, "--sample", 100, "--images", moved)
    assert result.exit_code == 1
    assert "its image cannot be read any more" in result.stdout
    repaired = layertap("verify", embedded, "--sample", 100, "--images", moved, "--repair")
    assert "0 rows set to pending" in repaired.stdout
    empty = tmp_path / "empty"  # where a disk is not mounted
    empty.mkdir()
    assert "name their place: --images FOLDER" in fails("verify", embedded, "--sample", 3, "--images", empty)


def test_images_of_another_folder_make_no_good_row_a_fault(embedded: Path, folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.*"):
        (tmp_path / "others" / path.parent.name).mkdir(parents=True, exist_ok=True)
        make_picture(70).save(tmp_path / "others" / path.parent.name / path.name)
    for wrong, what in (("others", "its image has changed since"), (".", "its image cannot be read any more")):
        error = fails("verify", embedded, "--sample", 3, "--images", tmp_path / wrong, "--repair")
        assert "none of the 3 sampled images" in error
        assert what in error
    succeeds("verify", embedded, "--sample", 3)


def test_a_sample_is_not_taken_of_what_is_known_to_be_wrong(embedded: Path) -> None:
    with h5py.File(embedded / "shards" / "000000.h5", "r+") as file:
        file["status"][0] = 3
    result = layertap("verify", embedded, "--sample", 3)
    assert result.exit_code == 1
    assert "no rows were computed again: fix the reported faults first" in result.stdout


def test_fewer_images_than_before_are_told_as_that(embedded: Path, folder: Path) -> None:
    next(folder.glob("ant/*")).unlink()
    error = fails("embed", folder, "-o", embedded, *SMALL, *LAYERS)
    assert "images.count: stored 12, now 11" in error
    assert "shard_rows" not in error


@pytest.mark.slow
def test_an_output_whose_name_is_no_text(folder: Path, tmp_path: Path) -> None:
    out = os.fsencode(tmp_path) + b"/out\xff"
    for command in (["embed", folder, "-o", out, *SMALL], ["verify", out], ["show", out]):
        run = subprocess.run([sys.executable, "-m", "layertap", *command], capture_output=True,
                             env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})  # fmt: skip
        assert run.returncode == 0, run.stderr.decode()


# export, merge


def test_export_writes_beside_the_data_set_and_nothing_of_one_without_a_shard(embedded: Path) -> None:
    for to, name in (("h5", "out.h5"), ("npy", "out-npy"), ("parquet", "out.parquet"), ("mat", "out.mat")):
        assert f"{name}: 12 rows of layer4, layer2" in succeeds("export", embedded, "--to", to).stdout
        assert embedded.with_name(name).exists()
        assert "already exists" in fails("export", embedded, "--to", to)
    (embedded / "shards" / "000001.h5").unlink()
    assert "000001.h5 is missing" in fails("export", embedded, "--to", "hf", code=1)
    assert not embedded.with_name("out-hf").exists()


def test_merge_of_two_halves_is_the_whole(made: Path, folder: Path, tmp_path: Path) -> None:
    half = tmp_path / "halves"
    for i, path in enumerate(sorted(folder.rglob("*.*"))):
        target = half / "ab"[i % 2] / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in "ab":
        layertap("embed", half / name, "-o", tmp_path / name, *SMALL, *LAYERS)
    result = succeeds("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "all")
    assert "all: 12 rows of 2 data sets, in 1 shards" in result.stdout
    succeeds("verify", tmp_path / "all", "--sample", 100)
    with FeatureReader(tmp_path / "all") as merged, FeatureReader(made / "whole") as whole:
        found = {path.split("/", 1)[1]: merged["layer4"][row] for row, path in enumerate(merged.paths)}
        for name, expected in zip(whole.paths, whole["layer4"][:], strict=True):
            assert np.allclose(found[name], expected, rtol=1e-4, atol=1e-6)
        assert merged.classes == whole.classes
    assert "all is a merged data set" in fails("embed", half, "-o", tmp_path / "all", *SMALL, *LAYERS)


def test_csv_files_run_nothing_and_their_paths_match(folder: Path, tmp_path: Path) -> None:
    (folder / "bee").rename(folder / "=bee()")
    (folder / "cat").rename(folder / "@cat\x1b[31m")
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL)
    succeeds("export", tmp_path / "out", "--to", "npy")
    table = tmp_path / "out-npy" / "rows.csv"
    content = table.read_bytes()
    assert b"\x1b" not in content
    assert not re.search(rb"(?m)(^|,)[=+@-](?!\d)", content)
    with FeatureReader(tmp_path / "out") as reader, table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
        assert [exact_text(row["path"]) for row in rows] == reader.paths[:]
        assert {exact_text(row["class"]) for row in rows} == {"ant", "=bee()", "@cat\x1b[31m"}
        assert [int(row["label"]) for row in rows] == reader.labels.tolist()
        labelling = label_rows(reader, f"{table}:class")
        assert labelling.counts["unlabelled"] == 0
    succeeds("probe", tmp_path / "out", "-p", "centroid", "-o", tmp_path / "res")
    predictions = (tmp_path / "res" / "predictions.csv").read_bytes()
    assert b"'=bee()" in predictions
    assert not re.search(rb"(?m)(^|,)[=+@-](?!\d)|\x1b", predictions)


def test_status_counts_the_rows_of_unfinished_shards_and_names_the_run_that_writes(tmp_path: Path) -> None:
    data = data_set(tmp_path / "out")
    data.open_or_create()
    with ShardWriter(*created(data, 0)) as writer:
        write(writer, list(range(10)))
        writer.publish()
    with ShardWriter(*created(data, 2)) as writer:
        write(writer, [20, 22])
    content = json.loads(layertap("status", data.out, "--json").stdout)
    assert (content["rows"], content["rows_done"]) == (ROWS, 10)
    assert (content["shards_unfinished"], content["rows_unfinished"], content["writer"]) == (1, 2, "")
    text = layertap("status", data.out).stdout
    assert f"{12 / ROWS:.1%} of the rows are stored" in text
    assert "2 in 1 unfinished shard" in text
    assert text.endswith("to resume, run `layertap embed` with the same arguments again\n")
    with data.locked():
        text = layertap("status", data.out).stdout
    assert text.endswith("a run is writing: another thread of this process\n")


# thumbnails in exports


def test_thumbnails_are_small_pictures_of_the_rows(folder: Path, out: Path, tmp_path: Path) -> None:
    with FeatureReader(out) as reader:
        paths = reader.paths[:]
    (folder / paths[2]).unlink()
    (folder / paths[4]).write_bytes((folder / paths[5]).read_bytes())  # another picture
    succeeds("export", out, "--to", "parquet", "--thumbnails", 32, "-o", tmp_path / "a.parquet")
    images = parquet.read_table(tmp_path / "a.parquet")["image"].to_pylist()
    assert [row for row, image in enumerate(images) if image is None] == [2, 4]
    for path, image in zip(paths, images, strict=True):
        if image is None:
            continue
        assert image["path"] == path
        with Image.open(io.BytesIO(image["bytes"])) as thumbnail, Image.open(folder / path) as picture:
            assert max(thumbnail.size) == min(32, max(picture.size))
            expected = np.asarray(picture.convert("RGB").resize(thumbnail.size), float).mean((0, 1))
            np.testing.assert_allclose(np.asarray(thumbnail, float).mean((0, 1)), expected, atol=6)


def test_exports_without_pictures_are_refused(folder: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("")
    of = ("export", out, "--to", "parquet", "--thumbnails", 32, "--images", tmp_path / "other")
    assert "none of the first 12 images can be read: no such file" in fails(*of)
    folder.rename(tmp_path / "moved")
    of = ("export", out, "--to", "parquet", "--thumbnails", 32, "-o", tmp_path / "a.parquet")
    assert "no thumbnails: the images are not in" in fails(*of)
    assert not (tmp_path / "a.parquet").exists()
    succeeds(*of, "--images", tmp_path / "moved")


def test_a_data_set_whose_images_are_all_gone_has_no_thumbnails_to_export(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    root.mkdir()
    (root / "0.ppm").write_bytes(picture(0))
    (root / "notes.txt").touch()
    one_pass(root, out, planner())
    (root / "0.ppm").unlink()
    one_pass(root, out, planner(), force=True)
    assert "there are no rows to export" in fails("export", out, "--to", "parquet", "--thumbnails", 32)
