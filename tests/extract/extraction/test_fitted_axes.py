"""Runs whose features are projected on principal axes: where the axes come from, and what a data set keeps."""

from __future__ import annotations

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

from extract import InputError, LockedError, extract_features
from extract.compute.backbone import Backbone, load_backbone
from extract.extraction import plan as planning
from extract.extraction.plan import existing_at, resolve
from extract.extraction.reproduce import recheck
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.store.reader import FeatureReader
from extract.store.verify import verify
from tests.conftest import make_picture
from tests.pipelines.test_cli import fails, layertap
from tests.planning import BY_COMMAND, NET, plan


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("timm/test_resnet", weights="random", device="cpu")


def axes_in(out: Path) -> list[Path]:
    return sorted((out / "axes").iterdir())


def test_rows_are_those_of_scikit_learn_for_all_ways_to_ask_for_them(folder: Path, tmp_path: Path) -> None:
    layers = ["layer1:none", "layer1:pca5", "layer1:pcaw3", "layer1:grid2:pca4", "layer4:pca6"]
    reader = extract_features(folder, out=tmp_path / "out", layers=[*layers, "layer4:mean_map"], batch_size=5, **NET)
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


def test_a_run_is_resumed_with_its_axes_and_refuses_others(folder: Path, tmp_path: Path, backbone: Backbone) -> None:
    settings: dict[str, Any] = {"layers": ["layer1:pca4"], "batch_size": 4, "shard_rows": 4, "fit_on": 9}
    whole = extract_features(folder, out=tmp_path / "whole", **settings, **NET)
    out, calls = tmp_path / "out", []
    extract(plan(folder, out=out, backbone=backbone, **settings), stop=lambda: bool(calls.append(0) or len(calls) > 1))
    said: list[str] = []
    resolve(ExtractionSettings(**settings), list_images(folder), backbone, existing_at(out), on_fit=said.append)
    assert said == []
    with pytest.raises(InputError, match="the axes of layer1 were fitted on 9 images, not 8; use --fit-on 9, or"):
        extract_features(folder, out=out, **{**settings, "fit_on": 8}, **NET)
    with pytest.raises(InputError, match=r"features.layer1: stored layer1 pca4 .*, now layer1 pca5"):
        extract_features(folder, out=out, **{**settings, "layers": ["layer1:pca5"]}, **NET)
    extract_features(folder, out=tmp_path / "six", **{**settings, "fit_on": 6}, **NET)
    with pytest.raises(InputError, match=r"features.layer1: stored layer1 pca4 .*, now layer1 pca4 "):
        extract_features(folder, out=out, axes=tmp_path / "six", **settings, **NET)
    resumed = extract_features(folder, out=out, **settings, **NET)
    assert np.array_equal(resumed["layer1"][:], whole["layer1"][:])
    assert recheck(out, 5, backbone=backbone).faults == []
    [path] = axes_in(out)
    [kept] = axes_in(tmp_path / "whole")
    assert path.read_bytes() == kept.read_bytes()
    assert verify(out).faults == []
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert [fault.what.split(":")[0] for fault in verify(out).faults] == [f"axes/{path.name} was changed"]
    with pytest.raises(InputError, match=f"{path.name} was changed"):
        extract_features(folder, out=out, **settings, **NET)
    description = (out / "dataset.json").read_text()
    content = json.loads(description)
    content["features"][0]["attributes"]["principal_axes"] = "../../../elsewhere"
    (out / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"principal_axes is '../../../elsewhere'; expected a sha256"):
        extract_features(folder, out=out, **settings, **NET)
    assert "expected a sha256" in verify(out).faults[0].what
    (out / "dataset.json").write_text(description)
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} is missing: it has the principal axes of"):
        extract_features(folder, out=out, **settings, **NET)


def test_axes_of_a_run_that_stored_no_rows_are_fitted_again(folder: Path, tmp_path: Path, backbone: Backbone) -> None:
    out = tmp_path / "out"
    settings: dict[str, Any] = {"layers": ["layer1:pca3"], "fit_on": 9}
    extract(plan(folder / "ant", out=out, backbone=backbone, **settings), stop=lambda: True)
    for shard in (out / "shards").iterdir():
        shard.unlink()
    [first] = axes_in(out)
    (out / "axes" / "0123456789abcdef.safetensors.0123456789ab-01234567.new").touch()  # of a run that was killed
    reader = extract_features(folder, out=out, **settings, **NET)
    [axes] = axes_in(out)
    assert axes.name != first.name
    assert reader["layer1"].attributes["principal_axes"].startswith(axes.stem)
    axes.unlink()
    os.mkfifo(axes)
    with pytest.raises(InputError, match="is not a regular file"):
        extract_features(folder, out=out, **settings, **NET)


def test_a_fit_removes_no_axes_of_rows_that_another_process_stored_meanwhile(
    folder: Path, tmp_path: Path, backbone: Backbone
) -> None:
    images, out = list_images(folder), tmp_path / "out"
    before = existing_at(out)
    extract_features(folder, out=out, layers=["layer1:pca4"], fit_on=12, **NET)
    kept = axes_in(out)
    with pytest.raises(LockedError, match="another process has written rows"):
        resolve(ExtractionSettings(layers=["layer1:pca4"], fit_on=9), images, backbone, before)
    assert axes_in(out) == kept
    verify(out)


