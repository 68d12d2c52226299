"""A loaded backbone, and the errors of downloads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from extract.backbones.preprocessing import Preprocessing
from extract.backbones.reachability import hub_offline_if_unreachable
from extract.backbones.request import LoadRequest
from extract.backbones.weights import Weights
from extract.errors import InputError, LayertapError, first_line

__all__ = ["LoadRequest", "LoadedBackbone", "downloading"]


@dataclass(frozen=True)
class LoadedBackbone:
    """A frozen network, ready to run: in eval mode, on its device.

    Attributes:
        spec: the requested spec; a local folder or file in it is an absolute path.
        architecture: library and name, the same for every spec of this network, and what the features depend on beside
            the weights: a hash of the settings of hf/, QuickGELU of open_clip/, a hash of code.
        model: the network.
        weights: origin and hash of the weights.
        preprocessing: converts a picture to the input of the network.
        classifier: the layer whose input is the embedding; None if there is no single such layer. Then the embedding is
            the output of the layer `embedding`, if the model has that layer (`extract.backbones.output_as_embedding`).
        no_embedding: why the model has neither layer; may be empty.
        prefix_tokens: number of tokens before the patch tokens (class token, registers).
        patches: number of patches of the input; None if unknown.
        class_token: whether the first prefix token is a class token.
        reads_class_token: whether the embedding is computed from the class token.
        notes: messages for the user about how the backbone was loaded.
        device: device of the network.
        asked: the arguments weights, seed, allow_missing_head and preprocessing of `load_backbone`.
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


def downloading(
    request: LoadRequest,
    load: Callable[[], Any],
    remedy: Callable[[], str],
    item: str = "weights",
    from_hub: bool = False,
) -> Any:
    """Return `load()`; convert the errors of hubs to errors of layertap.

    Args:
        request: the request, named in errors.
        load: loads the object, and may download it.
        remedy: returns what to download by hand, and where to put it.
        item: the downloaded object, named in errors.
        from_hub: whether the Hugging Face hub has it. If the hub cannot be reached, only its cache is used.

    Raises:
        InputError: the hub answered, but not with the expected content.
        LayertapError: the download failed.
    """
    unreachable = ""
    try:
        with contextlib.ExitStack() as settings:
            unreachable = settings.enter_context(hub_offline_if_unreachable()) if from_hub else ""
            settings.enter_context(
                contextlib.redirect_stdout(sys.stderr)
            )  # torch.hub prints; --json promises JSON only
            return load()
    except LayertapError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # the base classes of the hubs' own errors
        # `LocalEntryNotFoundError` of some versions of the hub is also a ValueError.
        if isinstance(error, ValueError) and not isinstance(error, OSError):  # the hub answered with other content
            raise InputError(f"{request.spec}: {first_line(error)}") from error
        reason = unreachable if unreachable and _is_missing_file(error) else first_line(error)
        raise LayertapError(f"{item} of {request.spec} could not be downloaded: {reason}", hint=remedy()) from error


def _is_missing_file(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, is about a file: not about its content."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False
