"""Copies that the model continues with are what the originals are: their attributes, and memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from extract import Taps

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def same(h: Tensor) -> Tensor:
    return h


class Net(nn.Module):
    """A linear layer, and what is done with its output and a layer `f`."""

    def __init__(self, f: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.f, self.use = nn.Linear(4, 4), f, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.f, self.linear(x))


class Merge(nn.Module):
    """As in fastai."""

    def forward(self, x: Any) -> Tensor:
        return x + x.orig


def merged(f: nn.Module, h: Any) -> Tensor:
    h.orig = h * 2
    return f(h)


@pytest.mark.parametrize(("what", "verb"), [("output", "edit"), ("input", "edit"), ("grad_input", "keep")])
def test_attributes_of_tensors_are_those_of_what_stands_in_for_them(what: Any, verb: str) -> None:
    model = Net(Merge(), merged)
    taps = Taps(model).keep("f", what) if verb == "keep" else Taps(model).edit("f", same, what)
    with taps:
        y = taps(X)
    assert torch.equal(y, 3 * model.linear(X))


def test_attributes_reach_the_layer_behind_one_that_is_watched() -> None:
    def use(f: nn.Module, h: Any) -> Tensor:
        h.mask = (h > 0).float()
        v = f(h)
        return v * v.mask

    model = Net(nn.Dropout().eval(), use)
    h = model.linear(X)
    for taps in (Taps(model).keep("f", "grad"), Taps(model).edit("f", same)):
        with taps:
            assert torch.equal(taps(X), h * (h > 0))


@pytest.mark.parametrize("what", ["output", "input"])
def test_an_edit_in_place_of_frames_that_overlap_leaves_their_neighbours(what: Any) -> None:
    class Frames(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unfold(-1, 4, 2)

    def edit(h: Tensor) -> Tensor:
        h[..., 1] = 0
        return h

    model, x = nn.Sequential(Frames(), nn.Identity()), torch.arange(1.0, 9.0)[None]
    with torch.no_grad(), Taps(model).edit("0" if what == "output" else "1", edit, what) as taps:
        assert taps(x).tolist() == [[[1, 0, 3, 4], [3, 0, 5, 6], [5, 0, 7, 8]]]
