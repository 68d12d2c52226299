"""Wrapped, fused, compiled, quantised, shared and threaded models: where a naive hook is wrong, and Taps are not.

A naive hook is `register_forward_hook(lambda m, a, out: found.__setitem__(name, out.detach().cpu()))`.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle

from extract import InputError, LayertapError, Taps, UnknownNameError
from extract.taps.edits import scale


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).eval()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def naive(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for name in names:
        modules[name].register_forward_hook(lambda m, a, out, name=name: found.__setitem__(name, out.detach().cpu()))
    return found


def hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(autouse=True)
def no_trace_of_taps() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert not torch.overrides._get_current_function_mode_stack()


# Fused code


def test_attention_projections_never_run_and_that_is_said() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0).eval()
    wrapped = nn.Sequential(model)
    found = naive(wrapped, ["0.linear1", "0.self_attn.out_proj"])
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = wrapped(x)
        assert "0.self_attn.out_proj" not in found  # and nobody says so
        with Taps(wrapped, ["0.linear1", "0.self_attn", "0.self_attn.out_proj"]) as taps:
            output = taps(x)
        assert torch.allclose(output, plain, atol=1e-5)
        attended = model.self_attn(x, x, x, need_weights=False)[0]
        expected = model.linear1(model.norm1(x + attended))
    assert torch.allclose(taps.record["0.self_attn:0"], attended, atol=1e-5)
    assert torch.allclose(taps.record["0.linear1"], expected, atol=1e-5)
    with pytest.raises(UnknownNameError, match=r"never runs: nn\.MultiheadAttention uses its weights without calling"):
        taps.record["0.self_attn.out_proj"]


class Padded(nn.Module):
    """In eval mode, without gradients, its encoder returns zeros at padded places, unless a function mode is active."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        h = self.encoder(self.first(x), src_key_padding_mask=padding)
        return self.head(torch.tanh(h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


WORDS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False, False, False, True, True], [False, False, False, False, True]])


