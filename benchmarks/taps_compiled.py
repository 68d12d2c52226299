"""What compiled Taps cost beside the compiled model: python -m benchmarks.taps_compiled [ROUNDS]

Inductor on one core, 8 images of 224 pixels, random weights, without gradients: CPU seconds of `torch.compile(model)`
and of `Taps(model, layers).compile()` in turn, in an order that alternates. Printed are the median of the ratios within
the rounds, its 95 % interval (order statistics: the median of as many coin tosses), and the deviation of what is kept
from that of eager Taps.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torchvision import models

from benchmarks.common import in_turn
from extract import Taps
from extract.system.torch_state import keeping_freed_memory

BATCH = 8
JOBS = {"resnet50": "layer?", "vit_b_16": "encoder.layers.*"}


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    count, outer = len(ratios), 0
    while sum(math.comb(count, k) for k in range(outer + 2)) <= 0.025 * 2**count:
        outer += 1
    return sorted(ratios)[outer], sorted(ratios)[-1 - outer]


def print_cost(name: str, layers: str, rounds: int) -> None:
    """Compile a model with and without taps, compare what is kept, and print the ratio of their times."""
    torch.manual_seed(0)
    model, images = models.get_model(name).eval(), torch.randn(BATCH, 3, 224, 224)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)

    def plain() -> None:
        with torch.compiler.set_stance("default"):  # open taps turn other compiled code off
            compiled(images)

    with torch.no_grad(), keeping_freed_memory():
        with Taps(model, layers) as eager:
            eager(images)
        with Taps(model, layers).compile() as taps:
            for _ in range(2):
                plain(), taps(images)
            kept, expected = taps.record, eager.record
            worst = max(float((kept[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected)
            taken = in_turn({"plain": plain, "taps": lambda: taps(images)}, rounds, clock=time.process_time)
    ratios = [one / other for one, other in zip(taken["taps"], taken["plain"], strict=True)]
    low, high = interval(ratios)
    medians = ", ".join(f"{statistics.median(times) * 1000:.0f} ms" for times in taken.values())
    print(
        f"{name}, {len(kept)} values: {statistics.median(ratios):.3f} of the model without taps, "
        f"{low:.3f} to {high:.3f} ({medians}); deviation {worst:.1e}",
        flush=True,
    )


def main(rounds: int) -> None:
    """Print both networks."""
    torch.set_num_threads(1)
    for name, layers in JOBS.items():
        print_cost(name, layers, rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 21)
