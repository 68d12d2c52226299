from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from extract import LayertapError, Site, Taps, UnknownNameError
from extract.errors import InputError
from tests.extract.taps.networks import Net, hooks_in, linear, naive


class InPlace(nn.Module):
    """A block that rewrites what its layers gave, twice."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_place = in_place
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=in_place)
        self.second = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.relu(self.norm(self.conv(x)))
        y = self.second(h)
        if self.in_place:
            y += h
        else:
            y = y + h
        return self.relu(y)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_inplace_layers_do_not_change_kept_outputs() -> None:
    model, twin = InPlace().eval(), InPlace(in_place=False).eval()
    found = naive(model, "norm", "second")
    with torch.no_grad(), Taps(model, ["norm", "second"]).keep("relu", "input") as taps:
        taps(images())
        h = twin.norm(twin.conv(images()))
        y = twin.second(F.relu(h))
    assert torch.equal(taps.record["norm"], h)
    assert torch.equal(taps.record["relu#0:0@input"], h)
    assert torch.equal(taps.record["second"], y)
    assert h.min() < 0
    assert found["norm"].min() >= 0  # what a bare hook holds was rewritten
    assert not torch.equal(found["second"], y)


def test_every_call_of_a_shared_layer_is_kept() -> None:
    model, twin = InPlace().eval(), InPlace(in_place=False).eval()
    with torch.no_grad(), Taps(model, "relu") as taps:
        output = taps(images())
        first = F.relu(twin.norm(twin.conv(images())))
    record = taps.record
    assert list(record) == ["relu#0", "relu#1"]
    assert torch.equal(record["relu#0"], first)
    assert torch.equal(record["relu#1"], output)
    assert torch.equal(record[Site("relu", 1)], output)
    with pytest.raises(UnknownNameError, match="'relu#0', 'relu#1'"):
        record["relu"]


def test_one_call_can_be_asked_for() -> None:
    with Taps(InPlace().eval()).keep("relu", call=1) as taps:
        output = taps(images())
    assert list(taps.record) == ["relu#1"]
    assert torch.equal(taps.record["relu"], output)


def test_a_layer_that_did_not_run_raises_and_does_not_answer_with_old_values() -> None:
    def sometimes(model: Net, x: Tensor) -> Any:
        y = model.always(x)
        return model.sometimes(y) if x.sum() > 0 else y

    model = Net(sometimes, always=linear(), sometimes=linear())
    with Taps(model, ["always", "sometimes"]) as taps:
        taps(torch.ones(2, 4))
        first = taps.record
        assert first["sometimes"].shape == (2, 4)
        taps(-torch.ones(3, 4))
        assert taps.record["always"].shape == (3, 4)
        with pytest.raises(LayertapError, match="'sometimes' did not run"):
            taps.record["sometimes"]
        assert first["always"].shape == (2, 4)  # a record stays what it was
        model.always = linear()
        taps(torch.ones(2, 4))
        with pytest.raises(LayertapError, match="'always' did not run"):  # the layer that was replaced
            taps.record["always"]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_only_own_hooks_are_removed(error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = InPlace().eval()
    seen: list[int] = []
    model.relu.register_forward_hook(lambda *_: seen.append(1))
    expected = contextlib.nullcontext() if error is None else pytest.raises(error)
    with expected, Taps(model, ["conv", "relu"]).keep("norm", "input"):
        assert hooks_in(model) > 1
        if error:
            raise error
    assert hooks_in(model) == 1
    model(images())
    assert seen == [1, 1]
    monkeypatch.setattr(model.second, "register_forward_hook", lambda *a, **k: 1 / 0)  # it fails half-way
    with pytest.raises(ZeroDivisionError), Taps(model, ["conv", "norm", "second"]):
        pass
    assert hooks_in(model) == 1


def test_the_model_comes_out_as_it_went_in() -> None:
    model = InPlace().train()
    model.norm.eval()
    model.conv.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    with Taps(model, "*", stop=True) as taps:
        taps(images())
        taps(images())
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.conv.parameters()] == [False, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_kept_tensors_can_be_trained_on_and_own_their_memory() -> None:
    with torch.inference_mode(), Taps(nn.Sequential(linear()), "0", reduce=lambda h: h[:, :1].t()) as taps:
        taps(torch.ones(8, 4))
    kept = taps.record["0"]
    assert kept.shape == (1, 8)
    assert kept.is_contiguous()
    assert not kept.is_inference()
    assert kept.untyped_storage().nbytes() == 8 * 4
    weight = torch.zeros(8, requires_grad=True)
    (kept @ weight).sum().backward()
    assert torch.equal(weight.grad, kept[0])


def test_kept_tensors_of_a_channels_last_model_are_contiguous() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    with torch.no_grad(), Taps(nn.Sequential(model), "0") as taps:
        output = taps(x)
    assert not output.is_contiguous()  # .view(), and writing its bytes, would fail or shuffle
    assert taps.record["0"].is_contiguous()
    assert torch.equal(taps.record["0"], output)


def test_reduce_runs_before_the_copy_and_may_give_several() -> None:
    model = InPlace().eval()
    with torch.no_grad(), Taps(model, "norm", reduce=lambda h: {"mean": h.mean((2, 3)), "all": h}) as taps:
        taps(images())
        h = model.norm(model.conv(images()))
    assert torch.equal(taps.record["norm"]["mean"], h.mean((2, 3)))
    assert torch.equal(taps.record["norm"]["all"], h)  # the ReLU that follows in place did not reach it


def test_an_error_in_reduce_names_the_layer() -> None:
    with Taps(InPlace(), "norm", reduce=lambda h: h.reshape(7)) as taps, pytest.raises(RuntimeError) as raised:
        taps(images())
    assert "while reducing norm of shape (2, 4, 6, 6)" in raised.value.__notes__


@dataclasses.dataclass
class Pair:
    a: Tensor
    b: Tensor


def structured() -> Net:
    """Returns tensors in a dict, a dataclass and a list, and has an LSTM."""

    def forward(model: Net, x: Tensor) -> Any:
        model.inner(x, scale=torch.tensor(2.0))
        return model.lstm(x)[0]

    inner = Net(lambda self, x, *, scale: {"pair": Pair(x, x * scale), "list": [x + 1, None], "count": 3})
    return Net(forward, inner=inner, lstm=nn.LSTM(4, 5, batch_first=True))


def test_tensors_inside_structures_are_named_by_their_way() -> None:
    model, x = structured(), torch.randn(2, 3, 4)
    with torch.no_grad(), Taps(model, ["inner", "lstm"]).keep("inner", "input") as taps:
        output = taps(x)
        _, (h, c) = model.lstm(x)
    expected = {
        "inner:0@input": x, "inner:scale@input": torch.tensor(2.0), "inner:pair.a": x, "inner:pair.b": x * 2,
        "inner:list.0": x + 1, "lstm:0": output, "lstm:1.0": h, "lstm:1.1": c,
    }  # fmt: skip
    assert list(taps.record) == list(expected)
    for name, value in expected.items():
        assert torch.equal(taps.record[name], value)
    assert torch.equal(taps.record["inner:list"], x + 1)
    with Taps(model).keep(Site("lstm", 0, (1, 0)), reduce=lambda h: h * 2) as taps:  # exactly this one
        taps(x)
    assert list(taps.record) == ["lstm:1.0"]


class Counted(nn.Module):
    """Counts its calls, and catches every Exception, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.ran = 0

    def forward(self, x: Tensor) -> Any:
        try:
            x = self.shared(self.first(x))
            x = self.shared(x - 1)
        except Exception:
            return x
        self.ran += 1
        return self.last(x)


