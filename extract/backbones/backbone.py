"""A backbone as its source gives it, and what a source is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from extract.backbones.preprocessing import Preprocessing
from extract.backbones.weights import Weights
from extract.errors import InputError, LayertapError, first_line

__all__ = ["Asked", "LoadedBackbone", "downloading"]


@dataclass(frozen=True)
class Asked:
    """What a source is asked for.

    Attributes:
        spec: SOURCE/NAME.
        name: behind the source.
        weights: a name, a file, "random", or None: the source's default.
        seed: of random weights.
        allow_missing_head: whether a file may lack the classifier.
        preprocessing: in place of the library's own; any of size, crop, interpolation, mean, std.
    """

    spec: str
    name: str
    weights: str | None
    seed: int
    allow_missing_head: bool
    preprocessing: Mapping[str, Any]


@dataclass(frozen=True)
class LoadedBackbone:
    """A frozen network, ready to run: in eval mode, on its device.

    Attributes:
        spec: as it was asked for.
        architecture: library and name, the same for every way to ask for it.
        model: the network.
        weights: where its numbers come from.
        preprocessing: from picture to input.
        classifier: the layer whose input is the embedding; None if there is no single such layer. Then it is what the
            layer `embedding` gives, if the model has one (`extract.backbones.output_as_embedding`).
        no_embedding: why there is neither, if there is a reason to tell.
        prefix_tokens: tokens before those of the patches (class token, registers).
        patches: patches the input is cut into, where known.
        class_token: whether the first of them is a class token.
        reads_class_token: whether the embedding is made of it.
        notes: what the user must be told of how it was loaded.
        device: where it runs.
        asked: weights, seed, allow_missing_head and preprocessing, as `load_backbone` was given them.
    """

    spec: str
    architecture: str
    model: nn.Module
    weights: Weights
    preprocessing: Preprocessing
    classifier: str | None = None
    no_embedding: str = ""
    prefix_tokens: int = 0
    patches: int | None = None
    class_token: bool = False
    reads_class_token: bool = False
    notes: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    asked: dict[str, Any] = field(default_factory=dict)


def downloading(asked: Asked, load: Callable[[], Any], remedy: Callable[[], str], what: str = "weights") -> Any:
    """What `load` gives; where a hub does not, an error.

    Args:
        asked: for the error.
        load: may download.
        remedy: says what to fetch by hand, and where to put it.
        what: is downloaded, for the error.
    """
    try:
        return load()
    except LayertapError:
        raise
    except ValueError as error:  # it was reached, and there is something else there
        raise InputError(f"{asked.spec}: {first_line(error)}") from error
    except (OSError, RuntimeError) as error:  # what the hubs' many classes of error have in common
        raise LayertapError(
            f"{what} of {asked.spec} could not be downloaded: {first_line(error)}. To do it by hand: {remedy()}"
        ) from error
