"""Values of every kind of container are replaced, and the container stays what it was."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from extract import Taps
from extract.taps.nested import map_tensors, tensors_in


class Pair(tuple):
    """A tuple whose constructor takes two arguments, with an attribute beside its items."""

    def __new__(cls, left: Tensor, right: Tensor):
        return super().__new__(cls, (left, right))


class Several(tuple):
    """A tuple whose constructor takes its items."""

    def __new__(cls, *items: Tensor):
        return super().__new__(cls, items)


class Items(list):
    pass


@dataclasses.dataclass(frozen=True)
class Fields:
    left: Tensor
    right: Any


Named = collections.namedtuple("Named", "left right")


def test_containers_keep_their_type_and_attributes() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    pair, items = Pair(x, y), Items([x, y])
    pair.note = items.note = "kept"
    values = [
        pair, items, Several(x, y), Named(x, y), Fields(x, y), MappingProxyType({"left": x, "right": y}),
        collections.OrderedDict(left=x, right=y), (x, y), [x, y], {"left": x, "right": y},
    ]  # fmt: skip
    for value in values:
        mapped: Any = map_tensors(value, lambda path, tensor: tensor + 2)
        assert type(mapped) is type(value)
        parts = list(mapped.values()) if hasattr(mapped, "values") else mapped
        parts = [parts.left, parts.right] if isinstance(mapped, Fields) else list(parts)
        assert [part.tolist() for part in parts] == [[3, 3], [2, 2]]
        assert getattr(mapped, "note", None) == getattr(value, "note", None)
        assert value is pair or x.tolist() == [1, 1]


def test_results_of_torch_and_packed_sequences_are_rebuilt() -> None:
    largest = torch.tensor([[1.0, 3.0]]).max(1)
    mapped = map_tensors(largest, lambda path, tensor: tensor + 1)
    assert (type(mapped), mapped.values.item(), mapped.indices.item()) == (type(largest), 4, 2)
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    doubled = map_tensors(packed, lambda path, tensor: tensor * 2 if path == (0,) else tensor)
    assert isinstance(doubled, PackedSequence)
    assert doubled.data.tolist() == [[2]] * 5


@pytest.mark.parametrize("kind", [lambda a, b: Pair(a, b), lambda a, b: MappingProxyType({"a": a, "b": b})])
def test_what_a_layer_returns_in_them_is_edited(kind: Any) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor):
            return kind(x, x + 1)

    with torch.no_grad(), Taps(Returns(), "").edit("", lambda h: h * 10) as taps:
        output = taps(torch.ones(2))
    left, right = output.values() if isinstance(output, MappingProxyType) else output
    assert (left.tolist(), right.tolist()) == ([10, 10], [20, 20])
    assert [value.tolist() for value in taps.record.values()] == [[10, 10], [20, 20]]


def test_attributes_that_are_parts_follow_them() -> None:
    class Out(tuple):
        def __new__(cls, logits: Tensor, hidden: Tensor):
            out = super().__new__(cls, (logits, hidden))
            out.logits, out.note = logits, "kept"
            return out

    class Rows(list):
        def __init__(self, items) -> None:
            super().__init__(items)
            self.last, self.total = self[-1], sum(float(item.sum()) for item in self)

    x, y = torch.ones(2), torch.zeros(2)
    out: Any = map_tensors(Out(x, y), lambda path, tensor: tensor + 1)
    assert (type(out), out.note) == (Out, "kept")
    assert out.logits is out[0]
    rows: Any = map_tensors(Rows([x, y]), lambda path, tensor: tensor + 1)
    assert type(rows) is Rows
    assert rows.last is rows[1]
    assert rows.total == 6


def test_long_lists_of_numbers_are_not_walked_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    x, numbers = torch.ones(2), [*range(1000), 0.5, None, "a"]
    monkeypatch.setattr("extract.taps.nested.enumerate", lambda value: pytest.fail("walked"), raising=False)
    assert list(tensors_in(numbers)) == []
    assert map_tensors(numbers, lambda path, tensor: tensor) is numbers
    monkeypatch.undo()
    numbers[500] = x  # type: ignore[call-overload]
    assert list(tensors_in(numbers)) == [((500,), x)]
    assert map_tensors(numbers, lambda path, tensor: tensor * 2)[500].tolist() == [2, 2]
