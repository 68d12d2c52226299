"""Runs whose features are projected: the stored rows, resumption, and what the data set records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.random_projection import johnson_lindenstrauss_min_dim

from extract import InputError, LayertapError, extract_features
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.sparse_projection import SparseProjection
from extract.extraction.reproduce import recheck
from extract.extraction.run import extract
from tests.extract.compute.test_sparse_projection import matrix_of
from tests.pipelines.test_cli import fails, layertap
from tests.planning import BY_COMMAND, NET, plan


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("timm/test_resnet", weights="random", device="cpu")


def test_stored_rows_are_the_projections_of_the_whole_layer(folder: Path, tmp_path: Path) -> None:
    layers = ["layer1:none", "layer1:srp50s2", "layer1:grid4:srp20"]
    reader = extract_features(folder, out=tmp_path / "out", layers=layers, batch_size=5, **NET)
    whole = reader["layer1:none"][:].astype(np.float64)
    grid = whole.reshape(len(whole), whole.shape[1], 4, whole.shape[2] // 4, 4, -1).mean((3, 5))
    for name, values, seed in (("layer1:srp50s2", whole, 2), ("layer1:grid4:srp20", grid, 0)):
        values = values.reshape(len(values), -1)
        outputs = reader[name].shape[1]
        expected = values @ matrix_of(SparseProjection(values.shape[1], outputs, seed)).T
        assert np.abs(reader[name][:] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert reader["layer1:grid4:srp20"].attributes["pooling"] == "grid4:srp20"
    assert reader["layer1:srp50s2"].attributes["axes"] == "C"


def test_a_run_is_resumed_to_the_same_bytes_and_refuses_another_seed(
    folder: Path, tmp_path: Path, backbone: Backbone
) -> None:
    settings: dict[str, Any] = {"layers": ["layer1:srp50"], "batch_size": 4, "shard_rows": 4}
    whole = extract_features(folder, out=tmp_path / "whole", **settings, **NET)
    out = tmp_path / "out"
    calls = []
    extract(plan(folder, out=out, backbone=backbone, **settings), stop=lambda: bool(calls.append(0) or len(calls) > 1))
    with pytest.raises(InputError, match=r"features.layer1: stored layer1 srp50 \[50\], now layer1 srp50s1 \[50\]"):
        extract_features(folder, out=out, **{**settings, "layers": ["layer1:srp50s1"]}, **NET)
    resumed = extract_features(folder, out=out, **settings, **NET)
    assert np.array_equal(resumed["layer1"][:], whole["layer1"][:])
    assert recheck(out, 5, backbone=backbone).faults == []


def test_without_a_number_the_bound_for_the_images_is_taken_and_recorded(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    layertap("embed", folder, *BY_COMMAND, "-l", "layer1:srps3", "--distortion", 0.5, "-o", out)
    expected = johnson_lindenstrauss_min_dim(12, eps=0.5)
    reader = extract_features(folder, out=out, layers="layer1:srps3", distortion=0.5, **NET)  # nothing to do
    assert reader["layer1"].shape == (12, expected)
    assert reader["layer1"].attributes["pooling"] == f"srp{expected}s3"
    assert reader.provenance["configuration"]["layers"] == [f"layer1:srp{expected}s3"]
    assert layertap("verify", out, "--sample", 3).exit_code == 0  # two or three images have another bound
    with pytest.raises(LayertapError, match="other features"):
        extract_features(folder, out=out, layers="layer1:srps3", distortion=0.4, **NET)


def test_without_a_number_and_a_number_of_images_it_is_refused(
    folder: Path, tmp_path: Path, backbone: Backbone
) -> None:
    with pytest.raises(InputError, match="srp alone needs a number of images to choose K; give K, such as srp4096"):
        backbone.features(np.zeros((8, 8, 3), np.uint8), "layer1:srp")
    config = {"images": str(folder), "out": str(tmp_path / "out"), "backbone": "timm/test_resnet", "weights": "random",
              "device": "cpu", "workers": 0, "settle": 0, "layers": ["layer1:srp"]}  # fmt: skip
    (tmp_path / "sync.yaml").write_text(yaml.safe_dump(config))
    # Each pass has another number of images, and all are to have as many values.
    assert "srp alone needs a number of images" in fails("sync", tmp_path / "sync.yaml")


@pytest.mark.parametrize("distortion", [0, 1, -0.1, 2])
def test_distortions_out_of_range_are_refused(folder: Path, tmp_path: Path, distortion: float) -> None:
    with pytest.raises(InputError, match="distortion is .*; it must be above 0 and below 1"):
        extract_features(folder, out=tmp_path / "out", distortion=distortion, **NET)


def test_a_limit_of_what_a_projection_changes_is_refused_with_what_measures_it(folder: Path, tmp_path: Path) -> None:
    assert "layertap.probe.feature_similarity" in fails("embed", folder, "--max-distortion", 0)
    (tmp_path / "embed.yaml").write_text("max_distortion: 0\n")
    told = fails("embed", folder, "--config", tmp_path / "embed.yaml")
    assert "key 'max_distortion' not found" in told
    assert "layertap.probe.feature_similarity" in told
