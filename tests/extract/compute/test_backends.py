"""Compiled forwards against eager ones: the same features; and what happens where that cannot be."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from extract import FeatureReader, load_backbone
from extract.compute import backends
from extract.compute.agreement import FULL_PRECISION, agreement, refusal
from extract.compute.backbone import Backbone
from extract.compute.backends import ByOpenVino, engine_for, graph_of, open_forward
from extract.compute.feature_choice import Choice, choose_features
from extract.errors import DisagreementError, InputError, LayertapError
from extract.extraction import validation as first_batch
from extract.extraction.reproduce import recheck
from extract.extraction.run import extract
from extract.system.torch_state import evaluating
from tests.extract.compute.small_network import Job, pictures_for, small_network

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
BY_OPENVINO = pytest.param("openvino", marks=openvino)
BY_INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)  # it calls a C++ compiler

# Layers that are rewritten in place after they ran, that run more than once, that give maps, tokens and windows; and
# poolings of each kind. The soak tests repeat it on more networks.
LAYERS = {
    "test/small": [
        "layer1.0:none", "layer1.1:none", "layer1:grid3", "layer1:grid2:srp20", "layer1:srp64", "layer1:srp64s1",
        "layer1:gem", "layer1:gem2.5:srp8", "layer1:std_map", "layer2:meanstd", "layer2:grid2:max_map",
        "embedding:srp16", "embedding",
    ],
    "timm/test_efficientnet": ["blocks.*", "conv_stem:none", "global_pool", "classifier", "embedding"],
    "torchvision/resnet18": ["layer1.0.bn1:none", "layer1.*.relu:none", "relu", "layer?", "layer4:max_map", "avgpool"],
    "timm/test_convnext": [
        "stages.*", "stages.1.blocks.0.mlp:grid2", "stages.1.blocks.0.mlp:meanstd", "stages.1.blocks.0.mlp:srp20",
        "embedding",
    ],
    "timm/vit_tiny_patch16_224": [
        "blocks.*", "blocks.3.attn:none", "blocks.11:cls_token", "norm:mean_tokens", "blocks.0:cls+mean",
        "blocks.0:last_token", "blocks.0:gem", "blocks.0:meanstd", "blocks.0:grid3:srp20", "blocks.1:srp100:srp10",
        "norm:grid2",
    ],
    "bundled/efficientnet_lite0": ["blocks.*", "conv_stem:none", "global_pool", "classifier", "embedding"],
    "timm/test_vit3": ["blocks.*", "blocks.1.attn:none", "norm:mean_tokens"],
    "torchvision/vgg11": ["features.*:none", "embedding"],
    "torchvision/mobilenet_v3_small": ["features.*", "embedding"],
    "timm/swin_tiny_patch4_window7_224": ["layers.*", "layers.0.blocks.0.attn:none", "embedding"],
}  # fmt: skip


def _marked(position: int, spec: str) -> Any:
    marks = () if position < 2 else pytest.mark.slow if position < 5 else pytest.mark.soak
    return pytest.param(spec, "float32", marks=marks)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_network()


def _choice(backbone: Backbone, layers: list[str]) -> Choice:
    with evaluating(backbone.model):
        return choose_features(backbone, layers)


@pytest.mark.parametrize("engine", [BY_OPENVINO, BY_INDUCTOR])
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        *[_marked(position, spec) for position, spec in enumerate(LAYERS)],
        pytest.param("test/small", "float16", marks=pytest.mark.slow),
    ],
)
def test_compiled_features_are_those_of_an_eager_forward(
    spec: str, dtype: str, engine: str, backbone: Backbone
) -> None:
    if spec != "test/small":
        backbone = load_backbone(spec, weights=None if spec.startswith("bundled") else "random", device="cpu")
    choice, pictures = _choice(backbone, LAYERS[spec]), pictures_for(backbone, 5)
    with open_forward(backbone, choice, dtype) as forward:
        plain = forward(pictures)
    with open_forward(backbone, choice, dtype, "float32", engine, batch_size=5) as forward:
        compiled, short = forward(pictures), forward(pictures[:2])
    assert list(compiled) == list(plain)
    for name, found in agreement(compiled, plain).items():
        assert compiled[name].dtype == plain[name].dtype == dtype
        assert compiled[name].shape == plain[name].shape
        assert found.max_deviation <= (FULL_PRECISION if dtype == "float32" else 2**-10), name
        assert np.array_equal(short[name], compiled[name][:2]), name  # a short batch gives the same rows


@openvino
def test_batches_of_several_chunks_are_computed_side_by_side(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several chunks, one ahead of the other, and one whose features are asked for first."""
    monkeypatch.setattr("extract.compute.backends._CHUNK_TO_POOL", 2)
    choice, pictures = _choice(backbone, ["layer1:srp64", "layer2"]), pictures_for(backbone, 23)
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
def test_an_interrupted_wait_for_requests_can_be_repeated(
    backbone: Backbone, layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, calls, result = pictures_for(backbone, 40), itertools.count(1), Future.result

    def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return result(self, timeout)

    choice = _choice(backbone, layers)
    with open_forward(backbone, choice, "float32", "float32", "openvino", batch_size=40) as forward:
        expected = forward(pictures)
        monkeypatch.setattr(Future, "result", interrupted)
        wait, other = forward.start(pictures), forward.start(pictures[::2])
        with pytest.raises(KeyboardInterrupt):
            wait()
        for name, values in expected.items():
            assert np.array_equal(wait()[name], values)
            assert np.array_equal(other()[name], values[::2])


def test_values_that_are_not_finite_or_off_late_in_the_batch_do_not_agree() -> None:
    plain = {"a": np.array([[1.0, 2.0], [np.inf, 1.0], [0.0, 0.0]], np.float32)}
    same = agreement(plain, plain)["a"]
    assert (same.min_cosine, same.max_deviation) == (1.0, 0.0)  # the second row has no say
    broken = agreement({"a": np.array([[1.0, np.nan], [1.0, 1.0], [0.0, 0.0]], np.float32)}, plain)
    assert np.isnan(broken["a"].min_cosine)
    assert refusal(broken, None)
    assert refusal(broken, -1.0)
    assert refusal({"b": same, **broken}, 0.9)  # also where another feature agrees
    for amount in (np.nan, 1e-4):
        plain, other = ({"a": np.ones((64, 8), np.float32)} for _ in range(2))
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


@openvino
def test_what_is_compiled_stops_at_the_last_layer(backbone: Backbone) -> None:
    """Layers behind those asked for are not computed."""
    sizes = []
    for layer in ("layer1", "layer2"):
        graph = graph_of(backbone, _choice(backbone, [layer]), "float32", pictures_for(backbone, 2))
        nodes = graph.run_decompositions({}).graph.nodes
        sizes.append(sum(str(node.target) == "aten.conv2d.default" for node in nodes))
    assert sizes == [2, 3]


@pytest.fixture(scope="module")
def graphs() -> dict[Any, Any]:
    """Graphs that OpenVINO has converted for runs: each takes longer than a run."""
    return {}


@pytest.fixture
def job(
    folder: Path, tmp_path: Path, backbone: Backbone, graphs: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> Job:
    monkeypatch.setattr(backends, "_CONVERTED", graphs)
    return Job(folder, tmp_path, backbone, {"batch_size": 5})


def _computation(out: Path) -> Any:
    """What the last run recorded about how it computed."""
    told = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    return [line["computation"] for line in told if line["event"] == "computing"][-1]


@openvino
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", FULL_PRECISION), ("float16", 2**-10)])
def test_a_compiled_run_says_how_it_agrees_and_holds_the_same_features(job: Job, dtype: str, rounding: float) -> None:
    """Rounding to the 11 bits of float16 is far more than what compiled code may be off: float32 is compared."""
    eager = job.run("eager", compile="off", dtype=dtype)
    compiled = job.run("compiled", compile="on", dtype=dtype)
    assert compiled.fingerprint == eager.fingerprint  # the features are the same
    assert compiled["embedding"].dtype == dtype
    rows, expected = (reader["embedding"][:].astype(float) for reader in (compiled, eager))
    deviation = np.abs(rows - expected).max()
    assert deviation <= rounding * np.abs(expected).max()
    assert deviation > 0 or dtype == "float16"
    computation = _computation(job.root / "compiled")
    assert computation["engine"] == "openvino"
    assert 0 < computation["agreement"]["embedding"]["max_deviation"] <= FULL_PRECISION
    assert computation["agreement"]["embedding"]["min_cosine"] > 1 - 1e-9


def _run(job: Job, out: str = "out", pays_from: int = 12, stop: Any = None, **settings: Any) -> Any:
    """A run for which compiling pays from so many images on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(first_batch._PAYS_FROM, "openvino", pays_from)
        return extract(job.plan(out, **settings), stop=stop)


@openvino
def test_a_shared_graph_is_converted_once_and_gives_the_same_bits(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, pictures = [], pictures_for(backbone, 6)

    def counted(*arguments: Any) -> Any:
        exported.append(arguments)
        return graph_of(*arguments)

    def computed(layer: str) -> Any:
        choice = _choice(backbone, [layer])
        with open_forward(backbone, choice, "float32", engine="openvino", batch_size=6) as forward:
            return forward(pictures)[layer]

    monkeypatch.setattr(backends, "graph_of", counted)
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
def test_auto_compiles_long_jobs_and_a_resumed_run_has_the_engine_of_the_whole_job(job: Job) -> None:
    short = _run(job, "short", pays_from=13)
    assert short.computation.engine == "eager"
    assert "compiling pays from" in short.computation.why
    stopped = _run(job, stop=lambda: True)
    assert stopped.computed == 5
    rest = _run(job)
    assert (rest.computed, rest.computation.engine, stopped.computation.engine) == (7, "openvino", "openvino")
    _run(job, "whole")
    rows, expected = (FeatureReader(job.root / name)["embedding"][:] for name in ("out", "whole"))
    assert np.array_equal(rows, expected)


class Branching(nn.Sequential):
    """What it computes depends on values: no compiler can take it."""

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = super().forward(x)
        return maps * 2 if float(maps.sum()) > 1e9 else maps


@openvino
def test_where_compiling_fails_auto_goes_on_eagerly_and_on_ends_the_run(job: Job) -> None:
    branching = replace(job.backbone, model=Branching(nn.Conv2d(3, 8, 16, 16)).eval(), classifier=None)
    job = replace(job, backbone=branching)
    summary = _run(job, "auto", layers="0")
    assert summary.computation.engine == "eager"
    assert "cannot be compiled by openvino: " in summary.computation.why
    assert "use --" not in summary.computation.why  # nobody need do anything
    assert summary.computation.failed
    assert dict(summary.status) == {"ok": 12}
    with pytest.raises(LayertapError, match="cannot be compiled by openvino: .*; use --compile off"):
        job.run("on", layers="0", compile="on")
    assert not list((job.root / "on" / "shards").iterdir())


def test_other_code_stays_compiled_while_an_eager_forward_is_open(backbone: Backbone) -> None:
    executed = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def counted(*values: Any) -> Any:
            executed.append(1)
            return graph(*values)

        return counted

    doubled = torch.compile(lambda x: 2 * x, backend=counting)
    with torch.no_grad(), open_forward(backbone, choose_features(backbone, ["embedding"]), "float32"):
        doubled(torch.ones(3))
    assert executed == [1]


@openvino
def test_compiled_code_that_is_off_is_not_used(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ByOpenVino.start

    def begin_wrong(self: Any, images: Any) -> Any:
        values = begin(self, images)
        return lambda: {name: one * np.float32(1 + 1e-4) for name, one in values().items()}

    monkeypatch.setattr(ByOpenVino, "start", begin_wrong)
    with pytest.raises(LayertapError, match="off by 1.0e-04 of the largest value; at most 1e-05 is rounding"):
        _run(job, "refused", compile="openvino")
    summary = _run(job, compile="auto")
    assert "off by 1.0e-04" in summary.computation.why
    assert summary.computation.failed
    plain = job.run("plain")
    assert np.array_equal(FeatureReader(job.root / "out")["embedding"][:], plain["embedding"][:])


@pytest.mark.parametrize("compile", ["off", pytest.param("openvino", marks=[openvino, pytest.mark.slow])])
def test_low_precision_that_is_refused_leaves_nothing_behind(
    job: Job, compile: str, request: pytest.FixtureRequest
) -> None:
    if compile == "openvino":
        request.getfixturevalue("openvino_in_bfloat16")
    with pytest.raises(LayertapError, match="has a cosine of 0.9.* at least 1.0 is required"):
        job.run(precision="bfloat16", compile=compile, min_cosine=1.0)
    assert not list((job.root / "out" / "shards").iterdir())
    shutil.copytree(job.root / "out", job.root / "lower")
    found = job.run("lower", precision="bfloat16", min_cosine=0.9)
    assert found.provenance["depends_on"]["precision"] == "bfloat16 autocast"  # whatever was refused
    assert len(job.run()["embedding"]) == 12  # in float32, the same folder takes it


@pytest.mark.slow  # inductor calls a C++ compiler
@pytest.mark.parametrize("engine", ["openvino", "inductor"])
def test_lower_precision_is_another_fingerprint_for_each_engine_and_auto_goes_on_as_it_began(
    job: Job, engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "openvino":
        request.getfixturevalue("openvino_in_bfloat16")
    lower: dict[str, Any] = {"precision": "bfloat16", "min_cosine": 0.9, "limit": 7}
    found = job.run("compiled", compile=engine, **lower)
    assert found.provenance["depends_on"]["precision"] == f"bfloat16 {engine}"
    assert job.run("compiled", **lower).fingerprint == found.fingerprint
    assert recheck(job.root / "compiled", 7, backbone=job.backbone).faults == []
    with pytest.raises(InputError, match=f"precision: stored bfloat16 {engine}, now bfloat16 autocast"):
        job.run("compiled", compile="off", **lower)
    job.run("eager", **lower)  # by autocast, unless a compiler is asked for
    with pytest.raises(InputError, match=f"precision: stored bfloat16 autocast, now bfloat16 {engine}"):
        job.run("eager", compile=engine, **lower)


def test_a_run_that_began_in_lower_precision_is_gone_on_with(job: Job) -> None:
    """Its first batch was compared; the next one is told, since without the break nobody would have refused it."""
    settings: dict[str, Any] = {"precision": "bfloat16", "compile": "off"}
    stopped = extract(job.plan(min_cosine=0.9, **settings), stop=lambda: True)
    assert stopped.computed == 5
    runs = (job.root / "out" / "runs.jsonl").read_text()
    assert '"event": "computing"' in runs  # kept also where a run is killed
    rest = extract(job.plan(min_cosine=1.0, **settings))
    assert rest.computed == 7
    assert rest.computation is not None
    assert 0.9 < rest.computation.agreement["embedding"].min_cosine < 1


def test_what_compile_means_and_what_openvino_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert engine_for("off", cpu, "float32") == "eager"
    assert engine_for("on", gpu, "float32") == "inductor"
    assert engine_for("on", cpu, "float16") == "inductor"
    assert engine_for("inductor", cpu, "float32") == "inductor"
    with pytest.raises(InputError, match="the device is cuda"):
        engine_for("openvino", gpu, "float32")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(LayertapError, match=r"pip install 'openvino>="):
        engine_for("openvino", cpu, "float32")


class FlagsAsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        in_tf32 = torch.backends.cuda.matmul.allow_tf32 + 2 * torch.backends.cudnn.allow_tf32
        return torch.as_tensor(self.fc(x.mean((2, 3)) + in_tf32 * torch.tensor([1e-3, 0, 0])))


def test_tf32_is_allowed_in_the_forward_alone_and_compared_with_full_float32(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job, backbone=replace(job.backbone, model=FlagsAsFeatures().eval()), always={"layers": "fc"})
    with pytest.raises(InputError, match=r"TF32 needs an NVIDIA GPU of .* 8.0 .*; the device is cpu; use --precision"):
        job.run("cpu", precision="tf32")
    monkeypatch.setattr(backends, "has_tensor_float32", lambda device: True)
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    full = job.run("full")["fc"][:]
    reader = job.run("tf32", precision="tf32", batch_size=5)
    moved = job.backbone.model.state_dict()["fc.weight"][:, 0].numpy() * 3e-3
    assert np.allclose(reader["fc"][:], full + moved, atol=1e-7)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == flags
    assert reader.provenance["depends_on"]["precision"] == "tf32 eager"
    found = _computation(job.root / "tf32")["agreement"]["fc"]
    assert found["max_deviation"] == pytest.approx(np.abs(moved).max() / np.abs(full[:5]).max(), rel=0.01)
    with pytest.raises(LayertapError, match="in tf32 .eager., fc has a cosine of .*; use --precision float32"):
        job.run("no", precision="tf32", min_cosine=1.0)
    # It adds float32 to its input.
    with pytest.raises(DisagreementError, match="the model cannot compute in bfloat16-weights: .*; use --precision"):
        job.run("weights", precision="bfloat16-weights")


def test_weights_in_bfloat16_are_those_of_a_copy(job: Job) -> None:
    before = copy.deepcopy(job.backbone.model.state_dict())
    lower: dict[str, Any] = {"precision": "bfloat16-weights", "min_cosine": 0.9}
    reader = job.run(layers=["layer2:none", "embedding"], **lower)
    assert all(torch.equal(value, before[name]) for name, value in job.backbone.model.state_dict().items())
    assert reader.provenance["depends_on"]["precision"] == "bfloat16-weights eager"
    pictures = [
        job.backbone.preprocessing.cpu_transform(Image.open(job.images / path).convert("RGB")) for path in reader.paths
    ]
    model: Any = copy.deepcopy(job.backbone.model).eval().bfloat16()
    with torch.no_grad():
        x = job.backbone.preprocessing.to_input(torch.stack(pictures)).bfloat16()
        expected = model.layer2(model.layer1(model.conv1(x))).mean((2, 3)).float().numpy()
    assert agreement({"embedding": reader["embedding"][:]}, {"embedding": expected})["embedding"].min_cosine > 0.99999
    assert recheck(job.root / "out", 12, backbone=job.backbone).faults == []


def test_a_first_batch_that_is_refused_leaves_no_forward_open(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = job.plan(precision="bfloat16", min_cosine=1.0)
    is_open = set[int]()

    @contextlib.contextmanager
    def counted(*args: Any) -> Any:
        with open_forward(*args) as forward:
            is_open.add(id(forward))
            yield forward
            is_open.remove(id(forward))

    monkeypatch.setattr(first_batch, "open_forward", counted)
    with evaluating(job.backbone.model), first_batch.ValidatedForward(planned, False, print) as forward:
        for _ in range(3):  # each shard tries again
            with pytest.raises(DisagreementError, match="at least 1.0 is required"):
                forward.validated(pictures_for(job.backbone, 4))
            assert not is_open


@pytest.mark.slow
def test_fast_decoding_is_compared_stored_and_refused_where_features_point_elsewhere(job: Job) -> None:
    job = replace(job, backbone=load_backbone("timm/test_resnet", weights="random", device="cpu"))
    exact, fast = job.run("exact"), job.run("fast", decode="fast")
    assert fast.provenance["depends_on"]["preprocessing"]["resized_by"] == "torchvision"
    found = agreement({"embedding": fast["embedding"][:]}, {"embedding": exact["embedding"][:]})["embedding"]
    assert 0.999 < found.min_cosine < 1
    told = _computation(job.root / "fast")["decoding"]["embedding"]
    assert told["min_cosine"] == pytest.approx(found.min_cosine, abs=1e-7)
    assert told["max_deviation"] == pytest.approx(found.max_deviation, rel=0.01)
    assert recheck(job.root / "fast", 12, backbone=job.backbone).faults == []
    with pytest.raises(InputError, match="resized_by: stored torchvision, now pillow"):
        job.run("fast")
    with pytest.raises(LayertapError, match="of fast decoded images, embedding has a cosine of .*; use --decode exact"):
        job.run("no", decode="fast", min_cosine=1.0)
