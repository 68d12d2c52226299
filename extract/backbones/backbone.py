"""A loaded backbone or text tower; its description without weights; errors of downloads."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.backbones.weights import LoadRequest, Weights
from extract.errors import InputError, LayertapError, first_line
from extract.system.torch_state import full_float32

__all__ = [
    "Entry", "LoadRequest", "LoadedBackbone", "TextTower", "count_parameters", "downloading", "quiet", "too_long",
    "why_unreachable", "without_weights",
]  # fmt: skip

_CONNECT_S = 10  # the libraries of the Hugging Face hub retry for a minute, also for files that are in its cache


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager: suppress log messages of libraries, such as warnings about random weights."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


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
            # torch.hub prints; --json promises JSON only.
            settings.enter_context(contextlib.redirect_stdout(sys.stderr))
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


def why_unreachable(url: str) -> str:
    """Return why the server of a URL cannot be connected to; empty if it can, or if a proxy connects to it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if {parts.scheme, "all"} & getproxies().keys() and not proxy_bypass(host):
        return ""
    try:
        socket.create_connection((host, parts.port or (80 if parts.scheme == "http" else 443)), _CONNECT_S).close()
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or error}"
    return ""


@contextlib.contextmanager
def hub_offline_if_unreachable() -> Iterator[str]:
    """Context manager: set the hub's offline mode if its server cannot be reached, and yield why; empty if it can.

    In offline mode, the libraries of the hub take files from its cache at once.
    """
    from huggingface_hub import constants

    reason = "" if constants.HF_HUB_OFFLINE else why_unreachable(constants.ENDPOINT)
    if not reason:
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = False


@dataclass(frozen=True)
class TextTower:
    """The text tower of a model with an image tower, ready to run; both map to vectors in the same space.

    It takes a third to a half of the memory of a CLIP model, so only a search loads it, with the weights whose hash the
    data set records: cosines between two checkpoints of one architecture look plausible, but mean nothing.

    Attributes:
        spec: the requested spec.
        architecture: architecture of the backbone that is the image tower.
        weights_sha256: hash of that backbone's weights; embeddings from other weights are not in the same space.
        model: the model that contains the tower.
        tokens_of: maps a text to the tokens that `embed` takes, (1, T) each; raises the error of `too_long`.
        embed: maps the model and tokens, (B, T) each, to features (B, D).
        device: device of the model.
    """

    spec: str
    architecture: str
    weights_sha256: str
    model: nn.Module
    tokens_of: Callable[[str], dict[str, Tensor]]
    embed: Callable[[Any, dict[str, Tensor]], Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def features(self, texts: str | Sequence[str]) -> NDArray[np.float32]:
        """Compute features of texts, not normalised; compare them with image embeddings by cosine similarity.

        Args:
            texts: a text or several texts.

        Returns:
            (number of texts, D) float32.

        Raises:
            InputError: there is no text, or a text is empty or longer than the model reads.
        """
        text_list = [texts] if isinstance(texts, str) else list(texts)
        if not text_list or not all(text.strip() for text in text_list):
            raise InputError("a text is empty" if text_list else "no texts were given")
        tokens = [self.tokens_of(text) for text in text_list]
        blocks = []
        with torch.inference_mode(), full_float32():
            for first in range(0, len(tokens), defaults.BATCH_SIZE):
                chunk = tokens[first : first + defaults.BATCH_SIZE]
                batch = {name: torch.cat([encoded[name] for encoded in chunk]).to(self.device) for name in chunk[0]}
                blocks.append(self.embed(self.model, batch).float().cpu().numpy())
        return np.concatenate(blocks)


def too_long(text: str, limit: int) -> InputError:
    """Return the error for a text of which the tower would read only the beginning."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    return InputError(
        f"the text {shown!r} has more than {limit} tokens, the limit of the model", hint="shorten the text"
    )
