"""What a source says of a backbone without its weights, and what the sources share to find it out."""

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
    """What is known of a backbone.

    Attributes:
        spec: SOURCE/NAME.
        width: of the embedding; None if it has none.
        input_px: (height, width) of its input, as its default weights take it; None if the source does not state it.
        parameters: how many.
        licence: of the default weights, where their source states it; else empty.
        weights: their names, the default one first.
    """

    spec: str
    width: int | None
    input_px: tuple[int, int] | None
    parameters: int
    licence: str
    weights: tuple[str, ...]


def without_weights(make: Callable[[], Any]) -> Any:
    """Build a model on the meta device; on the CPU if it cannot be built there.

    Args:
        make: builds the model.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # each model that computes with its weights while it is built has an error of its own
        return make()


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a model, each shared one once."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages of libraries, such as warnings that weights are random."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
