"""What a monitor costs: steps of a training of ResNet-18, with and without one, in turn.

    python tests/benchmarks/monitor_cost.py --rounds 3

The time of a whole look is measured by itself (`every=1`), and what `every=100` costs is the time of 100 steps with one
look in them, by that of 100 without.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torchvision
from torch.nn import functional as F

from extract.analysis.network.monitors import ActivationMonitor, GradientMonitor


def seconds(
    make: Callable[[torch.nn.Module], AbstractContextManager[object]], steps: int, batch: int, px: int
) -> float:
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    images, labels = torch.randn(batch, 3, px, px), torch.arange(batch) % 1000
    for _ in range(2):
        F.cross_entropy(model(images), labels).backward()
    with make(model):
        start = time.perf_counter()
        for _ in range(steps):
            loss = F.cross_entropy(model(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--px", type=int, default=128)
    args = parser.parse_args()
    ways: dict[str, Callable[[torch.nn.Module], AbstractContextManager[object]]] = {
        "none": lambda model: contextlib.nullcontext(),
        "activations": lambda model: ActivationMonitor(model, every=args.steps),
        "gradients": lambda model: GradientMonitor(model, every=args.steps),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, make in ways.items():
            times[name].append(seconds(make, args.steps, args.batch, args.px))
    plain = statistics.median(times["none"])
    for name, found in times.items():
        ratio = statistics.median(found) / plain
        rounds = ", ".join(f"{one:.1f}" for one in found)
        print(f"{name:12} {args.steps} steps, one look: {rounds} s; {100 * (ratio - 1):+.1f} %")
    one = plain / args.steps
    for name, monitor in (("activations", ActivationMonitor), ("gradients", GradientMonitor)):
        look = seconds(lambda model, monitor=monitor: monitor(model, every=1), 5, args.batch, args.px) / 5 - one
        print(f"{name:12} one look costs {look / one:.2f} steps: {100 * look / one / 100:.2f} % with every=100")


if __name__ == "__main__":
    main()
