"""Runs whose features are projected, at random or on axes that are fitted: the stored rows, and what is kept of it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.numpy import load_file
from sklearn.decomposition import PCA
from sklearn.random_projection import johnson_lindenstrauss_min_dim

from extract import FeatureReader, InputError, LayertapError, LockedError, extract_features
from extract.compute.backbone import Backbone
from extract.compute.sparse_projection import SparseProjection
from extract.extraction import plan as planning
from extract.extraction.plan import existing_at, resolve
from extract.extraction.reproduce import recheck
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.store.verify import verify
from tests.conftest import make_picture
from tests.extract.compute.small_network import small_network
from tests.extract.compute.test_sparse_projection import matrix_of
from tests.pipelines.test_cli import fails, layertap
from tests.planning import BY_COMMAND, plan

NET = small_network()


def run(images: Path, out: Path, layers: str | list[str], backbone: Backbone = NET, **options: Any) -> FeatureReader:
    return extract_features(
        images, out=out, layers=layers, backbone=backbone, workers=0, progress=False, compile="off", **options
    )


def begin(images: Path, out: Path, batches: int, **settings: Any) -> None:
    """A run that is stopped after so many batches."""
    calls = itertools.count(1)
    extract(plan(images, out=out, backbone=NET, **settings), stop=lambda: next(calls) >= batches)


def axes_in(out: Path) -> list[Path]:
    return sorted((out / "axes").iterdir())


# Random projections


def test_stored_rows_are_the_projections_of_the_whole_layer(folder: Path, tmp_path: Path) -> None:
    reader = run(folder, tmp_path / "out", ["layer1:none", "layer1:srp50s2", "layer1:grid4:srp20"], batch_size=5)
    whole = reader["layer1:none"][:].astype(np.float64)
    grid = whole.reshape(len(whole), whole.shape[1], 4, whole.shape[2] // 4, 4, -1).mean((3, 5))
    for name, values, seed in (("layer1:srp50s2", whole, 2), ("layer1:grid4:srp20", grid, 0)):
        values = values.reshape(len(values), -1)
        outputs = reader[name].shape[1]
        expected = values @ matrix_of(SparseProjection(values.shape[1], outputs, seed)).T
        assert np.abs(reader[name][:] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert reader["layer1:grid4:srp20"].attributes["pooling"] == "grid4:srp20"
    assert reader["layer1:srp50s2"].attributes["axes"] == "C"


def test_a_run_is_resumed_to_the_same_bytes_and_refuses_another_seed(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shard_rows": 4}
    whole = run(folder, tmp_path / "whole", "layer1:srp50", **settings)
    out = tmp_path / "out"
    begin(folder, out, 2, layers=["layer1:srp50"], **settings)
    with pytest.raises(InputError, match=r"features.layer1: stored layer1 srp50 \[50\], now layer1 srp50s1 \[50\]"):
        run(folder, out, "layer1:srp50s1", **settings)
    resumed = run(folder, out, "layer1:srp50", **settings)
    assert np.array_equal(resumed["layer1"][:], whole["layer1"][:])
    assert recheck(out, 5, backbone=NET).faults == []


def test_without_a_number_the_bound_for_the_images_is_taken_and_recorded(folder: Path, tmp_path: Path) -> None:
    out, expected = tmp_path / "out", johnson_lindenstrauss_min_dim(12, eps=0.5)
    for _ in range(2):  # the second time, there is nothing to do
        reader = run(folder, out, "layer1:srps3", distortion=0.5)
    assert reader["layer1"].shape == (12, expected)
    assert reader["layer1"].attributes["pooling"] == f"srp{expected}s3"
    assert reader.provenance["configuration"]["layers"] == [f"layer1:srp{expected}s3"]
    assert recheck(out, 3, backbone=NET).faults == []  # two or three images have another bound
    with pytest.raises(LayertapError, match="other features"):
        run(folder, out, "layer1:srps3", distortion=0.4)
    for distortion in (0, 1, -0.1, 2):
        with pytest.raises(InputError, match="distortion is .*; it must be above 0 and below 1"):
            run(folder, out, "layer1:srps3", distortion=distortion)


def test_without_a_number_and_a_number_of_images_it_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="srp alone needs a number of images to choose K; give K, such as srp4096"):
        NET.features(np.zeros((8, 8, 3), np.uint8), "layer1:srp")
    config = {"images": str(folder), "out": str(tmp_path / "out"), "backbone": "timm/test_resnet", "weights": "random",
              "device": "cpu", "workers": 0, "settle": 0, "layers": ["layer1:srp"]}  # fmt: skip
    (tmp_path / "sync.yaml").write_text(yaml.safe_dump(config))
    # Each pass has another number of images, and all are to have as many values.
    assert "srp alone needs a number of images" in fails("sync", tmp_path / "sync.yaml")


def test_a_limit_of_what_a_projection_changes_is_refused_with_what_measures_it(folder: Path, tmp_path: Path) -> None:
    assert "layertap.probe.feature_similarity" in fails("embed", folder, "--max-distortion", 0)
    (tmp_path / "embed.yaml").write_text("max_distortion: 0\n")
    told = fails("embed", folder, "--config", tmp_path / "embed.yaml")
    assert "key 'max_distortion' not found" in told
    assert "layertap.probe.feature_similarity" in told


# Axes that are fitted


def test_rows_are_those_of_scikit_learn_for_all_ways_to_ask_for_them(folder: Path, tmp_path: Path) -> None:
    layers = ["layer1:none", "layer1:pca5", "layer1:pcaw3", "layer1:grid2:pca4", "layer2:pca6"]
    reader = run(folder, tmp_path / "out", [*layers, "layer2:mean_map"], batch_size=5)
    whole = reader["layer1:none"][:].astype(np.float64)
    half = whole.shape[2] // 2
    grid = whole.reshape(12, -1, 2, half, 2, half).mean((3, 5))
    for name, values, whiten in (
        ("layer1:pca5", whole, False), ("layer1:pcaw3", whole, True), ("layer1:grid2:pca4", grid, False)
    ):  # fmt: skip
        pca = PCA(reader[name].shape[1], svd_solver="full", whiten=whiten)
        expected = pca.fit_transform(values.reshape(12, -1))
        assert np.abs(reader[name][:] - expected).max() <= 2e-4 * np.abs(expected).max()
    assert reader["layer1:pca5"].attributes["pooling"] == "pca5"
    hashes = {name: reader[name].attributes.get("principal_axes") for name in layers}
    assert hashes["layer1:none"] is None
    assert hashes["layer1:pca5"] == hashes["layer1:pcaw3"]  # one fit of one activation
    names = {f"{sha256[:16]}.safetensors" for sha256 in hashes.values() if sha256}
    assert {path.name for path in axes_in(tmp_path / "out")} == names
    with h5py.File(tmp_path / "out" / "shards" / "000000.h5") as file:
        assert file["features/layer1:pca5"].attrs["principal_axes"] == hashes["layer1:pca5"]


def test_a_run_is_resumed_with_its_axes_and_refuses_others(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"layers": ["layer1:pca4"], "batch_size": 4, "shard_rows": 4, "fit_on": 9}
    whole = run(folder, tmp_path / "whole", **settings)
    out = tmp_path / "out"
    begin(folder, out, 2, **settings)
    said: list[str] = []
    resolve(ExtractionSettings(**settings), list_images(folder), NET, existing_at(out), on_fit=said.append)
    assert said == []
    with pytest.raises(InputError, match="the axes of layer1 were fitted on 9 images, not 8; use --fit-on 9, or"):
        run(folder, out, **{**settings, "fit_on": 8})
    with pytest.raises(InputError, match=r"features.layer1: stored layer1 pca4 .*, now layer1 pca5"):
        run(folder, out, **{**settings, "layers": ["layer1:pca5"]})
    run(folder, tmp_path / "six", **{**settings, "fit_on": 6})
    with pytest.raises(InputError, match=r"features.layer1: stored layer1 pca4 .*, now layer1 pca4 "):
        run(folder, out, axes=tmp_path / "six", **settings)
    resumed = run(folder, out, **settings)
    assert np.array_equal(resumed["layer1"][:], whole["layer1"][:])
    assert recheck(out, 5, backbone=NET).faults == []
    [path], [kept] = axes_in(out), axes_in(tmp_path / "whole")
    assert path.read_bytes() == kept.read_bytes()
    assert verify(out).faults == []


def test_axes_of_a_data_set_that_were_changed_or_are_missing_are_told(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(folder, out, "layer1:pca4").close()
    [path] = axes_in(out)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert [fault.what.split(":")[0] for fault in verify(out).faults] == [f"axes/{path.name} was changed"]
    with pytest.raises(InputError, match=f"{path.name} was changed"):
        run(folder, out, "layer1:pca4")
    description = (out / "dataset.json").read_text()
    content = json.loads(description)
    content["features"][0]["attributes"]["principal_axes"] = "../../../elsewhere"
    (out / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"principal_axes is '../../../elsewhere'; expected a sha256"):
        run(folder, out, "layer1:pca4")
    assert "expected a sha256" in verify(out).faults[0].what
    (out / "dataset.json").write_text(description)
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing: it has the principal axes of"):
        run(folder, out, "layer1:pca4")


def test_axes_of_a_run_that_stored_no_rows_are_fitted_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begin(folder / "ant", out, 1, layers=["layer1:pca3"], fit_on=9)
    for shard in (out / "shards").iterdir():
        shard.unlink()
    [first] = axes_in(out)
    (out / "axes" / "0123456789abcdef.safetensors.0123456789ab-01234567.new").touch()  # of a run that was killed
    reader = run(folder, out, "layer1:pca3", fit_on=9)
    [axes] = axes_in(out)
    assert axes.name != first.name
    assert reader["layer1"].attributes["principal_axes"].startswith(axes.stem)
    axes.unlink()
    os.mkfifo(axes)
    with pytest.raises(InputError, match="is not a regular file"):
        run(folder, out, "layer1:pca3", fit_on=9)


def test_a_fit_removes_no_axes_of_rows_that_another_process_stored_meanwhile(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = existing_at(out)
    run(folder, out, "layer1:pca4", fit_on=12)
    kept = axes_in(out)
    with pytest.raises(LockedError, match="another process has written rows"):
        resolve(ExtractionSettings(layers=["layer1:pca4"], fit_on=9), list_images(folder), NET, before)
    assert axes_in(out) == kept


def test_other_images_are_computed_with_the_axes_of_a_data_set(folder: Path, tmp_path: Path) -> None:
    first = run(folder, tmp_path / "first", "layer1:pca5")
    [axes] = axes_in(tmp_path / "first")
    shutil.copyfile(axes, tmp_path / "mine.safetensors")
    shutil.copyfile(axes, tmp_path / "first" / "axes" / "0123456789abcdef.safetensors")  # not recorded
    pictures = [Image.open(folder / name).convert("RGB") for name in ("ant/00.png", "bee/01.jpg")]
    expected = first["layer1"][[first.paths.index("ant/00.png"), first.paths.index("bee/01.jpg")]]
    for place in (tmp_path / "first", axes, tmp_path / "mine.safetensors"):
        out = tmp_path / f"of-{place.name}"
        second = run(folder / "bee", out, "layer1:pca3", axes=place)
        bees = [row for row, path in enumerate(first.paths) if path.startswith("bee")]
        np.testing.assert_allclose(second["layer1"][:], first["layer1"][bees][:, :3], rtol=1e-4, atol=1e-4)
        assert axes_in(out)[0].name == axes.name  # the data set keeps its own
        values = NET.features(pictures, "layer1:pca5", axes=place)["layer1"]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
    shutil.rmtree(out / "axes")
    with pytest.raises(InputError, match="is missing"):
        run(folder / "bee", out, "layer1:pca3")


@pytest.mark.slow  # `test_backends.py` has random projections by default, which follow a compiled graph in the same way
@pytest.mark.parametrize("engine", ["openvino", "inductor"])
def test_compiled_runs_store_the_same_projections(folder: Path, tmp_path: Path, engine: Any) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    layers = ["layer1:grid4:pcaw4", "layer2:pca5", "layer2"]
    eager, out = run(folder, tmp_path / "eager", layers, batch_size=6), tmp_path / "compiled"
    compiled = extract_features(
        folder, out=out, layers=layers, backbone=NET, batch_size=6, compile=engine, axes=tmp_path / "eager"
    )
    for name in eager.layers:
        largest = np.abs(eager[name][:]).max()
        np.testing.assert_allclose(compiled[name][:], eager[name][:], rtol=0, atol=1e-4 * largest)


def test_axes_of_another_layer_or_backbone_or_place_are_refused(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "first", "layer1:pca5")
    for layers, backbone, text in (
        ("layer2:pca3", NET, re.escape("do not fit layer2: they are of layer 'layer1' instead of 'layer2'")),
        ("layer1:grid2:pca3", NET, "they are of poolings 'none' instead of 'grid2'"),
        ("layer1:pca3", small_network(seed=1), "they are of weights_sha256 "),
        ("layer1:pca6", NET, "has 5 axes of .* values; pca6 needs 6 of"),
    ):
        with pytest.raises(InputError, match=text):
            run(folder, tmp_path / "out", layers, backbone, axes=tmp_path / "first")
    run(folder, tmp_path / "whole", "layer2")
    for place, text in (("whole", "has no principal axes"), ("absent", "does not exist; expected principal axes")):
        with pytest.raises(InputError, match=f"{place} {text}"):
            run(folder, tmp_path / "out", "layer1:pca3", axes=tmp_path / place)
    assert not (tmp_path / "out").exists()


def test_fits_that_fail_leave_nothing_and_name_the_cause(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    same, out = tmp_path / "same", tmp_path / "out"
    same.mkdir()
    for number in range(4):
        make_picture(1).save(same / f"{number}.png")
    cases: list[tuple[Path, str, dict[str, Any], str]] = [
        (folder, "layer1:pca11", {}, "layer1: 11 axes need at least 12 images to fit, and there are 11"),
        (folder, "layer1:pca5:pcaw3", {}, "axes are fitted once in a chain of poolings"),
        (folder, "layer1:pca9", {"fit_on": 5}, "layer1: 9 axes need at least 10 images to fit, and there are 4"),
        (folder, "layer1:pca5", {"fit_on": 1}, "fit_on is 1; it must be at least 2"),
        (same, "layer1:pca2", {}, "layer1: the 4 images vary along 0 axes only, not 2; use pca1 or less"),
    ]
    for images, layers, options, message in cases:
        with pytest.raises(InputError, match=message):
            run(images, out, layers, **options)
    monkeypatch.setattr(planning, "FIT_BYTES", 100_000)
    with pytest.raises(InputError, match=r"layer1: axes of .* values fitted on 12 images take 0.0 GB of memory; at"):
        run(folder, out, "layer1:pca5")
    assert not list((out / "axes").iterdir())


def test_images_without_finite_activations_are_left_out_of_a_fit(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    assert len(run(folder, tmp_path / "good", "layer1:pca5").failures) == 1

    def poisoned(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        bad = torch.arange(len(output))[:, None, None, None] == 5  # there are three in the trial forwards
        return torch.where(bad, torch.nan, output)

    settings, told = ExtractionSettings(layers=["layer1:pca5", "conv1:grid2:pca2"], fit_on=12), list[str]()
    with NET.model.get_submodule("layer1").register_forward_hook(poisoned):
        resolve(settings, list_images(folder), NET, existing_at(tmp_path / "nan"), on_fit=told.append)
    assert told[1].endswith("of the variance; 2 of the images have no finite activation, and are left out")
    assert told[2].endswith("; 1 of the images have no finite activation, and are left out")
    for path in axes_in(tmp_path / "nan"):
        assert np.isfinite(load_file(path)["components"]).all()


@pytest.mark.slow
def test_several_workers_and_sync_take_axes_and_do_not_fit_them(folder: Path, tmp_path: Path) -> None:
    shared = ["embed", folder, *BY_COMMAND, "-l", "layer1:pca5", "--engine", "processes", "--device", "cpu"]
    text = fails(*shared, "-o", tmp_path / "shared")
    assert "layer1: pca5 needs principal axes, and this run does not fit any" in text
    assert "--axes" in text
    layertap("embed", folder, *BY_COMMAND, "-l", "layer1:pca5", "--fit-on", 10, "-o", tmp_path / "first")
    layertap(*shared, "--axes", tmp_path / "first", "-o", tmp_path / "shared")
    config = {"images": str(folder), "out": str(tmp_path / "synced"), "backbone": "timm/test_resnet", "device": "cpu",
              "weights": "random", "workers": 0, "settle": 0, "layers": ["layer1:pca5"],
              "axes": str(tmp_path / "first")}  # fmt: skip
    (tmp_path / "sync.yaml").write_text(yaml.safe_dump(config))
    layertap("sync", tmp_path / "sync.yaml")
    make_picture(50).save(folder / "ant" / "new.png")
    layertap("sync", tmp_path / "sync.yaml")
    with FeatureReader(tmp_path / "first") as first:
        for name in ("shared", "synced"):
            with FeatureReader(tmp_path / name) as reader:
                rows = [reader.paths.index(path) for path in first.paths]
                assert np.array_equal(reader["layer1"][:][rows], first["layer1"][:])
            assert layertap("verify", tmp_path / name, "--sample", 3).exit_code == 0
    assert len(load_file(axes_in(tmp_path / "shared")[0])["explained_variance"]) == 5
