"""Copies that the model continues with are what the originals are: their attributes, and memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from extract import Taps
from tests.extract.taps.networks import Net, linear, same

X = torch.linspace(-1, 1, 12).reshape(3, 4)


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
