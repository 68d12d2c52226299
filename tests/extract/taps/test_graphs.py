"""Compiled `Taps`: the record of eager ones, from one graph; made again where the model has changed, or refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from benchmarks.census.compiled import judge
from benchmarks.census.networks import named, prepare
from extract import InputError, LayertapError, Record, Taps
from tests.extract.taps.networks import Net, hooks_in, linear

ROOT = Path(__file__).parents[3]


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X = seeded(3, 4)


class Counting:
    """A backend that runs graphs as they are, and counts them, their calls and their operations."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)

        def run(*values: Any) -> Any:
            self.calls += 1
            return graph(*values)

        return run


def mlp() -> nn.Sequential:
    """Layers that work in place, and one that runs twice."""
    torch.manual_seed(0)
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(nn.Linear(4, 8), relu, nn.BatchNorm1d(8), nn.Linear(8, 8), relu, nn.Linear(8, 2)).eval()


def attention() -> nn.Module:
    def compute(net: Any, q: Tensor, k: Tensor, scale: float = 1.0) -> dict[str, Any]:
        attended, weights = net.attend(q, k, k)
        heads = F.scaled_dot_product_attention(q[:, None], k[:, None], k[:, None])
        return {"out": (attended * scale + heads[:, 0]).relu(), "weights": [weights, None], "size": 3}

    torch.manual_seed(0)
    return Net(compute, attend=nn.MultiheadAttention(4, 2, batch_first=True)).eval()


def lstm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LSTM(4, 4)).eval()


QUICK = "reductions, and an output before an in-place layer"

# Model, its arguments, and what is kept.
WORLDS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any], Callable[[Taps], Taps]]] = {
    "outputs and inputs before in-place layers": (
        mlp, (X,), {}, lambda taps: taps.keep(["*", ""]).keep(["*", ""], "input"),
    ),
    "one call, functions": (mlp, (X,), {}, lambda taps: taps.keep("1#1").keep(["0/linear", "*/relu"])),
    QUICK: (
        mlp, (X,), {},
        lambda taps: (
            taps.keep("0", reduce=lambda h: {"mean": h.mean(1), "max": h.amax(1)}).keep("5", reduce=F.relu).keep("3")
        ),
    ),
    "attention, keywords and mappings": (
        attention, (seeded(2, 3, 4), seeded(2, 3, 4) + 1), {"scale": 2.0},
        lambda taps: taps.keep("", "attention").keep("attend").keep("attend", "input"),
    ),
    "tuples in tuples": (lstm, (seeded(5, 3, 4),), {}, lambda taps: taps.keep("0:1")),
}  # fmt: skip


def check_same(record: Record, expected: Record) -> None:
    assert list(record) == list(expected)
    assert record.missing == expected.missing
    for name in expected:
        ours, theirs = record[name], expected[name]
        for one, other in zip(*([v.values() if isinstance(v, dict) else [v] for v in (ours, theirs)]), strict=True):
            torch.testing.assert_close(one, other, msg=name)
            assert one.is_contiguous()
            assert not one.requires_grad


@pytest.mark.parametrize(("world", "mode"), [
    *(pytest.param(world, torch.no_grad, marks=() if world == QUICK else pytest.mark.slow) for world in WORLDS),
    pytest.param(QUICK, torch.inference_mode, marks=pytest.mark.slow),
    pytest.param(QUICK, torch.enable_grad, marks=pytest.mark.slow),
])  # fmt: skip
def test_compiled_taps_fill_the_record_of_eager_ones(world: str, mode: Callable[[], Any]) -> None:
    make, args, kwargs, keep = WORLDS[world]
    model = make()
    with mode():
        with keep(Taps(model)) as taps:
            output = taps(*args, **kwargs)
        expected = taps.record
        with keep(Taps(model)).compile(backend="aot_eager") as taps:
            compiled = taps(*args, **kwargs)
            check_same(taps.record, expected)
            again = taps(*args, **kwargs)
        check_same(taps.record, expected)
    torch.testing.assert_close(compiled, output)
    torch.testing.assert_close(again, output)
    assert hooks_in(model) == 0


