"""Edits: each verb against its formula, and their place in the forward and the backward pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision import models

from extract import InputError, LayertapError, Site, Taps
from extract.taps.edits import ablate, clamp, clip, freeze, mix, noise, prune, replace, scale, smooth

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


@pytest.mark.parametrize(
    ("verb", "formula"),
    [
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
        (prune(0), lambda h: h),
        (prune(1), torch.zeros_like),
        (clip(0.5), lambda g: torch.where(g > 0.5, 0.5, torch.where(g < -0.5, -0.5, g))),
        (clip(2.0, "norm"), lambda g: g * 2 / (g**2).sum().sqrt()),
        (clip(1e6, "norm"), lambda g: g),
    ],
)
def test_a_verb_is_its_formula(verb, formula) -> None:
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


def test_smoothed_gradients_are_a_moving_average() -> None:
    layer = nn.Linear(2, 1, bias=False)
    model = nn.Sequential(layer, nn.Identity())
    expected = None
    with Taps(model).edit("0", smooth(0.9), what="grad").keep("0", "grad") as taps:
        for step in range(4):
            (taps(torch.ones(3, 2)) * (step + 1)).sum().backward()
            raw = torch.full((3, 1), step + 1.0)
            expected = raw if expected is None else 0.9 * expected + 0.1 * raw
            assert torch.allclose(taps.record["0@grad"], expected)


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


class Doubled(nn.Module):
    """ResNet-18 with the doubling of layer2 written into its forward."""

    def __init__(self, net: models.ResNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        n = self.net
        x = n.layer1(n.maxpool(n.relu(n.bn1(n.conv1(x)))))
        x = n.layer4(n.layer3(2 * n.layer2(x)))
        return n.fc(torch.flatten(n.avgpool(x), 1))


def test_doubling_a_layer_is_doubling_written_into_forward() -> None:
    torch.manual_seed(0)
    edited = models.resnet18().eval()
    written = Doubled(copy.deepcopy(edited))
    x = torch.randn(2, 3, 64, 64)
    with Taps(edited).edit("layer2", scale(2)) as taps:
        logits = taps(x)
        logits.square().sum().backward()
    expected = written(x)
    expected.square().sum().backward()
    assert torch.equal(logits, expected)
    assert logits.std() > 0
    for (name, ours), theirs in zip(edited.named_parameters(), written.net.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6 * float(theirs.grad.abs().max())), name
    plain = copy.deepcopy(written.net)
    assert not torch.allclose(plain(x), expected)


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


def test_an_edit_cannot_reach_memory_that_numpy_owns() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = np.ones((2, 3), np.float32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(self.table)

    model, mine = nn.Sequential(Table()), np.full((2, 3), -1, np.float32)
    with torch.no_grad(), Taps(model, ["0"]).edit("0", lambda h: h.mul_(2)) as taps:
        assert (taps(H) == 2).all()
    assert (model[0].table == 1).all()
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    with torch.no_grad(), Taps(model).edit("0", lambda h: torch.from_numpy(mine)) as taps:
        assert (taps(torch.ones(2, 3)) == 0).all()
    assert (mine == -1).all()


@pytest.mark.parametrize("what", ["output", "input"])
def test_what_the_model_writes_into_an_edited_tensor_reaches_the_tensor_that_it_replaces(what) -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.identity = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            return F.relu(self.identity(h), inplace=True) + h  # both are what relu returns

    x = torch.randn(2, 3)
    with torch.no_grad(), Taps(Shortcut()).edit("identity", lambda h: h * 3, what) as taps:
        assert torch.equal(taps(x), 2 * F.relu(3 * x))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h[:1], r"edit of 0 returned \(1, 4\) torch.float32 on cpu; expected, as given, \(2, 4\)"),
        (lambda h: h.half(), "returned .* torch.float16"),
        (lambda h: None, "returned NoneType; it must return a tensor"),
    ],
)
def test_an_edit_that_changes_shape_or_dtype_is_refused(edit, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match=message), Taps(model).edit("0", edit) as taps:
        taps(torch.ones(2, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_edit_that_is_not_a_function_is_refused_when_it_is_given() -> None:
    taps = Taps(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        InputError, match=r"the edit of '0' is 0\.5; expected a function of a tensor; use an edit, such as"
    ):
        taps.edit("0", 0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the reduce of '0' is 2; expected a function of a tensor"):
        taps.keep("0", reduce=2)  # type: ignore[arg-type]
    assert not taps._requests


def test_an_edit_that_raises_names_the_layer_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ZeroDivisionError) as raised, Taps(model).edit("1", lambda h: h / (1 // 0)) as taps:
        taps(torch.ones(2, 4))
    assert raised.value.__notes__ == ["while editing 1 of shape (2, 4)"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_functions_without_a_module_can_be_edited() -> None:
    net = models.resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), Taps(net, "layer1.0/add").edit("layer1.0/add", ablate()).keep("layer1.0") as taps:
        taps(x)
    assert (taps.record["layer1.0/add"] == 0).all()
    assert (taps.record["layer1.0"] == 0).all()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ablate("median"), "by 'median'"),
    (lambda: prune(1.5), "prune fraction 1.5"),
    (lambda: clip(1, "max"), "by 'max'"),
])  # fmt: skip
def test_wrong_settings(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("what", ["output", "input", "grad"])
@pytest.mark.parametrize("elsewhere", ["forward", "layer", "thread", "nothing"])
def test_an_edit_of_a_model_that_was_not_called_is_an_error(what, elsewhere: str) -> None:
    model = net()

    def run(use) -> None:
        if use == "forward":
            model.forward(X).sum().backward()
        elif use == "layer":
            model[0](X).sum().backward()
        elif use == "thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: model(X).sum().backward()).result()

    message = "the edit of 0 never took effect: the model itself was not called"
    with pytest.raises(LayertapError, match=message), Taps(model).edit("0", scale(0.0), what):
        run(elsewhere)


def test_an_error_about_many_layers_names_twenty_of_them() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(50)))
    message = r"^the edit of 0, 1, .*, 19 and 30 more never took effect"
    with pytest.raises(LayertapError, match=message), Taps(model).edit("*", lambda h: h):
        pass


def test_an_edit_that_took_no_effect_says_how_often_its_layer_or_function_ran() -> None:
    model = net()
    for layers, what, message in (
        ("0/linear#2", "output", "function 'linear' of layer '0' ran 1 time in this forward; there is no call 2"),
        ("0/relu", "output", "no function 'relu' was called in the forward of layer '0'"),
        ("0/linear", "grad", "no gradient reached function 'linear' of layer '0'"),
        ("0#1", "output", "layer '0' ran 1 time in this forward; there is no call 1"),
    ):
        with pytest.raises(LayertapError, match=message), Taps(model).edit(layers, scale(0.0), what) as taps:
            taps(X)


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


class Statements(nn.Module):
    """Uses layers and functions for what they write into their argument."""

    def __init__(self, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.way = nn.Linear(4, 4), way
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.way == "layer":
            self.relu(y)
        elif self.way == "layer, used":
            y = self.relu(y)
        elif self.way == "function":
            F.relu(y, inplace=True)
        elif self.way == "positional":
            F.relu(y, True)
        elif self.way == "method":
            y.relu_()
        elif self.way == "method, used":
            y = y.relu_()
        else:
            y += 0
            y.relu_()
        return y


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize(
    "way", ["layer", "layer, used", "function", "positional", "method", "method, used", "operator"]
)
def test_an_edit_of_what_works_in_place_takes_effect_where_the_result_is_not_used_or_is_refused(
    way: str, mode: str
) -> None:
    model = Statements(way)
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
    class Checkpoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(Statements(way), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    refused = pytest.raises(LayertapError, match=r"part\.0\.relu is not available")
    with refused, Taps(Checkpoints()).edit("part.0.relu", scale(3.0)) as taps:
        taps(X.clone().requires_grad_()).square().sum().backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_edit_reaches_a_shortcut_as_the_layers_writes_do_or_is_refused(in_place: bool, mode) -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.inner = (
                nn.Linear(4, 4),
                nn.Sequential(nn.ReLU(inplace=True) if in_place else nn.Identity()),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h + self.inner(h)

    model = Shortcut()
    h = model.linear(X)
    # Autograd has saved what would be changed; inference mode does not tell whether the layer has written.
    is_refused = mode is torch.inference_mode or (in_place and mode is torch.enable_grad)
    refused = pytest.raises(LayertapError, match="inner is not available") if is_refused else contextlib.nullcontext()
    with refused, mode(), Taps(model).edit("inner", scale(3.0)) as taps:
        torch.testing.assert_close(taps(X), 6 * h.relu() if in_place else h + 3 * h)


def test_an_edit_of_a_layer_that_returns_its_argument_leaves_the_argument() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(x)

    model = Residual().eval()
    with Taps(model).edit("drop", scale(3.0)) as taps:
        assert torch.equal(taps(X), X + 3 * X)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inputs_are_edited_in_every_mode(mode) -> None:
    model = Statements("layer")
    with mode(), Taps(model).edit("relu", scale(-1.0), "input") as taps:
        y = taps(X).clone()
    plain = F.linear(X, model.linear.weight, model.linear.bias)
    torch.testing.assert_close(y, (-plain).relu())  # the layer writes into what it got, and the model reads it there


def test_a_layer_or_parameter_with_two_names_is_edited_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    torch.manual_seed(0)
    model = Twice()
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h * h + h
        return torch.tanh(h)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.b, self.reentrant = Block(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_edit_of_a_function_in_a_layer_that_a_checkpoint_recomputes_is_refused(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    refused = pytest.raises(LayertapError, match="a function of layer 'b' is edited, and checkpointing computes")
    with refused, Taps(model).edit("b/add", scale(3.0)) as taps:
        taps(X.clone().requires_grad_()).sum().backward()
    with Taps(model, "b/add") as taps:
        taps(X.clone().requires_grad_()).sum().backward()
    h = model.b.linear(X)
    torch.testing.assert_close(taps.record["b/add"], (h * h + h).detach())


def test_functions_that_a_backward_pass_calls_are_not_edited() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            return torch.mul(gradient, 1.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(self.b(x)) * 2.0

    torch.manual_seed(0)
    model = Model()
    with Taps(model).edit("/mul", scale(10.0)) as taps:
        taps(X).sum().backward()
    expected = torch.autograd.grad((20.0 * model.b(X)).sum(), model.b.weight)[0]
    torch.testing.assert_close(model.b.weight.grad, expected)


def test_a_tensor_in_several_places_is_edited_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, *, again: Tensor | None = None):
            return [x, {"same": x, "other": x + 1}]

    x, draws = torch.zeros(3), []

    def add_noise(h: Tensor) -> Tensor:
        draws.append(torch.randn_like(h))
        return h + draws[-1]

    with torch.no_grad(), Taps(Twice(), "").edit("", add_noise) as taps:
        first, parts = taps(x)
    assert len(draws) == 2
    assert first is parts["same"]
    assert torch.equal(first, draws[0])
    assert torch.equal(parts["other"], 1 + draws[1])
    assert torch.equal(taps.record[":0"], taps.record[":1.same"])
    with torch.no_grad(), Taps(Twice()).edit(Site("", 0, (0,)), add_noise) as taps:
        first, parts = taps(x)
    assert not torch.equal(first, parts["same"])  # only the first place was asked for
    assert not parts["same"].any()
    draws.clear()
    with torch.no_grad(), Taps(Twice()).edit("", add_noise, "input") as taps:
        taps(x, again=x)
    assert len(draws) == 1


def test_tensors_made_when_a_mapping_is_read_are_edited_each() -> None:
    class Lazy(Mapping):
        def __init__(self, value: float) -> None:
            self.value, self.edited = value, None

        def __getitem__(self, key: str) -> Tensor:
            return torch.full((4,), float(self.value)) if self.edited is None else self.edited

        def __setitem__(self, key: str, value: Tensor) -> None:
            self.edited = value

        def __iter__(self):
            return iter("k")

        def __len__(self) -> int:
            return 1

    class Returns(nn.Module):
        def forward(self, x: Tensor):
            return [Lazy(1), Lazy(2), Lazy(3)]

    with torch.no_grad(), Taps(Returns()).edit("", lambda h: h * 10) as taps:
        assert [float(part["k"][0]) for part in taps(torch.zeros(1))] == [10, 20, 30]


@pytest.mark.parametrize("what", ["edit", "grad", "grad_input"])
def test_looking_at_a_slice_leaves_every_bit_of_the_output(what: str) -> None:
    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x.split(20, -1)[0])

    torch.manual_seed(0)
    model, x = Slices(), torch.randn(64, 41, requires_grad=True)
    expected = model(x)
    taps = Taps(model)
    taps = taps.edit("act", lambda h: h).edit("act", lambda h: h, "input") if what == "edit" else taps.keep("act", what)
    with taps:
        assert torch.equal(taps(x), expected)
