"""The description of a backbone without its weights, and helpers that the sources share to build it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Entry", "count_parameters", "quiet", "without_weights"]


@dataclass(frozen=True)
class Entry:
    """Description of a backbone.

    Attributes:
        spec: SOURCE/NAME.
        width: width of the embedding; None if there is no embedding, or if neither the source nor a model that was
            built states its width.
        input_px: (height, width) of the input for the default weights; None if the source does not state it.
        parameters: number of parameters; None if the model was not built for the description.
        licence: licence of the default weights, or of the weights that the spec names; empty if it is not stated.
        weights: names of the published weights; the default, or the name in the spec, comes first where there is one.
    """

    spec: str
    width: int | None
    input_px: tuple[int, int] | None
    parameters: int | None
    licence: str
    weights: tuple[str, ...]


def without_weights(make: Callable[[], Any]) -> Any:
    """Build a model on the meta device, or on the CPU if that fails.

    Args:
        make: builds the model.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # a model that reads its weights while it is built raises an error of its own
        return make()


def count_parameters(model: nn.Module | None) -> int | None:
    """Count the parameters of a model; a shared parameter counts once."""
    return None if model is None else sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: suppress log messages of libraries, such as warnings about random weights."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
