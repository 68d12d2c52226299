"""Gradients of outputs and inputs, against twins whose in-place modules were made out-of-place."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from extract import InputError, LayertapError, Taps
from extract.taps.edits import scale
from extract.taps.layer_names import named_layers
from tests.conftest import out_of_place
from tests.extract.taps.networks import Net, linear, same


class Through(torch.autograd.Function):
    """The identity, which writes the gradient that passes into a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(gradient.clone())
        return gradient, None


def expected_gradients(twin: nn.Module, x: Tensor) -> dict[str, list[list[Tensor]]]:
    """Gradients of every output and first input of every module, by an identity put before and behind each."""
    found: dict[str, list[list[Tensor]]] = {}
    for name, module in named_layers(twin).items():

        def wrapped(*args: Any, name: str = name, original: Any = module.forward, **kwargs: Any) -> Any:
            into: list[Tensor] = []
            out: list[Tensor] = []
            found.setdefault(f"{name}@grad_input", []).append(into)
            found.setdefault(f"{name}@grad", []).append(out)
            if isinstance(args[0], Tensor) and args[0].requires_grad:
                args = (Through.apply(args[0], into), *args[1:])
            result = original(*args, **kwargs)
            return Through.apply(result, out) if isinstance(result, Tensor) else result

        module.forward = wrapped  # type: ignore[method-assign]
    twin(x).square().sum().backward()
    return found


def residual(block: Any, x: Tensor) -> Tensor:
    """`out += shortcut` rewrites the output of the second norm; the twin computes it as a sum."""
    out = block.norm2(block.conv2(block.relu(block.norm1(block.conv1(x)))))
    shortcut = x if block.shortcut is None else block.shortcut(x)
    if block.relu.inplace:
        out += shortcut
    else:
        out = out + shortcut
    relu: Tensor = block.relu(out)
    return relu


def attention(block: Any, x: Tensor) -> Tensor:
    q, k, v = block.qkv(block.norm(x)).chunk(3, -1)
    attended = block.drop((q @ k.transpose(-2, -1)).softmax(-1)) @ v
    y: Tensor = x + block.drop(block.project(attended))
    return y


def test_gradients_of_every_layer_equal_the_out_of_place_twins() -> None:
    def block(inputs: int, outputs: int) -> Net:
        return Net(
            residual, conv1=nn.Conv2d(inputs, outputs, 3, padding=1), norm1=nn.BatchNorm2d(outputs),
            conv2=nn.Conv2d(outputs, outputs, 3, padding=1), norm2=nn.BatchNorm2d(outputs), relu=nn.ReLU(inplace=True),
            shortcut=None if inputs == outputs else nn.Conv2d(inputs, outputs, 1),
        )  # fmt: skip

    torch.manual_seed(0)
    attend = Net(attention, norm=nn.LayerNorm(4), qkv=nn.Linear(4, 12), drop=nn.Dropout(0.1), project=nn.Linear(4, 4))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Hardswish(inplace=True), block(4, 4), block(4, 6), nn.Flatten(2), nn.Linear(36, 4),
        attend, nn.Identity(), nn.LayerNorm(4), nn.Flatten(), nn.Linear(24, 5), nn.ReLU(inplace=True),
    ).eval()  # fmt: skip
    twin, x = out_of_place(model), torch.randn(2, 3, 8, 8, requires_grad=True)
    expected = expected_gradients(twin, x.detach().clone().requires_grad_())
    layers = list(named_layers(model))
    with Taps(model).keep(layers, "grad").keep(layers, "grad_input") as taps:
        taps(x).square().sum().backward()
    checked = 0
    for key, calls in expected.items():
        layer, what = key.split("@")
        for call, gradients in enumerate(calls):
            if not gradients:
                continue
            sites = [s for s in taps.record.sites.values() if (s.layer, s.call, s.what) == (layer, call, what)]
            first = [s for s in sites if s.path in ((), (0,))]
            assert first, (key, call)
            found = taps.record[first[0]]
            assert torch.allclose(found, gradients[0], rtol=1e-5, atol=1e-5 * float(gradients[0].abs().max())), key
            checked += bool(found.any())
    assert checked > 50


def test_a_layer_used_for_what_it_does_to_its_input_still_does_it() -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        h = x * 2
        model.relu(h)
        return h * 3

    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with Taps(Net(forward, relu=nn.ReLU(inplace=True))).keep("relu", "grad_input") as taps:
        y = taps(x)
        y.sum().backward()
    assert y.tolist() == [0, 12]
    assert taps.record["relu@grad_input"].tolist() == [0, 3]
    assert x.grad.tolist() == [0, 6]