def test_layers_of_a_compiled_student_are_matched_with_those_of_its_teacher() -> None:
    """As in pytorch#173452: with hooks, `fullgraph=True` keeps nothing, and other code breaks the graph."""
    teacher, student, backend = mlp(), mlp(), Counting()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.1
    plain = copy.deepcopy(student)
    hidden = ["0", "3"]

    def loss(net: Any, record: Any, x: Tensor) -> Any:
        with torch.no_grad(), Taps(teacher, hidden) as theirs:
            target = theirs(x)
        apart = sum((record[name] - theirs.record[name]).square().mean() for name in hidden)
        return apart + (net - target).square().mean()

    ours = Taps(student).keep(hidden, live=True, reduce=torch.clone).keep("0.weight", "grad").compile(backend=backend)
    eager = Taps(plain).keep(hidden, live=True, reduce=torch.clone).keep("0.weight", "grad")
    optimisers = [torch.optim.SGD(model.parameters(), 0.1) for model in (student, plain)]
    for x in (X, X + 1, seeded(5, 4), X - 1):
        for taps, optimiser in zip((ours, eager), optimisers, strict=True):
            optimiser.zero_grad()
            with taps:  # each time, hooks are added and removed
                loss(taps(x), taps.record, x).backward()
            optimiser.step()
        torch.testing.assert_close(ours.record["0.weight@grad"], eager.record["0.weight@grad"])
        for one, other in zip(student.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert backend.calls == 4
    assert len(backend.graphs) == 2  # of two sizes of batches
    with torch.no_grad(), Taps(student, "2").compile(backend=backend) as other_layer:
        other_layer(X)
    assert list(other_layer.record) == ["2"]
    assert len(backend.graphs) == 3


def freeze(model: Any) -> None:
    model[0].requires_grad_(False)


# A change of a model -> whether the graph still holds.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "weights in place": (lambda model: model[0].weight.data.mul_(2), True),
    "buffers in place": (lambda model: model[2].running_mean.add_(1), True),
    "another parameter": (lambda model: setattr(model[0], "bias", nn.Parameter(torch.ones(8))), False),
    "another layer": (lambda model: setattr(model, "5", linear(8, 3)), False),
    "another layer inside": (lambda model: setattr(model[6], "0", nn.Tanh()), False),
    "a number": (lambda model: setattr(model[2], "eps", 1.0), False),
    "another tensor that is no buffer": (lambda model: setattr(model[7], "shift", torch.ones(2)), False),
    "another layer at the end": (lambda model: model.append(nn.Tanh()), False),
    "a list": (lambda model: model[8].factors.append(2.0), False),
    "a configuration": (lambda model: setattr(model[8].config, "power", 2), False),
    "an attribute that the class had": (lambda model: setattr(model[8], "forward", torch.tanh), False),
    "the mode": (lambda model: model.train(), False),
    "the mode of a layer": (lambda model: model[2].train(), False),
    "another precision": (lambda model: model.double(), False),
    "what is trained": (freeze, False),
}


QUICK_CHANGES = ("weights in place", "a number", "another layer at the end", "a list", "a configuration")


def changing() -> nn.Sequential:
    net = mlp()
    net.append(nn.Sequential(nn.Sigmoid()))
    net.append(Net(lambda net, x: x + net.shift, shift=torch.zeros(1)))
    config = SimpleNamespace(power=1)
    net.append(Net(lambda net, x: x**net.config.power * sum(net.factors), factors=[1.5], config=config))
    return net.eval()


@pytest.mark.parametrize(
    "change",
    [pytest.param(change, marks=() if change in QUICK_CHANGES else pytest.mark.slow) for change in CHANGES],
)
def test_after_a_change_of_the_model_the_record_is_that_of_the_changed_model(change: str) -> None:
    model, backend = changing(), Counting()
    apply, is_same_graph = CHANGES[change]
    with torch.no_grad(), Taps(model, ["0", "2"]).compile(backend=backend) as taps:
        taps(X)
        taps(X + 1)
        assert len(backend.graphs) == 1
        apply(model)
        x = X.to(model[0].weight.dtype)
        changed = copy.deepcopy(model)
        expected = changed[0](x)
        output = taps(x)
        torch.testing.assert_close(taps.record["0"], expected)
        torch.testing.assert_close(output, changed(x))
        torch.testing.assert_close(model[2].running_mean, changed[2].running_mean)
    assert len(backend.graphs) == 2 - is_same_graph


@pytest.mark.slow
def test_a_graph_is_made_for_each_kind_of_arguments_and_many_are_warned_of() -> None:
    def compute(net: Any, q: Tensor, k: Tensor, half: Any = False) -> Any:
        return net.a(q) + net.b(k) * (0.5 if half else 1.0)

    model, backend, y = Net(compute, a=linear(), b=linear(seed=1)), Counting(), X * 3
    with torch.no_grad(), Taps(model, ["a", "b"]).compile(backend=backend) as taps:
        for q, k, half in ((X, X, False), (X, y, False), (X, y, 1), (X, y, True), (X.double().float(), y, False)):
            torch.testing.assert_close(taps(q, k, half=half), model(q, k, half))
            torch.testing.assert_close(taps.record["b"], model.b(k))
        assert len(backend.graphs) == 4
        for rows in range(4, 7):
            taps(seeded(rows, 4), seeded(rows, 4))
        with pytest.warns(RuntimeWarning, match="8 graphs of Net are compiled: one for each shape of its arguments"):
            taps(seeded(9, 4), seeded(9, 4))


