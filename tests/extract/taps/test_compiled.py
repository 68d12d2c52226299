"""Compiled, traced, scripted and exported models: seen through, refused, or their layers said to be missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from extract import InputError, LayertapError, Taps
from extract.taps.edits import scale
from tests.extract.taps.networks import linear

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).eval()


def wrapper_itself(model: nn.Module, **options: Any) -> Any:
    compiled = torch.compile(model, **options)
    return compiled, compiled


def own_forward(model: nn.Module, **options: Any) -> Any:
    model.forward = torch.compile(model.forward, **options)  # type: ignore[method-assign]
    return model, model


def in_place(model: nn.Module, **options: Any) -> Any:
    model.compile(**options)
    return model, model


def one_layer(model: nn.Sequential, **options: Any) -> Any:
    model[0] = torch.compile(model[0], **options)  # type: ignore[assignment]
    return model, model


# What is compiled -> the model that is given to Taps, and what is called.
COMPILED: dict[str, Callable[..., Any]] = {
    "a wrapper that taps are given": wrapper_itself,
    "a wrapper of the model": lambda model, **options: (model, torch.compile(model, **options)),
    "a function": lambda model, **options: (model, torch.compile(lambda x: model(x), **options)),
    "a model around it": lambda model, **options: (model, torch.compile(nn.Sequential(model), **options)),
    "its own forward": own_forward,
    "the model in place": in_place,
    "a layer": one_layer,
}


@pytest.mark.parametrize(("what", "backend", "called"), [
    *((what, "eager", True) for what in COMPILED),
    ("a wrapper that taps are given", "eager", False),
    ("its own forward", "eager", False),
    *(pytest.param(what, "inductor", True, marks=pytest.mark.slow) for what in ("its own forward", "a layer")),
])  # fmt: skip
def test_compiled_code_that_calls_the_model_is_seen_through(what: str, backend: str, called: bool) -> None:
    expected, plain = net()[0](X), net()(X)
    torch.compiler.reset()
    model, call = COMPILED[what](net(), backend=backend, fullgraph=called)
    with torch.no_grad():
        if called:
            call(X)
        with Taps(model, ["0", "2"]) as taps:
            assert torch.allclose(call(X), plain)
        assert torch.allclose(taps.record["0"], expected)
        assert torch.allclose(taps.record["2"], plain)
        with Taps(model).edit("2", lambda h: h * 0):
            assert not call(X).any()
        assert torch.allclose(call(X), plain)


class CompiledMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fast = torch.compile(self.tail, backend="eager")

    def tail(self, x: Tensor) -> Tensor:
        return self.two(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(self.one(x))


def compiled_forward() -> nn.Module:
    class CompiledForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        @torch.compile(backend="eager")  # which imports the compiler
        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    return nn.Sequential(CompiledForward())


@pytest.mark.parametrize("make", [CompiledMethod, compiled_forward])
def test_layers_in_compiled_methods_are_kept_and_edited(make: Callable[[], Any]) -> None:
    torch.compiler.reset()
    model = make()
    inner = model[0] if isinstance(model, nn.Sequential) else model
    with torch.no_grad():
        model(X)  # compiled
        with Taps(model).edit("**", lambda h: h / 2).keep(nn.Linear) as taps:
            output = taps(X)
        one = inner.one(X) / 2
        two = inner.two(one) / 2
    assert torch.equal(output, two / 2 if inner is not model else two)
    assert [value.tolist() for value in taps.record.values()] == [one.tolist(), two.tolist()]


@pytest.mark.parametrize("error", [AttributeError, KeyError])
def test_a_wrapper_that_has_the_attributes_of_a_compiled_module_is_a_model_of_its_own(error: type[Exception]) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(2, 4)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if hasattr(inner := self._modules["inner"], name):
                    return getattr(inner, name)
                raise error(name) from None

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x))

    model = Wrapper(torch.compile(net(), backend="eager") if error is AttributeError else net())
    with torch.no_grad(), Taps(model, ["", "head", "inner.2"]) as taps:
        output = taps(X)
    expected = {"": model.head(net()(X)), "head": model.head(net()(X)), "inner.2": net()(X)}
    assert torch.equal(output, expected[""])
    for name, value in expected.items():
        assert torch.equal(taps.record[name], value)


def test_a_compiled_method_forward_is_no_call_of_the_model() -> None:
    model = net()
    forward = torch.compile(model.forward, backend="eager")
    with Taps(model, "0") as taps:
        forward(X)
        with pytest.raises(LayertapError, match="model itself was not called .* do not count, compiled or not"):
            taps.record["0"]


def test_a_block_in_a_compiled_function_says_where_to_open_it() -> None:
    model = net()

    @torch.compile(backend="eager")
    def first_output(x: Tensor) -> Tensor:
        with Taps(model, "0") as taps:
            model(x)
            return taps.record["0"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        with pytest.raises(LayertapError, match="open the block outside of compiled functions"):
            first_output(X)


class Traced(nn.Module):
    """A layer before, and a layer inside, what PyTorch's compiler traces."""

    def __init__(self, how: str):
        super().__init__()
        self.a, self.inside, self.how = linear(seed=0), linear(seed=1), how

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if self.how == "cond":
            return torch.cond(h.sum() > -1e9, self.inside, self.inside, (h,))
        if self.how == "while_loop":
            start = (torch.tensor(0), h)
            return torch.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, self.inside(h)), start)[1]
        if self.how == "compile":
            return torch.compile(lambda h: self.inside(h).relu(), backend="eager", fullgraph=True)(h)
        from torch.nn.attention.flex_attention import flex_attention

        heads = F.pad(h, (0, 12))[None, None]
        return flex_attention(heads, heads, heads, score_mod=lambda score, b, head, i, j: score + i - j)


