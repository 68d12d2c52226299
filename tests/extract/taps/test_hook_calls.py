"""Several `Taps` at once, hooks of others, interrupted passes, and what a layer writes into copies."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from extract import LayertapError, Taps
from tests.extract.taps.networks import Net, linear, same

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collections() -> None:
    """Leave what other tests have imported and made out of the garbage collections of these."""
    gc.collect()
    gc.freeze()


def two_layers() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Identity())


@pytest.mark.parametrize("changed_by", ["outer edit", "hook", "pre-hook"])
def test_the_gradient_is_that_of_the_value_that_is_kept(changed_by: str) -> None:
    model = two_layers()
    outer = Taps(model).edit("0", lambda h: 10 * h) if changed_by == "outer edit" else Taps(model)
    what, site = ("grad_input", "1:0@grad_input") if changed_by == "pre-hook" else ("grad", "0@grad")
    if changed_by == "hook":
        model[0].register_forward_hook(lambda module, args, output: 10 * output)
    if changed_by == "pre-hook":
        model[1].register_forward_pre_hook(lambda module, args: (10 * args[0],))
    with outer, Taps(model, ["0"]).keep("1" if changed_by == "pre-hook" else "0", what) as taps:
        taps(X).sum().backward()
    assert (taps.record[site] == 1).all()


def relu_for_its_writes(model: Net, x: Tensor) -> Tensor:
    y: Tensor = model.linear(x)
    model.relu(y)
    return y


@pytest.mark.parametrize("inner", ["output", "input", "grad_input"])
@pytest.mark.parametrize("outer", ["output", "input", "grad_input"])
def test_what_a_layer_writes_reaches_the_model_through_several_taps(outer: Any, inner: Any) -> None:
    model, x = Net(relu_for_its_writes, linear=linear(), relu=nn.ReLU(inplace=True)), X.clone().requires_grad_()
    plain = model(x)
    expected = torch.autograd.grad(plain.sum(), model.linear.weight)[0]
    refused = pytest.raises(LayertapError, match="relu is not available")
    is_refused = "output" in (outer, inner)  # with gradients, autograd has saved what would be changed
    with (
        refused if is_refused else contextlib.nullcontext(),
        Taps(model).edit("relu", same, outer),
        Taps(model).edit("relu", same, inner) as taps,
    ):
        y = taps(x)
        y.sum().backward()
        assert torch.equal(y, plain)
        torch.testing.assert_close(model.linear.weight.grad, expected)
    with refused, Taps(model).edit("relu", lambda h: 3 * h).edit("relu", same, "grad_input") as taps:
        taps(x)
    if not is_refused or "grad_input" in (outer, inner):
        return
    with (
        torch.no_grad(),
        Taps(model).edit("relu", lambda h: 3 * h, outer),
        Taps(model).edit("relu", same, inner) as taps,
    ):
        assert torch.equal(taps(x), 3 * plain if outer == "output" else (3 * model.linear(x)).relu())


def test_the_taps_that_are_opened_last_edit_first() -> None:
    model = two_layers()
    with Taps(model).edit("0", lambda h: h * 10), Taps(model).edit("0", lambda h: h + 1) as taps:
        assert torch.equal(taps(X), (model[0].forward(X) + 1) * 10)


class Interrupted(nn.Module):
    on = True

    def forward(self, x: Tensor) -> Tensor:
        if self.on and torch._C._current_graph_task_id() != -1:
            raise KeyboardInterrupt
        return (x.relu() * 2) ** 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_interrupted_backward_pass_leaves_modes_as_they_were_and_can_be_repeated(reentrant: bool) -> None:
    def forward(model: Net, x: Tensor) -> Any:
        return checkpoint(lambda h: model.part(model.linear(h)), x, use_reentrant=reentrant)

    model, x = Net(forward, part=Interrupted(), linear=linear()), X.clone().requires_grad_()
    with Taps(model).edit("part", lambda h: 5 * h) as taps:
        with pytest.raises(KeyboardInterrupt):
            taps(x).sum().backward()
        model.part.on = False
        model.zero_grad()
        taps(x).sum().backward()
    del taps
    gc.collect()
    with torch.device("meta"):
        assert torch.ones(1).device.type == "meta"
    gradient = model.linear.weight.grad
    model.zero_grad()
    ((F.linear(X, model.linear.weight, model.linear.bias).relu() * 2) ** 2 * 5).sum().backward()
    torch.testing.assert_close(gradient, model.linear.weight.grad)


def test_a_tensor_that_is_passed_twice_has_a_gradient_for_each_argument() -> None:
    model = Net(lambda self, x: self.add(h := x * 1, h), add=Net(lambda self, a, b: a + 2 * b))
    x = X.clone().requires_grad_()
    with Taps(model).edit("add", lambda g: 10 * g, "grad_input").keep("add", "grad_input") as taps:
        taps(x).sum().backward()
    assert (x.grad == 30).all()
    assert [taps.record[f"add:{number}@grad_input"].unique().item() for number in (0, 1)] == [10, 20]
    with Taps(model).edit("add:0", torch.zeros_like, "grad_input").edit("add:1", lambda g: 3 * g, "grad_input") as taps:
        taps(x).sum().backward()
    assert (x.grad == 36).all()
    with Taps(model).keep("add:1", "grad_input") as taps:
        taps(x).sum().backward()
    assert (taps.record["add:1@grad_input"] == 2).all()


def test_gradients_of_the_arguments_of_attention_are_those_of_three_tensors() -> None:
    model = Net(lambda self, x: self.attn(h := 1 * x, h, h)[0], attn=nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 3, 8)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    model.attn(*leaves)[0].square().sum().backward()
    with Taps(model).keep("attn", "grad_input") as taps:
        taps(x.clone().requires_grad_()).square().sum().backward()
    for number, leaf in enumerate(leaves):
        assert leaf.grad is not None
        torch.testing.assert_close(taps.record[f"attn:{number}@grad_input"], leaf.grad)


def test_attentions_are_counted_once_for_several_requests() -> None:
    def attend(layer: nn.Module, x: Tensor) -> Tensor:
        F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(3 * x, x, x)

    model, x = nn.Sequential(Net(attend)), torch.randn(1, 1, 3, 4)
    with Taps(model).keep("0", "attention") as taps:
        taps(x)
    both = taps.record
    with Taps(model).keep("0", "attention", call=0).keep("0", "attention", call=1) as taps:
        taps(x)
    assert torch.equal(taps.record["0#0@attention"], both["0#0@attention"])
    assert torch.equal(taps.record["0#1@attention"], both["0#1@attention"])


def test_nothing_of_a_forward_stays_alive() -> None:
    model, kept = two_layers(), []
    with Taps(model).keep("0", live=True).keep("0", "grad").keep("1", "grad") as taps:
        for _ in range(3):
            output = taps(X)
            output.sum().backward()
            kept.append(weakref.ref(taps.record["0"]))
        finished = weakref.ref(output)
        del output
        gc.collect()
        assert finished() is None
    del taps, model
    gc.collect()
    assert [tensor() for tensor in kept] == [None, None, None]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_frames_of_an_interrupted_forward_are_freed(error: type[BaseException]) -> None:
    def fail(model: Net, x: Tensor) -> None:
        raise error

    class Local:
        pass

    taps = Taps(Net(fail, linear=linear()), "linear").keep("linear/linear")

    def training() -> weakref.ref[Local]:
        local = Local()
        with taps, pytest.raises(error):
            taps(X)
        return weakref.ref(local)

    local = training()
    gc.collect()
    assert local() is None


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_what_an_edited_layer_received_is_freed_when_it_ends(error: type[BaseException] | None) -> None:
    def double(layer: nn.Module, x: Tensor) -> Tensor:
        if error is not None:
            raise error
        return x * 2

    received: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), Net(double), nn.Linear(4, 4))
    model[1].register_forward_pre_hook(lambda module, args: received.append(weakref.ref(args[0])))
    model[2].register_forward_pre_hook(lambda module, args: received.append(received[0]()))
    taps = Taps(model).edit("1", same)
    with torch.no_grad(), pytest.raises(error) if error else contextlib.nullcontext(), taps:
        taps(X)
    gc.collect()
    assert received[0]() is None
    assert error or received[1] is None


def test_a_model_that_stops_its_own_network_is_stopped_by_taps_around_it() -> None:
    def first_two(model: Net, x: Tensor) -> Tensor:
        with Taps(model.net, stop=True).keep("1", live=True) as taps:
            taps(x)
            output: Tensor = taps.record["1"]
        model.ended.append(1)
        return output

    model = Net(first_two, net=nn.Sequential(linear(), linear(), linear()), ended=[])
    with torch.no_grad(), Taps(model, "net.0", stop=True) as taps:
        for _ in range(3):
            taps(X)
            assert torch.equal(taps.record["net.0"], model.net[0].forward(X))
    assert model.ended == [1]  # the first forward runs to its end


def test_calls_are_numbered_in_the_order_in_which_they_start_also_where_a_hook_calls_the_layer() -> None:
    model, depth = nn.Sequential(nn.Linear(4, 4)), []

    def call_again(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if not depth:
            depth.append(1)
            module(0 * args[0])

    model[0].register_forward_hook(call_again)
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(X)
    assert torch.equal(taps.record["0#0"], model[0].forward(X))
    assert torch.equal(taps.record["0#1"], model[0].forward(0 * X))


def test_functions_that_write_no_values_or_return_none_are_left_alone() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = x * 1
        y[0] = 1
        y.unsqueeze_(0)
        return y.squeeze_(0) + 1

    model = Net(forward)
    with Taps(model).edit("/*", same) as taps:
        assert torch.equal(taps(X), forward(model, X))


@pytest.mark.parametrize("what", ["grad", "grad_input"])
def test_gradients_where_autograd_is_off_are_none(what: Any) -> None:
    model = Net(lambda self, x: checkpoint(self.layer, x, use_reentrant=True), layer=linear())
    with Taps(model).keep("layer", what) as taps:
        taps(X.clone().requires_grad_()).sum().backward()
    assert len(taps.record) == 1
    with torch.no_grad(), Taps(model).keep("layer", what) as taps:
        taps(nn.Parameter(X))
    assert len(taps.record) == 0


def test_several_parts_and_calls_of_one_layer_are_edited_by_one_call_of_edit() -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        h, c = model.cell(x)
        return torch.stack([model.twice(h), model.twice(c), model.twice(x)])

    model = Net(forward, cell=nn.LSTMCell(4, 4), twice=nn.Identity())
    h, c = model.cell(X)
    with torch.no_grad(), Taps(model).edit(["cell:0", "cell:1", "twice#0", "twice#2"], lambda v: v + 1) as taps:
        torch.testing.assert_close(taps(X), torch.stack([h + 2, c + 1, X + 1]))
    idle = pytest.raises(LayertapError, match="the edit of twice never took effect")
    with idle, torch.no_grad(), Taps(model).edit(["twice#0", "twice#7"], same) as taps:
        taps(X)


def test_taps_that_are_closed_out_of_order_leave_the_modes_of_others() -> None:
    model, device = two_layers(), torch.device("meta")
    taps = Taps(model).keep("0", "grad")
    taps.__enter__()
    taps(X).sum().backward()
    device.__enter__()
    try:
        taps.__exit__(None, None, None)
        assert torch.ones(1).device.type == "meta"
    finally:
        device.__exit__(None, None, None)
    assert torch.ones(1).device.type == "cpu"
    assert torch._C._len_torch_function_stack() == 0


def test_a_device_that_the_model_chooses_meanwhile_is_left_where_it_was_chosen() -> None:
    def choose(model: Net, x: Tensor) -> Tensor:
        with torch.device("meta"):
            x = model.identity(x)  # functions are watched from here on
            assert torch.empty(2).is_meta
        return x + torch.ones(4)

    with torch.no_grad(), Taps(Net(choose, identity=nn.Identity())).edit("identity", same) as taps:
        assert torch.equal(taps(X), X + 1)
    assert not torch.empty(2).is_meta


@pytest.mark.parametrize("write", ["h.data.mul_(2)", "h.detach().mul_(2)", "h.mul_(2)"])
def test_a_write_that_autograd_does_not_see_is_repeated_unseen(write: str) -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        y = x * 1
        exec(write, {"h": model.identity(y)})
        return y * y

    model, x = Net(forward, identity=nn.Identity()), X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with Taps(model).keep("identity", "grad_input") as taps:
        assert torch.equal(torch.autograd.grad(taps(x).sum(), x)[0], expected)


class Doubles(torch.autograd.Function):
    """Doubles a tensor in place; PyTorch tells no function mode of it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize(("verb", "what"), [("keep", "grad_input"), ("edit", "input"), ("edit", "output")])
