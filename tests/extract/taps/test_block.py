"""The user's own functions in a block of `Taps`: what they call is no call of the model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from extract import Record, Taps
from tests.extract.taps.networks import Net


def residual() -> Net:
    def forward(model: Net, x: Tensor) -> Any:
        for block in model.blocks:
            x = x + torch.tanh(block(x))
        return model.head(x)

    return Net(forward, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), head=nn.Linear(4, 2))


@pytest.mark.parametrize("stop", [False, True])
def test_layers_that_a_reduction_calls_are_no_calls_of_the_model(stop: bool) -> None:
    model, x, found = residual(), torch.randn(3, 4), []
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        expected = model(x)
        handle.remove()
        with (
            Taps(model, ["head"], stop=stop)
            .keep("blocks.0", reduce=lambda h: model.head(h))
            .keep("blocks.1", reduce=lambda h: model.blocks[1](h))  # its own layer
            .keep("blocks.2", reduce=lambda h: model(h))
        ) as taps:
            for _ in range(2):
                taps(x)
        assert list(taps.record) == ["blocks.0", "blocks.1", "blocks.2", "head"]
        assert torch.equal(taps.record["head"], expected)
        assert torch.equal(taps.record["blocks.1"], model.blocks[1](found[0]))


def test_edits_miss_the_layers_that_the_users_own_functions_call() -> None:
    model, x, records = residual(), torch.randn(3, 4), []

    def with_layers(h: Tensor) -> Tensor:
        model(torch.ones(1, 4)), model.head(h)
        return h * 1

    def on_record(record: Record) -> None:
        assert model(x).any()
        assert model.head(x).any()
        records.append(record)

    taps = Taps(model, on_record=on_record).edit("head", lambda h: h * 0, call=0).keep("head")
    with taps.edit("blocks.*", with_layers).edit("blocks.1", with_layers, "grad").edit("/tanh", with_layers):
        for _ in range(2):
            output = taps(x)
            assert not output.any()
            assert list(taps.record) == ["head"]
            output.sum().backward()
    assert len(records) == 2


def test_layers_that_an_edit_of_a_gradient_calls_are_not_edited() -> None:
    model, x, seen = residual(), torch.randn(3, 4), []

    def look(gradient: Tensor) -> Tensor:
        seen.append(model.head(gradient))
        return gradient

    with Taps(model).edit("head", lambda h: h * 3).edit("blocks.2", look, "grad").keep("blocks.2", "grad") as taps:
        taps(x).sum().backward()
    assert torch.equal(seen[0], model.head(taps.record["blocks.2@grad"]))


def test_taps_inside_an_edit_record_what_the_edit_calls() -> None:
    model, other, x = residual(), residual(), torch.randn(3, 4)
    inner = Taps(other, "blocks.0")

    def edit(h: Tensor) -> Tensor:
        inner(x)
        return h + inner.record["blocks.0"]

    with torch.no_grad(), inner, Taps(model).edit("blocks.2", edit).keep("blocks.2") as taps:
        taps(x)
        plain = x
        for block in model.blocks[:2]:
            plain = plain + torch.tanh(block(plain))
        assert torch.equal(taps.record["blocks.2"], model.blocks[2](plain) + other.blocks[0](x))


def test_a_call_in_another_thread_is_not_stopped_and_returns_the_output() -> None:
    model, x, outputs = residual(), torch.randn(3, 4), []
    with torch.no_grad(), Taps(model, "blocks.0", stop=True) as taps:
        thread = threading.Thread(target=lambda: outputs.append(taps(x)))
        thread.start()
        thread.join()
        assert taps(x) is None
    assert torch.equal(outputs[0], model(x))
