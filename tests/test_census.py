"""The census (`benchmarks.census`) on a few networks, what it would notice, its page, and how it stops processes."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.census import embedding
from benchmarks.census.comparison import Report, compare
from benchmarks.census.embedding import compare_embedding
from benchmarks.census.networks import named, prepare
from benchmarks.census.page import page, read
from benchmarks.census.processes import LimitError, run_limited
from benchmarks.census.unchanged import NETWORKS, REQUESTS, judge, judge_model
from benchmarks.census.weights import shake
from extract import InputError, Taps, load_backbone
from extract.taps import capture
from extract.taps.batch_axis import BatchAxis, Trial
from extract.taps.surgery import Surgery

ROOT = Path(__file__).parents[1]

# In-place ReLU and SiLU, layers that run twice, identities before in-place layers, maps whose channels come last.
QUICK = ("timm/test_byobnet", "timm/test_efficientnet", "timm/test_mambaout", "timm/test_resnet")
SLOW = (
    "timm/cs3darknet_focus_s", "timm/dla46x_c", "timm/edgenext_xx_small", "timm/efficientvit_b0", "timm/fastvit_t8",
    "timm/gcvit_xxtiny", "timm/ghostnet_050", "timm/levit_128s", "timm/mobilevit_xxs", "timm/pvt_v2_b0",
    "timm/starnet_s050", "timm/test_nfnet", "timm/test_vit", "timm/tf_efficientnet_lite0",
    "timm/xcit_nano_12_p16_224", "torchvision/convnext_tiny", "torchvision/efficientnet_b0",
    "torchvision/googlenet", "torchvision/lraspp_mobilenet_v3_large", "torchvision/resnet50",
    "transformers/SegformerModel", "transformers/SwiftFormerModel",
)  # fmt: skip
MOST_REFUSED = 0.01  # of layers and requests


def tiny_swin() -> nn.Module:
    from torchvision import models

    swin: nn.Module = models.SwinTransformer([2, 2], 16, [1, 1], [2, 2], [4, 4], num_classes=10)
    return swin


def tiny_detector() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=[32, 32],
        num_detection_tokens=5,
    )  # fmt: skip
    detector: nn.Module = transformers.YolosForObjectDetection(config)
    return detector


TINY: dict[str, Callable[[], nn.Module]] = {"torchvision/swin": tiny_swin, "transformers/yolos": tiny_detector}


def built(key: str) -> tuple[nn.Module, Tensor]:
    if key not in TINY:
        return prepare(named(key))
    torch.manual_seed(0)
    model, pictures = TINY[key]().eval(), torch.randn(2, 3, 32, 32)
    shake(model, pictures)
    return model, pictures


def check(key: str) -> Report:
    report = compare(*built(key), Report())
    print(f"{key}: {dict(report.numbers)}, refused: {dict(report.refused)}")
    assert not +report.wrong, report.examples
    assert not report.uncompared
    for kind in ("outputs", "inputs", "gradients", "gradients of parameters", "rows"):
        assert report.numbers[kind] > 20, kind
    return report


@pytest.mark.parametrize("key", [*QUICK, *TINY])
def test_taps_record_what_the_references_compute(key: str) -> None:
    report = check(key)
    if key == "timm/test_resnet":
        assert report.numbers["wrong calls of naive hooks"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("key", SLOW)
def test_taps_record_what_the_references_compute_in_larger_networks(key: str, tmp_path: Path) -> None:
    report = check(key)
    if key != "torchvision/lraspp_mobilenet_v3_large":  # a network for segmentation, which has no embedding
        compare_embedding(named(key), tmp_path, report)
        assert not +report.wrong
        assert report.numbers["embeddings"] == 4 or any(reason.startswith("embedding") for reason in report.refused)


def test_the_stored_embedding_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    (tmp_path / "same").mkdir()
    compare_embedding(named("timm/test_vit"), tmp_path / "same", report)
    assert (report.numbers["embeddings"], report.wrong["embeddings"]) == (4, 0)

    def load_with_another_mean(*args: Any, **options: Any) -> Any:
        backbone = load_backbone(*args, **options)
        other = dataclasses.replace(backbone.preprocessing, mean=(0.3, 0.4, 0.5))
        return dataclasses.replace(backbone, preprocessing=other)

    monkeypatch.setattr(embedding, "load_backbone", load_with_another_mean)
    (tmp_path / "other").mkdir()
    compare_embedding(named("timm/test_vit"), tmp_path / "other", report)
    assert (report.numbers["embeddings"], report.wrong["embeddings"]) == (8, 4)


class Branches(nn.Module):
    """A layer returns its input, which another layer reads, too; two layers take sequences before the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.same, self.other = nn.Conv2d(3, 4, 3), nn.Identity(), nn.Conv2d(4, 4, 1)
        self.relu, self.tokens, self.mix = nn.ReLU(inplace=True), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.same(x) * self.relu(self.other(x))
        tokens: Tensor = self.mix(self.tokens(x.flatten(2).permute(2, 0, 1) * 2))
        return tokens.mean(0)


def compared() -> Report:
    return compare(Branches().eval(), torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)), Report())


