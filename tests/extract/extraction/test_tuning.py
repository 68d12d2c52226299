"""Choosing how to compute on this machine: what is tried, and what is taken."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import FeatureReader, InputError, extract_features
from extract.compute import backends
from extract.compute.backends import openvino_computes_in
from extract.compute.feature_choice import choose_features
from extract.extraction import tuning
from extract.extraction.tuning import (
    PLAIN,
    ComputeOption,
    Measured,
    Tuned,
    compute_options,
    decode_seconds,
    fastest,
    forward_rates,
)  # fmt: skip
from extract.extraction.validation import decoded_in
from extract.images import list_images
from extract.system.torch_state import evaluating
from pipelines.embed import job
from pipelines.embed.config import EmbedConfig
from tests.extract.compute.small_network import small_network
from tests.extract.compute.test_transfers import on_a_gpu
from tests.planning import plan

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
CPU = torch.device("cpu")
LOWER, BY_OPENVINO = ComputeOption("bfloat16", "eager"), ComputeOption("float32", "openvino")
LOWER_BY_OPENVINO = ComputeOption("bfloat16", "openvino")


@pytest.fixture(scope="module")
def backbone() -> Any:
    return small_network(resize_px=160, crop_px=(160, 160), interpolation="bicubic")


@pytest.fixture
def all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is too short to try all options."""
    monkeypatch.setattr(tuning, "_PAYS_FROM", 0)


def _tuned(folder: Path, out: Path, backbone: Any, **settings: Any) -> Tuned:
    """What is taken for a run with these settings, which stay."""
    return fastest(plan(folder, out=out, backbone=backbone, **settings), fixed=settings)


def broken(paths: Iterable[Path]) -> None:
    for path in paths:
        path.write_bytes(b"no picture")


def test_images_that_can_be_decoded_are_compared_each_with_itself(folder: Path, backbone: Any) -> None:
    ways = [backbone.preprocessing.faster(), backbone.preprocessing]
    broken([folder / "ant" / "00.png"])
    images = list_images(folder)
    (pictures,) = decoded_in(images, [backbone.preprocessing], 10**6, 25)
    assert len(pictures) == len(np.unique(pictures.flatten(1), axis=0)) == 11
    assert decode_seconds(images, backbone.preprocessing) > 0
    fast, exact = decoded_in(images, ways, 10**6)
    assert len(fast) == len(exact) == 11
    assert float((fast.int() - exact.int()).abs().float().mean()) < 1  # not with its neighbour
    broken(sorted((folder / "ant").iterdir()))
    fast, _ = decoded_in(list_images(folder), ways, 10**6, 3)
    assert len(fast) == 2  # of rows 3 to 5, the first is broken as well
    broken(folder.rglob("*.*"))
    with pytest.raises(InputError, match="none of the 12 images can be decoded: "):
        decoded_in(images, [backbone.preprocessing], 10**6, 25)
    with pytest.raises(InputError, match="none of the 12 images can be decoded: .*use --decode exact"):
        decoded_in(images, ways, 10**6)


def test_options_are_those_that_were_asked_for_or_the_device_is_likely_to_gain_by() -> None:
    cpu = compute_options(CPU)
    assert cpu[0] == PLAIN
    assert not any(way.precision == "float16" or way.engine == "inductor" for way in cpu)
    if importlib.util.find_spec("openvino"):
        assert (LOWER_BY_OPENVINO in cpu) == openvino_computes_in("bfloat16")
        assert LOWER not in cpu  # slow without a compiler
    assert compute_options(CPU, precision="float16", compile="off") == [ComputeOption("float16", "eager")]  # as asked
    assert compute_options(CPU, precision="float32", compile="off") == [PLAIN]
    assert ComputeOption("float16", "eager") in compute_options(CPU, precision="float16")
    with pytest.raises(InputError, match="use --device cpu"):
        compute_options(torch.device("cuda"), compile="openvino")


def test_the_options_of_a_gpu_are_ordered_and_a_long_job_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")

    def order(n_images: int, **fixed: str) -> list[str]:
        return [str(option) for option in compute_options(gpu, n_images, **fixed)]

    assert order(10) == ["float16, eager", "bfloat16, eager", "float32, eager"]  # before Ampere
    for module in (tuning, backends):
        monkeypatch.setattr(module, "has_tensor_float32", lambda device: True)
    eager = ["bfloat16-weights, eager", "bfloat16, eager", "tf32, eager", "float32, eager"]
    assert order(999_999) == eager
    assert order(1_000_000) == ["bfloat16-weights, inductor", *eager]
    assert order(1_000_000, compile="off") == eager
    assert order(10, precision="bfloat16") == ["bfloat16, eager"]
    assert order(10, compile="inductor") == [each.replace("eager", "inductor") for each in eager]