def test_other_images_are_computed_with_the_axes_of_a_data_set(
    folder: Path, tmp_path: Path, backbone: Backbone
) -> None:
    first = extract_features(folder, out=tmp_path / "first", layers="layer1:pca5", **NET)
    [axes] = axes_in(tmp_path / "first")
    shutil.copyfile(axes, tmp_path / "mine.safetensors")
    shutil.copyfile(axes, tmp_path / "first" / "axes" / "0123456789abcdef.safetensors")  # not recorded
    pictures = [Image.open(folder / name).convert("RGB") for name in ("ant/00.png", "bee/01.jpg")]
    expected = first["layer1"][[first.paths.index("ant/00.png"), first.paths.index("bee/01.jpg")]]
    for place in (tmp_path / "first", axes, tmp_path / "mine.safetensors"):
        out = tmp_path / f"of-{place.name}"
        second = extract_features(folder / "bee", out=out, layers="layer1:pca3", axes=place, **NET)
        bees = [row for row, path in enumerate(first.paths) if path.startswith("bee")]
        np.testing.assert_allclose(second["layer1"][:], first["layer1"][bees][:, :3], rtol=1e-4, atol=1e-4)
        assert axes_in(out)[0].name == axes.name  # the data set keeps its own
        values = backbone.features(pictures, "layer1:pca5", axes=place)["layer1"]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
    shutil.rmtree(out / "axes")
    with pytest.raises(InputError, match="is missing"):
        extract_features(folder / "bee", out=out, layers="layer1:pca3", **NET)


@pytest.mark.slow  # `test_backends.py` has random projections by default, which follow a compiled graph in the same way
@pytest.mark.parametrize("engine", ["openvino", "inductor"])
def test_compiled_runs_store_the_same_projections(folder: Path, tmp_path: Path, engine: str) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    layers = ["layer1:grid4:pcaw4", "layer4:pca5", "layer4"]
    options: dict[str, Any] = {"layers": layers, "batch_size": 6, **NET}
    eager = extract_features(folder, out=tmp_path / "eager", compile="off", **options)
    compiled = extract_features(folder, out=tmp_path / "compiled", compile=engine, axes=tmp_path / "eager", **options)
    for name in eager.layers:
        largest = np.abs(eager[name][:]).max()
        np.testing.assert_allclose(compiled[name][:], eager[name][:], rtol=0, atol=1e-4 * largest)


def test_axes_of_another_layer_or_backbone_or_place_are_refused(folder: Path, tmp_path: Path) -> None:
    extract_features(folder, out=tmp_path / "first", layers="layer1:pca5", **NET)
    options: dict[str, Any] = {"out": tmp_path / "out", "axes": tmp_path / "first"}
    for layers, more, text in (
        ("layer2:pca3", {}, "do not fit layer2: they are of layer 'layer1' instead of 'layer2'"),
        ("layer1:grid2:pca3", {}, "they are of poolings 'none' instead of 'grid2'"),
        ("layer1:pca3", {"seed": 1}, "they are of weights_sha256 "),
        ("layer1:pca6", {}, "has 5 axes of .* values; pca6 needs 6 of"),
    ):
        with pytest.raises(InputError, match=re.escape(text) if "*" not in text else text):
            extract_features(folder, layers=layers, **options, **NET, **more)
    extract_features(folder, out=tmp_path / "whole", layers="layer4", **NET)
    for place, text in (("whole", "has no principal axes"), ("absent", "does not exist; expected principal axes")):
        with pytest.raises(InputError, match=f"{place} {text}"):
            extract_features(folder, layers="layer1:pca3", out=tmp_path / "out", axes=tmp_path / place, **NET)
    assert not (tmp_path / "out").exists()


def test_fits_that_fail_leave_nothing_and_name_the_cause(
    folder: Path, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="layer1: 11 axes need at least 12 images to fit, and there are 11"):
        extract_features(folder, out=tmp_path / "few", layers="layer1:pca11", **NET)
    with pytest.raises(InputError, match="axes are fitted once in a chain of poolings"):
        extract_features(folder, out=tmp_path / "two", layers="layer1:pca5:pcaw3", **NET)
    with pytest.raises(InputError, match="layer1: 9 axes need at least 10 images to fit, and there are 4"):
        extract_features(folder, out=tmp_path / "few", layers="layer1:pca9", fit_on=5, **NET)
    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match=r"layer1: axes of .* values fitted on 12 images take 0.0 GB of memory; at"),
    ):
        patch.setattr(planning, "FIT_BYTES", 100_000)
        extract_features(folder, out=tmp_path / "few", layers="layer1:pca5", **NET)
    same = tmp_path / "same"
    same.mkdir()
    for number in range(4):
        make_picture(1).save(same / f"{number}.png")
    with pytest.raises(InputError, match="layer1: the 4 images vary along 0 axes only, not 2; use pca1 or less"):
        extract_features(same, out=tmp_path / "same-out", layers="layer1:pca2", **NET)
    with pytest.raises(InputError, match="fit_on is 1; it must be at least 2"):
        extract_features(folder, out=tmp_path / "two", layers="layer1:pca5", fit_on=1, **NET)
    reader = extract_features(folder, out=tmp_path / "good", layers="layer1:pca5", **NET)
    assert len(reader.failures) == 1  # the image that failed was left out of the fit

    def poisoned(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        bad = torch.arange(len(output))[:, None, None, None] == 5  # there are three in the trial forwards
        return torch.where(bad, torch.nan, output)

    settings, told = ExtractionSettings(layers=["layer1:pca5", "conv1:grid2:pca2"], fit_on=12), list[str]()
    with backbone.model.get_submodule("layer1").register_forward_hook(poisoned):
        resolve(settings, list_images(folder), backbone, existing_at(tmp_path / "nan"), on_fit=told.append)
    assert told[1].endswith("of the variance; 2 of the images have no finite activation, and are left out")
    assert told[2].endswith("; 1 of the images have no finite activation, and are left out")
    for path in axes_in(tmp_path / "nan"):
        assert np.isfinite(load_file(path)["components"]).all()
    assert not list((tmp_path / "few" / "axes").iterdir())


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
