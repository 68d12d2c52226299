"""Compiled forwards against eager ones: the same features; and what happens where that cannot be."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extract import FeatureReader, extract_features, load_backbone
from extract.compute import backends
from extract.compute.agreement import FULL_PRECISION, agreement, refusal
from extract.compute.backends import ByOpenVino, engine_for, open_forward
from extract.compute.feature_choice import choose_features
from extract.errors import DisagreementError, InputError, LayertapError
from extract.extraction import validation as first_batch
from extract.extraction.reproduce import recheck
from extract.extraction.run import extract
from extract.system.torch_state import evaluating
from tests.conftest import make_picture
from tests.planning import plan

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
BY_OPENVINO = pytest.param("openvino", marks=openvino)
BY_INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)  # it calls a C++ compiler

# Layers that are rewritten in place after they ran, that run more than once, that give maps, tokens and windows.
LAYERS = {
    "torchvision/resnet18": ["layer1.0.bn1:none", "layer1.*.relu:none", "relu", "layer?", "layer4:max_map", "avgpool"],
    "torchvision/vgg11": ["features.*:none", "embedding"],
    "torchvision/mobilenet_v3_small": ["features.*", "embedding"],
    "timm/test_vit3": ["blocks.*", "blocks.1.attn:none", "norm:mean_tokens"],
    "timm/test_efficientnet": ["blocks.*", "conv_stem:none", "global_pool", "classifier", "embedding"],
    "timm/vit_tiny_patch16_224": ["blocks.*", "blocks.3.attn:none", "blocks.11:cls_token", "norm:mean_tokens"],
    "timm/swin_tiny_patch4_window7_224": ["layers.*", "layers.0.blocks.0.attn:none", "embedding"],
    "timm/convnext_atto": ["stages.*", "embedding"],
    "bundled/efficientnet_lite0": ["blocks.*", "conv_stem:none", "global_pool", "classifier", "embedding"],
}  # fmt: skip

QUICK = ("timm/test_efficientnet",)
SLOW = (
    "torchvision/resnet18", "timm/convnext_atto", "timm/vit_tiny_patch16_224", "bundled/efficientnet_lite0",
    "timm/test_vit3",
)  # fmt: skip


def _marked(spec: str) -> Any:
    mark = pytest.mark.slow if spec in SLOW else pytest.mark.soak
    return spec if spec in QUICK else pytest.param(spec, marks=mark)


def _pictures(backbone: Any, count: int) -> torch.Tensor:
    return torch.stack([backbone.preprocessing.cpu_transform(make_picture(seed, 300, 260)) for seed in range(count)])


def _both_ways(spec: str, engine: str, layers: list[str], dtype: str = "float32") -> tuple[dict[str, Any], ...]:
    """Features of five pictures from an eager forward, a compiled one, and a compiled one of the first two."""
    backbone = load_backbone(spec, weights=None if spec.startswith("bundled") else "random", device="cpu")
    pictures = _pictures(backbone, 5)
    with evaluating(backbone.model):
        choice = choose_features(backbone, layers)
    with open_forward(backbone, choice, dtype) as forward:
        plain = forward(pictures)
    with open_forward(backbone, choice, dtype, "float32", engine, batch_size=5) as forward:
        return plain, forward(pictures), forward(pictures[:2])


@pytest.mark.parametrize("engine", [BY_OPENVINO, BY_INDUCTOR])
@pytest.mark.parametrize("spec", [_marked(spec) for spec in LAYERS])
def test_compiled_features_are_those_of_an_eager_forward(spec: str, engine: str) -> None:
    plain, compiled, short = _both_ways(spec, engine, LAYERS[spec])
    assert list(compiled) == list(plain)
    for name, found in agreement(compiled, plain).items():
        assert compiled[name].dtype == plain[name].dtype
        assert compiled[name].shape == plain[name].shape
        assert found.max_deviation <= FULL_PRECISION, name
        assert np.array_equal(short[name], compiled[name][:2]), name  # a short batch gives the same rows


POOLED = {
    "timm/test_resnet": [
        "layer1:grid3", "layer1:grid2:srp40", "layer1:srp64", "layer1:srp64s1", "layer1:none", "layer1:gem",
        "layer1:gem2.5:srp8", "layer2:std_map", "layer2:meanstd", "layer4:grid2:max_map", "embedding:srp16",
    ],
    "timm/vit_tiny_patch16_224": [
        "blocks.0:cls+mean", "blocks.0:last_token", "blocks.0:gem", "blocks.0:meanstd", "blocks.0:grid3:srp20",
        "blocks.1:srp100:srp10", "norm:grid2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("engine", [BY_OPENVINO, BY_INDUCTOR])
@pytest.mark.parametrize(
    "spec", ["timm/test_resnet", pytest.param("timm/vit_tiny_patch16_224", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_compiled_poolings_are_those_of_an_eager_forward(spec: str, engine: str, dtype: str) -> None:
    plain, compiled, short = _both_ways(spec, engine, POOLED[spec], dtype)
    assert list(compiled) == list(plain)
    for name, found in agreement(compiled, plain).items():
        assert compiled[name].dtype == plain[name].dtype == dtype
        assert compiled[name].shape == plain[name].shape
        assert found.max_deviation <= (FULL_PRECISION if dtype == "float32" else 2**-10), name
        assert np.array_equal(short[name], compiled[name][:2]), name


@openvino
def test_batches_of_several_chunks_are_computed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several chunks, one ahead of the other, and one whose features are asked for first."""
    monkeypatch.setattr("extract.compute.backends._CHUNK_TO_POOL", 2)
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["layer1:srp64", "layer2"])
    pictures = _pictures(backbone, 23)
    with open_forward(backbone, choice, "float32") as forward:
        plain = forward(pictures)
    with open_forward(backbone, choice, "float32", "float32", "openvino", batch_size=23) as forward:
        first, second, third = forward.start(pictures), forward.start(pictures[:9]), forward.start(pictures[9:10])
        results = {"third": third(), "first": first(), "second": second()}
        unread = forward.start(pictures)
    del unread
    for name, values in plain.items():
        for key, rows in {"first": values, "second": values[:9], "third": values[9:10]}.items():
            found = results[key][name]
            assert found.shape == rows.shape
            assert np.abs(found - rows).max() <= FULL_PRECISION * np.abs(values).max(), (key, name)