def test_on_a_gpu_the_first_option_that_agrees_is_used_and_nothing_is_timed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a made-up GPU, whose bfloat16 is that of the CPU and whose TF32 is float32."""
    for module in (tuning, backends):
        monkeypatch.setattr(module, "has_tensor_float32", lambda device: True)
    monkeypatch.setattr(tuning, "_is_gpu", lambda device: True)
    monkeypatch.setattr(tuning, "_timed_s", lambda call: pytest.fail("timed"))
    config: dict[str, Any] = {"images": folder, "backbone": "timm/test_resnet", "weights": "random", "device": "cpu",
                              "workers": 0, "batch_size": 5}  # fmt: skip
    made = []
    for min_cosine in (0.9, 1 - 1e-9):
        with on_a_gpu(1) as transfers:
            out = tmp_path / str(min_cosine)
            made.append(job.embed(EmbedConfig(**config, out=out, fast=True, min_cosine=min_cosine)))
            assert transfers
    assert [each.plan.settings.precision for each in made] == ["bfloat16-weights", "tf32"]
    assert capsys.readouterr().err.count("Trying the next fastest") == 2
    plain = job.embed(EmbedConfig(**config, out=tmp_path / "plain"))
    rows, expected = (FeatureReader(each.plan.dataset.out)["embedding"][:] for each in (made[1], plain))
    assert np.allclose(rows, expected, atol=1e-6)


@pytest.mark.slow
@openvino
@pytest.mark.usefixtures("all_tried")
def test_ways_that_do_not_agree_or_fail_are_not_to_be_taken(
    folder: Path, backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["embedding"])
    (pictures,) = decoded_in(list_images(folder), [backbone.preprocessing], 10**6, 6)
    slow = ComputeOption("float32", "inductor")

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", no_compiler)
    reference, (plain, lower, failed, compiled) = forward_rates(
        backbone, choice, pictures, [PLAIN, LOWER, slow, BY_OPENVINO], min_cosine=1.0
    )
    assert reference == plain
    assert (plain.why_not, compiled.why_not) == ("", "")
    assert plain.images_per_s > 0 < compiled.images_per_s
    assert "at least 1.0 is required" in lower.why_not
    assert failed.images_per_s == 0.0
    assert failed.why_not == "test/small cannot be compiled by inductor: no C++ compiler"


@pytest.mark.usefixtures("all_tried")
def test_the_fastest_that_agrees_is_taken(
    folder: Path, tmp_path: Path, backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [
        Measured(PLAIN, 10.0),
        Measured(LOWER, 10**6),
        Measured(LOWER_BY_OPENVINO, 10**7, why_not="embedding has a cosine of 0.9 to eager float32"),
        Measured(BY_OPENVINO, 20.0),
    ]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: (rates[0], rates))
    monkeypatch.setattr(tuning, "_FAST_DECODING_PAYS_FROM", 0)
    tuned = _tuned(folder, tmp_path / "out", backbone, min_cosine=0.9)
    in_order = (("bfloat16", "off"), ("float32", "openvino"), ("float32", "off"))
    assert [(each["precision"], each["compile"], each["decode"]) for each in tuned.settings] == [
        (precision, compile, decode) for precision, compile in in_order for decode in ("fast", "exact")
    ]
    assert (tuned.measured, tuned.source) == (rates, "measured")
    reader = extract_features(
        folder, out=tmp_path / "out", backbone=backbone, progress=False, min_cosine=0.9, **tuned.settings[0]
    )
    assert np.isfinite(reader["embedding"][:]).all()


@pytest.mark.usefixtures("all_tried")
def test_where_no_compiler_was_tried_the_number_of_images_decides(
    folder: Path, tmp_path: Path, backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = Measured(PLAIN, 10.0), Measured(BY_OPENVINO, 5.0)
    for tried, compile in (([plain], "auto"), ([plain, compiled], "off")):
        monkeypatch.setattr(tuning, "forward_rates", lambda *_, tried=tried, **__: (plain, tried))
        assert _tuned(folder, tmp_path / "out", backbone, decode="exact").settings[0]["compile"] == compile


def test_a_data_set_is_gone_on_with_as_it_began(
    folder: Path, tmp_path: Path, backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = {"precision": "bfloat16", "compile": "off", "decode": "fast"}
    options: dict[str, Any] = {"limit": 5, "min_cosine": 0.9, "progress": False, **began}
    extract_features(folder, out=tmp_path / "out", backbone=backbone, **options).close()
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: pytest.fail("measured"))
    tuned = _tuned(folder, tmp_path / "out", backbone)
    assert tuned.settings == [began]
    assert (tuned.measured, tuned.source) == ([], "resumed")


def test_a_short_job_starts_at_once_and_is_exact(
    folder: Path, tmp_path: Path, backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: pytest.fail("measured"))
    tuned = _tuned(folder, tmp_path / "out", backbone)
    plain = {"precision": "float32", "compile": "auto", "decode": "exact"}
    assert (tuned.settings, tuned.measured, tuned.source) == ([plain], [], "short")
    tuned = _tuned(folder, tmp_path / "out", backbone, precision="bfloat16", decode="fast", batch_size=8)
    assert tuned.settings == [{"precision": "bfloat16", "compile": "auto", "decode": "fast"}]


@pytest.mark.usefixtures("all_tried")
def test_where_nothing_agrees_each_reason_is_told(folder: Path, tmp_path: Path, backbone: Any) -> None:
    with pytest.raises(
        InputError, match=r"(?s)every requested compute option was rejected:.*bfloat16, eager: embedding has a cos"
    ):
        _tuned(folder, tmp_path / "out", backbone, precision="bfloat16", compile="off", min_cosine=1.0)