def to_padded(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("ask", [
    lambda taps: taps.keep("head"),
    lambda taps: taps.keep(["head", "first", "encoder", "head.weight", "head.bias"], "grad"),
    lambda taps: taps.edit("head", lambda h: h),
    lambda taps: taps.keep("encoder.layers.1.linear1", reduce=to_padded),
])  # fmt: skip
def test_padded_places_are_zero_behind_an_encoder_in_which_no_functions_are_watched(ask, gradients) -> None:
    model, kept = Padded().eval(), []
    model.encoder.requires_grad_(False)
    model.first.requires_grad_(False)  # else the encoder uses no fused code with gradients
    with torch.set_grad_enabled(gradients):
        plain = model(WORDS, PADDING)
        model.encoder.register_forward_hook(lambda m, args, output: kept.append(output.detach()))
        model(WORDS, PADDING)
        with ask(Taps(model)) as taps:
            output = taps(WORDS, PADDING)
            if gradients:
                output.sum().backward()
    assert torch.allclose(output, plain, atol=1e-6)
    assert torch.allclose(kept[0], kept[1], atol=1e-6)
    assert not kept[1][PADDING].any()
    if gradients:
        record = taps.record
        assert "head.bias@grad" not in record or torch.equal(record["head.bias@grad"], torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layers_give_what_bare_hooks_give_and_the_model_returns_the_same() -> None:
    model, found = Padded().eval(), {}
    for name, layer in model.named_modules():
        if name and "." not in name.removeprefix("encoder.layers."):
            layer.register_forward_hook(
                lambda m, args, output, name=name: found.__setitem__(
                    name, to_padded(output if isinstance(output, Tensor) else output[0]).clone()
                )
            )
    with torch.no_grad():
        bare = model(WORDS, PADDING)
        hooked = dict(found)
        with Taps(model, list(found), reduce=to_padded) as taps:
            assert torch.equal(taps(WORDS, PADDING), bare)
    assert {"encoder.layers.1", "attention"} <= set(hooked)
    for name, value in hooked.items():
        assert torch.equal(taps.record[f"{name}:0" if name == "attention" else name], value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_models_compute_as_ever_while_taps_are_open() -> None:
    model, other = net(), Padded().eval()
    results: list[Tensor] = []

    def compute() -> None:
        with torch.no_grad():
            results.append(other(WORDS, PADDING))

    compute()
    taps = Taps(nn.Sequential(model, nn.TransformerEncoderLayer(2, 2, 4, batch_first=True).eval()), stop=True)
    with taps.keep("0.0", "attention").keep(["/*", "0.0"]):
        compute()
        for _ in range(2):  # the second one stops after the first layer
            taps(X[None])
            compute()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    failing = Taps(nn.Sequential(net(), nn.Linear(3, 3))).keep("/*")
    with failing:
        with pytest.raises(RuntimeError, match="shapes"):
            failing(X)
        compute()
    assert len(results) == 6
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("ask", [
    lambda taps: taps.keep("/tanh"),
    lambda taps: taps.edit("first", lambda h: h),
    lambda taps: taps.edit("encoder", lambda h: h, "input"),
    lambda taps: taps.keep("attention", "attention"),
    lambda taps: taps.keep("encoder.layers.1/*"),
    lambda taps: taps.edit("encoder.layers.0/relu", lambda h: h),
    lambda taps: taps.keep("encoder.layers.1.self_attn", "attention"),
    lambda taps: taps.keep("", "attention"),
])  # fmt: skip
def test_functions_and_edits_before_the_end_of_an_encoder_that_leaves_zeros_are_refused(ask) -> None:
    model = Padded().eval()
    refused = pytest.raises(
        InputError, match="layer 'encoder' computes this padded batch as a nested tensor; functions"
    )
    with torch.no_grad(), refused, ask(Taps(model)) as taps:
        taps(WORDS, PADDING)
    assert hooks_in(model) == 0
    model.encoder.use_nested_tensor = False
    with torch.no_grad():
        plain = model(WORDS, PADDING)
        with ask(Taps(model)) as taps:
            assert torch.allclose(taps(WORDS, PADDING), plain, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_found_where_fused_code_would_hide_it(padded) -> None:
    model, padding = Padded().eval(), PADDING if padded else None
    model.encoder.use_nested_tensor = not padded
    first = model.encoder.layers[0]
    asked = ["encoder", "encoder.layers.0", "encoder.layers.0.self_attn", "attention"]
    with torch.no_grad(), Taps(model, "encoder").keep(asked, "attention") as taps:
        taps(WORDS, padding)
        h, record = model.first(WORDS), taps.record
        found = first.self_attn(h, h, h, key_padding_mask=padding, average_attn_weights=False)[1]
        h = record["encoder"]
        behind = model.attention(h, h, h, average_attn_weights=False)[1]
    for name in ("encoder#0", *asked[1:3]):
        assert torch.allclose(record[f"{name}@attention"], found, atol=1e-6)
    assert torch.allclose(record["attention@attention"], behind, atol=1e-6)
    assert len(record) == 6  # the encoder's output, and the attention of its two layers


def test_functions_are_heard_in_the_layers_of_an_encoder_that_is_not_called_itself() -> None:
    class Loop(Padded):
        def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
            for layer in self.encoder.layers:
                x = layer(x, src_key_padding_mask=padding)
            return x + 1

    model = Loop().eval()
    with torch.no_grad(), Taps(model, "/add").keep("encoder.layers.*.self_attn", "attention") as taps:
        output = taps(WORDS, PADDING)
    assert torch.allclose(output, model(WORDS, PADDING), atol=1e-6)
    attention = [f"encoder.layers.{i}.self_attn@attention" for i in (0, 1)]
    assert list(taps.record) == [*attention, "/add"]
    assert torch.equal(taps.record["/add"], output)


def test_functions_are_heard_after_a_call_of_the_model_by_itself_has_failed() -> None:
    class Retrying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                raise ValueError("one at a time")
            try:
                self(torch.cat([x, x]))
            except ValueError:
                return x * 2
            return x

    with Taps(Retrying()).keep("/mul") as taps:
        assert torch.equal(taps(X[:1]), 2 * X[:1])
    assert torch.equal(taps.record["/mul"], 2 * X[:1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_edits_and_reductions_of_nested_tensors_fail_in_words() -> None:
    model = Padded().eval()
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    for what in ("output", "input"):
        refused = pytest.raises(InputError, match=r"^0.* is a nested tensor, which edits do not take")
        with torch.no_grad(), refused, Taps(nn.Sequential(nn.ReLU())).edit("0", lambda h: h, what) as taps:
            taps(nested)
    failed = pytest.raises(ValueError, match="my own")
    with (
        torch.no_grad(),
        failed as raised,
        Taps(model, "encoder.layers.1", reduce=raising(ValueError("my own"))) as taps,
    ):
        taps(WORDS, PADDING)
    assert raised.value.__notes__ == ["while reducing encoder.layers.1"]


def raising(error: Exception) -> Callable[[Tensor], Tensor]:
    def reduce(tensor: Tensor) -> Tensor:
        raise error

    return reduce


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", ["wrapper", "in place", "a layer"])
def test_compiled_models_are_seen_through(called: bool, how: str) -> None:
    expected = net()[0](X)
    torch.compiler.reset()
    model: nn.Module = net()
    if how == "wrapper":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    if called:
        model(X)
        inner = getattr(model, "_orig_mod", model)
        found: dict[str, Tensor] = {}
        handle = getattr(inner[0], "_orig_mod", inner[0]).register_forward_hook(
            lambda m, a, out: found.__setitem__("0", out.detach().cpu())
        )
        model(X)
        handle.remove()
        assert "0" not in found or not torch.equal(found["0"], expected)  # ignored, or rewritten by the ReLU
    with torch.no_grad(), Taps(model, ["0", "2"]) as taps:
        output = taps(X)
    assert torch.allclose(taps.record["0"], expected)
    assert torch.equal(taps.record["2"], output)
    assert model(X).shape == (3, 2)


@pytest.mark.parametrize("error", [AttributeError, KeyError])
def test_a_wrapper_that_has_the_attributes_of_a_compiled_module_is_a_model_of_its_own(error) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(2, 4)

        def __getattr__(self, name: str):
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
    expected = model.head(net()(X))
    assert torch.equal(output, expected)
    assert torch.equal(taps.record[""], expected)
    assert torch.equal(taps.record["head"], expected)
    assert torch.equal(taps.record["inner.2"], net()(X))


def _compiled_forward(model: nn.Module, **options: Any) -> nn.Module:
    model.forward = torch.compile(model.forward, **options)  # type: ignore[method-assign]
    return model


COMPILED_CALLERS: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "the model in a wrapper": torch.compile,
    "a function": lambda model, **options: torch.compile(lambda x: model(x), **options),
    "a model around it": lambda model, **options: torch.compile(nn.Sequential(model), **options),
    "its own forward": _compiled_forward,
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiled", COMPILED_CALLERS.values(), ids=COMPILED_CALLERS)
def test_compiled_code_that_calls_the_model_is_seen_through(
    compiled: Callable[..., Any], backend: str, fullgraph: bool, called: bool
) -> None:
    expected, plain = net()[0](X), net()(X)
    torch.compiler.reset()
    model = net()
    call = compiled(model, backend=backend, fullgraph=fullgraph)
    with torch.no_grad():
        if called:
            call(X)
        with Taps(model, "0") as taps:
            assert torch.allclose(call(X), plain)
            assert torch.allclose(taps.record["0"], expected)
        with Taps(model).edit("2", lambda h: h * 0):
            assert not call(X).any()
        assert torch.allclose(call(X), plain)


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

    def __init__(self, higher_order: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.inside, self.higher_order = nn.Linear(4, 4), nn.Linear(4, 4), higher_order

    def forward(self, x: Tensor) -> Tensor:
        return self.higher_order(self.inside, self.a(x))


HIGHER_ORDER: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "cond": lambda inside, h: torch.cond(h.sum() > -1e9, inside, inside, (h,)),
    "while_loop": lambda inside, h: torch.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, inside(h)), (torch.tensor(0), h)
    )[1],
    "compile": lambda inside, h: torch.compile(lambda h: inside(h).relu(), backend="eager", fullgraph=True)(h),
    "flex_attention": lambda inside, h: flex_attention(
        *[F.pad(h, (0, 12))[None, None]] * 3, score_mod=lambda score, b, head, i, j: score + i - j
    ),
}


@pytest.mark.parametrize("higher_order", HIGHER_ORDER.values(), ids=HIGHER_ORDER)
@pytest.mark.parametrize("grad", [False, True])
def test_code_that_the_compiler_traces_computes_the_same_inside_the_block(
    higher_order: Callable[[nn.Module, Tensor], Tensor], grad: bool
) -> None:
    torch.compiler.reset()
    model = Traced(higher_order)
    with torch.set_grad_enabled(grad and higher_order is not HIGHER_ORDER["flex_attention"]):  # it has none on a CPU
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
        if higher_order is not HIGHER_ORDER["flex_attention"]:
            assert taps.record.missing["inside"].startswith("layer 'inside' ran in code that PyTorch's compiler traces")


@pytest.mark.parametrize("layers", ["inside", "*", "inside/linear"])
def test_an_edit_of_a_layer_that_the_compiler_traces_is_an_error(layers: str) -> None:
    torch.compiler.reset()
    model = Traced(HIGHER_ORDER["cond"])
    with pytest.raises(LayertapError, match=r"the edit of inside(/linear)? never took effect: it ran in code"):  # noqa: SIM117
        with torch.no_grad(), Taps(model).edit(layers, scale(0)) as taps, torch.compiler.set_stance("default"):
            taps(X)
    with torch.no_grad(), Taps(model).edit("inside", scale(0)) as taps:  # where it is not traced
        assert torch.equal(taps(X), torch.zeros(3, 4))


@pytest.mark.parametrize("layers", ["inside/linear", "*/linear"])
def test_functions_inside_a_branch_that_are_not_seen_are_not_passed_over_in_silence(layers: str) -> None:
    model = Traced(HIGHER_ORDER["cond"])
    with torch.no_grad():
        with pytest.raises(LayertapError, match=r"the edit of inside/linear never took effect: it ran in code"):  # noqa: SIM117
            with Taps(model).edit(layers, scale(0)) as taps:
                taps(X)
        with Taps(model, "inside/linear") as taps:
            taps(X)
    assert taps.record.missing["inside/linear"].startswith("layer 'inside' ran in code that")


def test_gradients_of_a_branch_are_computed_where_the_block_lets_the_compiler_work() -> None:
    model = Traced(HIGHER_ORDER["cond"])
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
    with pytest.raises(InputError, match="the model is scripted"):
        Taps(scripted, "0")
    with pytest.raises(InputError, match="layer '0' is scripted"):
        Taps(nn.Sequential(scripted), "0")
    exported = torch.export.export(net(), (X,))
    with pytest.raises(InputError, match="expected an nn.Module, got"):
        Taps(exported, "0")
    with pytest.raises(InputError, match="the model is exported"):
        Taps(exported.module(), "0")


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, X[:, :4])])
def test_layers_beside_a_scripted_one_are_hooked_and_those_inside_it_refused(make) -> None:
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = make(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model, found = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 2)), []
    handle = model[2].register_forward_hook(lambda module, args, output: found.append((args[0], output)))
    model(x).square().sum().backward()
    handle.remove()
    weight = dict(model.named_parameters())["1.0.weight"]
    expected = weight.grad.clone()
    with Taps(model, ["0", "2"]).keep("2", "input").keep("2/linear").keep("1.0.weight", "grad") as taps:
        taps(x).square().sum().backward()
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


