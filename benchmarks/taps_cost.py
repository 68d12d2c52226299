"""What Taps cost, as ratios in one run: python -m benchmarks.taps_cost [ROUNDS]

1. resnet18, ten layers kept, whole forward: over bare forward hooks that make the same copies.
2. resnet18, only `layer2` kept, early stop: over a model cut behind `layer2` with one such hook.
3. 500 linear layers of width 64, one thread: edits `h * 1` of all outputs, or inputs, over bare hooks that return the
   same; gradients of all outputs kept, forward and backward, over bare hooks that clone them in a tensor hook.

Each round times both sides one after the other, in an order that alternates; medians over rounds are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from benchmarks.common import in_turn, ratio
from extract import Taps
from extract.system.torch_state import keeping_freed_memory

TEN = ["conv1", "bn1", "layer1", "layer1.0.conv1", "layer2", "layer2.0.conv2", "layer3", "layer3.1.bn1", "layer4", "fc"]
BATCH = 16


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> float:
    """The time of ours over that of theirs."""
    for _ in range(3):
        ours(), theirs()
    taken = in_turn({"ours": ours, "theirs": theirs}, rounds)
    return ratio(taken["ours"], taken["theirs"])


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


def print_resnet(rounds: int) -> None:
    """Time both comparisons of resnet18."""
    x = torch.randn(BATCH, 3, 224, 224)
    tapped, bare = models.resnet18().eval(), Bare(models.resnet18().eval(), TEN)
    with torch.inference_mode(), keeping_freed_memory():
        with Taps(tapped, TEN) as taps:
            of_bare = compare(lambda: taps(x), lambda: bare(x), rounds)
            print(f"ten layers, whole forward: {of_bare:.3f} of bare hooks")
        whole = models.resnet18().eval()
        parts = [whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1, whole.layer2]
        cut = Bare(nn.Sequential(*parts), ["5"])
        with Taps(tapped, "layer2", stop=True) as taps:
            of_cut = compare(lambda: taps(x), lambda: cut(x), rounds)
            print(f"layer2, early stop: {of_cut:.3f} of a model cut there")


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
        print(f"500 x Linear(64, 64), {name}: {result:.2f} of bare hooks")


def main(rounds: int) -> None:
    """Print all comparisons."""
    torch.manual_seed(0)
    print_resnet(rounds)
    torch.set_num_threads(1)
    print_changes(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 41)