def test_a_record_owns_its_values() -> None:
    model = nn.Sequential(nn.Identity(), linear()).eval()
    with torch.no_grad(), Taps(model, ["0", "1", ""]).keep("0", "input").compile(backend="eager") as taps:
        x = X.clone()
        output, first = taps(x), taps.record
        x.zero_()
        output.zero_()
        first["1"].zero_()
        taps(X + 1)
    assert torch.equal(first["0"], X)
    assert torch.equal(first["0@input"], X)
    torch.testing.assert_close(first[""], model(X))
    torch.testing.assert_close(taps.record["1"], model(X + 1))


def test_records_are_handed_on_in_order_and_say_what_is_missing() -> None:
    found: list[Record] = []
    model = Net(lambda net, x: net.a(x), a=linear(), never=linear())
    asked = Taps(model, ["a", "never"], on_record=found.append).keep("a", "input", call=2)
    with torch.no_grad(), asked.compile(backend="eager") as taps:
        taps(X)
        model(X + 1)  # eagerly
        taps(X + 2)
        with pytest.raises(LayertapError, match="layer 'never' did not run in this forward"):
            taps.record["never"]
    assert (
        found[0].missing["a#2@input"]
        == "layer 'a' ran 1 time in this forward; there is no call 2, since the first is 0"
    )
    assert found[0].missing == found[1].missing == found[2].missing
    torch.testing.assert_close([record["a"] for record in found], [model.a(X + i).detach() for i in range(3)])


@pytest.mark.slow
def test_later_layers_are_not_computed_by_taps_that_stop() -> None:
    model, operations = mlp(), list[Any]()

    def compile_forward(graph: Any, inputs: Any) -> Any:
        operations.extend(node.target for node in graph.graph.nodes)
        return graph

    backend = aot_autograd(fw_compiler=compile_forward)
    with torch.no_grad(), Taps(model, "0", stop=True).compile(backend=backend) as taps:
        assert taps(X) is None
    torch.testing.assert_close(taps.record["0"], model[0](X))
    assert sum("addmm" in str(operation) for operation in operations) == 1
    with Taps(model.train(), "0", stop=True).compile(backend=backend) as taps:  # noqa: SIM117
        with pytest.raises(InputError, match="cannot stop in training mode"):
            taps(X)


@pytest.mark.parametrize("other", ["edit", "keep"])
def test_a_graph_is_refused_while_other_taps_are_open_and_an_earlier_record_is_not_returned(other: str) -> None:
    model = mlp()
    others = Taps(model).edit("0", lambda h: h * 3) if other == "edit" else Taps(model, "0")
    with torch.no_grad(), Taps(model, "0").compile(backend="eager") as taps:
        taps(X)
        with others:
            model(X)
            with pytest.raises(InputError, match="the model has a hook that no graph calls; .* close other Taps"):
                taps(X + 1)
        with pytest.raises(LayertapError, match="the last forward of the model did not finish"):
            taps.record  # noqa: B018
        taps(X + 1)
        torch.testing.assert_close(taps.record["0"], model[0](X + 1))


def test_capturing_leaves_no_tensor_without_values_in_the_model() -> None:
    def compute(net: Any, x: Tensor) -> Tensor:
        net.last = net.a(x)
        return net.last

    model = Net(compute, a=linear())
    with torch.no_grad(), Taps(model, "a").compile(backend="eager") as taps:
        torch.testing.assert_close(taps(X), model.a(X))
    assert not hasattr(model, "last")


def of_length(net: Any, x: Tensor, numbers: list[Any]) -> Tensor:
    return x * 2 if numbers[0] is True else x


def test_long_lists_of_numbers_of_other_types_have_other_graphs() -> None:
    with torch.no_grad(), Taps(Net(of_length), "").compile(backend="eager") as taps:
        assert torch.equal(taps(X, [1] * 20), X)
        assert torch.equal(taps(X, [True] * 20), X * 2)


def counting(net: Any, x: Tensor) -> Tensor:
    net.seen = net.seen + 1
    return x * net.seen


