"""Models whose embedding is what they themselves return: it is made a layer of its own, called `embedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from extract.errors import InputError, first_line
from extract.system.torch_state import evaluating
from extract.taps.layer_names import INSIDE

__all__ = ["WithEmbedding", "with_embedding", "with_own_output"]


class WithEmbedding(nn.Module):
    """A model whose last layer, `embedding`, hands on its embedding; its layers keep the names they have inside it.

    Args:
        model: the network.
        embed: calls it with a batch (B, 3, H, W) and gives the embedding (B, D).
    """

    def __init__(self, model: nn.Module, embed: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        setattr(self, INSIDE, model)
        self.embedding = nn.Identity()
        self._embed = embed

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D)."""
        embedded: Tensor = self.embedding(self._embed(getattr(self, INSIDE), images))
        return embedded


def with_embedding(
    model: nn.Module, size: tuple[int, int], embed: Callable[[Any, Tensor], Tensor]
) -> tuple[nn.Module, str]:
    """The model with a layer `embedding`; or itself, and why.

    Args:
        model: on the CPU.
        size: (height, width) of its input.
        embed: calls it with a batch (B, 3, H, W) and gives the embedding (B, D).

    Raises:
        InputError: it cannot be called with a batch of pictures.
    """
    why = _unfit(model, _tried(model, size, embed))
    return (model, why) if why else (WithEmbedding(model, embed), "")


def with_own_output(model: nn.Module, size: tuple[int, int]) -> tuple[nn.Module, str, tuple[str, ...]]:
    """The model with what it returns as the layer `embedding`; or itself, and why; and what is to be told.

    A tensor (B, D) is taken for an embedding, unless a linear layer gave it, or its values are probabilities: that may
    be a classifier. It cannot always be seen, so what was taken is told.

    Args:
        model: on the CPU.
        size: (height, width) of its input.

    Raises:
        InputError: it cannot be called with a batch of pictures.
    """
    given: list[tuple[str, Any]] = []
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output, name=name: given.append((name, output)))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        output = _tried(model, size, _called)
    finally:
        for handle in handles:
            handle.remove()
    why = _unfit(model, output)
    if not why and given and given[-1][1] is output:
        why = f"what it returns comes from the linear layer {given[-1][0]!r}, which may be a classifier"
    if not why and any(_are_probabilities(values) for values in (output, output.exp())):
        why = "what it returns are probabilities, of a classifier"
    if why:
        return model, why, ()
    return WithEmbedding(model, _called), "", (f"the embedding is what the model returns, {output.shape[1]} values",)


def _called(model: Any, images: Tensor) -> Any:
    return model(images)


def _tried(model: nn.Module, size: tuple[int, int], embed: Callable[[Any, Tensor], Any]) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return embed(model, torch.zeros(2, 3, *size))
    except Exception as error:  # it is anybody's code
        raise InputError(
            f"the model cannot be run on (2, 3, {size[0]}, {size[1]}): {type(error).__name__}: {first_line(error)}"
        ) from error


def _unfit(model: nn.Module, output: Any) -> str:
    """Why an output is no embedding; empty if it can be one."""
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        return f"it returns {found}, not one vector for each picture"
    return "it has a part of its own that is called embedding" if hasattr(model, "embedding") else ""


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())