def test_replicated_models_are_refused() -> None:
    model = nn.DataParallel(net())
    with Taps(model, "0") as taps:
        taps(X)
    model.device_ids = [0, 1]
    with pytest.raises(InputError, match="replicated over 2 devices"):
        Taps(model, "0")
    with pytest.raises(InputError, match="layer '0' is replicated"):
        Taps(nn.Sequential(model), "0")
    with pytest.raises(InputError, match=r"layer '0\.module\.0', inside '0', is replicated over 2"):
        Taps(nn.Sequential(model), nn.Linear)
    taps = Taps(nn.Sequential(model, nn.Identity()), "1")
    model.device_ids = []
    with taps:
        assert torch.equal(taps(X), taps.record["1"])


# Numbers


def test_under_autocast_tensors_keep_the_type_they_have_inside() -> None:
    model = net()
    found = naive(model, ["0"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Taps(model, ["0", "2"]) as taps:
        taps(X)
        seen = found["0"]
        expected = model[0](X)
    assert taps.record["0"].dtype == torch.bfloat16
    assert torch.equal(taps.record["0"], expected)
    assert not torch.equal(seen, expected)  # rewritten by the ReLU


def test_quantised_tensors_are_kept_as_plain_numbers() -> None:
    class Quantise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)

    class Dequantise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.dequantize()

    model = nn.Sequential(Quantise(), Dequantise())
    found = naive(model, ["0"])
    with torch.no_grad(), Taps(model, "0") as taps:
        output = taps(X)
    assert found["0"].is_quantized
    assert not taps.record["0"].is_quantized
    assert torch.equal(taps.record["0"], output)


def test_sparse_tensors_are_kept_dense_and_nested_ones_refused() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nested.nested_tensor([x[0], x[1, :2]])

    with Taps(nn.Sequential(Sparse()), "0") as taps:
        taps(X)
    assert torch.equal(taps.record["0"], X)
    with (
        warnings.catch_warnings(),
        pytest.raises(InputError, match="0 is a nested tensor"),
        Taps(nn.Sequential(Nested()), "0") as taps,
    ):
        warnings.simplefilter("ignore")
        taps(X)


def test_parametrised_layers_and_their_parametrisations() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 2)), nn.ReLU(inplace=True)).eval()
    found = naive(model, ["0"])
    with torch.no_grad(), Taps(model, ["0", "0.parametrizations.weight"]) as taps:
        taps(X)
        expected = X @ model[0].weight.T + model[0].bias
        assert torch.allclose(taps.record["0"], expected)
        assert torch.allclose(taps.record["0.parametrizations.weight"], model[0].weight)
    assert found["0"].min() >= 0 > expected.min()


