"""Where a naive hook goes wrong and says nothing, and Taps do not; more of it in `test_taps` and `test_wrappers`."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from extract import InputError, LayertapError, Taps
from extract.taps.batch_axis import BatchAxis
from tests.extract.taps.batch_axes import find_batch_axis

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def naive(model: nn.Module, *names: str) -> dict[str, Tensor]:
    """What tutorials write: the last output of each layer, `detach`ed and moved to the CPU."""
    found: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: found.__setitem__(name, out.detach().cpu())
        )
    return found


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)  # (T, B, C)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0]


def test_rows_of_a_sequence_first_layer_are_the_images_though_its_first_axis_is_not() -> None:
    model, images = SequenceFirst().eval(), torch.randn(3, 4, 2, 2)
    found: list[Tensor] = []
    model.attention.register_forward_hook(lambda m, args, out: found.append(out[0].detach().clone()))
    with torch.no_grad():
        output = model(images)
        rows = find_batch_axis(model, images, ["attention"])
    assert len(found[0]) == 4  # four "rows" for three images: written to disk, a mixture of them
    assert rows == {"attention:0": BatchAxis(axis=1)}
    assert torch.equal(rows["attention:0"].by_image(output)[2], output[:, 2])


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
        with pytest.raises(LayertapError, match="did not run"):
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
