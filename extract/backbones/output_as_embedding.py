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

    So a stored tensor is always the output or input of a layer, and `Taps` needs no special case for outputs of the
    model.

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
    reason = _reason_against(model, _trial_output(model, size, embed))
    return (model, reason) if reason else (WithEmbedding(model, embed), "")


def with_own_output(model: nn.Module, size: tuple[int, int]) -> tuple[nn.Module, str, tuple[str, ...]]:
    """Make the output of a model its layer `embedding`.

    A tensor (B, D) counts as an embedding unless it is the output of a linear layer or holds probabilities: then it may
    come from a classifier, whose logits look like a projection. A classifier cannot always be recognised, so the choice
    is reported in the notes.

    Args:
        model: the network, on the CPU.
        size: (height, width) of its input.

    Returns:
        (wrapped model, "", notes for the user), or (model, reason, ()) if its output cannot be an embedding.

    Raises:
        InputError: the model cannot be run on a batch of pictures.
    """
    linear_outputs: list[tuple[str, Any]] = []
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output, name=name: linear_outputs.append((name, output)))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        output = _trial_output(model, size, _call)
    finally:
        for handle in handles:
            handle.remove()
    reason = _reason_against(model, output)
    if not reason and linear_outputs and linear_outputs[-1][1] is output:
        reason = f"its output comes from the linear layer {linear_outputs[-1][0]!r}, which may be a classifier"
    if not reason and any(_are_probabilities(values) for values in (output, output.exp())):
        reason = "its output holds probabilities, so the model is a classifier"
    if reason:
        return model, reason, ()
    return WithEmbedding(model, _call), "", (f"the embedding is the output of the model, {output.shape[1]} values",)


def _call(model: Any, images: Tensor) -> Any:
    return model(images)


def _trial_output(model: nn.Module, size: tuple[int, int], embed: Callable[[Any, Tensor], Any]) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return embed(model, torch.zeros(2, 3, *size))
    except Exception as error:  # third-party code may raise anything
        raise InputError(
            f"the model failed on a zero input of shape (2, 3, {size[0]}, {size[1]}): {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _reason_against(model: nn.Module, output: Any) -> str:
    """Return why the output of a model cannot be its layer `embedding`; empty if it can."""
    if not isinstance(output, Tensor):
        return f"its output is {type(output).__name__}, not one vector for each picture"
    if output.is_nested or output.layout is not torch.strided or output.is_meta:
        return "its output is not a dense tensor with values"
    if not output.is_floating_point():
        return f"its output is {output.dtype}, not floating point"
    if output.ndim != 2 or len(output) != 2 or not output.numel():
        return f"its output is {tuple(output.shape)}, not one vector for each picture"
    return "it already has an attribute called embedding" if hasattr(model, "embedding") else ""


def _are_probabilities(values: Tensor) -> bool:
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())
