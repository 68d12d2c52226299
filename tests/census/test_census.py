"""The census on a few networks, what it would notice, and how it stops processes; on all: `python -m tests.census`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from extract import InputError, Taps
from extract.taps import capture
from extract.taps.batch_axis import BatchAxis, Trial
from extract.taps.surgery import Surgery
from tests.census.comparison import Report, compare
from tests.census.embedding import compare_embedding
from tests.census.networks import Network, prepare
from tests.census.processes import LimitError, run_limited
from tests.census.values import Place, digest, values_by_bare_hooks
from tests.census.weights import shake

# In-place ReLU and SiLU, layers that run twice, branches, windows, tokens, sequences, maps whose channels come last.
QUICK = (
    "timm/test_byobnet", "timm/test_coatnet", "timm/test_convnext", "timm/test_convnext2", "timm/test_convnext3",
    "timm/test_efficientnet", "timm/test_efficientnet_evos", "timm/test_efficientnet_gn", "timm/test_efficientnet_ln",
    "timm/test_mambaout", "timm/test_nfnet", "timm/test_resnet", "timm/test_vit", "timm/test_vit_relpos",
    "torchvision/mobilenet_v3_small", "torchvision/shufflenet_v2_x0_5", "torchvision/squeezenet1_1",
)  # fmt: skip
SLOW = (
    "timm/coat_tiny", "timm/convnext_atto", "timm/crossvit_tiny_240", "timm/cs3darknet_focus_s", "timm/dla46x_c",
    "timm/edgenext_xx_small", "timm/efficientvit_b0", "timm/ese_vovnet19b_slim_dw", "timm/fastvit_t8",
    "timm/gcvit_xxtiny", "timm/ghostnet_050", "timm/levit_128s", "timm/mambaout_femto", "timm/mobilenetv3_small_100",
    "timm/mobilevit_xxs", "timm/pvt_v2_b0", "timm/regnety_002", "timm/repghostnet_050", "timm/resnet18",
    "timm/starnet_s050", "timm/swin_tiny_patch4_window7_224", "timm/tf_efficientnet_lite0",
    "timm/vit_tiny_patch16_224", "timm/xcit_nano_12_p16_224",
    "torchvision/convnext_tiny", "torchvision/densenet121", "torchvision/efficientnet_b0", "torchvision/googlenet",
    "torchvision/inception_v3", "torchvision/lraspp_mobilenet_v3_large", "torchvision/mnasnet0_5",
    "torchvision/mobilenet_v2", "torchvision/regnet_y_400mf", "torchvision/resnet50", "torchvision/swin_t",
    "torchvision/vgg16_bn", "transformers/MobileViTModel", "transformers/PvtV2Backbone",
    "transformers/SegformerModel", "transformers/SwiftFormerModel",
)  # fmt: skip


def tiny_dinov2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    return transformers.Dinov2Model(config)


def tiny_swin() -> nn.Module:
    return models.SwinTransformer([2, 2], 16, [1, 1], [2, 2], [4, 4], num_classes=10)


def tiny_detector() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=[32, 32],
        num_detection_tokens=5,
    )  # fmt: skip
    return transformers.YolosForObjectDetection(config)


TINY: dict[str, Callable[[], nn.Module]] = {
    "transformers/dinov2": tiny_dinov2, "torchvision/swin": tiny_swin, "transformers/yolos": tiny_detector,
}  # fmt: skip


def network(key: str) -> Network:
    library, _, name = key.partition("/")
    return Network(library, name, "")


def built(key: str) -> tuple[nn.Module, Tensor]:
    if key not in TINY:
        return prepare(network(key))
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
    check(key)


@pytest.mark.slow
@pytest.mark.parametrize("key", SLOW)
def test_taps_record_what_the_references_compute_in_larger_networks(key: str, tmp_path: Path) -> None:
    report = check(key)
    if key != "torchvision/lraspp_mobilenet_v3_large":  # a network for segmentation, which has no embedding
        compare_embedding(network(key), tmp_path, report)
        assert not +report.wrong
        assert report.numbers["embeddings"] == 4 or any(reason.startswith("embedding") for reason in report.refused)


def test_the_stored_embedding_is_that_of_the_library(tmp_path: Path) -> None:
    report = Report()
    compare_embedding(network("timm/test_vit"), tmp_path, report)
    assert (report.numbers["embeddings"], report.wrong["embeddings"]) == (4, 0)


def test_the_census_has_nets_on_which_naive_hooks_fail() -> None:
    model, x = models.resnet50().eval(), torch.randn(2, 3, 32, 32)
    values = values_by_bare_hooks(model, lambda: model(x), naive=True)
    wrong = [place for place, tensor in values.naive.items() if digest(tensor) != values.outputs[place]]
    assert len(wrong) > 40


def test_the_census_notices_taps_that_do_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_copied", lambda value, site, to_cpu: value)
    report = compare(*built("timm/test_resnet"), Report())
    assert report.wrong["outputs"] > 10


class Branches(nn.Module):
    """A layer returns its input, which another layer reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same, self.other = nn.Conv2d(3, 4, 3), nn.Identity(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (self.same(x) * self.other(x)).mean((2, 3))


def test_the_census_notices_gradients_of_a_shared_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pictures = Branches().eval(), torch.randn(2, 3, 8, 8)
    assert not +compare(model, pictures, Report()).wrong
    monkeypatch.setattr(Surgery, "_separated", lambda self, gradients, call, is_one_of_several, path, tensor: tensor)
    report = compare(model, pictures, Report())
    assert report.examples["gradients"] == [str(Place("same", 0, ()))]


def test_the_census_notices_rows_that_are_not_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "rows", lambda self, site: BatchAxis())
    report = compare(*built("timm/test_vit_relpos"), Report())
    assert report.wrong["rows"] > 0


