"""Replicated, quantised, sparse, shared and threaded models, copies of models, and blocks inside blocks."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle

from extract import InputError, LayertapError, Taps
from extract.taps.edits import scale
from tests.extract.taps.networks import Net, hooks_in, linear

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("no_trace_of_taps")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).eval()


def test_layers_of_wrapped_models_are_named_without_the_wrapper_and_replicated_ones_refused() -> None:
    model = nn.DataParallel(net())
    with torch.no_grad(), Taps(model, "2") as taps:
        assert torch.equal(taps(X), taps.record["2"])
    replicated = nn.Sequential(model, nn.Identity())
    model.device_ids = [0, 1]
    for refused, layers, message in (
        (model, "0", "replicated over 2 devices, and each copy sees a part of the batch"),
        (nn.Sequential(model), "0", "layer '0' is replicated"),
        (nn.Sequential(model), nn.Linear, r"layer '0\.module\.0', inside '0', is replicated over 2"),
    ):
        with pytest.raises(InputError, match=message):
            Taps(refused, layers)
    taps = Taps(replicated, "1")
    model.device_ids = []
    with taps:
        assert torch.equal(taps(X), taps.record["1"])


# Numbers


def test_under_autocast_tensors_keep_the_type_they_have_inside() -> None:
    model = net()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Taps(model, ["0", "2"]) as taps:
        taps(X)
        expected = model[0](X)
    assert taps.record["0"].dtype == torch.bfloat16
    assert torch.equal(taps.record["0"], expected)


def test_quantised_sparse_and_subclassed_tensors_are_kept_as_plain_ones() -> None:
    class Mine(Tensor):
        pass

    quantised = Net(lambda self, x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
    for layer, plain in (
        (quantised, quantised(X).dequantize()),
        (Net(lambda self, x: x.to_sparse()), X),
        (Net(lambda self, x: x.as_subclass(Mine)), X),
    ):
        with torch.no_grad(), Taps(nn.Sequential(layer), "0") as taps:
            taps(X)
        assert type(taps.record["0"]) is Tensor
        assert not taps.record["0"].is_quantized
        assert torch.equal(taps.record["0"], plain)


def test_nested_tensors_and_reductions_to_tuples_are_refused() -> None:
    nested = Net(lambda self, x: torch.nested.nested_tensor([x[0], x[1, :2]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match="0 is a nested tensor"), Taps(nn.Sequential(nested), "0") as taps:
            taps(X)
    refused = pytest.raises(InputError, match="the reduction of 0 returned tuple")
    with refused, Taps(net(), "0", reduce=lambda h: (h, h)) as taps:  # type: ignore[arg-type]
        taps(X)


def test_parametrised_layers_and_their_parametrisations() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 2)), nn.ReLU(inplace=True)).eval()
    with torch.no_grad(), Taps(model, ["0", "0.parametrizations.weight"]) as taps:
        taps(X)
        assert torch.allclose(taps.record["0"], X @ model[0].weight.T + model[0].bias)
        assert torch.allclose(taps.record["0.parametrizations.weight"], model[0].weight)


def test_lazy_layers_are_kept_from_their_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(inplace=True))
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(X)
        assert torch.equal(taps.record["0"], nn.functional.linear(X, model[0].weight, model[0].bias))
    assert type(model[0]) is nn.Linear
    assert hooks_in(model) == 0


def test_infinite_half_precision_values_are_told() -> None:
    told = pytest.warns(RuntimeWarning, match="0 has infinite values: the largest float16 is 65504")
    with told, Taps(nn.Sequential(nn.Identity()), "0") as taps:
        taps(torch.tensor([70000.0]).half())


def test_values_inside_torch_func_are_refused() -> None:
    model = net()
    with pytest.raises(InputError, match="inside torch.func"), Taps(model, "0") as taps:
        torch.func.grad(lambda x: taps(x).sum())(X)
    assert hooks_in(model) == 0


# Names and numbers of calls


def test_a_layer_under_two_names_answers_to_both_and_is_edited_before_it_is_kept() -> None:
    layer = linear()
    model = Net(lambda self, x: self.second(torch.relu_(self.first(x))), first=layer, second=layer)
    with torch.no_grad(), Taps(model, ["first", "second"]).edit("second", scale(1)) as taps:
        output = taps(X)
        first = layer(X)
    for name in ("first", "second"):
        assert torch.equal(taps.record[f"{name}#0"], first)
        assert torch.equal(taps.record[f"{name}#1"], output)
    with torch.no_grad(), Taps(model, "first").edit("second", torch.zeros_like) as taps:
        taps(X)
    assert not taps.record["first#0"].any()


def test_layers_run_past_the_model_are_not_recorded_and_that_is_said() -> None:
    class Features(nn.Sequential):
        def forward_features(self, x: Tensor) -> Tensor:
            return self[0](x)

    model = Features(linear(), nn.Linear(4, 2))
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(X)
        kept = taps.record["0"]
        model.forward_features(X * 2)
        assert torch.equal(taps.record["0"], kept)  # of the model's own call
    not_called = pytest.raises(
        LayertapError, match=r"model itself was not called .* other methods and single layers do not"
    )
    with torch.no_grad(), Taps(model, "0") as taps:
        model.forward_features(X)
        with not_called:
            _ = taps.record


def test_calls_are_numbered_right_after_an_error_that_the_model_catches() -> None:
    def bad(layer: nn.Module, x: Tensor) -> Tensor:
        if x.item() < 0:
            raise ValueError
        return x + 1

    def forward(model: Net, x: Tensor) -> Tensor:
        try:
            model.bad(-x)
        except ValueError:
            x = x * 5
        return model.bad(x)

    with torch.no_grad(), Taps(Net(forward, bad=Net(bad)), ["bad", "/*"]).keep("bad", "input") as taps:
        taps(torch.ones(1))
    assert {name: value.item() for name, value in taps.record.items()} == {
        "bad#0:0@input": -1, "/neg": -1, "/mul": 5, "bad#1:0@input": 5, "bad#1": 6,
    }  # fmt: skip


def test_a_layer_that_calls_itself_has_its_inputs_and_outputs_paired() -> None:
    recursive = Net(lambda self, x, depth: x + 1 if depth == 0 else self(x * 10, depth - 1) + 1)
    with torch.no_grad(), Taps(Net(lambda self, x: self.r(x, 2), r=recursive), "r").keep("r", "input") as taps:
        taps(torch.ones(1))
    pairs = [(taps.record[f"r#{i}:0@input"].item(), taps.record[f"r#{i}"].item()) for i in range(3)]
    assert pairs == [(1, 103), (10, 102), (100, 101)]


def test_keeping_attention_draws_no_random_numbers() -> None:
    attention, x = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).train(), torch.randn(2, 5, 4)
    model = Net(
        lambda self, x: self.drop(self.attn(x, x, x, need_weights=False)[0]), attn=attention, drop=nn.Dropout(0.5)
    )
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    with Taps(model).keep("attn", "attention") as taps:
        assert torch.equal(taps(x), plain)
    assert torch.allclose(taps.record["attn@attention"].sum(-1), torch.ones(2, 2, 5))


def test_stopping_counts_each_layer_by_itself() -> None:
    def forward(model: Net, x: Tensor) -> Tensor:
        h = model.a(x)
        if model.calls:  # once more than in the first forward
            h = model.a(h)
        model.calls.append(1)
        return model.b(h)

    with torch.no_grad(), Taps(Net(forward, a=linear(), b=linear(), calls=[]), ["a", "b"], stop=True) as taps:
        taps(X)
        taps(X)
        assert "b" in taps.record


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


def test_nested_taps_do_not_see_each_others_work() -> None:
    model = Net(lambda self, x: self.linear(x) * 3, linear=linear())
    with torch.no_grad(), Taps(model, ["/mul"]) as outer, Taps(model).edit("linear", lambda h: h * 2) as inner:
        output = inner(X)
    assert list(outer.record) == ["/mul"]
    assert torch.equal(outer.record["/mul"], output)


def test_blocks_that_close_in_another_order_leave_no_trace() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    first, second = Taps(model, "/*"), Taps(model, ["0.linear1", "*/linear"])
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second(torch.randn(1, 3, 8))
        assert "0.linear1" in second.record
        second.__exit__(None, None, None)
    assert hooks_in(model) == 0


def test_threads_keep_to_their_own_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    failures: list[str] = []
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad(), Taps(model, ["0"]).edit("0", scale(seed)) as taps:
            barrier.wait()
            for _ in range(200):
                x = torch.randn(2, 4, generator=generator)
                taps(x)
                expected = seed * nn.functional.linear(x, model[0].weight, model[0].bias)
                if not torch.allclose(taps.record["0"], expected, atol=1e-6):
                    failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert hooks_in(model) == 0


# Copies, and blocks that end by an error


def test_a_copy_made_inside_takes_no_hook_along() -> None:
    model = net()
    calls: list[int] = []

    def count(h: Tensor) -> Tensor:
        calls.append(1)
        return h

    with torch.no_grad(), Taps(model, ["0"], reduce=count).edit("2", scale(0)) as taps:
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


def test_a_model_saved_inside_a_block_is_loaded_without_layertap_and_takes_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, outputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a new process
    with Taps(model, "**").edit("0", lambda h: 2 * h).keep("1", "input") as taps:
        taps(X)
        saved = pickle.dumps(model)
    assert b"extract" not in saved  # no class of this project
    assert b"layertap" not in saved
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    loaded = pickle.loads(saved)
    loaded[1].register_forward_hook(lambda module, args, output: outputs.append(output))
    assert torch.equal(loaded(X), model(X))
    assert torch.equal(outputs[0], model(X))


def raising(error: type[BaseException]) -> Callable[[Net, Tensor], Tensor]:
    def forward(model: Net, x: Tensor) -> Tensor:
        y = model.inner(x)
        if model.fails:
            raise error
        return y

    return forward


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_that_fails_leaves_the_model_as_it_was_and_no_record(error: type[BaseException]) -> None:
    model = Net(raising(error), inner=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), fails=True).train()
    model.inner[0].requires_grad_(False)
    state = [(m.training, [p.requires_grad for p in m.parameters(recurse=False)]) for m in model.modules()]
    taps = Taps(model, ["inner.*", "inner/linear"]).keep("inner", "grad").keep("inner", "input")
    with pytest.raises(error), taps.keep("inner", "attention").edit("inner.0", scale(2)):
        taps(X)
    assert hooks_in(model) == 0
    assert state == [(m.training, [p.requires_grad for p in m.parameters(recurse=False)]) for m in model.modules()]
    with pytest.raises(LayertapError, match="did not finish"):
        _ = taps.record


def test_a_forward_after_an_interrupted_one_is_not_taken_for_a_part_of_it() -> None:
    model = Net(raising(KeyboardInterrupt), inner=linear(), fails=True)
    with torch.no_grad(), Taps(model, "inner") as taps:
        with pytest.raises(KeyboardInterrupt):
            taps(torch.zeros(1, 4))
        model.fails = False
        taps(X)
        assert list(taps.record) == ["inner"]
        assert torch.equal(taps.record["inner"], model.inner(X))