@openvino
@pytest.mark.parametrize("layers", [["layer2"], ["layer1:srp64"]])
def test_an_interrupted_wait_for_requests_can_be_repeated(layers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    with evaluating(backbone.model):
        choice = choose_features(backbone, layers)
    pictures, calls, result = _pictures(backbone, 40), itertools.count(1), Future.result

    def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return result(self, timeout)

    with open_forward(backbone, choice, "float32", "float32", "openvino", batch_size=40) as forward:
        expected = forward(pictures)
        monkeypatch.setattr(Future, "result", interrupted)
        wait, other = forward.start(pictures), forward.start(pictures[::2])
        with pytest.raises(KeyboardInterrupt):
            wait()
        for name, values in expected.items():
            assert np.array_equal(wait()[name], values)
            assert np.array_equal(other()[name], values[::2])


@openvino
@pytest.mark.slow
def test_features_are_compiled_to_float16_too() -> None:
    plain, compiled, _ = _both_ways("timm/test_resnet", "openvino", ["layer4", "layer1:none"], "float16")
    for name, values in compiled.items():
        assert values.dtype == np.float16
        assert np.abs(values.astype(float) - plain[name]).max() <= 2**-10 * np.abs(plain[name]).max()


@openvino
@pytest.mark.slow
def test_a_run_that_stores_float16_is_compared_in_float32(folder: Path, tmp_path: Path) -> None:
    """Rounding to 11 bits is far more than what compiled code may be off."""
    found = extract_features(folder, out=tmp_path / "out", compile="on", dtype="float16", **NET)
    plain = extract_features(folder, out=tmp_path / "plain", compile="off", dtype="float16", **NET)
    assert found["embedding"].dtype == np.float16
    rows, expected = (one["embedding"][:].astype(float) for one in (found, plain))
    assert np.abs(rows - expected).max() <= 2**-10 * np.abs(expected).max()
    told = json.loads((tmp_path / "out" / "runs.jsonl").read_text().splitlines()[-2])
    assert told["computation"]["engine"] == "openvino"
    assert told["computation"]["agreement"]["embedding"]["max_deviation"] <= FULL_PRECISION


def test_values_that_are_not_finite_do_not_agree() -> None:
    plain = {"a": np.array([[1.0, 2.0], [np.inf, 1.0], [0.0, 0.0]], np.float32)}
    same = agreement(plain, plain)["a"]
    assert (same.min_cosine, same.max_deviation) == (1.0, 0.0)  # the second row has no say
    broken = agreement({"a": np.array([[1.0, np.nan], [1.0, 1.0], [0.0, 0.0]], np.float32)}, plain)
    assert np.isnan(broken["a"].min_cosine)
    assert refusal(broken, None)
    assert refusal(broken, -1.0)
    assert refusal({"b": same, **broken}, 0.9)  # also where another feature agrees


@pytest.mark.parametrize("amount", [np.nan, 1e-4])
def test_what_is_off_later_in_the_batch_is_found(amount: float) -> None:
    plain = {"a": np.ones((64, 8), np.float32)}
    other = {"a": plain["a"].copy()}
    other["a"][63, 7] *= 1 + amount
    assert refusal(agreement(other, plain), None)


@openvino
@pytest.mark.slow
def test_openvino_reports_to_nobody() -> None:
    """Its telemetry would fork a process in mid-run, and send from there."""
    program = """
import multiprocessing.process, socket, sys
def forbidden(*_, **__): raise SystemExit("a process or a connection")
multiprocessing.process.BaseProcess.start = socket.socket.connect = forbidden
import torch
from extract import load_backbone
from extract.compute.feature_choice import choose_features
from extract.compute.backends import open_forward
backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
choice = choose_features(backbone, ["embedding"])
pictures = torch.zeros(2, *backbone.preprocessing.crop_px, 3, dtype=torch.uint8)
with open_forward(backbone, choice, "float32", "float32", "openvino", 2) as forward:
    forward(pictures)
print("openvino" in sys.modules, "openvino_telemetry" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


@pytest.mark.slow
@openvino
def test_what_is_compiled_stops_at_the_last_layer() -> None:
    """Layers behind those asked for are not computed."""
    from extract.compute.backends import graph_of

    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    with evaluating(backbone.model):
        early, late = (choose_features(backbone, [layer]) for layer in ("layer1", "layer4"))
        sizes = []
        for choice in (early, late):
            program = graph_of(backbone, choice, "float32", _pictures(backbone, 2)).run_decompositions({})
            sizes.append(sum(str(node.target) == "aten.conv2d.default" for node in program.graph.nodes))
    assert sizes == [5, 15]


NET: dict[str, Any] = {"backbone": "timm/test_resnet", "weights": "random", "batch_size": 5, "progress": False}


@openvino
def test_a_compiled_run_says_how_it_agrees_and_holds_the_same_features(folder: Path, tmp_path: Path) -> None:
    eager = extract_features(folder, out=tmp_path / "eager", compile="off", **NET)
    compiled = extract_features(folder, out=tmp_path / "compiled", compile="on", **NET)
    assert compiled.fingerprint == eager.fingerprint  # the features are the same
    rows, expected = compiled["embedding"][:], eager["embedding"][:]
    assert 0 < np.abs(rows - expected).max() <= FULL_PRECISION * np.abs(expected).max()
    told = json.loads((tmp_path / "compiled" / "runs.jsonl").read_text().splitlines()[-2])
    computation = told["computation"]
    assert computation["engine"] == "openvino"
    assert 0 < computation["agreement"]["embedding"]["max_deviation"] <= FULL_PRECISION
    assert computation["agreement"]["embedding"]["min_cosine"] > 1 - 1e-9


def _run(folder: Path, out: Path, backbone: Any, pays_from: int = 12, stop: Any = None, **settings: Any) -> Any:
    """A run for which compiling pays from so many images on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(first_batch._PAYS_FROM, "openvino", pays_from)
        return extract(plan(folder, out=out, backbone=backbone, batch_size=5, **settings), stop=stop)


@pytest.mark.slow
@openvino
def test_auto_compiles_long_jobs_and_leaves_short_ones_eager(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    long = _run(folder, tmp_path / "long", backbone)
    short = _run(folder, tmp_path / "short", backbone, pays_from=13)
    assert (long.computation.engine, short.computation.engine) == ("openvino", "eager")
    assert "compiling pays from" in short.computation.why


@openvino
def test_a_shared_graph_is_converted_once_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    real, exported = backends.graph_of, []
    monkeypatch.setattr(backends, "graph_of", lambda *args: exported.append(1) or real(*args))
    pictures = torch.randint(0, 256, (6, *backbone.preprocessing.crop_px, 3), dtype=torch.uint8)

    def computed(layer: str) -> Any:
        with evaluating(backbone.model):
            choice = choose_features(backbone, [layer])
        with open_forward(backbone, choice, "float32", engine="openvino", batch_size=6) as forward:
            return forward(pictures)[layer]

    alone = computed("layer2")
    with backends.sharing_graphs() as graphs:
        shared = [computed("layer2") for _ in range(2)]
        assert computed("layer1").shape != alone.shape  # other layers have another graph
        assert len(exported) == 3
        graphs.clear()
        monkeypatch.setattr(torch.export, "export", None)  # that it would be called is enough: it takes a second
        with pytest.raises(LayertapError, match="cannot be compiled"):
            computed("layer2")
    with pytest.raises(LayertapError, match="cannot be compiled"):
        computed("layer2")
    assert len(exported) == 5
    assert all(np.array_equal(rows, alone) for rows in shared)


@openvino
def test_a_resumed_run_has_the_engine_of_the_whole_job(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    stopped = _run(folder, tmp_path / "out", backbone, stop=lambda: True)
    assert stopped.computed == 5
    rest = _run(folder, tmp_path / "out", backbone)
    assert (rest.computed, rest.computation.engine, stopped.computation.engine) == (7, "openvino", "openvino")
    _run(folder, tmp_path / "whole", backbone)
    rows = [FeatureReader(tmp_path / name)["embedding"][:] for name in ("out", "whole")]
    assert np.array_equal(*rows)


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 16, 16), nn.Linear(8, 4)

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        if float(x.sum()) > 1e9:  # depends on the values
            x = x * 2
        return self.fc(x)

def net():
    torch.manual_seed(0)
    return Net(), transform

def transform(picture):
    from torchvision.transforms.functional import pil_to_tensor
    return pil_to_tensor(picture.resize((32, 32))).float() / 255
"""


@pytest.fixture
def branching(tmp_path: Path) -> Any:
    """A backbone that no compiler can take."""
    (tmp_path / "nets.py").write_text(FACTORY)
    return load_backbone(f"python/{tmp_path}/nets.py:net")


@openvino
def test_where_compiling_fails_auto_goes_on_eagerly_and_says_so(folder: Path, tmp_path: Path, branching: Any) -> None:
    summary = _run(folder, tmp_path / "out", branching, layers="conv")
    assert summary.computation.engine == "eager"
    assert "cannot be compiled by openvino: " in summary.computation.why
    assert "use --" not in summary.computation.why  # nobody need do anything
    assert summary.computation.failed
    assert dict(summary.status) == {"ok": 12}


def test_other_code_stays_compiled_while_an_eager_forward_is_open() -> None:
    executed = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *values: executed.append(1) or graph(*values)

    doubled = torch.compile(lambda x: 2 * x, backend=counting)
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    with torch.no_grad(), open_forward(backbone, choose_features(backbone, ["embedding"]), "float32"):
        doubled(torch.ones(3))
    assert executed == [1]


@openvino
def test_where_compiling_fails_on_ends_the_run(folder: Path, tmp_path: Path, branching: Any) -> None:
    with pytest.raises(LayertapError, match="cannot be compiled by openvino: .*; use --compile off"):
        extract_features(folder, out=tmp_path / "out", backbone=branching, layers="conv", compile="on", progress=False)
    assert not list((tmp_path / "out" / "shards").iterdir())


def _wrong(amount: float) -> Any:
    real = ByOpenVino.start

    def begin(self: Any, images: Any) -> Any:
        values = real(self, images)
        return lambda: {name: one * np.float32(1 + amount) for name, one in values().items()}

    return begin


@openvino
@pytest.mark.parametrize("compile", ["auto", pytest.param("openvino", marks=pytest.mark.slow)])
def test_compiled_code_that_is_off_is_not_used(
    folder: Path, tmp_path: Path, compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByOpenVino, "start", _wrong(1e-4))
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    if compile == "openvino":
        with pytest.raises(LayertapError, match="off by 1.0e-04 of the largest value; at most 1e-05 is rounding"):
            _run(folder, tmp_path / "out", backbone, compile=compile)
        return
    summary = _run(folder, tmp_path / "out", backbone, compile=compile)
    assert "off by 1.0e-04" in summary.computation.why
    assert summary.computation.failed
    plain = extract_features(folder, out=tmp_path / "plain", backbone=backbone, batch_size=5, progress=False)
    stored = extract_features(folder, out=tmp_path / "out", backbone=backbone, batch_size=5, progress=False)
    assert np.array_equal(stored["embedding"][:], plain["embedding"][:])


@pytest.mark.parametrize("compile", ["off", pytest.param("openvino", marks=[openvino, pytest.mark.slow])])
def test_low_precision_that_is_refused_leaves_nothing_behind(
    folder: Path, tmp_path: Path, compile: str, request: pytest.FixtureRequest
) -> None:
    if compile == "openvino":
        request.getfixturevalue("openvino_in_bfloat16")
    out = tmp_path / "out"
    with pytest.raises(LayertapError, match="has a cosine of 0.9.* at least 1.0 is required"):
        extract_features(folder, out=out, precision="bfloat16", compile=compile, min_cosine=1.0, **NET)
    assert not list((out / "shards").iterdir())
    assert extract_features(folder, out=out, **NET)["embedding"].shape[0] == 12  # in float32, the same folder takes it


@pytest.mark.slow  # inductor calls a C++ compiler
def test_what_inductor_computes_in_lower_precision_has_a_fingerprint_of_its_own(folder: Path, tmp_path: Path) -> None:
    lower = {**NET, "precision": "bfloat16", "min_cosine": 0.9}
    found = extract_features(folder, out=tmp_path / "out", compile="inductor", limit=7, **lower)
    assert found.provenance["depends_on"]["precision"] == "bfloat16 inductor"
    again = extract_features(folder, out=tmp_path / "out", limit=7, **lower)  # auto goes on as it began
    assert again.fingerprint == found.fingerprint
    assert recheck(tmp_path / "out", 7, backbone=load_backbone("timm/test_resnet", weights="random")).faults == []
    with pytest.raises(InputError, match="precision: stored bfloat16 inductor, now bfloat16 autocast"):
        extract_features(folder, out=tmp_path / "out", compile="off", limit=7, **lower)


@pytest.mark.slow
@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_what_was_refused_does_not_decide_the_engine(folder: Path, tmp_path: Path) -> None:
    lower = {**NET, "precision": "bfloat16"}
    with pytest.raises(LayertapError, match="is required"):
        extract_features(folder, out=tmp_path / "out", compile="openvino", min_cosine=1.0, **lower)
    found = extract_features(folder, out=tmp_path / "out", min_cosine=0.9, **lower)
    assert found.provenance["depends_on"]["precision"] == "bfloat16 autocast"


def test_a_run_that_began_in_lower_precision_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    """Its first batch was compared; the next one is told, since without the break nobody would have refused it."""
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    settings: dict[str, Any] = {"backbone": backbone, "batch_size": 5, "precision": "bfloat16", "compile": "off"}
    planned = plan(folder, out=tmp_path / "out", min_cosine=0.9, **settings)
    stopped = extract(planned, stop=lambda: True)
    assert stopped.computed == 5
    runs = (tmp_path / "out" / "runs.jsonl").read_text()
    assert '"event": "computing"' in runs  # kept also where a run is killed
    rest = extract(plan(folder, out=tmp_path / "out", min_cosine=1.0, **settings))
    assert rest.computed == 7
    assert rest.computation is not None
    assert 0.9 < rest.computation.agreement["embedding"].min_cosine < 1


@pytest.mark.slow
@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_lower_precision_is_another_fingerprint_for_each_engine_and_auto_goes_on_as_it_began(
    folder: Path, tmp_path: Path
) -> None:
    lower = {**NET, "precision": "bfloat16", "min_cosine": 0.9}
    extract_features(folder, out=tmp_path / "torch", limit=7, **lower)  # by autocast, unless it was asked for
    found = extract_features(folder, out=tmp_path / "openvino", compile="on", limit=7, **lower)
    assert found.provenance["depends_on"]["precision"] == "bfloat16 openvino"
    again = extract_features(folder, out=tmp_path / "openvino", limit=7, **lower)
    assert again.fingerprint == found.fingerprint
    assert recheck(tmp_path / "openvino", 7, backbone=load_backbone("timm/test_resnet", weights="random")).faults == []
    with pytest.raises(InputError, match=r"precision: stored bfloat16 autocast, now bfloat16 openvino"):
        extract_features(folder, out=tmp_path / "torch", compile="openvino", limit=7, **lower)


def test_what_compile_means() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert engine_for("off", cpu, "float32") == "eager"
    assert engine_for("on", gpu, "float32") == "inductor"
    assert engine_for("on", cpu, "float16") == "inductor"
    assert engine_for("inductor", cpu, "float32") == "inductor"
    with pytest.raises(InputError, match="the device is cuda"):
        engine_for("openvino", gpu, "float32")


def test_without_openvino_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(LayertapError, match=r"pip install 'openvino>="):
        engine_for("openvino", torch.device("cpu"), "float32")


FLAGS_AS_FEATURES = """
import torch
from torch import nn
from torchvision.transforms import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        in_tf32 = torch.backends.cuda.matmul.allow_tf32 + 2 * torch.backends.cudnn.allow_tf32
        return self.fc(x.mean((2, 3)) + in_tf32 * torch.tensor([1e-3, 0, 0]))


def net():
    return Net(), lambda picture: functional.to_tensor(picture.resize((16, 16)))
"""


def test_tf32_is_allowed_in_the_forward_alone_and_compared_with_full_float32(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets.py").write_text(FLAGS_AS_FEATURES)
    how: Any = {"backbone": load_backbone(f"python/{tmp_path}/nets.py:net", device="cpu"), "layers": "fc", "workers": 0}
    with pytest.raises(InputError, match=r"TF32 needs an NVIDIA GPU of .* 8.0 .*; the device is cpu; use --precision"):
        extract_features(folder, out=tmp_path / "cpu", precision="tf32", **how)
    monkeypatch.setattr(backends, "has_tensor_float32", lambda device: True)
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    full = extract_features(folder, out=tmp_path / "full", **how)["fc"][:]
    reader = extract_features(folder, out=tmp_path / "tf32", precision="tf32", batch_size=5, **how)
    moved = how["backbone"].model.get_submodule("fc").weight[:, 0].detach().numpy() * 3e-3
    assert np.allclose(reader["fc"][:], full + moved, atol=1e-7)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == flags
    assert reader.provenance["depends_on"]["precision"] == "tf32 eager"
    told = [json.loads(line) for line in (tmp_path / "tf32" / "runs.jsonl").read_text().splitlines()]
    found = next(line["computation"] for line in told if line["event"] == "computing")["agreement"]["fc"]
    assert found["max_deviation"] == pytest.approx(np.abs(moved).max() / np.abs(full[:5]).max(), rel=0.01)
    with pytest.raises(LayertapError, match="in tf32 .eager., fc has a cosine of .*; use --precision float32"):
        extract_features(folder, out=tmp_path / "no", precision="tf32", min_cosine=1.0, **how)


def test_weights_in_bfloat16_are_those_of_a_copy(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    before = copy.deepcopy(backbone.model.state_dict())
    reader = extract_features(
        folder, out=tmp_path / "out", backbone=backbone, layers=["layer2:none", "embedding"], batch_size=5, workers=0,
        precision="bfloat16-weights", min_cosine=0.9,
    )  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())
    assert reader.provenance["depends_on"]["precision"] == "bfloat16-weights eager"
    pictures = [backbone.preprocessing.cpu_transform(Image.open(folder / path).convert("RGB")) for path in reader.paths]
    model: Any = copy.deepcopy(backbone.model).eval().bfloat16()
    with torch.no_grad():
        maps = model.forward_features(backbone.preprocessing.to_input(torch.stack(pictures)).bfloat16())
        expected = model.forward_head(maps, pre_logits=True).float().numpy()
    assert agreement({"embedding": reader["embedding"][:]}, {"embedding": expected})["embedding"].min_cosine > 0.99999
    assert recheck(tmp_path / "out", 12, backbone=backbone).faults == []


def test_a_model_that_insists_on_float32_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(FLAGS_AS_FEATURES)  # it adds float32 to its input
    backbone = load_backbone(f"python/{tmp_path}/nets.py:net", device="cpu")
    with pytest.raises(DisagreementError, match="the model cannot compute in bfloat16-weights: .*; use --precision"):
        extract_features(folder, out=tmp_path / "o", backbone=backbone, layers="fc", precision="bfloat16-weights")


def test_a_first_batch_that_is_refused_leaves_no_forward_open(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    planned = plan(folder, out=tmp_path / "out", backbone=backbone, precision="bfloat16", min_cosine=1.0)
    is_open = set[int]()

    @contextlib.contextmanager
    def counted(*args: Any) -> Any:
        with open_forward(*args) as forward:
            is_open.add(id(forward))
            yield forward
            is_open.remove(id(forward))

    monkeypatch.setattr(first_batch, "open_forward", counted)
    with evaluating(backbone.model), first_batch.ValidatedForward(planned, False, print) as forward:
        for _ in range(3):  # each shard tries again
            with pytest.raises(DisagreementError, match="at least 1.0 is required"):
                forward.validated(_pictures(backbone, 4))
            assert not is_open


@pytest.mark.slow
def test_fast_decoding_is_compared_stored_and_refused_where_features_point_elsewhere(
    folder: Path, tmp_path: Path
) -> None:
    exact = extract_features(folder, out=tmp_path / "exact", **NET)
    fast = extract_features(folder, out=tmp_path / "fast", decode="fast", **NET)
    assert fast.provenance["depends_on"]["preprocessing"]["resized_by"] == "torchvision"
    found = agreement({"embedding": fast["embedding"][:]}, {"embedding": exact["embedding"][:]})["embedding"]
    assert 0.999 < found.min_cosine < 1
    told = json.loads((tmp_path / "fast" / "runs.jsonl").read_text().splitlines()[-2])
    told = told["computation"]["decoding"]["embedding"]
    assert told["min_cosine"] == pytest.approx(found.min_cosine, abs=1e-7)
    assert told["max_deviation"] == pytest.approx(found.max_deviation, rel=0.01)
    assert recheck(tmp_path / "fast", 12, backbone=load_backbone("timm/test_resnet", weights="random")).faults == []
    with pytest.raises(InputError, match="resized_by: stored torchvision, now pillow"):
        extract_features(folder, out=tmp_path / "fast", **NET)
    with pytest.raises(LayertapError, match="of fast decoded images, embedding has a cosine of .*; use --decode exact"):
        extract_features(folder, out=tmp_path / "no", decode="fast", min_cosine=1.0, **NET)
