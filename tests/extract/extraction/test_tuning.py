"""Measuring what a machine can do, and choosing by it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import InputError, extract_features, load_backbone
from extract.compute.agreement import Agreement
from extract.compute.compiled import openvino_computes_in
from extract.compute.feature_choice import choose_features
from extract.extraction import tuning
from extract.extraction.tuning import (
    ComputeOption,
    Measured,
    batch_rates,
    best_batch_size,
    compute_options,
    fastest,
    forward_rates,
    pictures_of,
    ranked,
)
from extract.extraction.validation import decoded_both_ways
from extract.images import list_images
from extract.system.torch_state import evaluating

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
NET: dict[str, Any] = {"weights": "random", "device": "cpu"}


def test_pictures_are_the_first_that_can_be_decoded_repeated_where_there_are_fewer(folder: Path) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    images = list_images(folder)
    pictures, fast = pictures_of(images, backbone.preprocessing, 25)
    assert (len(pictures), fast) == (25, None)
    assert torch.equal(pictures[:11], pictures[11:22])
    assert len(pictures[:11].flatten(1).unique(dim=0)) == 11
    for path in folder.rglob("*.*"):
        path.write_bytes(b"no picture")
    with pytest.raises(InputError, match="none of the first 12 images can be decoded"):
        pictures_of(images, backbone.preprocessing, 25)


def test_the_plain_way_comes_first_and_slow_compilers_only_when_asked_for() -> None:
    cpu, gpu = (compute_options(torch.device(name)) for name in ("cpu", "cuda"))
    assert cpu[0] == gpu[0] == ComputeOption("float32", "eager")
    assert ComputeOption("float16", "inductor") in gpu
    assert not any(way.precision == "float16" for way in cpu)
    if importlib.util.find_spec("openvino"):
        assert (ComputeOption("bfloat16", "openvino") in cpu) == openvino_computes_in("bfloat16")
        assert not any(way.engine == "inductor" for way in cpu)
        assert ComputeOption("float32", "inductor") in compute_options(torch.device("cpu"), thorough=True)


@openvino
@pytest.mark.slow
def test_ways_that_do_not_agree_or_fail_are_not_to_be_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["embedding"])
    pictures, _ = pictures_of(list_images(folder), backbone.preprocessing, 6)
    ways = [
        ComputeOption("float32", "eager"),
        ComputeOption("float32", "openvino"),
        ComputeOption("bfloat16", "eager"),
        ComputeOption("float32", "inductor"),
    ]

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", no_compiler)
    plain, compiled, lower, failed = forward_rates(backbone, choice, pictures, ways, min_cosine=1.0)
    assert (plain.why_not, plain.agreement, plain.decoding) == ("", {}, {})
    assert compiled.why_not == ""
    assert plain.images_per_s > 0 < compiled.images_per_s
    assert "at least 1.0 is required" in lower.why_not
    assert lower.images_per_s == 0.0  # not timed, since it may not be taken
    assert lower.agreement["embedding"].min_cosine > 0.99
    assert failed.images_per_s == 0.0
    assert failed.why_not == "timm/test_resnet cannot be compiled by inductor: no C++ compiler"


def test_the_fastest_that_agrees_is_taken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    near = {"embedding": Agreement(0.9995, 1e-3)}
    rates = [
        Measured(ComputeOption("float32", "eager"), 10.0, decoding=near),
        Measured(ComputeOption("float32", "openvino"), 12.0, decoding=near),
        Measured(ComputeOption("bfloat16", "openvino"), 30.0, why_not="embedding has a cosine of 0.9 to eager float32"),
        Measured(ComputeOption("bfloat16", "eager"), 20.0, decoding=near),
    ]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: rates)
    settings, measured = fastest(folder, backbone=backbone, min_cosine=0.9)
    assert settings == [
        {"precision": precision, "compile": compile, "decode": "fast", "batch_size": 64}
        for precision, compile in (("bfloat16", "off"), ("float32", "openvino"), ("float32", "off"))
    ]
    assert measured is rates
    reader = extract_features(
        folder, out=tmp_path / "out", backbone=backbone, progress=False, min_cosine=0.9, **settings[0]
    )
    assert np.isfinite(reader["embedding"][:]).all()


def test_a_data_set_is_gone_on_with_as_it_began(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    began = {"precision": "bfloat16", "compile": "off", "decode": "fast"}
    extract_features(
        folder, out=tmp_path / "out", backbone=backbone, limit=5, min_cosine=0.9, progress=False, **began
    ).close()  # type: ignore[arg-type]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: pytest.fail("measured"))
    settings, measured = fastest(folder, backbone=backbone, out=tmp_path / "out")
    assert settings == [{**began, "batch_size": 64}]
    assert measured == []


def test_what_takes_long_to_compile_must_win_that_back() -> None:
    slow, soon = (
        Measured(ComputeOption("float32", "inductor"), 20.0, start_s=30.0),
        Measured(ComputeOption("float32", "eager"), 10.0),
    )
    assert ranked([slow, soon], 100) == [soon, slow]  # 10 s and 35 s
    assert ranked([slow, soon], 1000) == [slow, soon]  # 80 s and 100 s
    assert ranked([soon, slow]) == [slow, soon]


def test_decoding_and_precision_must_agree_together() -> None:
    near, off = {"embedding": Agreement(0.9995, 1e-3)}, {"embedding": Agreement(0.998, 1e-2)}
    lower = Measured(
        ComputeOption("bfloat16", "eager"), 20.0, decoding=off, why_not_fast="embedding has a cosine of 0.998"
    )
    plain = Measured(ComputeOption("float32", "eager"), 10.0, decoding=near)
    assert ranked([plain, lower]) == [lower, plain]
    assert (lower.decode, plain.decode) == ("exact", "fast")
    assert ranked([plain, lower], decode="fast") == [plain]


def test_where_nothing_agrees_each_reason_is_told(folder: Path) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    with pytest.raises(
        InputError, match=r"(?s)every requested compute option was rejected:.*bfloat16, eager: embedding has a cos"
    ):
        fastest(folder, backbone=backbone, precision="bfloat16", compile="off", min_cosine=1.0)


def test_ways_are_those_that_were_asked_for() -> None:
    cpu = torch.device("cpu")
    assert compute_options(cpu, precision="float16", compile="off") == [ComputeOption("float16", "eager")]
    assert compute_options(cpu, compile="off") == [
        ComputeOption("float32", "eager"),
        ComputeOption("bfloat16", "eager"),
    ]
    assert ComputeOption("float16", "eager") in compute_options(cpu, precision="float16")
    with pytest.raises(InputError, match="use --device cpu"):
        compute_options(torch.device("cuda"), compile="openvino")


def test_broken_images_do_not_shift_those_that_are_compared(folder: Path) -> None:
    """Each picture is compared with itself, not with its neighbour."""
    preprocessing = load_backbone("timm/test_resnet", **NET).preprocessing
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    images = list_images(folder)
    fast, exact = decoded_both_ways(images, preprocessing.faster(), 10**6)
    assert len(fast) == len(exact) == 11
    pictures, twins = pictures_of(images, preprocessing, 14, both_ways=True)
    assert torch.equal(pictures, torch.cat([exact, exact[:3]]))
    assert torch.equal(twins, torch.cat([fast, fast[:3]]))
    assert float((fast.int() - exact.int()).abs().float().mean()) < 1
    for path in folder.rglob("*.*"):
        path.write_bytes(b"no picture")
    with pytest.raises(InputError, match="none of the 12 images can be decoded both fast and exactly"):
        decoded_both_ways(images, preprocessing.faster(), 10**6)


def test_where_the_first_images_are_broken_later_ones_are_compared(folder: Path) -> None:
    for path in sorted((folder / "ant").iterdir())[:4]:
        path.write_bytes(b"no picture")
    preprocessing = load_backbone("timm/test_resnet", **NET).preprocessing.faster()
    fast, _ = decoded_both_ways(list_images(folder), preprocessing, 10**6, 3)
    assert len(fast) == 2  # of rows 3 to 5, the first is broken as well


def test_batches_grow_until_the_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that takes 20 images at most."""
    backbone = load_backbone("timm/test_resnet", **NET)
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["embedding"])
    real = backbone.model.conv1.forward

    def conv1(images: Any) -> Any:
        if len(images) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(images)

    monkeypatch.setattr(backbone.model.conv1, "forward", conv1)
    monkeypatch.setattr(tuning, "_AT_LEAST_S", 0.0)
    pictures = torch.zeros(3, *backbone.preprocessing.crop_px, 3, dtype=torch.uint8)
    assert list(batch_rates(backbone, choice, pictures)) == [8, 16]


def test_of_batch_sizes_the_default_is_taken_or_the_smallest_than_which_none_is_clearly_faster() -> None:
    """What efficientnet_lite0 did on two cores: eager forwards of 8 are 5 % faster, the pipeline 13 % slower."""
    assert best_batch_size({8: 103.3, 16: 103.9, 32: 100.7, 64: 98.5, 128: 96.5}) == 64
    assert best_batch_size({8: 50.0, 16: 98.0, 32: 100.0, 64: 80.0}) == 16
    assert best_batch_size({32: 50.0, 64: 80.0, 128: 99.0, 256: 100.0}) == 128
    assert best_batch_size({8: 50.0, 16: 51.0}) == 8  # the memory ended before the default