class WithHook(nn.Module):
    def __init__(self, register: str) -> None:
        super().__init__()
        self.layer = linear()
        getattr(self.layer, register)(lambda *args: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# What is refused: model, requests, arguments, and the error.
REFUSED: dict[str, tuple[Any, Callable[[Taps], Taps], Any, str]] = {
    "edits": (mlp, lambda taps: taps.edit("0", lambda h: h * 0), X, "the edit of '0' runs Python in each pass"),
    "gradients": (mlp, lambda taps: taps.keep("0", "grad"), X, "the grad of '0' runs Python in each pass"),
    "gradients of inputs": (mlp, lambda taps: taps.keep("0", "grad_input"), X, "the grad_input of '0' runs Python"),
    "hooks": (
        lambda: WithHook("register_forward_hook"), lambda taps: taps, X,
        "layer 'layer' has a hook that no graph calls",
    ),
    "backward hooks": (
        lambda: WithHook("register_full_backward_hook"), lambda taps: taps, X, "layer 'layer' has a hook",
    ),
    "values decide": (Deciding, lambda taps: taps, X, "Deciding cannot run as one graph: .*; leave out compile"),
    "an argument": (lambda: Net(lambda net, box: box.tensor), lambda taps: taps, Box(X), "an argument is, or holds,"),
    "the output": (lambda: Net(lambda net, x: [Box(x)]), lambda taps: taps, X, "the output of Net is, or holds, a Box"),
    "a live value that is changed": (
        mlp, lambda taps: taps.keep("0", live=True), X, "0 was changed in place after it was kept live",
    ),
    "a reduction": (
        mlp, lambda taps: taps.keep("0", reduce=lambda h: h.tolist()), X, "the reduction of 0|cannot run",
    ),
    "a buffer that is replaced": (
        lambda: Net(counting, seen=nn.Buffer(torch.zeros(1))), lambda taps: taps, X, "Net replaces a buffer",
    ),
    "a wrapper": (lambda: nn.DataParallel(mlp(), [0]), lambda taps: taps, X, "leave out what the wrapper"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_in_a_graph_is_refused_by_name(what: str) -> None:
    make, ask, x, message = REFUSED[what]
    with pytest.raises(LayertapError, match=message):  # noqa: SIM117
        with ask(Taps(make())).compile(backend="eager") as taps:
            taps(x)


def test_values_cannot_be_kept_live_in_inference_mode() -> None:
    model = linear()
    with torch.inference_mode(), Taps(model).keep("", live=True).compile(backend="eager") as taps:  # noqa: SIM117
        with pytest.raises(InputError, match="cannot be kept live in inference mode"):
            taps(X)


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_no_graph_and_no_record() -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    with torch.no_grad(), Taps(mlp(), "0").compile(backend=fail) as taps:
        for _ in range(2):
            with pytest.raises(LayertapError, match="Sequential cannot run as one graph: .*no compiler"):
                taps(X)
            with pytest.raises(LayertapError, match="did not finish; it left no record"):
                taps.record  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapper", "in place", "a layer"])
def test_a_model_that_is_compiled_already_is_captured_as_it_was(how: str) -> None:
    model: Any = mlp()
    expected = copy.deepcopy(model)
    if how == "in place":
        model.compile(backend="eager")
    elif how == "a layer":
        model[0] = torch.compile(model[0], backend="eager")
    with torch.no_grad():
        given = torch.compile(model, backend="eager") if how == "wrapper" else model
        given(X)
        with Taps(given, ["0", "3"]).compile(backend="aot_eager") as taps:
            torch.testing.assert_close(taps(X), expected(X))
            torch.testing.assert_close(taps.record["0"], expected[0](X))
            assert list(taps.record) == ["0", "3"]


@pytest.mark.slow
def test_hooks_of_weight_norm_are_part_of_the_graph() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(linear()))
    with torch.no_grad(), Taps(model, "0").compile(backend="eager") as taps:
        taps(X)
        torch.testing.assert_close(taps.record["0"], model(X))


@pytest.mark.slow
def test_the_example_of_the_guide_runs_with_inductor() -> None:
    guide = (ROOT / "docs" / "guides" / "hooks.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if ".compile()" in code)
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "Taps": Taps, "net": mlp()}
    exec(code, names)
    expected = names["net"][0](names["x"])
    torch.testing.assert_close(names["taps"].record["0"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["timm/resnet18", "timm/vit_tiny_patch16_224", "transformers/SegformerModel"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_taps_record_what_eager_ones_do_in_networks(key: str, backend: str) -> None:
    judged = judge(*prepare(named(key)), backend)
    print(f"{key}: {judged}")
    assert judged.outcome == "equal", judged.text
    assert judged.values > 100
