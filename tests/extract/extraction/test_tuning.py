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
from extract.extraction import kept_measurements, tuning
from extract.extraction.forward_rates import ComputeOption, ForwardRates, Measured, compute_options, forward_rates
from extract.extraction.kept_measurements import Measurements
from extract.extraction.tuning import batch_rates, best_batch_size, fastest, pictures_of, ranked
from extract.extraction.validation import decoded_both_ways
from extract.images import list_images
from extract.system.torch_state import evaluating

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
NET: dict[str, Any] = {"weights": "random", "device": "cpu"}
PLAIN = ComputeOption("float32", "eager")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layertap" / "measurements"


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is too short to be measured."""
    monkeypatch.setattr(tuning, "_PAYS_FROM_S", {"openvino": 0.0, "inductor": 0.0})


def _measurements(*measured: Measured, exact: float = 0.0, fast: float = 0.0, eager: float = 0.0) -> Measurements:
    return Measurements(list(measured), {"exact": exact, "fast": fast}, eager, True, 64)


def _order(measurements: Measurements, *args: Any, **settings: Any) -> list[tuple[str, str]]:
    return [(str(way.way), decode) for way, decode in ranked(measurements, *args, **settings)]


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
        thorough = compute_options(torch.device("cpu"), thorough=True)
        assert {ComputeOption("float32", "inductor"), ComputeOption("bfloat16", "eager")} <= set(thorough)


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
    plain, compiled, lower, failed = forward_rates(backbone, choice, pictures, ways, min_cosine=1.0).measured
    assert (plain.why_not, plain.agreement, plain.decoding) == ("", {}, {})
    assert compiled.why_not == ""
    assert plain.images_per_s > 0 < compiled.images_per_s
    assert "at least 1.0 is required" in lower.why_not
    assert lower.images_per_s == 0.0  # not timed, since it may not be taken
    assert lower.agreement["embedding"].min_cosine > 0.99
    assert failed.images_per_s == 0.0
    assert failed.why_not == "timm/test_resnet cannot be compiled by inductor: no C++ compiler"


@pytest.mark.usefixtures("measured_at_once")
def test_the_fastest_that_agrees_is_taken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    near = {"embedding": Agreement(0.9995, 1e-3)}
    rates = [
        Measured(PLAIN, 10.0, decoding=near),
        Measured(ComputeOption("float32", "openvino"), 12.0, decoding=near),
        Measured(ComputeOption("bfloat16", "openvino"), 30.0, why_not="embedding has a cosine of 0.9 to eager float32"),
        Measured(ComputeOption("bfloat16", "eager"), 20.0, decoding=near),
    ]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: ForwardRates(rates, True))
    monkeypatch.setattr(tuning, "decode_seconds", lambda *_, **__: {"exact": 0.02, "fast": 0.01})
    monkeypatch.setattr(tuning, "_job_s", lambda accepted, measurements, *_: _image_s(accepted, measurements))
    tuned = fastest(folder, backbone=backbone, min_cosine=0.9)
    assert [(each["precision"], each["compile"], each["decode"]) for each in tuned.settings] == [
        ("bfloat16", "off", "fast"),
        ("bfloat16", "off", "exact"),
        ("float32", "openvino", "fast"),
        ("float32", "openvino", "exact"),
        ("float32", "off", "fast"),
        ("float32", "off", "exact"),
    ]
    assert {each["batch_size"] for each in tuned.settings} == {64}
    assert (tuned.measured, tuned.source) == (rates, "measured")
    reader = extract_features(
        folder, out=tmp_path / "out", backbone=backbone, progress=False, min_cosine=0.9, **tuned.settings[0]
    )
    assert np.isfinite(reader["embedding"][:]).all()


def _image_s(accepted: Any, measurements: Measurements) -> float:
    return 1 / float(accepted.measured.images_per_s) + measurements.decode_s[accepted.decode]


def test_a_data_set_is_gone_on_with_as_it_began(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    began = {"precision": "bfloat16", "compile": "off", "decode": "fast"}
    extract_features(
        folder, out=tmp_path / "out", backbone=backbone, limit=5, min_cosine=0.9, progress=False, **began
    ).close()  # type: ignore[arg-type]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: pytest.fail("measured"))
    tuned = fastest(folder, backbone=backbone, out=tmp_path / "out")
    assert tuned.settings == [{**began, "batch_size": 64}]
    assert (tuned.measured, tuned.source) == ([], "resumed")


def test_a_short_job_starts_at_once_and_is_exact(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: pytest.fail("measured"))
    tuned = fastest(folder, backbone=backbone)
    plain = {"precision": "float32", "compile": "auto", "decode": "exact", "batch_size": 64}
    assert (tuned.settings, tuned.measured, tuned.source) == ([plain], [], "short")
    tuned = fastest(folder, backbone=backbone, precision="bfloat16", decode="fast", batch_size=8)
    assert tuned.settings == [{"precision": "bfloat16", "compile": "auto", "decode": "fast", "batch_size": 8}]
    assert not cache.exists()


@pytest.mark.usefixtures("measured_at_once")
def test_what_was_measured_is_kept_for_later_jobs(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    wanted: dict[str, Any] = {"backbone": backbone, "compile": "off", "min_cosine": 0.9}
    near = {"embedding": Agreement(0.9995, 1e-3)}
    lower = ComputeOption("bfloat16", "eager")
    rates = [Measured(PLAIN, 10.0, 0.5, decoding=near), Measured(lower, 30.0, 0.6, 0.1, near, near, "", "a cosine")]
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: ForwardRates(rates, True))
    first = fastest(folder, **wanted)
    assert first.source == "measured"
    (kept,) = cache.iterdir()
    again = fastest(folder, **wanted)
    assert again.source == "kept"
    assert (again.settings, again.measured) == (first.settings, first.measured)

    for damage in (b"", b"{}", b"[1]", kept.read_bytes()[:-30], kept.read_bytes().replace(b'"eager"', b"7")):
        whole = kept.read_bytes()
        kept.write_bytes(damage)
        assert fastest(folder, **wanted).source == "measured"
        assert kept.read_bytes() != damage
        kept.write_bytes(whole)
    for other in (
        {"layers": ["layer2"]},
        {"min_cosine": 0.91},
        {"batch_size": 8},
        {"decode": "exact"},
        {"precision": "float32"},
        {"backbone": load_backbone("timm/test_resnet", seed=1, **NET)},
    ):
        assert fastest(folder, **wanted | other).source == "measured", other
    with monkeypatch.context() as patch:
        patch.setattr(kept_measurements, "cpu_features", lambda: "another")
        assert fastest(folder, **wanted).source == "measured"
    assert fastest(folder, **wanted).source == "kept"


@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_where_openvino_cannot_compile_eager_lower_precision_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, asked = load_backbone("timm/test_resnet", **NET), []

    def rates(backbone: Any, choice: Any, pictures: Any, options: Any, *_: Any) -> ForwardRates:
        asked.append(list(map(str, options)))
        good = [Measured(way, 10.0 if way == PLAIN else 30.0) for way in options if way.engine == "eager"]
        return ForwardRates([*good, *(Measured(way, why_not="no") for way in options if way.engine != "eager")], True)

    monkeypatch.setattr(tuning, "forward_rates", rates)
    monkeypatch.setattr(tuning, "_PAYS_FROM_S", {"openvino": 0.0})
    monkeypatch.setattr(tuning, "_job_s", lambda accepted, *_: 1 / accepted.measured.images_per_s)
    best = fastest(folder, backbone=backbone, decode="exact").settings[0]
    assert (best["precision"], best["compile"]) == ("bfloat16", "off")
    assert asked == [["float32, eager", "float32, openvino", "bfloat16, openvino"], ["bfloat16, eager"]]
    with pytest.raises(InputError, match="bfloat16, openvino: no"):
        fastest(folder, backbone=backbone, precision="bfloat16", compile="openvino", decode="exact")
    assert asked[2:] == [["bfloat16, openvino"]]


@pytest.mark.usefixtures("measured_at_once")
def test_an_order_that_is_not_sure_is_not_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    rates = ForwardRates([Measured(PLAIN, 10.0)], False)
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: rates)
    assert fastest(folder, backbone=backbone, decode="exact").source == "unsure"
    assert not cache.exists()


def test_what_takes_long_to_start_must_win_that_back() -> None:
    slow = Measured(ComputeOption("float32", "inductor"), 20.0, start_s=60.0, starting_again_s=30.0)
    soon = Measured(PLAIN, 10.0)
    measurements = _measurements(slow, soon, eager=0.1)
    inductor, eager = ("float32, inductor", "exact"), ("float32, eager", "exact")
    assert _order(measurements, 100) == [eager, inductor]  # 10 s; 5 + 30 + 6.4 s, since 64 are computed by both
    assert _order(measurements, 1000) == [inductor, eager]  # 50 + 30 + 6.4 s, and 100 s
    assert _order(measurements) == [inductor, eager]
    assert _order(measurements, 650) == [eager, inductor]  # 65 s and 68.9 s
    assert _order(_measurements(soon, slow, eager=0.1), 740) == [eager, inductor]  # 74 and 73.4 s: the same


def test_decoding_counts_and_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes 40 or 20 ms of one of two cores, and a forward 10 or 5 ms of both."""
    monkeypatch.setattr(tuning.defaults, "CORES", 2)
    near = {"embedding": Agreement(0.9999, 1e-3)}
    plain = Measured(PLAIN, 100.0, decoding=near)
    lower = Measured(ComputeOption("bfloat16", "openvino"), 200.0, decoding=near)
    measurements = _measurements(plain, lower, exact=0.04, fast=0.02, eager=0.01)
    order = _order(measurements)
    assert order == [
        ("bfloat16, openvino", "fast"),  # 15 ms
        ("float32, eager", "fast"),  # 20 ms
        ("bfloat16, openvino", "exact"),  # 25 ms
        ("float32, eager", "exact"),  # 30 ms
    ]
    # Of 10 images, 10 are computed twice, and decoded in both ways in one process: 1.02 s more.
    assert _order(measurements, 10)[0] == ("float32, eager", "exact")
    assert _order(measurements, 10_000) == order