def test_the_census_notices_rows_that_are_refused_needlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trial: Trial, site: Any) -> BatchAxis:
        raise InputError("refused")

    monkeypatch.setattr(Trial, "rows", refuse)
    report = compare(*built("timm/test_vit"), Report())
    assert report.wrong["refusals of rows"] == report.numbers["refusals of rows"] > 20


def test_the_census_notices_hooks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    register = Taps._register

    def register_one_more(taps: Taps, *how: Any) -> None:
        register(taps, *how)
        taps._model.register_forward_hook(lambda module, args, output: None)

    monkeypatch.setattr(Taps, "_register", register_one_more)
    report = compare(*built("timm/test_resnet"), Report())
    assert "hooks" in report.examples["state"]


def test_the_census_notices_another_embedding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.census import embedding

    load = embedding.load_backbone

    def load_with_another_mean(*args: Any, **options: Any) -> Any:
        backbone = load(*args, **options)
        other = dataclasses.replace(backbone.preprocessing, mean=(0.3, 0.4, 0.5))
        return dataclasses.replace(backbone, preprocessing=other)

    monkeypatch.setattr(embedding, "load_backbone", load_with_another_mean)
    report = Report()
    compare_embedding(network("timm/test_vit"), tmp_path, report)
    assert report.wrong["embeddings"] == 4


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
    ("function", "reason"),
    [(sleep, "more than 0.5 s"), (fill_memory, "GB of memory"), (fail, "the process died")],
)
def test_a_process_is_stopped_at_its_limits(function: Callable[..., None], reason: str) -> None:
    told: list[str] = []
    seconds = 0.5 if function is sleep else 30
    memory = 300_000_000 if function is fill_memory else 1 << 40
    with pytest.raises(LimitError, match=reason):
        run_limited(function, seconds=seconds, memory_bytes=memory, update=told.append)
    assert told == (["started"] if function is sleep else [])


@pytest.mark.slow
def test_a_census_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.census", str(out), "--library", "timm", "--only", "timm/test_convnext?"]
    subprocess.run([*command, "--limit", "1"], check=True, capture_output=True)
    with out.open("a") as file:
        file.write('{"library": "timm", "name": "tes')  # of a process that was killed while it wrote
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = [line["name"] for line in lines if "about" not in line]
    assert sorted(names) == sorted(timm.list_models("test_convnext?"))
    assert len(set(names)) == 2
    assert all(not line.get("wrong") for line in lines)