def test_lazy_layers_are_kept_from_their_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(inplace=True))
    found: dict[str, Tensor] = {}
    handle = model[0].register_forward_hook(lambda m, a, out: found.__setitem__("0", out.detach().cpu()))
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(X)
        handle.remove()
        assert not torch.equal(found["0"], taps.record["0"])
        assert torch.equal(taps.record["0"], nn.functional.linear(X, model[0].weight, model[0].bias))
    assert type(model[0]) is nn.Linear
    assert hooks_in(model) == 0


# Names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu_(self.first(x)))


def test_a_layer_under_two_names_answers_to_both() -> None:
    model = Tied()
    found = naive(model, ["first"])
    with torch.no_grad(), Taps(model, ["first", "second"]).edit("second", scale(1)) as taps:
        output = taps(X)
        seen = found["first"]
        first = model.first(X)
    for name in ("first", "second"):
        assert torch.equal(taps.record[f"{name}#0"], first)
        assert torch.equal(taps.record[f"{name}#1"], output)
    assert torch.equal(seen, output)  # the last call only


def test_edits_under_one_name_come_before_keeps_under_another() -> None:
    model = Tied()
    with torch.no_grad(), Taps(model, "first").edit("second", torch.zeros_like) as taps:
        taps(X)
    assert not taps.record["first#0"].any()


