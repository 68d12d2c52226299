"""Small networks for tests of `Taps`, and what tutorials write instead of `Taps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A module whose forward is a function of the module and its arguments.

    Args:
        compute: the forward.
        parts: layers, and other attributes, by name.
    """

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)

    if TYPE_CHECKING:  # its layers may be of any class

        def __getattr__(self, name: str) -> Any: ...


def linear(inputs: int = 4, outputs: int = 4, seed: int = 0) -> nn.Linear:
    """Return a layer with weights that depend on the seed."""
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def same(h: Tensor) -> Tensor:
    """Return the tensor: an edit that changes nothing."""
    return h


def naive(model: nn.Module, *names: str) -> dict[str, Tensor]:
    """What tutorials write: the last output of each layer, `detach`ed and moved to the CPU."""
    found: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: found.__setitem__(name, output.detach().cpu())
        )
    return found


def hooks_in(model: nn.Module) -> int:
    """Return the number of hooks of all layers."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
