"""Thirteen things a hook library must get right: each as the naive way gets it wrong, and as Taps get it right."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from extract import InputError, LayertapError, Taps
from extract.taps.batch_axis import BatchAxis, find_batch_axis
from extract.taps.layer_names import named_layers

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def naive(model: nn.Module, *names: str) -> dict[str, Tensor]:
    """What tutorials write: the last output of each layer, `detach`ed and moved to the CPU."""
    found: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: found.__setitem__(name, out.detach().cpu())
        )
    return found


def test_1_copy_at_hook_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    found = naive(model, "0")
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(X)
        truth = F.linear(X, model[0].weight, model[0].bias)
    assert not torch.equal(found["0"], truth)
    assert torch.equal(taps.record["0"], truth)


def test_2_every_call_counts() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    found = naive(model, "1")
    with torch.no_grad(), Taps(model, "1") as taps:
        taps(X)
        first = F.relu(F.linear(X, model[0].weight, model[0].bias))
    assert not torch.equal(found["1"], first)  # only the last call is left
    assert torch.equal(taps.record["1#0"], first)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x if skip else self.inner(x)


def test_3_a_fresh_record_for_each_forward() -> None:
    model = Skips()
    found = naive(model, "inner")
    with torch.no_grad(), Taps(model, "inner") as taps:
        taps(X)
        taps(X * 2, skip=True)
        assert "inner" in found  # of the batch before
        with pytest.raises(LayertapError, match="did not run in this forward"):
            taps.record["inner"]


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)  # (T, B, C)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0]


def test_4_rows_are_images_proved() -> None:
    model, images = SequenceFirst().eval(), torch.randn(3, 4, 2, 2)
    found: list[Tensor] = []
    model.attention.register_forward_hook(lambda m, args, out: found.append(out[0].detach().clone()))
    with torch.no_grad():
        output = model(images)
        rows = find_batch_axis(model, images, ["attention"])
    assert len(found[0]) == 4  # four "rows" for three images: written to disk, a mixture of them
    assert rows == {"attention:0": BatchAxis(axis=1)}
    assert torch.equal(rows["attention:0"].by_image(output)[2], output[:, 2])


def test_5_structured_values() -> None:
    model = nn.Sequential(nn.LSTM(4, 2, batch_first=True))
    handle = model[0].register_forward_hook(lambda m, args, out: out.detach().cpu())
    with pytest.raises(AttributeError):
        model(X[None])
    handle.remove()
    with torch.no_grad(), Taps(model, "0") as taps:
        output, (h, c) = taps(X[None])
    assert [*taps.record] == ["0:0", "0:1.0", "0:1.1"]
    assert all(torch.equal(taps.record[name], value) for name, value in zip(taps.record, (output, h, c), strict=True))


def test_6_code_that_goes_past_the_hooks() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2, batch_first=True)).eval()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    net = Net()
    found = naive(net, "attention.out_proj")
    with torch.no_grad(), Taps(net, ["attention.out_proj"]) as taps:
        taps(X[None])
        assert not found  # nothing, and nobody says why
        with pytest.raises(
            LayertapError, match="never runs: nn.MultiheadAttention uses its weights without calling it"
        ):
            taps.record["attention.out_proj"]


def test_7_gradients_by_tensor_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    bare = copy.deepcopy(model)
    bare[0].register_full_backward_hook(lambda m, grad_in, grad_out: None)
    with pytest.raises(RuntimeError, match="modified inplace"):
        bare(X)
    with Taps(model).keep("0", "grad") as taps:
        taps(X).sum().backward()
    assert torch.equal(taps.record["0@grad"], (model[0](X) > 0).float())


def test_8_only_our_own_handles_are_removed() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    bare = copy.deepcopy(model)
    bare[0]._forward_hooks.clear()  # how some libraries clean up
    assert not bare[0]._forward_hooks
    with pytest.raises(KeyboardInterrupt), Taps(model, "0"):
        raise KeyboardInterrupt
    model(X)
    assert calls == [1]


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.finished = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x)
        except Exception:
            x = x * 0
        x = self.second(x)
        self.finished += 1
        return x


def test_9_early_stop() -> None:
    class Enough(Exception):  # noqa: N818
        pass

    def stop(*_: object) -> None:
        raise Enough

    bare = Catches()
    bare.first.register_forward_hook(stop)
    bare(X)
    assert bare.finished == 1  # swallowed: the model went on, with other values
    model = Catches()
    with torch.no_grad(), Taps(model, "first", stop=True) as taps:
        for _ in range(3):
            taps(X)
        assert torch.equal(taps.record["first"], model.first(X))
    assert model.finished == 1  # only the forward that learns


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_10_recompute_is_ignored() -> None:
    model, calls = Checkpointed(), []
    model.inner[0].register_forward_hook(lambda *_: calls.append(1))
    with Taps(model, "inner.0") as taps:
        taps(X).sum().backward()
    assert len(calls) == 2
    assert [*taps.record] == ["inner.0"]


def test_11_the_model_comes_out_as_it_went_in() -> None:
    def naive_shapes(model: nn.Module) -> None:  # as summaries of models do
        model.train()
        model(X)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad(), Taps(model, "*") as taps:
        taps(X)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model.training
    naive_shapes(model)
    assert not torch.equal(model[1].running_mean, state["1.running_mean"])


def test_12_kept_tensors_are_plain_and_own_their_memory() -> None:
    model = nn.Sequential(nn.Linear(4, 4000))
    found: list[Tensor] = []
    model[0].register_forward_hook(lambda m, args, out: found.append(out.detach().cpu()[:, :1]))
    with torch.inference_mode(), Taps(model, "0", reduce=lambda h: h[:, :1]) as taps:
        taps(X)
    kept, weight = taps.record["0"], torch.ones(1, requires_grad=True)
    assert found[0].untyped_storage().nbytes() == 3 * 4000 * 4  # one column holds all of them
    assert kept.untyped_storage().nbytes() == 3 * 4
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (found[0] @ weight).sum().backward()
    (kept @ weight).sum().backward()
    assert torch.equal(weight.grad, kept.sum(0))


def test_13_layers_are_reachable_by_every_name() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert "2" not in dict(model.named_modules())  # the second name is left out
    with torch.no_grad(), Taps(model, "[02]") as taps:
        taps(X)
    assert [*named_layers(model)] == ["0", "1", "2"]
    assert torch.equal(taps.record["0#1"], taps.record["2#1"])
    with pytest.raises(LayertapError, match="layer 'relu' not found"):
        Taps(model, "relu")


# Wrappers that have no naive side elsewhere


def test_a_naive_hook_goes_along_with_a_copy() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4)), []
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    twin = copy.deepcopy(model)
    handle.remove()
    twin(X)
    assert calls == [1]  # for good: nobody holds its handle
    with Taps(model, "0") as taps:
        twin = copy.deepcopy(model)
        taps(X)
        kept = taps.record["0"]
        twin(X * 2)
        assert torch.equal(taps.record["0"], kept)


def test_a_naive_hook_on_a_replaced_layer_answers_with_old_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    found = naive(model, "0")
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(X)
        old = found["0"]
        model[0] = nn.Linear(4, 2)
        taps(X)
        assert found["0"] is old
        with pytest.raises(LayertapError, match="was replaced"):
            taps.record["0"]


def test_a_naive_hook_sees_a_replica_as_the_whole_batch() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4)))
    replica = copy.copy(model.module)  # as `nn.parallel.replicate` makes them: with the hooks, for a part of the batch
    found = naive(model.module, "0")
    replica(X[:1])
    assert len(found["0"]) == 1
    model.device_ids = [0, 1]
    with pytest.raises(InputError, match="each copy sees a part of the batch"):
        Taps(model, "0")


def test_a_finished_forward_can_be_freed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with Taps(model).keep("*", "grad") as taps:
        output = taps(X)
        output.sum().backward()
        node = weakref.ref(output)
        del output
        gc.collect()
        assert node() is None
        assert "0@grad" in taps.record
