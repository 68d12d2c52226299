"""What Taps cost, as ratios in one run: python tests/benchmarks/taps_cost.py [ROUNDS]

1. resnet18, ten layers kept, whole forward: over bare forward hooks that make the same copies.
2. resnet18, only `layer2` kept, early stop: over a model cut behind `layer2` with one such hook.
3. 10, 100 and 500 small linear layers, all kept, one thread: each forward over one with the same bare hooks, and
   `with taps:` without a forward over registering and removing these hooks. A hook may take longer than such
   a layer: bare hooks over no hooks are printed too. With larger layers the ratios are lower.
4. 500 linear layers of width 64, one thread: edits `h * 1` of all outputs, or inputs, over bare hooks that return the
   same; gradients of all outputs kept, forward and backward, over bare hooks that clone them in a tensor hook.

Each round times both sides one after the other, in an order that alternates; medians over rounds are printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchvision import models

from extract import Taps
from extract.system.torch_state import keeping_freed_memory

TEN = ["conv1", "bn1", "layer1", "layer1.0.conv1", "layer2", "layer2.0.conv2", "layer3", "layer3.1.bn1", "layer4", "fc"]
BATCH = 16
LAYER_CALLS = 1000  # of small layers in one timing: 100 forwards of 10 layers, or 2 of 500


class Comparison(NamedTuple):
    """Medians over rounds: ours over theirs, and seconds of each."""

    ratio: float
    ours: float
    theirs: float


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, repeats: int = 1) -> Comparison:
    """Time both in turn."""
    for _ in range(3):
        ours(), theirs()
    our_times, their_times = [], []
    for number in range(rounds):
        sides = [(our_times, ours), (their_times, theirs)]
        for times, work in sides if number % 2 else reversed(sides):
            times.append(timed(work, repeats))
    ratio = statistics.median(our / their for our, their in zip(our_times, their_times, strict=True))
    return Comparison(ratio, statistics.median(our_times), statistics.median(their_times))


class Bare:
    """The model under hooks that copy, as short as they can be."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        self.model, self.layers, self.kept = model, layers, {}
        self.handles: list[RemovableHandle] = []
        self.register()

    def register(self) -> None:
        self.handles = [
            self.model.get_submodule(name).register_forward_hook(
                lambda m, args, out, name=name: self.kept.__setitem__(name, out.detach().clone())
            )
            for name in self.layers
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __call__(self, x: Tensor) -> None:
        self.model(x)


def print_resnet(rounds: int) -> None:
    """Time both comparisons of resnet18."""
    x = torch.randn(BATCH, 3, 224, 224)
    tapped, bare = models.resnet18().eval(), Bare(models.resnet18().eval(), TEN)
    with torch.inference_mode(), keeping_freed_memory():
        with Taps(tapped, TEN) as taps:
            ratio = compare(lambda: taps(x), lambda: bare(x), rounds).ratio
            print(f"ten layers, whole forward: {ratio:.3f} of bare hooks")
        whole = models.resnet18().eval()
        parts = [whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1, whole.layer2]
        cut = Bare(nn.Sequential(*parts), ["5"])
        with Taps(tapped, "layer2", stop=True) as taps:
            ratio = compare(lambda: taps(x), lambda: cut(x), rounds).ratio
            print(f"layer2, early stop: {ratio:.3f} of a model cut there")


def print_small_layers(count: int, width: int, batch: int, rounds: int) -> None:
    """Time a forward and a `with` block on a chain of linear layers that are all kept."""

    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).eval()

    x, names = torch.randn(batch, width), [str(number) for number in range(count)]
    tapped, bare, unhooked = Taps(chain(), names), Bare(chain(), names), chain()
    with torch.no_grad():
        with tapped:
            forward = compare(lambda: tapped(x), lambda: bare(x), rounds, LAYER_CALLS // count)
            assert tapped.record.keys() == bare.kept.keys()
        plain = compare(lambda: bare(x), lambda: unhooked(x), rounds, LAYER_CALLS // count)
    bare.remove()

    def open_taps() -> None:
        with tapped:
            pass

    def open_bare() -> None:
        bare.register()
        bare.remove()

    block = compare(open_taps, open_bare, rounds)
    print(
        f"{count:3} x Linear({width}, {width}), batch {batch}: forward {forward.ratio:.2f} of bare hooks, "
        f"{(forward.ours - forward.theirs) / count * 1e6:+.1f} µs a layer (bare hooks: {plain.ratio:.2f} of no hooks); "
        f"with block {block.ratio:.2f} of registering and removing, {block.ours * 1e3:.2f} ms"
    )


def edit_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1


def edit_input(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] * 1


def keep_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: KEPT.__setitem__(module, gradient.clone()))


KEPT: dict[nn.Module, Tensor] = {}


def print_changes(rounds: int) -> None:
    """Time edits and gradients on a chain of linear layers."""
    x = torch.randn(16, 64)

    def chain() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(500))).eval()

    def without_gradients(model: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return torch.no_grad()(lambda: model(x))

    def with_gradients(model: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: model(x).sum().backward()

    for name, taps, hook, run in (
        ("edits of outputs", Taps(chain()).edit("*", lambda h: h * 1), edit_output, without_gradients),
        ("edits of inputs", Taps(chain()).edit("*", lambda h: h * 1, "input"), edit_input, without_gradients),
        ("gradients", Taps(chain()).keep("*", "grad"), keep_gradient, with_gradients),
    ):
        bare = chain()
        for layer in bare:
            register = layer.register_forward_pre_hook if hook is edit_input else layer.register_forward_hook
            register(hook)
        with taps:
            result = compare(run(taps), run(bare), rounds)
        print(f"500 x Linear(64, 64), {name}: {result.ratio:.2f} of bare hooks")


def main(rounds: int) -> None:
    """Print all comparisons."""
    torch.manual_seed(0)
    print_resnet(rounds)
    torch.set_num_threads(1)
    for width in (8, 32):
        for batch in (1, 8):
            for count in (10, 100, 500):
                print_small_layers(count, width, batch, rounds)
    print_changes(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 41)
