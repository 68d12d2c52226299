"""Edits: each verb against its formula, and their place in the forward and the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from extract import InputError, LayertapError, Site, Taps
from extract.taps.edits import ablate, clamp, clip, freeze, mix, noise, prune, replace, scale, smooth
from tests.extract.taps.networks import Net, hooks_in, linear, same

H = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
PERMUTATION = torch.tensor([2, 0, 3, 1])


def mean_over_batch(h: Tensor) -> Tensor:
    return torch.stack([h[:, c].sum(0) / 4 for c in range(3)]).expand(4, -1, -1, -1)


def channel_zeroed(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 1] = 0
    return h


def smallest_zeroed(h: Tensor) -> Tensor:
    rows = []
    for row in h:
        limit = row.abs().flatten().sort().values[22]  # 0.3 * 75 = 22.5: the 22 smallest go
        rows.append(torch.where(row.abs() < limit, 0.0, row))
    return torch.stack(rows)


@pytest.mark.parametrize(("verb", "formula"), [
    (scale(-1.5), lambda h: -1.5 * h),
    (clamp(-0.2, 0.3), lambda h: torch.minimum(torch.maximum(h, torch.tensor(-0.2)), torch.tensor(0.3))),
    (clamp(high=0.0), lambda h: torch.where(h > 0, 0.0, h)),
    (replace(2.5), lambda h: torch.full((4, 3, 5, 5), 2.5)),
    (replace(H[:1] + 1), lambda h: torch.cat([H[:1] + 1] * 4)),
    (ablate(), torch.zeros_like),
    (ablate("mean"), mean_over_batch),
    (ablate(channels=[1]), channel_zeroed),
    (ablate(channels=[1], axis=-3), channel_zeroed),
    (ablate("mean", channels=[0, 1, 2]), mean_over_batch),
    (mix(PERMUTATION, 0.7), lambda h: torch.stack([0.7 * h[i] + 0.3 * h[j] for i, j in enumerate([2, 0, 3, 1])])),
    (prune(0.3), smallest_zeroed),
    (prune(0), same),
    (prune(1), torch.zeros_like),
    (clip(0.5), lambda g: torch.where(g > 0.5, 0.5, torch.where(g < -0.5, -0.5, g))),
    (clip(2.0, "norm"), lambda g: g * 2 / (g**2).sum().sqrt()),
    (clip(1e6, "norm"), lambda g: g),
])  # fmt: skip
def test_a_verb_is_its_formula(verb: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor]) -> None:
    conv = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(nn.Identity(), nn.ReLU(), conv)
    with torch.no_grad(), Taps(model, ["0"]).edit("0", verb) as taps:
        given = H.clone()
        output = taps(given)
    expected = formula(H)
    assert torch.allclose(taps.record["0"], expected, atol=1e-6)
    assert torch.allclose(output, conv(F.relu(expected)), atol=1e-5)  # what later layers see
    assert torch.equal(given, H)  # the caller's own tensor


def test_noise_has_its_spread_and_comes_from_the_default_generator() -> None:
    h = torch.zeros(1000, 100)
    torch.manual_seed(3)
    first = noise(0.5)(h)
    torch.manual_seed(3)
    assert torch.equal(first, noise(0.5)(h))
    assert abs(first.std() - 0.5) < 0.01
    assert abs(first.mean()) < 0.01


def test_smoothed_gradients_are_a_moving_average_of_each_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    weight, first, second = model[1].weight.item(), 0.0, 0.0
    with Taps(model).edit("?", smooth(0.9), what="grad").keep("?", "grad") as taps:
        for step in range(1, 5):
            (taps(torch.ones(3, 2)) * step).sum().backward()
            share = 1 if step == 1 else 0.1
            second = (1 - share) * second + share * step
            first = (1 - share) * first + share * weight * second  # what reaches it was smoothed behind it
            assert torch.allclose(taps.record["1@grad"], torch.full((3, 1), second))
            assert torch.allclose(taps.record["0@grad"], torch.full((3, 1), first))


def test_gradients_flow_through_a_smoothed_output() -> None:
    layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0]])
    with Taps(nn.Sequential(layer)).edit("0", smooth(0.9)) as taps:
        first = taps(x)
        second = taps(3 * x)
        second.sum().backward()
    assert torch.allclose(second, 0.9 * first + 0.1 * layer(3 * x))
    assert torch.allclose(layer.weight.grad, 0.1 * 3 * x)  # the first call counts as a constant


def test_freeze_gives_every_parameter_its_setting_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1][0].weight.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), freeze(model, ["1", "1.*"]):
        assert [p.requires_grad for p in model.parameters()] == [True] * 2 + [False] * 4
        raise ZeroDivisionError
    assert [p.requires_grad for p in model.parameters()] == before


def test_edits_by_call_by_input_and_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 3), relu := nn.ReLU(), nn.Linear(3, 3), relu)
    x = torch.randn(5, 3)
    with torch.no_grad():
        with Taps(model).edit("1", scale(3), call=0).edit("1", lambda h: h + 1, call=0).keep("2", "input") as taps:
            output = taps(x)
        expected = F.relu(model[0](x)) * 3 + 1
        assert torch.equal(taps.record["2:0@input"], expected)
        assert torch.equal(output, F.relu(model[2](expected)))
        with Taps(model).edit("2", torch.zeros_like, what="input") as taps:
            assert torch.equal(taps(x), F.relu(model[2](torch.zeros(5, 3))))


def test_a_site_names_the_part_to_edit() -> None:
    lstm = nn.LSTM(2, 3, batch_first=True)
    model, x = nn.Sequential(lstm), torch.randn(2, 4, 2)
    with torch.no_grad():
        out, (h, c) = lstm(x)
        with Taps(model).edit(Site("0", 0, (1, 0)), scale(2)) as taps:
            edited, (h2, c2) = taps(x)
        assert torch.equal(h2, 2 * h)
        assert torch.equal(edited, out)
        assert torch.equal(c2, c)
        with Taps(model).edit("0", scale(2)) as taps:
            edited, (h2, c2) = taps(x)
        assert torch.equal(edited, 2 * out)
        assert torch.equal(c2, 2 * c)


def test_an_edit_cannot_reach_the_tensors_of_others() -> None:
    mine = torch.full((2, 3), -1.0)
    x = torch.randn(2, 3)
    given = x.clone()
    with torch.no_grad(), Taps(nn.Sequential(nn.Identity())).edit("0", lambda h: h.mul_(0), what="input") as taps:
        taps(given)
    assert torch.equal(given, x)
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    with torch.no_grad(), Taps(model).edit("0", lambda h: mine) as taps:
        taps(given)
    assert (mine == -1).all()
    in_numpy, theirs = np.full((2, 3), -1, np.float32), np.ones((2, 3), np.float32)
    with torch.no_grad(), Taps(model).edit("0", lambda h: torch.from_numpy(in_numpy)) as taps:
        assert (taps(given) == 0).all()
    assert (in_numpy == -1).all()
    model = nn.Sequential(Net(lambda self, x: torch.from_numpy(theirs)))
    with torch.no_grad(), Taps(model, ["0"]).edit("0", lambda h: h.mul_(2)) as taps:
        assert (taps(given) == 2).all()
    assert (theirs == 1).all()


@pytest.mark.parametrize("what", ["output", "input"])
def test_what_the_model_writes_into_an_edited_tensor_reaches_the_tensor_that_it_replaces(what: Any) -> None:
    def shortcut(model: Net, x: Tensor) -> Tensor:
        h = x * 1
        return F.relu(model.identity(h), inplace=True) + h  # both are what relu returns

    model = Net(shortcut, identity=nn.Identity())
    x = torch.randn(2, 3)
    with torch.no_grad(), Taps(model).edit("identity", lambda h: h * 3, what) as taps:
        assert torch.equal(taps(x), 2 * F.relu(3 * x))


@pytest.mark.parametrize(("edit", "message"), [
    (lambda h: h[:1], r"edit of 0 returned \(1, 4\) torch.float32 on cpu; expected, as given, \(2, 4\)"),
    (lambda h: h.half(), "returned .* torch.float16"),
    (lambda h: None, "returned NoneType; it must return a tensor"),
])  # fmt: skip
def test_an_edit_that_changes_shape_or_dtype_is_refused(edit: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match=message), Taps(model).edit("0", edit) as taps:
        taps(torch.ones(2, 4))
    assert hooks_in(model) == 0


def test_an_edit_that_raises_names_the_layer_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ZeroDivisionError) as raised, Taps(model).edit("1", lambda h: h / (1 // 0)) as taps:
        taps(torch.ones(2, 4))
    assert raised.value.__notes__ == ["while editing 1 of shape (2, 4)"]
    assert hooks_in(model) == 0


UNTOUCHED = Taps(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(("ask", "message"), [
    (lambda: ablate("median"), "by 'median'"), (lambda: prune(1.5), "prune fraction 1.5"),
    (lambda: clip(1, "max"), "by 'max'"),
    (lambda: UNTOUCHED.edit("0", 0.5),  # type: ignore[arg-type]
     r"the edit of '0' is 0\.5; expected a function of a tensor; use an edit, such as"),
    (lambda: UNTOUCHED.keep("0", reduce=2),  # type: ignore[arg-type]
     r"the reduce of '0' is 2; expected a function of a tensor"),
])  # fmt: skip
def test_wrong_settings_are_refused_when_they_are_given(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask()
    assert not UNTOUCHED._requests


def test_functions_without_a_module_can_be_edited() -> None:
    block = Net(lambda self, x: torch.relu_(self.conv(x) + x), conv=nn.Conv2d(3, 3, 1))
    with torch.no_grad(), Taps(nn.Sequential(block), "0/add").edit("0/add", ablate()).keep("0") as taps:
        taps(torch.randn(1, 3, 4, 4))
    assert (taps.record["0/add"] == 0).all()
    assert (taps.record["0"] == 0).all()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("what", "called"),
    [("output", "forward"), ("grad", "forward"), ("input", "layer"), ("grad", "thread"), ("output", "nothing")],
)
def test_an_edit_of_a_model_that_was_not_called_is_an_error(what: Any, called: str) -> None:
    model = net()
    message = "the edit of 0 never took effect: the model itself was not called"
    with pytest.raises(LayertapError, match=message), Taps(model).edit("0", scale(0.0), what):
        if called == "forward":
            model.forward(X).sum().backward()
        elif called == "layer":
            model[0](X)
        elif called == "thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: model(X).sum().backward()).result()


def test_an_error_about_many_layers_names_twenty_of_them() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(50)))
    message = r"^the edit of 0, 1, .*, 19 and 30 more never took effect"
    with pytest.raises(LayertapError, match=message), Taps(model).edit("*", same):
        pass


@pytest.mark.parametrize(("layers", "what", "reason"), [
    ("0.self_attn.out_proj", "output", r"layer '0\.self_attn\.out_proj' never runs"),
    ("0.linear1:7", "output", "layer '0.linear1' ran, but returned no floating-point tensor at path 7"),
    ("1/linear#2", "output", "function 'linear' of layer '1' ran 1 time in this forward; there is no call 2"),
    ("1/relu", "output", "no function 'relu' was called in the forward of layer '1'"),
    ("1/linear", "grad", "no gradient reached function 'linear' of layer '1'"),
    ("1#1", "output", "layer '1' ran 1 time in this forward; there is no call 1"),
])  # fmt: skip
def test_an_edit_that_takes_no_effect_says_why(layers: str, what: Any, reason: str) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)).eval()
    refused = pytest.raises(LayertapError, match=f"never took effect: {reason}")
    with refused, Taps(model).edit(layers, same, what) as taps:
        taps(torch.randn(1, 3, 8))


def test_an_edit_of_a_glob_or_type_need_not_reach_every_layer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    for layers in (nn.Linear, "**"):  # self_attn.out_proj is never called
        with torch.no_grad(), Taps(model).edit(layers, same) as taps:
            taps(torch.randn(1, 3, 8))


def test_an_edit_has_to_take_effect_in_each_block_and_for_each_call_that_is_asked_for() -> None:
    one, other = linear(2, 2), linear(2, 2)
    model = Net(lambda self, x: self.one(x) if len(x) == 1 else self.other(x), one=one, other=other)
    taps = Taps(model).edit("one", torch.zeros_like)
    with taps:
        assert not taps(torch.ones(1, 2)).any()
    with pytest.raises(LayertapError, match="the edit of one never took effect"), taps:
        taps(torch.ones(2, 2))
    twice = Taps(model).edit("one", torch.zeros_like).edit("one", torch.zeros_like, call=1)
    with pytest.raises(LayertapError, match="the edit of one never took effect"), twice:
        twice(torch.ones(1, 2))


def test_an_edit_of_a_gradient_that_never_came_is_an_error() -> None:
    model = net()
    message = "the edit of 0 never took effect: no gradient reached"
    with pytest.raises(LayertapError, match=message), Taps(model).edit("0", clip(1e-4), "grad") as taps:
        y = taps(X)
    (1000 * y).sum().backward()
    with pytest.raises(LayertapError, match=message), Taps(model).edit("0", clip(1e-4), "grad") as taps:
        taps(X).detach()
    model[0].weight.requires_grad = False
    with (
        pytest.raises(LayertapError, match=r"the edit of 0\.weight never took effect: no gradient reached parameter"),
        Taps(model).edit("0.weight", clip(1e-4), "grad") as taps,
    ):
        taps(X).sum().backward()
    with Taps(model).edit("0", clip(1e-4), "grad").edit("0.bias", scale(2.0), "grad") as taps:
        taps(X).sum().backward()


def test_hooks_of_others_see_edited_values() -> None:
    model = net()
    seen_inputs, seen_outputs = [], []
    model[2].register_forward_pre_hook(lambda module, args: seen_inputs.append(args[0].clone()))
    model[0].register_forward_hook(lambda module, args, output: seen_outputs.append(output.clone()))
    edits = Taps(model, "0").edit("0", scale(0.0)).edit("2", scale(3.0), "input")
    with torch.no_grad(), Taps(model, ["0", "2:0@input"]) as outer, edits as taps:
        taps(X)
    assert torch.equal(seen_outputs[0], torch.zeros(3, 4))
    assert torch.equal(taps.record["0"], seen_outputs[0])
    assert torch.equal(outer.record["0"], seen_outputs[0])
    assert torch.equal(outer.record["2:0@input"], seen_inputs[0])


def test_values_that_other_hooks_replaced_are_kept() -> None:
    model = net()
    with Taps(model, ["0", "2:0@input"]).edit("0", scale(2.0)) as taps:
        plain = model[0].register_forward_hook(lambda module, args, output: output + 1)
        other = model[2].register_forward_pre_hook(lambda module, args: (args[0] + 5,))
        try:
            taps(X)
        finally:
            plain.remove()
            other.remove()
    expected = 2 * F.linear(X, model[0].weight, model[0].bias)
    torch.testing.assert_close(taps.record["0"], expected.detach())  # registered later: it replaces what is kept


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "layer": lambda model, y: model.relu(y),
    "function": lambda model, y: F.relu(y, inplace=True),
    "positional": lambda model, y: F.relu(y, True),
    "method": lambda model, y: y.relu_(),
    "operator": lambda model, y: y.__iadd__(0).relu_(),
}


def statements(way: str) -> Net:
    """A model that uses a layer or function for what it writes into its argument; "used": for what it returns, too."""

    def forward(model: Net, x: Tensor) -> Tensor:
        y: Tensor = model.linear(x)
        result: Tensor = WAYS[way.removesuffix(", used")](model, y)
        return result if way.endswith("used") else y

    return Net(forward, linear=linear(), relu=nn.ReLU(inplace=True))


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize(
    "way", ["layer", "layer, used", "function", "positional", "method", "method, used", "operator"]
)
def test_an_edit_of_what_works_in_place_takes_effect_where_the_result_is_not_used_or_is_refused(
    way: str, mode: str
) -> None:
    model = statements(way)
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    site = "relu" if way.startswith("layer") else "/relu"
    is_refused = mode == "grad" and "used" not in way  # autograd has saved the tensor that would be changed
    refused = pytest.raises(LayertapError, match=f"{site} is not available") if is_refused else contextlib.nullcontext()
    with refused, context(), Taps(model, site).edit(site, scale(3.0)) as taps:
        y = taps(X)
    if is_refused:
        return
    expected = 3 * F.linear(X, model.linear.weight, model.linear.bias).relu()
    torch.testing.assert_close(y.clone(), expected)
    torch.testing.assert_close(taps.record[site], expected.detach())
    if mode == "grad":
        (gradient,) = torch.autograd.grad(y.sum(), model.linear.weight)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), model.linear.weight)[0])


@pytest.mark.parametrize("way", ["layer", "layer, used"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_edit_of_an_in_place_layer_that_a_checkpoint_recomputes_is_refused(way: str, reentrant: bool) -> None:
    part = nn.Sequential(statements(way), nn.Linear(4, 4))
    model = Net(lambda self, x: checkpoint(self.part, x, use_reentrant=reentrant), part=part)
    refused = pytest.raises(LayertapError, match=r"part\.0\.relu is not available")
    with refused, Taps(model).edit("part.0.relu", scale(3.0)) as taps:
        taps(X.clone().requires_grad_()).square().sum().backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_edit_reaches_a_shortcut_as_the_layers_writes_do_or_is_refused(in_place: bool, mode: Any) -> None:
    inner = nn.Sequential(nn.ReLU(inplace=True) if in_place else nn.Identity())
    model = Net(lambda self, x: (h := self.linear(x)) + self.inner(h), linear=linear(), inner=inner)
    h = model.linear(X)
    # Autograd has saved what would be changed; inference mode does not tell whether the layer has written.
    is_refused = mode is torch.inference_mode or (in_place and mode is torch.enable_grad)
    refused = pytest.raises(LayertapError, match="inner is not available") if is_refused else contextlib.nullcontext()
    with refused, mode(), Taps(model).edit("inner", scale(3.0)) as taps:
        torch.testing.assert_close(taps(X), 6 * h.relu() if in_place else h + 3 * h)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inputs_are_edited_in_every_mode(mode: Any) -> None:
    model = statements("layer")
    with mode(), Taps(model).edit("relu", scale(-1.0), "input") as taps:
        y = taps(X).clone()
    plain = F.linear(X, model.linear.weight, model.linear.bias)
    torch.testing.assert_close(y, (-plain).relu())  # the layer writes into what it got, and the model reads it there


def test_a_layer_or_parameter_with_two_names_is_edited_once() -> None:
    layer = linear()
    model = Net(lambda self, x: self.b(self.a(x)), a=layer, b=layer)
    with Taps(model).edit("?", scale(2.0)) as taps:
        assert torch.equal(taps(X), 2 * model.a(2 * model.a(X)))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    tied(X).sum().backward()
    expected = tied[0].weight.grad.clone()
    tied.zero_grad()
    with Taps(tied).edit("*.weight", scale(0.5), "grad") as taps:
        taps(X).sum().backward()
    torch.testing.assert_close(tied[0].weight.grad, 0.5 * expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_edit_of_a_function_in_a_layer_that_a_checkpoint_recomputes_is_refused(reentrant: bool) -> None:
    def block(layer: Net, x: Tensor) -> Tensor:
        h = layer.linear(x)
        return torch.tanh(h * h + h)

    block_net = Net(block, linear=linear())
    model = Net(lambda self, x: checkpoint(self.b, x, use_reentrant=reentrant), b=block_net)
    refused = pytest.raises(LayertapError, match="a function of layer 'b' is edited, and checkpointing computes")
    with refused, Taps(model).edit("b/add", scale(3.0)) as taps:
        taps(X.clone().requires_grad_()).sum().backward()
    with Taps(model, "b/add") as taps:
        taps(X.clone().requires_grad_()).sum().backward()
    h = model.b.linear(X)
    torch.testing.assert_close(taps.record["b/add"], (h * h + h).detach())


def test_functions_that_a_backward_pass_calls_are_not_edited() -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.mul(gradient, 1.0)

    model = Net(lambda self, x: Identity.apply(self.b(x)) * 2.0, b=linear())
    with Taps(model).edit("/mul", scale(10.0)) as taps:
        taps(X).sum().backward()
    expected = torch.autograd.grad((20.0 * model.b(X)).sum(), model.b.weight)[0]
    torch.testing.assert_close(model.b.weight.grad, expected)


def test_a_tensor_in_several_places_is_edited_once() -> None:
    twice = Net(lambda self, x, *, again=None: [x, {"same": x, "other": x + 1}])
    x, draws = torch.zeros(3), []

    def add_noise(h: Tensor) -> Tensor:
        draws.append(torch.randn_like(h))
        return h + draws[-1]

    with torch.no_grad(), Taps(twice, "").edit("", add_noise) as taps:
        first, parts = taps(x)
    assert len(draws) == 2
    assert first is parts["same"]
    assert torch.equal(first, draws[0])
    assert torch.equal(parts["other"], 1 + draws[1])
    assert torch.equal(taps.record[":0"], taps.record[":1.same"])
    with torch.no_grad(), Taps(twice).edit(Site("", 0, (0,)), add_noise) as taps:
        first, parts = taps(x)
    assert not torch.equal(first, parts["same"])  # only the first place was asked for
    assert not parts["same"].any()
    draws.clear()
    with torch.no_grad(), Taps(twice).edit("", add_noise, "input") as taps:
        taps(x, again=x)
    assert len(draws) == 1


def test_tensors_made_when_a_mapping_is_read_are_edited_each() -> None:
    class Lazy(Mapping[str, Tensor]):
        def __init__(self, value: float) -> None:
            self.value, self.edited = value, None

        def __getitem__(self, key: str) -> Tensor:
            return torch.full((4,), float(self.value)) if self.edited is None else self.edited

        def __setitem__(self, key: str, value: Any) -> None:
            self.edited = value

        def __iter__(self) -> Iterator[str]:
            return iter("k")

        def __len__(self) -> int:
            return 1

    model = Net(lambda self, x: [Lazy(1), Lazy(2), Lazy(3)])
    with torch.no_grad(), Taps(model).edit("", lambda h: h * 10) as taps:
        assert [float(part["k"][0]) for part in taps(torch.zeros(1))] == [10, 20, 30]


@pytest.mark.parametrize("what", ["edit", "grad", "grad_input"])
def test_looking_at_a_slice_leaves_every_bit_of_the_output(what: str) -> None:
    model, x = Net(lambda self, x: self.act(x.split(20, -1)[0]), act=nn.GELU()), torch.randn(64, 41, requires_grad=True)
    expected = model(x)
    taps = Taps(model)
    taps = taps.edit("act", same).edit("act", same, "input") if what == "edit" else taps.keep("act", what)
    with taps:
        assert torch.equal(taps(x), expected)