def test_layers_run_past_the_model_are_not_recorded_and_that_is_said() -> None:
    model = timm.create_model("test_vit").eval()
    images = torch.randn(1, 3, 160, 160)
    found = naive(model, ["blocks.1"])
    with torch.no_grad(), Taps(model, "blocks.1") as taps:
        taps(images)
        kept = taps.record["blocks.1"]
        model.forward_features(images * 2)
        assert torch.equal(taps.record["blocks.1"], kept)  # of the model's own call
        assert not torch.equal(found["blocks.1"], kept)
    with torch.no_grad(), Taps(model, "blocks.1") as taps:
        model.forward_features(images)
        with pytest.raises(
            LayertapError, match=r"model itself was not called .* other methods and single layers do not"
        ):
            _ = taps.record


# Several at once


def test_nested_taps_remove_only_their_own() -> None:
    model = net()
    with torch.no_grad(), Taps(model, ["0"]) as outer:
        with Taps(model, ["2"]).edit("0", scale(0)) as inner:
            inner(X)
            assert torch.equal(inner.record["2"], model[2].bias.expand(3, 2))
        outer(X)
        assert torch.allclose(outer.record["0"], model[0](X))
        with pytest.raises(LayertapError, match="already open in a"), outer:
            pass
        outer(X)
    assert hooks_in(model) == 0


