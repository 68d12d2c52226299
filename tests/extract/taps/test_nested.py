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

from extract import InputError, Site, Taps
from extract.taps.nested import map_tensors
from tests.extract.taps.networks import Net


class Pair(tuple):
    """A tuple whose constructor takes two arguments."""

    def __new__(cls, left: Tensor, right: Tensor):
        return super().__new__(cls, (left, right))


@dataclasses.dataclass(frozen=True)
class Fields:
    left: Tensor
    right: Any


Named = collections.namedtuple("Named", "left right")


def test_containers_keep_their_type() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    values = [
        Fields(x, y), Named(x, y), collections.OrderedDict(left=x, right=y), (x, y), [x, y], {"left": x, "right": y}
    ]  # fmt: skip
    for value in values:
        mapped: Any = map_tensors(value, lambda path, tensor: tensor + 2)
        assert type(mapped) is type(value)
        parts = list(mapped.values()) if hasattr(mapped, "values") else mapped
        parts = [parts.left, parts.right] if isinstance(mapped, Fields) else list(parts)
        assert [part.tolist() for part in parts] == [[3, 3], [2, 2]]
        assert x.tolist() == [1, 1]


def test_results_of_torch_and_packed_sequences_are_rebuilt() -> None:
    largest = torch.tensor([[1.0, 3.0]]).max(1)
    mapped = map_tensors(largest, lambda path, tensor: tensor + 1)
    assert (type(mapped), mapped.values.item(), mapped.indices.item()) == (type(largest), 4, 2)
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    doubled = map_tensors(packed, lambda path, tensor: tensor * 2 if path == (0,) else tensor)
    assert isinstance(doubled, PackedSequence)
    assert doubled.data.tolist() == [[2]] * 5


class Boxes(list):
    """A list with an attribute, which a list of the same items lacks."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.size: Any = None


class Slotted(list):
    __slots__ = ("size",)


class Pairs(tuple):
    size: Any


def with_size(kind: Any) -> Any:
    def make(x: Tensor) -> Any:
        value = kind([x, x + 1])
        value.size = (7, 9)
        return value

    return make


@pytest.mark.parametrize(("name", "make"), [
    ("Pair", lambda x: Pair(x, x + 1)), ("mappingproxy", lambda x: MappingProxyType({"a": x, "b": x + 1})),
    ("Boxes", with_size(Boxes)), ("Slotted", with_size(Slotted)), ("Pairs", with_size(Pairs)),
])  # fmt: skip
def test_an_edit_inside_a_class_that_cannot_be_made_again_is_refused(name: str, make: Any) -> None:
    model = Net(lambda self, x: make(x))
    with torch.no_grad(), Taps(model, "") as taps:
        output = taps(torch.ones(2))
    assert getattr(output, "size", (7, 9)) == (7, 9)
    assert [value.tolist() for value in taps.record.values()] == [[1, 1], [2, 2]]
    refused = pytest.raises(InputError, match=f"a value inside {name} is to be replaced")
    with torch.no_grad(), refused, Taps(model).edit("", lambda h: h * 10) as taps:
        taps(torch.ones(2))


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.held = x


@pytest.mark.parametrize("container", [lambda x: {x}, lambda x: collections.deque([x]), Holder])
def test_an_edit_beside_tensors_that_it_does_not_reach_is_refused(container: Any) -> None:
    model = nn.Sequential(Net(lambda self, x: {"a": x * 2, "b": container(x * 3)}))
    x = torch.ones(2)
    for layers in ("0", "0:b"):
        with (
            torch.no_grad(),
            pytest.raises(InputError, match=rf"0:b is a {type(container(x)).__name__} that holds tensors"),
            Taps(model).edit(layers, lambda h: h + 1) as taps,
        ):
            taps(x)
    with torch.no_grad(), Taps(model, "0").edit("0:a", lambda h: h + 1) as taps:
        assert taps(x)["a"].tolist() == [3, 3]
    assert list(taps.record) == ["0:a"]


def test_tensors_whose_names_are_the_same_are_refused_and_have_their_sites() -> None:
    model = nn.Sequential(Net(lambda self, x: {0: x, "0": x * 2, "a.b": x * 3, "a": {"b": x * 4}}))
    x = torch.ones(2)
    with torch.no_grad(), Taps(model, "0") as taps:
        taps(x)
    for look in (dict, list, lambda record: record["0:0"], lambda record: record.select("*")):
        with pytest.raises(InputError, match="two tensors have the name '0:0'"):
            look(taps.record)
    for number, path in enumerate([(0,), ("0",), ("a.b",), ("a", "b")], 1):
        assert taps.record[Site("0", path=path)].tolist() == [number, number]
