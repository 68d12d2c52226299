"""What a monitor costs: steps of a training of ResNet-18, with and without one, in turn.

    python -m benchmarks.monitor_cost --rounds 3

The time of a whole look is measured by itself (`every=1`), and what `every=100` costs is the time of 100 steps with one
look in them, by that of 100 without.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torchvision
from torch.nn import functional as F

from benchmarks.common import in_turn, parser, ratio
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
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--px", type=int, default=128)
    args = options.parse_args()
    ways: dict[str, Callable[[torch.nn.Module], AbstractContextManager[object]]] = {
        "none": lambda model: contextlib.nullcontext(),
        "activations": lambda model: ActivationMonitor(model, every=args.steps),
        "gradients": lambda model: GradientMonitor(model, every=args.steps),
    }
    steps = {name: functools.partial(seconds, make, args.steps, args.batch, args.px) for name, make in ways.items()}
    times = in_turn(steps, args.rounds)
    for name, found in times.items():
        each = ", ".join(f"{one:.1f}" for one in found)
        print(f"{name:12} {args.steps} steps, one look: {each} s; {100 * (ratio(found, times['none']) - 1):+.1f} %")
    plain = statistics.median(times["none"])
    one = plain / args.steps
    for name, monitor in (("activations", ActivationMonitor), ("gradients", GradientMonitor)):
        look = seconds(lambda model, monitor=monitor: monitor(model, every=1), 5, args.batch, args.px) / 5 - one
        print(f"{name:12} one look costs {look / one:.2f} steps: {100 * look / one / 100:.2f} % with every=100")


if __name__ == "__main__":
    main()