def test_stop_ends_the_forward_after_the_last_call_asked_for() -> None:
    model = Counted()
    with torch.no_grad(), Taps(model, ["shared", "first"], stop=True) as taps:  # not in the order of computation
        for i in range(3):
            assert taps(torch.full((2, 4), float(i))) is None
            expected = model.shared(model.first(torch.full((2, 4), float(i))))
            assert torch.equal(taps.record["shared#0"], expected)
            assert torch.equal(taps.record["shared#1"], F.relu(expected - 1))
        assert model.ran == 1  # the first forward, which learns
        assert model(torch.ones(1, 4)).shape == (1, 4)  # only calls of the taps are stopped
    assert model.ran == 2


def test_a_layer_that_is_kept_later_is_reached_although_forwards_were_stopped_before_it() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(1, 2)
    taps = Taps(model, "0", stop=True)
    for _ in range(2):  # the second is stopped after what the first has kept
        with torch.no_grad(), taps:
            assert taps(x) is None
    with torch.no_grad(), taps.keep("2"):
        taps(x)
    assert torch.equal(taps.record["2"], model(x))


@pytest.mark.parametrize("stop", [False, True])
def test_a_model_that_calls_itself_has_one_record_with_both_calls(stop: bool) -> None:
    def with_flipped(model: Net, x: Tensor, flip: bool = True) -> Any:
        y = model.fc(x)
        return (y + model(x.flip(1), flip=False)) / 2 if flip else y

    model, records = Net(with_flipped, fc=linear(4, 2)), []
    with torch.no_grad(), Taps(model, "fc", stop=stop, on_record=records.append) as taps:
        for _ in range(3):
            taps(X)
    assert len(records) == 3
    for record in records:
        assert list(record) == ["fc#0", "fc#1"]
        assert torch.equal(record["fc#0"], model.fc(X))
        assert torch.equal(record["fc#1"], model.fc(X.flip(1)))


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.Sequential(
            nn.Sequential(linear(seed=1), nn.ReLU()), nn.Sequential(linear(seed=2), nn.ReLU(inplace=True))
        )

    def forward(self, x: Tensor) -> Any:
        return self.blocks(self.stem(x)) * 2


