"""Encoders that compute in fused code, and padded batches as nested tensors: as they are without `Taps`, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from extract import InputError, Taps, UnknownNameError
from tests.extract.taps.networks import Net, hooks_in, same

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

pytestmark = [
    pytest.mark.usefixtures("no_trace_of_taps"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

Ask = Callable[[Taps], Taps]


def test_attention_projections_never_run_and_that_is_said() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0).eval()
    wrapped, x = nn.Sequential(model), torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = wrapped(x)
        with Taps(wrapped, ["0.linear1", "0.self_attn", "0.self_attn.out_proj"]) as taps:
            output = taps(x)
        attended = model.self_attn(x, x, x, need_weights=False)[0]
        expected = model.linear1(model.norm1(x + attended))
    assert torch.allclose(output, plain, atol=1e-5)
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


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("ask", [
    lambda taps: taps.keep("head"),
    lambda taps: taps.keep(["head", "first", "encoder", "head.weight", "head.bias"], "grad"),
    lambda taps: taps.edit("head", same),
    lambda taps: taps.keep("encoder.layers.1.linear1", reduce=to_padded),
])  # fmt: skip
def test_padded_places_are_zero_behind_an_encoder_in_which_no_functions_are_watched(ask: Ask, gradients: bool) -> None:
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


def test_other_models_compute_as_ever_while_taps_are_open() -> None:
    other, results = Padded().eval(), []

    def compute() -> None:
        with torch.no_grad():
            results.append(other(WORDS, PADDING))

    compute()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    taps = Taps(nn.Sequential(net, nn.TransformerEncoderLayer(2, 2, 4, batch_first=True).eval()), stop=True)
    with taps.keep("0.0", "attention").keep(["/*", "0.0"]):
        compute()
        for _ in range(2):  # the second one stops after the first layer
            taps(X[None])
            compute()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    failing = Taps(nn.Sequential(net, nn.Linear(3, 3))).keep("/*")
    with failing:
        with pytest.raises(RuntimeError, match="shapes"):
            failing(X)
        compute()
    assert len(results) == 6
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("ask", [
    lambda taps: taps.keep("/tanh"),
    lambda taps: taps.edit("first", same),
    lambda taps: taps.edit("encoder", same, "input"),
    lambda taps: taps.keep("attention", "attention"),
    lambda taps: taps.keep("encoder.layers.1/*"),
    lambda taps: taps.edit("encoder.layers.0/relu", same),
    lambda taps: taps.keep("encoder.layers.1.self_attn", "attention"),
    lambda taps: taps.keep("", "attention"),
])  # fmt: skip
def test_functions_and_edits_before_the_end_of_an_encoder_that_leaves_zeros_are_refused(ask: Ask) -> None:
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
def test_attention_is_found_where_fused_code_would_hide_it(padded: bool) -> None:
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
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("one at a time")
        try:
            model(torch.cat([x, x]))
        except ValueError:
            return x * 2
        return x

    with Taps(Net(forward)).keep("/mul") as taps:
        assert torch.equal(taps(X[:1]), 2 * X[:1])
    assert torch.equal(taps.record["/mul"], 2 * X[:1])


def test_edits_and_reductions_of_nested_tensors_fail_in_words() -> None:
    model = Padded().eval()
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    for what in ("output", "input"):
        refused = pytest.raises(InputError, match=r"^0.* is a nested tensor, which edits do not take")
        with torch.no_grad(), refused, Taps(nn.Sequential(nn.ReLU())).edit("0", same, what) as taps:
            taps(nested)

    def reduce(tensor: Tensor) -> Tensor:
        raise ValueError("my own")

    failed = pytest.raises(ValueError, match="my own")
    with torch.no_grad(), failed as raised, Taps(model, "encoder.layers.1", reduce=reduce) as taps:
        taps(WORDS, PADDING)
    assert raised.value.__notes__ == ["while reducing encoder.layers.1"]
