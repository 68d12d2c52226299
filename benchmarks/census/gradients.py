"""Gradients of a model and of all its layers, computed without layertap.

The reference for the gradient of an output is a *twin*: the same model with hooks that hand on a clone of a clone of
each output. The first clone is the output as it was returned; nothing can write into it, since later layers receive the
second one. A tensor hook on the first clone therefore receives the gradient with respect to the returned output alone,
even if the layer returns its input, or a later layer writes into what it receives.

If a model reads a tensor again after writing into a layer's output, the twin computes other values than the model. The
twin's outputs are compared with those of the model, and where they differ, its gradients are not a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.census.values import Path, Place, digest, names_of, tensors_of


class NoGradientError(Exception):
    """The model has no gradient that could be compared."""


class Backward(NamedTuple):
    """The result of a backward pass: the model's output, and gradients of parameters and pictures (empty name)."""

    output: dict[Path, Tensor]
    gradients: dict[str, Tensor]


class Twin(NamedTuple):
    """Digests of all outputs of the twin and of their gradients, gradients as tensors, and outputs without a clone."""

    outputs: dict[Place, str]
    gradients: dict[Place, str]
    kept: dict[Place, Tensor]
    unclear: set[Place]


def backward(model: nn.Module, pictures: Tensor, call: Callable[[Tensor], Any] | None = None) -> Backward:
    """Run a model and a backward pass from a fixed random projection of everything floating that it returns.

    Raises:
        NoGradientError: nothing that it returns depends on pictures or parameters.
    """
    model.zero_grad(set_to_none=True)
    leaf = pictures.clone().requires_grad_()
    torch.manual_seed(0)
    output = (call or model)(leaf.clone())  # a clone, since a model may write into its input
    generator = torch.Generator().manual_seed(1)
    terms = []
    for _, tensor in tensors_of(output):
        if tensor.is_floating_point():
            weights = torch.randn(tensor.shape, generator=generator) / max(1, tensor.numel()) ** 0.5
            if tensor.requires_grad:
                terms.append((tensor.nan_to_num(0, 0, 0) * weights).sum(dtype=torch.float64))
    if not terms:
        raise NoGradientError("no output has a gradient")
    values = {path: tensor.detach().clone() for path, tensor in tensors_of(output)}
    torch.stack(terms).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if leaf.grad is not None:
        gradients[""] = leaf.grad
    model.zero_grad(set_to_none=True)
    return Backward(values, gradients)


def twin_gradients(model: nn.Module, pictures: Tensor, keep: Iterable[Place] = ()) -> Twin:
    """Run the twin forward and backward; gradients of `keep` are returned as tensors, those of others as digests."""
    twin, kept = Twin({}, {}, {}, set()), set(keep)
    counts: dict[nn.Module, int] = {}
    running: dict[nn.Module, list[int]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        counts[module] = counts.get(module, 0) + 1
        running.setdefault(module, []).append(counts[module] - 1)

    def handed_on(names: list[str], call: int, path: Any, tensor: Tensor) -> Tensor:
        text = digest(tensor)
        places = [Place(name, call, path) for name in names]
        twin.outputs.update(dict.fromkeys(places, text))
        if not tensor.requires_grad:
            return tensor

        def store(gradient: Tensor) -> None:
            text = digest(gradient)
            twin.gradients.update(dict.fromkeys(places, text))
            twin.kept.update({place: gradient.clone() for place in places if place in kept})

        returned = tensor.clone()
        returned.register_hook(store)
        return returned.clone()

    def leave(names: list[str], module: nn.Module, args: Any, output: Any) -> Any:
        call = running[module].pop()
        tensors = list(tensors_of(output))
        leaves, structure = pytree.tree_flatten(output)
        known = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(known) != len(tensors) or any(
            leaf is not given for leaf, (_, given) in zip(known, tensors, strict=True)
        ):
            # A class that PyTorch does not take apart.
            twin.unclear.update(Place(name, call, path) for name in names for path, _ in tensors)
            return output
        clones = iter([handed_on(names, call, path, tensor) for path, tensor in tensors])
        return pytree.tree_unflatten([next(clones) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    handles = []
    for module, names in names_of(model).items():
        handles.append(module.register_forward_pre_hook(enter))
        # Before the model's own hooks, which then read the clone as later layers do.
        handles.append(module.register_forward_hook(partial(leave, names), prepend=True))
    try:
        backward(model, pictures)
    finally:
        for handle in handles:
            handle.remove()
    return twin


def agree(a: Tensor, b: Tensor, tolerance: float, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, with the same NaN and infinite values.

    Args:
        a: a tensor.
        b: another tensor.
        tolerance: largest difference, relative to the largest value of both.
        floor: a difference that is rounding in any case.
    """
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    finite = a.isfinite()
    a, b = a[finite].double(), b[finite].double()
    if not a.numel():
        return True
    return bool((a - b).abs().max() <= max(floor, tolerance * float(torch.maximum(a.abs().max(), b.abs().max()))))
