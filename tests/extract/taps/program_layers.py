"""Small layers that random programs are made of: each does one thing that is hard to look at without a change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Pass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Slice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:]


class Expand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1].expand(4, 4)


class Frames(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(16)[:10].unfold(0, 4, 2)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2)


class SplitAndRelu(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.split(2)
        return a, b.relu()


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class DoubleInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return x


class ZeroSome(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[1:2].zero_()
        return x


class ReluInPlaceGivesOther(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(min=0)
        return x + 1


class NegateGivesView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.neg_().view(x.shape)


class WritesThroughView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0].mul_(2)
        return x * 1


class WritesOnly(nn.Module):
    def forward(self, x: Tensor) -> None:
        x.mul_(2)


class WritesData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x


class WritesDataGivesOther(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.add_(1)
        return x + x


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class AddInto(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a += b
        return a


class WritesSecond(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        return a * 2 + b


class WritesFirstGivesSecond(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b


class Swap(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return b, a


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y


class Cell(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = x * 2
        return c.relu(), c


class InputAndOther(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x, x + 1, 3


class ToDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x, "b": [x.relu(), (x.view(x.shape),)]}


class FromDict(nn.Module):
    def forward(self, d: dict[str, Tensor]) -> Tensor:
        d["a"].add_(1)
        return d["a"] + d["b"]


class FromList(nn.Module):
    def forward(self, values: list[Tensor]) -> list[Tensor]:
        values[0].mul_(2)
        return values


class Order(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1).sum(1).argsort(stable=True)


class KeepsInput(nn.Module):
    held: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.held = x
        return x * 2


class KeepsOutput(nn.Module):
    held: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.held = x * 2
        return self.held


class AddsLastInput(nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 if self.last is None else x + self.last.sum()
        self.last = x
        return y


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        return x + self.total.clone()


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        with torch.no_grad():
            cache[1:3].add_(x[1:3])
        return x + self.cache.sum()


class GivesCache(Cache):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.cache.add_(x)
        return self.cache


class Merge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.orig


class Marked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(x, "mark", 1)


class IsLast(nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 3 if x is self.last else x * 2
        self.last = x
        return y


class WritesNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy()[0] = 1
        return x * 2