def refuse(trial: Trial, site: Any) -> BatchAxis:
    raise InputError("refused")


register = Taps._register


def register_one_more(taps: Taps, *how: Any) -> None:
    register(taps, *how)
    taps._model.register_forward_hook(lambda module, args, output: None)


# Fault: what is replaced, and by what -> kind of comparison that finds it, and the first places.
FAULTS: dict[str, tuple[Any, str, Any, str, list[str]]] = {
    "outputs are not copied": (capture, "_copied", lambda value, site, to_cpu: value, "outputs", ["other#0"]),
    "inputs are not copied": (capture, "_copied", lambda value, site, to_cpu: value, "inputs", ["relu#0:0"]),
    "a tensor that two layers share": (
        Surgery,
        "_separated",
        lambda *arguments: arguments[-1],
        "gradients",
        ["same#0"],
    ),
    "rows are not the images": (Trial, "rows", lambda *_: BatchAxis(), "rows", ["tokens", "mix"]),
    "rows are refused needlessly": (Trial, "rows", refuse, "refusals of rows", ["stem", "same", "other"]),
    "hooks stay": (Taps, "_register", register_one_more, "state", ["hooks"]),
}


def test_the_census_finds_nothing_wrong_where_nothing_is() -> None:
    report = compared()
    assert not +report.wrong
    assert report.numbers["rows"] == 6
    assert report.numbers["wrong calls of naive hooks"] == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_the_census_notices_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, replacement, kind, places = FAULTS[fault]
    monkeypatch.setattr(where, name, replacement)
    report = compared()
    assert report.wrong[kind] >= len(places)
    assert report.examples[kind][: len(places)] == places


def sleep(tell: Callable[[Any], None]) -> None:
    tell("started")
    time.sleep(60)


def fill_memory(tell: Callable[[Any], None]) -> None:
    block = bytearray(b"x" * 400_000_000)
    time.sleep(60)
    tell(len(block))


def fail(tell: Callable[[Any], None]) -> None:
    raise RuntimeError


@pytest.mark.parametrize(
    ("function", "reason"), [(sleep, "more than 0.3 s"), (fill_memory, "GB of memory"), (fail, "the process died")]
)
def test_a_process_is_stopped_at_its_limits(function: Callable[..., None], reason: str) -> None:
    told: list[str] = []
    seconds = 0.3 if function is sleep else 30
    memory = 300_000_000 if function is fill_memory else 1 << 40
    with pytest.raises(LimitError, match=reason):
        run_limited(function, seconds=seconds, memory_bytes=memory, update=told.append)
    assert told == (["started"] if function is sleep else [])


def test_the_page_is_the_one_that_the_results_give() -> None:
    there = (ROOT / "docs" / "census.md").read_text(encoding="utf-8")
    assert there == page(*read(ROOT / "benchmarks" / "census" / "results.jsonl"))


def test_the_page_names_what_is_wrong_refused_and_not_run() -> None:
    network = {"library": "timm", "name": "net", "family": "nets", "parameters": 7, "size": [32, 32]}
    numbers = {"layers": 3, "calls": 4, "outputs": 5, "gradients": 5, "rounded gradients": 1, "rows": 2}
    results = [
        network | {"numbers": numbers, "wrong": {"outputs": 2}, "examples": {"outputs": ["conv"]}},
        network | {"name": "other", "numbers": numbers, "refused": {"rows: not the images": 6}},
        network | {"name": "third", "not run": "cannot be built: ImportError: no natten"},
    ]
    text = page({"timm": "1.0", "date": "2026-11-23", "families": 5}, results)
    lines = text.splitlines()
    for part in (
        "2 networks of 1 families: 8 calls of 6 layers. 2 values are wrong",
        "5 families",
        "Of 0, no network ran",
        "and 4 have not been tried yet",
    ):
        assert part in text
    assert "| timm/net | outputs | 2 | `conv` |" in lines
    assert (
        "6 values are refused with an error that gives the reason; 0 have no independent reference; 1 networks" in text
    )


@pytest.mark.slow
@pytest.mark.parametrize("key", NETWORKS if "LAYERTAP_FUZZ" in os.environ else NETWORKS[::8])
def test_a_request_that_changes_nothing_leaves_networks_as_they_are(key: str) -> None:
    tally = judge(named(key))
    print(f"{key}: {tally.line()}")
    assert not tally.wrong
    assert tally.refused <= MOST_REFUSED * tally.layers, tally.reasons


def test_a_change_is_noticed_and_a_refused_layer_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.randn(2, 4)
    tally = judge_model(model, x)
    assert (tally.layers, tally.refused, tally.wrong) == (3 * 10, 0, [])

    def refusing(taps: Taps, names: list[str]) -> Taps:
        taps.edit([name for name in names if name != "1"], lambda h: 1.5 * h)
        return taps.edit("1", lambda h: h[0]) if "1" in names else taps

    monkeypatch.setitem(REQUESTS, "edit output", refusing)
    tally = judge_model(model, x)
    assert tally.refused == 2  # with gradients and without
    assert [text.partition(":")[0] for text in tally.wrong] == ["edit output, no_grad", "edit output, grad"]