def test_gradients_of_dict_outputs_and_keyword_inputs() -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        out = model.inner(x=x)
        return out["double"].sum() + 10 * out["triple"].sum()

    model = Net(forward, inner=Net(lambda self, *, x: {"double": x * 2, "triple": x * 3}))
    with Taps(model).keep("inner", "grad").keep("inner", "grad_input") as taps:
        taps(torch.ones(2, requires_grad=True)).backward()
    record = {name: value.tolist() for name, value in taps.record.items()}
    assert record == {
        "inner:double@grad": [1, 1], "inner:triple@grad": [10, 10], "inner:x@grad_input": [32, 32],
    }  # fmt: skip


def test_clipping_at_one_layer_changes_what_flows_on() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.randn(3, 2)
    with Taps(model).edit("0", lambda g: g.clamp(-0.01, 0.01), what="grad").keep("0", "grad") as taps:
        (100 * taps(x)).sum().backward()
    raw = (100 * model[1].weight.sum(0)).expand(3, 2)
    clipped = raw.clamp(-0.01, 0.01)
    assert torch.allclose(taps.record["0@grad"], clipped)
    assert torch.allclose(model[0].weight.grad, clipped.T @ x)


def test_a_gradient_that_never_came_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Taps(model, "1").keep("0", "grad") as taps:
        y = taps(torch.ones(1, 2))
        with pytest.raises(LayertapError, match=r"no gradient reached layer '0': call backward\(\) inside"):
            taps.record["0@grad"]
    y.sum().backward()  # after the block nothing is kept any more
    with pytest.raises(LayertapError, match="no gradient reached"):
        taps.record["0@grad"]
    model[0].requires_grad_(False)
    with Taps(model).keep("0", "grad") as taps:
        taps(torch.ones(1, 2)).sum().backward()
        with pytest.raises(LayertapError, match="with all before it frozen, let the inputs require gradients"):
            taps.record["0@grad"]
        taps(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert torch.equal(taps.record["0@grad"], model[1].weight.sum(0, keepdim=True).detach())


def test_a_frozen_model_says_how_it_has_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    advice = "let the inputs require gradients, or edit the layer first"
    with pytest.raises(RuntimeError, match="does not require grad") as caught:  # noqa: SIM117
        with Taps(model).keep("0", "grad") as taps:
            taps(torch.ones(1, 2)).sum().backward()
    assert advice in caught.value.__notes__[0]
    with pytest.raises(LayertapError, match=advice), Taps(model).edit("0", scale(2), "grad") as taps:
        taps(torch.ones(1, 2))
    with Taps(model).edit("0", lambda h: h.requires_grad_()).keep("0", "grad") as taps:
        taps(torch.ones(1, 2)).sum().backward()
    assert torch.equal(taps.record["0@grad"], model[1].weight.sum(0, keepdim=True))


def test_records_are_handed_on_when_complete() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    seen: list[dict[str, float]] = []
    taps = Taps(model, "1", on_record=lambda r: seen.append({n: float(v.sum()) for n, v in r.items()}))
    with taps.keep("1", "grad"):
        for step in range(3):
            assert len(seen) == max(0, step - 1)
            (taps(torch.ones(1, 2)) * step).sum().backward()
    assert [record["1@grad"] for record in seen] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError), taps:
        taps(torch.ones(1, 2))
        raise ZeroDivisionError
    assert len(seen) == 3


def test_a_leaf_that_a_layer_returns_is_not_hooked_for_good() -> None:
    model = nn.Sequential(Net(lambda self, x: self.value, value=nn.Parameter(torch.ones(2))))
    with Taps(model).keep("0", "grad") as taps:
        for _ in range(3):
            (taps(torch.ones(2)) * 5).sum().backward()
    assert taps.record["0@grad"].tolist() == [5, 5]
    assert not model[0].value._backward_hooks