def test_of_equally_fast_options_the_plainer_one_is_taken() -> None:
    near = {"embedding": Agreement(0.9999, 1e-3)}
    ways = [
        Measured(way, rate, decoding=near)
        for way, rate in (
            (PLAIN, 100.0),
            (ComputeOption("float32", "openvino"), 101.9),
            (ComputeOption("bfloat16", "openvino"), 103.0),
        )
    ]
    measurements = _measurements(*ways, exact=1e-5, fast=1e-6)
    order = _order(measurements)
    assert order[0] == ("float32, openvino", "exact")  # 1.1 % slower than bfloat16; eager is 3 % slower
    assert _order(_measurements(*ways[:2], exact=1e-5, fast=1e-6))[0] == ("float32, eager", "exact")


def test_decoding_and_precision_must_agree_together() -> None:
    near, off = {"embedding": Agreement(0.9995, 1e-3)}, {"embedding": Agreement(0.998, 1e-2)}
    lower = Measured(
        ComputeOption("bfloat16", "eager"), 20.0, decoding=off, why_not_fast="embedding has a cosine of 0.998"
    )
    plain = Measured(PLAIN, 10.0, decoding=near)
    measurements = _measurements(plain, lower, exact=0.01, fast=0.001)
    assert _order(measurements) == [
        ("bfloat16, eager", "exact"),
        ("float32, eager", "fast"),
        ("float32, eager", "exact"),
    ]
    assert _order(measurements, decode="fast") == [("float32, eager", "fast")]
    assert ("float32, eager", "fast") not in _order(measurements, decode="exact")


@pytest.mark.usefixtures("measured_at_once")
def test_where_nothing_agrees_each_reason_is_told(folder: Path) -> None:
    backbone = load_backbone("timm/test_resnet", **NET)
    with pytest.raises(
        InputError, match=r"(?s)every requested compute option was rejected:.*bfloat16, eager: embedding has a cos"
    ):
        fastest(folder, backbone=backbone, precision="bfloat16", compile="off", min_cosine=1.0)


def test_ways_are_those_that_were_asked_for() -> None:
    cpu = torch.device("cpu")
    assert compute_options(cpu, precision="float16", compile="off") == [ComputeOption("float16", "eager")]
    assert compute_options(cpu, compile="off") == [PLAIN, ComputeOption("bfloat16", "eager")]
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
