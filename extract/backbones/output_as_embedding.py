"""Models whose embedding is their own output: a wrapper makes it the output of a layer called `embedding`."""

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
    """A model with an identity as its last layer, `embedding`; the names of the other layers do not change.

    Args:
        model: the network.
        embed: maps the network and a batch (B, 3, H, W) to the embedding (B, D).
    """

    def __init__(self, model: nn.Module, embed: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        setattr(self, INSIDE, model)
        self.embedding = nn.Identity()
        self._embed = embed

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to embeddings (B, D)."""
        embedded: Tensor = self.embedding(self._embed(getattr(self, INSIDE), images))
        return embedded


def with_embedding(
    model: nn.Module, size: tuple[int, int], embed: Callable[[Any, Tensor], Tensor]
) -> tuple[nn.Module, str]:
    """Add a layer `embedding` to a model.

    Args:
        model: the network, on the CPU.
        size: (height, width) of its input.
        embed: maps the network and a batch (B, 3, H, W) to the embedding (B, D).

    Returns:
        (wrapped model, ""), or (model, reason) if the output of `embed` cannot be an embedding.

    Raises:
        InputError: the model cannot be run on a batch of pictures.
    """
    why = _unfit(model, _tried(model, size, embed))
    return (model, why) if why else (WithEmbedding(model, embed), "")


def with_own_output(model: nn.Module, size: tuple[int, int]) -> tuple[nn.Module, str, tuple[str, ...]]:
    """Make the output of a model its layer `embedding`.

    A tensor (B, D) counts as an embedding unless it is the output of a linear layer or holds probabilities: then it may
    come from a classifier. A classifier cannot always be recognised, so the choice is reported in the notes.

    Args:
        model: the network, on the CPU.
        size: (height, width) of its input.

    Returns:
        (wrapped model, "", notes for the user), or (model, reason, ()) if its output cannot be an embedding.

    Raises:
        InputError: the model cannot be run on a batch of pictures.
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
        why = f"its output comes from the linear layer {given[-1][0]!r}, which may be a classifier"
    if not why and any(_are_probabilities(values) for values in (output, output.exp())):
        why = "its output holds probabilities, so the model is a classifier"
    if why:
        return model, why, ()
    return WithEmbedding(model, _called), "", (f"the embedding is the output of the model, {output.shape[1]} values",)


def _called(model: Any, images: Tensor) -> Any:
    return model(images)


def _tried(model: nn.Module, size: tuple[int, int], embed: Callable[[Any, Tensor], Any]) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return embed(model, torch.zeros(2, 3, *size))
    except Exception as error:  # third-party code may raise anything
        raise InputError(
            f"the model failed on a zero input of shape (2, 3, {size[0]}, {size[1]}): {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _unfit(model: nn.Module, output: Any) -> str:
    """Return why the output of a model cannot be its layer `embedding`; empty if it can."""
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        return f"its output is {found}, not one vector for each picture"
    return "it already has an attribute called embedding" if hasattr(model, "embedding") else ""


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())