def checkpointed(reentrant: bool | None) -> Net:
    def forward(model: Net, x: Tensor) -> Any:
        h = model.first(x)
        h = model.inner(h) if reentrant is None else checkpoint(model.inner, h, use_reentrant=reentrant)
        return model.last(h)

    return Net(forward, first=linear(3, 3), inner=nn.Sequential(linear(3, 3), nn.Tanh()), last=linear(3, 1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_kept_once_and_edited_both_times(reentrant: bool) -> None:
    x = torch.randn(4, 3)
    records, grads = [], []
    for kind in (None, reentrant):
        model = checkpointed(kind)
        taps = Taps(model, ["inner.0"]).edit("inner.0", lambda h: h * 3).keep("inner.0", "grad").keep("inner.1")
        with taps:
            taps(x).square().sum().backward()
        records.append(taps.record)
        grads.append([p.grad for p in model.parameters()])
    assert list(records[1]).count("inner.0") == 1
    for name in ("inner.0", "inner.1", "inner.0@grad"):
        assert torch.allclose(records[0][name], records[1][name]), name
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


def test_gradients_and_early_stop_exclude_each_other() -> None:
    with (
        pytest.raises(InputError, match="gradients need complete forwards"),
        Taps(nn.Sequential(nn.Linear(1, 1)), stop=True).keep("0", "grad"),
    ):
        pass


def test_gradients_of_parameters_are_kept_and_edited() -> None:
    model, plain = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 2)
    plain(x).square().sum().backward()
    with Taps(model).keep("*.weight", "grad").edit("1.weight", lambda g: g / 2, what="grad") as taps:
        taps(x).square().sum().backward()
    assert torch.equal(taps.record["0.weight@grad"], plain[0].weight.grad)
    assert torch.equal(taps.record["1.weight@grad"], plain[1].weight.grad / 2)
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad / 2)
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("identity", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Sequential(nn.Identity())])
def test_the_gradient_of_a_layer_that_hands_on_what_it_got_is_its_own(identity: nn.Module) -> None:
    def fork(model: Net, x: Tensor) -> Tensor:
        h = model.linear(x)
        return 3 * h + model.identity(h)

    model, x = Net(fork, linear=linear(3, 3), identity=identity), torch.randn(2, 3)
    with Taps(model).keep("identity", "grad").keep("linear", "grad") as taps:
        taps(x).sum().backward()
    assert (taps.record["identity@grad"] == 1).all()
    assert (taps.record["linear@grad"] == 4).all()
    model.zero_grad()
    with Taps(model).edit("identity", torch.zeros_like, what="grad") as taps:
        taps(x).sum().backward()
    assert torch.equal(model.linear.bias.grad, torch.full((3,), 6.0))  # the other branch, of two images


def test_gradient_edits_of_nested_layers_run_from_the_outside_in() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = torch.randn(2, 3)
    taps = Taps(model).edit("1", lambda g: g * 10, what="grad").edit("1.1", lambda g: g + 1, what="grad")
    with taps.keep("1", "grad").keep("1.1", "grad"):
        taps(x).sum().backward()
    assert (taps.record["1@grad"] == 10).all()
    assert (taps.record["1.1@grad"] == 11).all()


