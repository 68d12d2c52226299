"""Measuring what a machine can do, and choosing by it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import InputError, extract_features, load_backbone, tuning
from extract.features import choose_features
from extract.images import list_images
from extract.settings import evaluating
from extract.tuning import Measured, Way, fastest, forward_rates, pictures_of, ways_for

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
NET: dict[str, Any] = {"weights": "random", "device": "cpu"}


def test_pictures_are_the_first_that_can_be_decoded_repeated_where_there_are_fewer(folder: Path) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    images = list_images(folder)
    pictures = pictures_of(images, backbone.preprocessing, 25)
    assert len(pictures) == 25
    assert torch.equal(pictures[:11], pictures[11:22])
    assert len(pictures[:11].flatten(1).unique(dim=0)) == 11
    for path in folder.rglob("*.*"):
        path.write_bytes(b"no picture")
    with pytest.raises(InputError, match="none of the first 12 images can be decoded"):
        pictures_of(images, backbone.preprocessing, 25)


def test_the_plain_way_comes_first_and_slow_compilers_only_when_asked_for() -> None:
    cpu, gpu = (ways_for(torch.device(name)) for name in ("cpu", "cuda"))
    assert cpu[0] == gpu[0] == Way("float32", "eager")
    assert Way("float16", "inductor") in gpu
    assert not any(way.precision == "float16" for way in cpu)
    if importlib.util.find_spec("openvino"):
        assert Way("bfloat16", "openvino") in cpu
        assert not any(way.engine == "inductor" for way in cpu)
        assert Way("float32", "inductor") in ways_for(torch.device("cpu"), thorough=True)


@openvino
def test_ways_that_do_not_agree_or_fail_are_not_to_be_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["embedding"])
    pictures = pictures_of(list_images(folder), backbone.preprocessing, 6)
    ways = [Way("float32", "eager"), Way("float32", "openvino"), Way("bfloat16", "eager"), Way("float32", "none")]
    plain, compiled, lower, failed = forward_rates(backbone, choice, pictures, ways, min_cosine=1.0)
    assert (plain.why_not, plain.agreement) == ("", {})
    assert compiled.why_not == ""
    assert plain.images_per_s > 0 < compiled.images_per_s
    assert "less than 1.0" in lower.why_not
    assert lower.agreement["embedding"].min_cosine > 0.99
    assert (failed.images_per_s, failed.why_not) == (0.0, "'none'")


def test_the_fastest_that_agrees_is_taken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    rates = [
        Measured(Way("float32", "eager"), 10.0),
        Measured(Way("float32", "openvino"), 12.0),
        Measured(Way("bfloat16", "openvino"), 30.0, why_not="cosine to float32 0.9, less than 0.999"),
        Measured(Way("bfloat16", "eager"), 20.0),
    ]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_: rates)
    settings, measured = fastest(folder, backbone=backbone, min_cosine=0.9)
    assert settings == {"precision": "bfloat16", "compile": "off", "decode": "fast"}
    assert measured is rates
    strict, _ = fastest(folder, backbone=backbone, min_cosine=1.0)  # no decoding but the exact one agrees so well
    assert strict["decode"] == "exact"
    reader = extract_features(
        folder, out=tmp_path / "out", backbone=backbone, progress=False, min_cosine=0.9, **settings
    )
    assert np.isfinite(reader["embedding"][:]).all()


def test_a_data_set_is_gone_on_with_as_it_began(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    began = {"precision": "bfloat16", "compile": "off", "decode": "fast"}
    extract_features(
        folder, out=tmp_path / "out", backbone=backbone, limit=5, min_cosine=0.9, progress=False, **began
    ).close()  # type: ignore[arg-type]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_: pytest.fail("measured"))
    settings, measured = fastest(folder, backbone=backbone, out=tmp_path / "out")
    assert settings == {**began, "compile": "auto"}
    assert measured == []