def test_a_function_of_the_users_that_works_in_place_reaches_both_tensors_with_its_gradient(
    verb: str, what: Any
) -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        h = x * 1
        model.doubling(h)
        return h * h

    def gradient() -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        return (y := taps(x)).detach(), torch.autograd.grad(y.sum(), x)[0]

    model = Net(forward, doubling=Net(lambda self, x: Doubles.apply(x)))
    with Taps(model) as taps:
        plain = gradient()
    taps = Taps(model)
    with taps.keep("doubling", what) if verb == "keep" else taps.edit("doubling", same, what):
        tapped = gradient()
    assert torch.equal(tapped[0], plain[0])
    assert torch.equal(tapped[1], plain[1])


def test_layers_inside_torch_func_and_those_that_return_sparse_tensors_are_edited() -> None:
    model = Net(lambda self, x: torch.func.vmap(self.linear)(x), linear=linear())
    sparse = nn.Sequential(Net(lambda self, x: x.to_sparse()))
    for grad in (False, True):
        with torch.set_grad_enabled(grad), Taps(model).edit("linear", lambda h: 3 * h) as taps:
            assert torch.allclose(taps(X), 3 * model.linear.forward(X))
        with torch.set_grad_enabled(grad), Taps(sparse).edit("0", lambda h: 3 * h) as taps:
            assert torch.equal(taps(X).to_dense(), 3 * X)