def test_a_write_into_a_tensor_that_is_given_twice_is_refused() -> None:
    def twice(layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return a + b

    model = Net(lambda self, x: self.twice(h := x + 1, h), twice=Net(twice))
    refused = pytest.raises(LayertapError, match="twice:1@grad_input is not available: the model writes in place")
    with refused, Taps(model).keep("twice", "grad_input") as taps:
        taps(torch.ones(2, requires_grad=True))
    with Taps(model).keep("twice", "input") as taps:
        assert taps(torch.ones(2)).tolist() == [8, 8]


def test_gradients_of_parameters_are_those_of_this_thread() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    with Taps(model).edit("0.weight", torch.zeros_like, what="grad").keep("0.weight", "grad") as taps:
        taps(torch.ones(1, 2)).sum().backward()
        assert not model[0].weight.grad.any()
        other = threading.Thread(target=lambda: (model(torch.ones(1, 2)) * 7).sum().backward())
        other.start()
        other.join()
        assert (model[0].weight.grad == 7).all()
        assert (taps.record["0.weight@grad"] == 0).all()
    model[0].weight.requires_grad_(False)
    with Taps(model).keep("0.*", "grad") as taps:
        taps(torch.ones(1, 2)).sum().backward()
    assert list(taps.record) == ["0.bias@grad"]


def test_a_backward_pass_inside_a_forward_counts_no_call_twice() -> None:
    def force(model: Net, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = checkpoint(model.energy, x, use_reentrant=False).sum()
        return torch.autograd.grad(energy, x)[0]

    with Taps(Net(force, energy=nn.Sequential(linear(2, 2), nn.Tanh())), "energy.0") as taps:
        taps(torch.randn(3, 2))
    assert list(taps.record) == ["energy.0"]


VIEWS = {
    "InstanceNorm1d": (nn.InstanceNorm1d(4), (2, 4, 8)),
    "InstanceNorm2d": (nn.InstanceNorm2d(4), (2, 4, 8, 8)),
    "InstanceNorm3d": (nn.InstanceNorm3d(4), (2, 4, 4, 4, 4)),
    "MaxPool1d": (nn.MaxPool1d(2), (2, 4, 8)),
    "AvgPool1d": (nn.AvgPool1d(2), (2, 4, 8)),
    "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(2), (2, 4, 8)),
    "AdaptiveMaxPool1d": (nn.AdaptiveMaxPool1d(2), (2, 4, 8)),
    "Flatten": (nn.Flatten(), (2, 4, 8)),
    "Unflatten": (nn.Unflatten(1, (2, 2)), (2, 4, 8)),
    "Identity": (nn.Identity(), (2, 4, 8)),
    "Dropout": (nn.Dropout().eval(), (2, 4, 8)),
}


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_gradients_before_an_in_place_layer_at_layers_that_return_views_or_their_argument(
    name: str, edited: bool
) -> None:
    layer, shape = VIEWS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gradients, outputs = [], []
    for in_place in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(4).eval() if x.ndim == 3 else nn.Identity(), layer, nn.ReLU(in_place))
        taps = Taps(model).keep("1", "grad")
        with taps.edit("1", lambda g: 2 * g, "grad") if edited else taps:
            y = taps(x.clone().requires_grad_() * 1.5)
            (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        gradients.append(taps.record["1@grad"])
        outputs.append(y)
    assert torch.equal(*gradients)
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "statement", ["v += 1", "v.mul_(2)", "v[0] = 3.0", "torch.relu_(v)", "F.relu(v, inplace=True)"]
)
@pytest.mark.parametrize("identity", [nn.Identity(), nn.Dropout().eval(), nn.Flatten(0), nn.Sequential(nn.Identity())])
def test_a_model_that_writes_into_a_copy_reads_the_change_in_the_original(identity: nn.Module, statement: str) -> None:
    """At the end of the forward the original is gone, and the result would be wrong without a word."""

    def forward(model: Net, x: Tensor) -> Tensor:
        h = model.linear(x)
        v = model.identity(h)
        exec(statement, {"v": v, "torch": torch, "F": F})
        return (h * h).sum()

    model, x = Net(forward, linear=linear(), identity=identity), torch.randn(3, 4)
    plain = model(x)
    expected = torch.autograd.grad(plain, model.linear.weight)[0]
    for taps in (Taps(model).keep("**", "grad"), Taps(model).edit("identity", same, "grad")):
        with taps:
            y = taps(x)
            model.zero_grad()
            y.backward()
        assert torch.equal(y, plain)
        torch.testing.assert_close(model.linear.weight.grad, expected)


def gate(layer: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two values, the second made of the first."""
    h: Tensor = layer.linear(x)
    return h, h.square().mean(1)


def read_both(model: Net, x: Tensor) -> Tensor:
    a, b = model.layer(x)
    return 2 * a.sum() + 3 * b.sum()


@pytest.mark.parametrize(
    ("layer", "name"),
    [(Net(gate, linear=linear()), "layer"), (nn.LSTMCell(4, 4), "layer"), (nn.LSTMCell(4, 4), "layer/lstm_cell")],
)
def test_gradients_of_several_outputs_are_those_of_their_readers(layer: nn.Module, name: str) -> None:
    """Not of the layer or function itself, which makes one of the other."""
    torch.manual_seed(0)
    model, x = Net(read_both, layer=layer), torch.randn(3, 4)
    model(x).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Taps(model).keep(name, "grad") as taps:
        taps(x).backward()
    assert (taps.record[f"{name}:0@grad"] == 2).all()
    assert (taps.record[f"{name}:1@grad"] == 3).all()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
    model.zero_grad()
    with Taps(model).edit(name, lambda g: g / 2, "grad") as taps:
        taps(x).backward()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected / 2)


@pytest.mark.parametrize("reentrant", [None, False])
def test_the_gradient_of_an_input_is_edited_on_its_way_through_that_layer_alone(reentrant: bool | None) -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        h = model.stem(x)
        y = model.layer(h) if reentrant is None else checkpoint(model.layer, h, use_reentrant=reentrant)
        return y.sum() + 5 * h.sum()

    model, x = Net(forward, stem=linear(), layer=linear(seed=1)), torch.randn(3, 4)
    with Taps(model).edit("layer", torch.zeros_like, "grad_input").keep("layer", "grad_input") as taps:
        taps(x).backward()
    assert (taps.record["layer:0@grad_input"] == 0).all()
    assert torch.equal(model.stem.bias.grad, torch.full((4,), 15.0))  # what flows past the layer, of three pictures
    assert (model.layer.bias.grad == 3).all()
    idle = pytest.raises(LayertapError, match="the edit of layer never took effect: no gradient reached")
    with idle, Taps(model).edit("layer", torch.zeros_like, "grad_input") as taps:
        taps(x)


def shared(reentrant: bool | None, head: bool) -> Net:
    """One weight used in the head and, reentrant, in two checkpoints."""

    def forward(model: Net, x: Tensor) -> Any:
        def part(h: Tensor) -> Tensor:
            return torch.tanh(model.layer(h))

        h: Any = x
        for _ in range(2):
            h = part(h) if reentrant is None else checkpoint(part, h, use_reentrant=reentrant)
        return model.layer(h) if head else h

    return Net(forward, layer=linear())


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("head", [False, True])
def test_the_gradient_of_a_shared_weight_is_whole_under_checkpointing(reentrant: bool | None, head: bool) -> None:
    torch.manual_seed(1)
    model, images = shared(reentrant, head), [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
    with Taps(model).keep("layer.weight", "grad").keep("layer.bias", "grad") as taps:
        for x in images:
            model.zero_grad()
            taps(x).square().sum().backward()
            for name in ("weight", "bias"):
                torch.testing.assert_close(taps.record[f"layer.{name}@grad"], getattr(model.layer, name).grad)
        # Two backward passes of one forward: the gradients are those of the last.
        loss = taps(images[0]).square().sum()
        loss.backward(retain_graph=True)
        model.zero_grad()
        (3 * loss).backward()
        torch.testing.assert_close(taps.record["layer.weight@grad"], model.layer.weight.grad)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("verb", ["keep", "edit"])
def test_gradients_of_parameters_under_reentrant_checkpoints_are_refused(verb: str, head: bool) -> None:
    taps = Taps(shared(True, head))
    taps = taps.keep("layer.weight", "grad") if verb == "keep" else taps.edit("layer.weight", scale(2), "grad")
    with pytest.raises(LayertapError, match=r"layer.weight@grad comes in parts") as caught, taps:
        taps(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert "use_reentrant=False" in str(caught.value)


class OwnCheckpoint(torch.autograd.Function):
    """Checkpointing as diffusion models have it: `torch.autograd.grad` inside the backward pass."""

    @staticmethod
    def forward(ctx, function, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        return None, *torch.autograd.grad(output, [x, *ctx.parameters], gradient)


def test_captures_inside_a_backward_pass_are_no_parts_of_a_gradient() -> None:
    def forward(model: Net, x: Tensor) -> Any:
        return OwnCheckpoint.apply(lambda h: model.layer(h).tanh(), x, *model.layer.parameters())

    model, x = Net(forward, layer=linear(3, 3)), torch.randn(2, 3, requires_grad=True)
    for reduce in (None, torch.clone):
        model.zero_grad()
        with Taps(model).keep("layer.weight", "grad", reduce=reduce) as taps:
            taps(x).sum().backward()
        torch.testing.assert_close(taps.record["layer.weight@grad"], model.layer.weight.grad)
    expected = 3 * model.layer.weight.grad
    model.zero_grad()
    with Taps(model).edit("layer.weight", scale(3), "grad") as taps:
        taps(x).sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, expected)  # edited once


def test_what_another_hook_kept_of_an_output_is_part_of_its_gradient() -> None:
    def forward(model: Net, x: Tensor) -> Any:
        return model.head(model.block(x)).sum() + model.kept.pop().square().sum()

    block = Net(lambda self, x: self.inner(x), inner=linear(3, 3))
    model, x = Net(forward, block=block, head=linear(3, 1), kept=[]), torch.randn(2, 3)
    block.register_forward_hook(lambda module, args, output: model.kept.append(output))
    h = model.block.inner(x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model.head(h).sum() + h.square().sum(), h)
    for layers in (["block"], ["block.inner"], ["block", "block.inner"]):
        with Taps(model).keep(layers, "grad") as taps:
            taps(x).backward()
        for layer in layers:
            torch.testing.assert_close(taps.record[f"{layer}@grad"], expected)
    with Taps(model).edit("block", lambda g: g * 0, "grad").keep("block.inner", "grad") as taps:
        taps(x).backward()
    assert not taps.record["block.inner@grad"].any()