def test_threads_keep_to_their_own_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    failures: list[str] = []
    barrier = threading.Barrier(2)
    overwritten: list[int] = []
    shared = naive(model, ["0"])

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad(), Taps(model, ["0"]).edit("0", scale(seed)) as taps:
            barrier.wait()
            for _ in range(200):
                x = torch.randn(2, 4, generator=generator)
                taps(x)
                expected = nn.functional.linear(x, model[0].weight, model[0].bias)
                if not torch.allclose(taps.record["0"], seed * expected, atol=1e-6):
                    failures.append(f"thread {seed}")
                overwritten.append(not torch.allclose(shared["0"], expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert any(overwritten)
    assert hooks_in(model) == 1  # the naive one


def test_a_copy_made_inside_takes_no_hook_along() -> None:
    model = net()
    calls: list[int] = []
    with torch.no_grad(), Taps(model, ["0"], reduce=lambda h: calls.append(1) or h).edit("2", scale(0)) as taps:
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        taps(X)
        assert calls == [1]
        expected = net()(X)
        assert torch.allclose(twin(X), expected)
        buffer.seek(0)
        assert torch.allclose(torch.load(buffer, weights_only=False)(X), expected)
    assert torch.allclose(twin(X), expected)
    assert calls == [1]


class Failing(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.error = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_that_fails_leaves_the_model_as_it_was(error: type[BaseException]) -> None:
    model = Failing(error).train()
    model.inner[0].requires_grad_(False)
    state = [(m.training, [p.requires_grad for p in m.parameters(recurse=False)]) for m in model.modules()]
    taps = Taps(model, ["inner.*", "inner/linear"]).keep("inner", "grad").keep("inner", "input")
    with pytest.raises(error), taps.keep("inner", "attention").edit("inner.0", scale(2)):
        taps(X)
    assert hooks_in(model) == 0
    assert state == [(m.training, [p.requires_grad for p in m.parameters(recurse=False)]) for m in model.modules()]
    with pytest.raises(LayertapError, match="did not finish"):
        _ = taps.record


def test_stopping_counts_each_layer_by_itself() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.turn = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            h = self.a(x)
            if self.turn > 1:
                h = self.a(h)  # once more than in the first forward
            return self.b(h)

    with torch.no_grad(), Taps(Turns(), ["a", "b"], stop=True) as taps:
        taps(X)
        taps(X)
        assert "b" in taps.record


def test_blocks_that_close_in_another_order_leave_no_trace() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.randn(1, 3, 8)
    first, second = Taps(model, "/*"), Taps(model, ["0.linear1", "*/linear"])
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second(x)
        assert "0.linear1" in second.record
        second.__exit__(None, None, None)
    assert hooks_in(model) == 0


def test_nested_taps_do_not_see_each_others_work() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 3

    model = Net()
    with torch.no_grad(), Taps(model, ["/mul"]) as outer, Taps(model).edit("linear", lambda h: h * 2) as inner:
        output = inner(X)
    assert list(outer.record) == ["/mul"]
    assert torch.equal(outer.record["/mul"], output)


@pytest.mark.parametrize("ask", [
    lambda taps: taps.edit("0.self_attn.out_proj", torch.zeros_like),
    lambda taps: taps.edit("0.linear1", torch.zeros_like, call=3),
    lambda taps: taps.edit("0.linear1:7", torch.zeros_like),
    lambda taps: taps.edit("0/erf", torch.zeros_like),
])  # fmt: skip
def test_an_edit_that_never_takes_effect_is_told(ask) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    with (
        torch.no_grad(),
        pytest.raises(LayertapError, match="the edit of 0.* never took effect"),
        ask(Taps(model)) as taps,
    ):
        taps(torch.randn(1, 3, 8))


def test_an_edit_that_took_effect_in_an_earlier_block_alone_is_told() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if len(x) == 1 else self.other(x)

    model = Branching().eval()
    taps = Taps(model).edit("one", torch.zeros_like)
    with taps:
        assert not model(torch.ones(1, 2)).any()
    with pytest.raises(LayertapError, match="the edit of one never took effect"), taps:
        model(torch.ones(2, 2))


def test_an_edit_of_a_call_that_never_happens_is_told_beside_another_edit_of_the_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    taps = Taps(model).edit("0", torch.zeros_like).edit("0", torch.zeros_like, call=1)
    with pytest.raises(LayertapError, match="the edit of 0 never took effect"), taps:
        model(torch.ones(1, 2))


def test_calls_are_numbered_right_after_an_error_that_the_model_catches() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.item() < 0:
                raise ValueError
            return x + 1

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Bad()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.bad(-x)
            except ValueError:
                x = x * 5
            return self.bad(x)

    with torch.no_grad(), Taps(Net(), ["bad", "/*"]).keep("bad", "input") as taps:
        taps(torch.ones(1))
    assert {name: value.item() for name, value in taps.record.items()} == {
        "bad#0:0@input": -1, "/neg": -1, "/mul": 5, "bad#1:0@input": 5, "bad#1": 6,
    }  # fmt: skip


def test_a_layer_that_calls_itself_has_its_inputs_and_outputs_paired() -> None:
    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return x + 1 if depth == 0 else self(x * 10, depth - 1) + 1

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r = Recursive()

        def forward(self, x: Tensor) -> Tensor:
            return self.r(x, 2)

    with torch.no_grad(), Taps(Net(), "r").keep("r", "input") as taps:
        taps(torch.ones(1))
    pairs = [(taps.record[f"r#{i}:0@input"].item(), taps.record[f"r#{i}"].item()) for i in range(3)]
    assert pairs == [(1, 103), (10, 102), (100, 101)]


def test_keeping_attention_draws_no_random_numbers() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).train()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.drop = attention, nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.attn(x, x, x, need_weights=False)[0])

    model, x = Net(), torch.randn(2, 5, 4)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    with Taps(model).keep("attn", "attention") as taps:
        assert torch.equal(taps(x), plain)
    assert torch.allclose(taps.record["attn@attention"].sum(-1), torch.ones(2, 2, 5))


def test_values_inside_torch_func_are_refused() -> None:
    model = net()
    with pytest.raises(InputError, match="inside torch.func"), Taps(model, "0") as taps:
        torch.func.grad(lambda x: taps(x).sum())(X)
    assert hooks_in(model) == 0


def test_infinite_half_precision_values_are_told() -> None:
    model = nn.Sequential(nn.Identity())
    with (
        pytest.warns(RuntimeWarning, match="0 has infinite values: the largest float16 is 65504"),
        Taps(model, "0") as taps,
    ):
        taps(torch.tensor([70000.0]).half())


def test_subclasses_are_kept_as_plain_tensors_and_wrong_reductions_named() -> None:
    class Mine(Tensor):
        pass

    model = nn.Sequential(nn.Identity())
    with Taps(model, "0") as taps:
        taps(torch.ones(2).as_subclass(Mine))
        assert type(taps.record["0"]) is Tensor
    with (
        pytest.raises(InputError, match="the reduction of 0 returned tuple"),
        Taps(model, "0", reduce=lambda h: (h, h)) as taps,
    ):
        taps(torch.ones(2))


def test_a_model_saved_inside_a_block_takes_hooks_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, outputs = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), []
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a new process
    with Taps(model, "0") as taps:
        taps(x)
        saved = pickle.dumps(model)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    loaded = pickle.loads(saved)
    loaded[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(outputs[0], model(x))


@pytest.mark.slow
def test_a_model_saved_inside_a_block_is_loaded_without_layertap(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with Taps(model, "**").edit("0", lambda h: 2 * h).keep("1", "input") as taps:
        taps(x)
        torch.save(model, tmp_path / "model.pt")
    torch.save((x, model(x)), tmp_path / "expected.pt")
    script = f"""
import sys
sys.modules["extract"] = sys.modules["layertap"] = None
import torch
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
assert torch.equal(torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)(x), expected)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