# Copies that the model continues with are what the originals are: their attributes, and memory of their own


def merged(model: Net, x: Tensor) -> Any:
    """As in fastai: a layer reads an attribute of its input."""
    h = model.linear(x)
    h.orig = h * 2
    return model.f(h)


@pytest.mark.parametrize(("what", "verb"), [("output", "edit"), ("input", "edit"), ("grad_input", "keep")])
def test_attributes_of_tensors_are_those_of_what_stands_in_for_them(what: Any, verb: str) -> None:
    model = Net(merged, linear=linear(), f=Net(lambda self, x: x + x.orig))
    taps = Taps(model).keep("f", what) if verb == "keep" else Taps(model).edit("f", same, what)
    with taps:
        y = taps(X)
    assert torch.equal(y, 3 * model.linear(X))


def test_attributes_reach_the_layer_behind_one_that_is_watched() -> None:
    def forward(model: Net, x: Tensor) -> Any:
        h = model.linear(x)
        h.mask = (h > 0).float()
        v = model.f(h)
        return v * v.mask

    model = Net(forward, linear=linear(), f=nn.Dropout().eval())
    h = model.linear(X)
    for taps in (Taps(model).keep("f", "grad"), Taps(model).edit("f", same)):
        with taps:
            assert torch.equal(taps(X), h * (h > 0))


@pytest.mark.parametrize("what", ["output", "input"])
def test_an_edit_in_place_of_frames_that_overlap_leaves_their_neighbours(what: Any) -> None:
    def edit(h: Tensor) -> Tensor:
        h[..., 1] = 0
        return h

    model, x = nn.Sequential(Net(lambda self, x: x.unfold(-1, 4, 2)), nn.Identity()), torch.arange(1.0, 9.0)[None]
    with torch.no_grad(), Taps(model).edit("0" if what == "output" else "1", edit, what) as taps:
        assert taps(x).tolist() == [[[1, 0, 3, 4], [3, 0, 5, 6], [5, 0, 7, 8]]]
