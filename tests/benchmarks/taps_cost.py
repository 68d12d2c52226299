"""What Taps cost, on resnet18, as ratios in one run: python tests/benchmarks/taps_cost.py [ROUNDS]

1. Ten layers kept, the forward run whole: over bare forward hooks that make the same copies.
2. Only `layer2` kept, with early stop: over a model cut behind `layer2` with one such hook.

Each round times both sides one after the other, in an order that alternates; the median over rounds is told.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from extract import Taps
from extract.system.torch_state import keeping_freed_memory

TEN = ["conv1", "bn1", "layer1", "layer1.0.conv1", "layer2", "layer2.0.conv2", "layer3", "layer3.1.bn1", "layer4", "fc"]
BATCH = 16


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> float:
    """Median of ours over theirs."""
    for _ in range(3):
        ours(), theirs()
    ratios = []
    for number in range(rounds):
        if number % 2:
            one = timed(ours)
            other = timed(theirs)
        else:
            other = timed(theirs)
            one = timed(ours)
        ratios.append(one / other)
    return statistics.median(ratios)


class Bare:
    """The model under hooks that copy, as short as they can be."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        self.model, self.kept = model, {}
        for name in layers:
            model.get_submodule(name).register_forward_hook(
                lambda m, args, out, name=name: self.kept.__setitem__(name, out.detach().clone())
            )

    def __call__(self, x: Tensor) -> None:
        self.model(x)


def main(rounds: int) -> None:
    """Time both comparisons."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, 3, 224, 224)
    tapped, bare = models.resnet18().eval(), Bare(models.resnet18().eval(), TEN)
    with torch.inference_mode(), keeping_freed_memory():
        with Taps(tapped, TEN) as taps:
            print(f"ten layers, whole forward: {ratio(lambda: taps(x), lambda: bare(x), rounds):.3f} of bare hooks")
        whole = models.resnet18().eval()
        parts = [whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1, whole.layer2]
        cut = Bare(nn.Sequential(*parts), ["5"])
        with Taps(tapped, "layer2", stop=True) as taps:
            print(f"layer2, early stop: {ratio(lambda: taps(x), lambda: cut(x), rounds):.3f} of a model cut there")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 41)