@pytest.mark.parametrize(("how", "grad"), [
    ("cond", True),
    ("compile", True),
    ("flex_attention", False),
    pytest.param("while_loop", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_code_that_the_compiler_traces_computes_the_same_inside_the_block(how: str, grad: bool) -> None:
    torch.compiler.reset()
    model = Traced(how)
    with torch.set_grad_enabled(grad):
        expected = model(X)
        torch.compiler.reset()
        # As in a process where the compiler is first imported inside the block.
        with (
            Taps(model, ["a", "inside", "a/linear", "/pad"]).keep("", "attention").edit("a/linear", scale(1)) as taps,
            torch.compiler.set_stance("default"),
        ):
            output = taps(X)
        assert torch.equal(output, expected)
        assert torch.equal(taps.record["a"], model.a(X))
        assert torch.equal(taps.record["a/linear"], model.a(X))
    if how != "flex_attention":
        assert taps.record.missing["inside"].startswith("layer 'inside' ran in code that PyTorch's compiler traces")


@pytest.mark.parametrize(
    ("layers", "stance"),
    [("inside", "default"), ("*", "default"), ("inside/linear", "force_eager"), ("*/linear", "force_eager")],
)
def test_an_edit_of_a_layer_or_function_that_the_compiler_traces_is_an_error(layers: str, stance: Any) -> None:
    torch.compiler.reset()
    model = Traced("cond")
    with pytest.raises(LayertapError, match=r"the edit of inside(/linear)? never took effect: it ran in code"):  # noqa: SIM117
        with torch.no_grad(), Taps(model).edit(layers, scale(0)) as taps, torch.compiler.set_stance(stance):
            taps(X)


def test_in_a_branch_that_is_not_traced_layers_are_edited_and_functions_said_to_be_missing() -> None:
    model = Traced("cond")
    with torch.no_grad(), Taps(model).edit("inside", scale(0)) as taps:
        assert torch.equal(taps(X), torch.zeros(3, 4))
    with torch.no_grad(), Taps(model, "inside/linear") as taps:
        taps(X)
    assert taps.record.missing["inside/linear"].startswith("layer 'inside' ran in code that")


def test_gradients_of_a_branch_are_computed_where_the_block_lets_the_compiler_work() -> None:
    model = Traced("cond")
    with Taps(model).keep("a", "grad") as taps, torch.compiler.set_stance("default"):
        taps(X).sum().backward()
    assert torch.allclose(taps.record["a@grad"], model.inside.weight.sum(0).expand(3, 4))


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_inside_the_block_is_no_call_of_the_model(strict: bool) -> None:
    model = net()
    with torch.no_grad(), Taps(model, ["*", "0/linear"]).edit("*", scale(0)) as taps:
        taps(X)
        program = torch.export.export(model, (X,), strict=strict)
        assert {type(value) for value in taps.record.values()} == {Tensor}
    assert torch.equal(taps.record["2"], torch.zeros(3, 2))
    assert torch.equal(program.module()(X), model(X))


def test_a_stance_that_is_set_inside_the_block_stays() -> None:
    with Taps(net(), "0"):
        ours = torch.compiler.set_stance("eager_on_recompile")
    now = torch.compiler.set_stance("default")
    assert ours.prev.stance == "force_eager"
    assert now.prev is ours.stance
    with Taps(net(), "0"):
        pass
    assert torch.compiler.set_stance("default").prev is now.stance


def test_scripted_and_exported_models_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net())
    exported = torch.export.export(net(), (X,))
    for model, message in (
        (scripted, "the model is scripted"),
        (nn.Sequential(scripted), "layer '0' is scripted"),
        (exported, "expected an nn.Module, got"),
        (exported.module(), "the model is exported"),
    ):
        with pytest.raises(InputError, match=message):
            Taps(model, "0")


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_layers_beside_a_scripted_one_are_hooked_and_those_inside_it_refused(make: Callable[..., nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = make(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model, found = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 2)), []
    handle = model[2].register_forward_hook(lambda module, args, output: found.append((args[0], output)))
    model(X).square().sum().backward()
    handle.remove()
    expected = dict(model.named_parameters())["1.0.weight"].grad.clone()
    with Taps(model, ["0", "2"]).keep("2", "input").keep("2/linear").keep("1.0.weight", "grad") as taps:
        taps(X).square().sum().backward()
    assert torch.equal(taps.record["2"], found[0][1])
    assert torch.equal(taps.record["2/linear"], found[0][1])
    assert torch.equal(taps.record["2@input"], found[0][0])
    assert torch.allclose(taps.record["1.0.weight@grad"], expected)
    for layers in ("1", "*", "1/tanh"):
        with pytest.raises(InputError, match="layer '1' is scripted: its code ignores hooks"):
            Taps(model, layers)
    for layers in ("1.0", "*.0"):
        with pytest.raises(InputError, match="layer '1.0', inside '1', is scripted"):
            Taps(model).edit(layers, lambda h: h)