@pytest.mark.parametrize(("layers", "names"), [
    ("**", ["stem", "blocks.0.0", "blocks.0.1", "blocks.0", "blocks.1.0", "blocks.1.1", "blocks.1", "blocks"]),
    ("blocks.**.0", ["blocks.0.0", "blocks.0", "blocks.1.0"]),
    (nn.Linear, ["stem", "blocks.0.0", "blocks.1.0"]),
    ([nn.ReLU, "stem"], ["stem", "blocks.0.1", "blocks.1.1"]),
    ("", [""]),
    (["", "stem"], ["stem", ""]),
])  # fmt: skip
def test_layers_are_named_by_globs_of_any_depth_by_type_and_the_model_by_the_empty_name(
    layers: Any, names: list[str]
) -> None:
    with torch.no_grad(), Taps(Tree(), layers) as taps:
        y = taps(X)
        assert list(taps.record) == names
        if "" in names:
            assert torch.equal(taps.record[""], y)


NO_LAYER = "expected names, globs or types of layers"


@pytest.mark.parametrize(("ask", "error", "message"), [
    (lambda: Taps(Tree(), 0), InputError, NO_LAYER),  # type: ignore[arg-type]
    (lambda: Taps(Tree(), nn.Linear(1, 1)), InputError, NO_LAYER),  # type: ignore[arg-type]
    (lambda: Taps(Tree(), [nn.Linear(1, 1)]), InputError, NO_LAYER),  # type: ignore[list-item]
    (lambda: Taps(Tree(), nn.Sequential(nn.ReLU())), InputError, NO_LAYER),  # type: ignore[arg-type]
    (lambda: Taps(Tree(), int), InputError, NO_LAYER),  # type: ignore[arg-type]
    (lambda: Taps(Tree(), nn.Conv2d), UnknownNameError, "the model has no layer of type Conv2d"),
    (lambda: Taps(InPlace(), ["conv", "rellu"]), UnknownNameError, "'rellu' not found.*'relu'"),
    (lambda: Taps(InPlace(), "norm").keep("n*"), InputError, "'norm' is already kept"),
    (
        lambda: Taps(Tree()).keep("stem", "grad", live=True),
        InputError,
        "live=True keeps outputs and inputs; a value of kind 'grad' has no graph",
    ),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused_when_it_is_asked_for(
    ask: Callable[[], Taps], error: type[LayertapError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask()


def test_the_model_itself_is_edited_and_its_gradient_kept() -> None:
    model, x = Tree(), X.clone().requires_grad_()
    plain = model(x)
    taps = Taps(model).edit("", lambda y: y + 1).edit("", lambda h: 3 * h, "input").keep("", "grad").keep("", "input")
    with taps:
        y = taps(x)
        (2 * y).sum().backward()
    assert torch.equal(y, model(3 * x) + 1)
    assert not torch.equal(y, plain)
    assert torch.equal(taps.record["@grad"], torch.full((3, 4), 2.0))
    assert torch.equal(taps.record[":0@input"], 3 * x.detach())


@pytest.mark.parametrize("site", ["blocks.0.0", "blocks.0.0:0@input", Site("blocks.0", 0, (), "output"), ""])
def test_a_live_tensor_carries_the_gradient_of_a_loss_to_earlier_layers(site: str | Site) -> None:
    target = torch.randn(3, 4)

    def by_hand(model: Tree) -> Any:
        h = model.stem(X)
        values = {"blocks.0.0": model.blocks[0][0](h), "blocks.0.0:0@input": h, "blocks.0": model.blocks[0](h)}
        return values["blocks.0"] if isinstance(site, Site) else values.get(site, model(X))

    expected, model = Tree(), Tree()
    ((by_hand(expected) - target) ** 2).mean().backward()
    for _ in range(2):  # the second forward is stopped early
        model.zero_grad()
        with Taps(model, stop=site != "").keep(site, live=True) as taps:
            taps(X)
            kept = taps.record[site]
            ((kept - target) ** 2).mean().backward()
        assert kept.requires_grad
        for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None), name
            assert parameter.grad is None or torch.equal(parameter.grad, other.grad), name


def test_a_live_tensor_that_a_later_layer_overwrites_is_an_error() -> None:
    model = Tree()
    with Taps(model).keep("blocks.1.0", live=True).keep("stem", live=True) as taps:
        taps(X)
    record = taps.record
    assert torch.equal(record["stem"], model.stem(X))
    with pytest.raises(LayertapError, match=r"blocks\.1\.0 was changed in place after it was kept live"):
        record["blocks.1.0"]
    assert "blocks.1.0: (3, 4)" in repr(record)
    # Inference mode counts no changes.
    refused = pytest.raises(InputError, match="stem cannot be kept live in inference mode")
    with torch.inference_mode(), Taps(model).keep("stem", live=True) as taps, refused:
        taps(X)
    with torch.inference_mode(), Taps(model).keep("stem", live=True, reduce=torch.clone) as taps:
        taps(X)
        assert torch.equal(taps.record["stem"], model.stem(X))


def test_a_reduced_live_tensor_has_its_graph_and_is_not_overwritten() -> None:
    model = Tree()
    layer = model.blocks[1][0]  # an in-place ReLU follows
    (expected,) = torch.autograd.grad(layer(model.blocks[0](model.stem(X))).square().sum(), model.stem.weight)
    for reduce, loss in (
        (torch.clone, lambda kept: kept.square().sum()),
        (lambda h: {"sum": h.clone().square().sum()}, lambda kept: kept["sum"]),
    ):
        with Taps(model).keep("blocks.1.0", live=True, reduce=reduce) as taps:
            taps(X)
        found = torch.autograd.grad(loss(taps.record["blocks.1.0"]), model.stem.weight)[0]
        torch.testing.assert_close(found, expected)
    with Taps(model).keep("blocks.1.0", live=True, reduce=lambda h: {"sum": h.square().sum(), "same": h}) as taps:
        taps(X)
    with pytest.raises(LayertapError, match=r"blocks\.1\.0 was changed in place after it was kept live"):
        taps.record["blocks.1.0"]


def test_kept_values_carry_no_tangents() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    with forward_ad.dual_level(), Taps(model, "0") as taps:
        taps(forward_ad.make_dual(torch.randn(3, 4), torch.randn(3, 4)))
        assert forward_ad.unpack_dual(taps.record["0"]).tangent is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_checkpointed_as_a_whole_keeps_its_record(reentrant: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), X.clone().requires_grad_()
    with Taps(model, "0") as taps:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(taps.record["0"], model[0](x).detach())
