"""Models whose embedding is what they themselves return: it is made a layer of its own, called `embedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from extract.errors import InputError, first_line
from extract.layers import INSIDE
from extract.settings import evaluating

__all__ = ["WithEmbedding", "with_own_output"]


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


def with_own_output(
    model: nn.Module, size: tuple[int, int], embed: Callable[[Any, Tensor], Tensor] | None = None
) -> tuple[nn.Module, str, tuple[str, ...]]:
    """The model with a layer `embedding`, if what it returns is one, or itself; why; and what is to be told.

    A tensor (B, D) is taken for an embedding, unless a linear layer gave it, or its values are probabilities: that may
    be a classifier. It cannot always be seen, so what was taken is told.

    Args:
        model: on the CPU.
        size: (height, width) of its input.
        embed: calls it and gives the embedding, also one of a linear layer; None: what it returns.

    Raises:
        InputError: it cannot be called with a batch of pictures.
    """
    given: list[tuple[nn.Module, Any]] = []
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output: given.append((layer, output)))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.no_grad(), evaluating(model):
            output = (embed or _called)(model, torch.zeros(2, 3, *size))
    except Exception as error:  # it is anybody's code
        raise InputError(
            f"the model cannot be run on (2, 3, {size[0]}, {size[1]}): {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        return model, f"it returns {found}, not one vector for each picture", ()
    if hasattr(model, "embedding"):
        return model, "it has a part of its own that is called embedding", ()
    names = [name for name, module in model.named_modules() if given and module is given[-1][0]]
    if embed is None and given and given[-1][1] is output:
        return model, f"what it returns comes from the linear layer {names[0]!r}, which may be a classifier", ()
    if embed is None and any(_are_probabilities(values) for values in (output, output.exp())):
        return model, "what it returns are probabilities, of a classifier", ()
    told = () if embed else (f"the embedding is what the model returns, {output.shape[1]} values",)
    return WithEmbedding(model, embed or _called), "", told


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())


def _called(model: Any, images: Tensor) -> Any:
    return model(images)
