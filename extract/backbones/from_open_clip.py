"""Backbones of open_clip: image towers of CLIP-like models. The embedding is that of `encode_image`, not normalised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extract.backbones.backbone import (
    Entry,
    LoadedBackbone,
    LoadRequest,
    TextTower,
    count_parameters,
    downloading,
    quiet,
    too_long,
    without_weights,
)
from extract.backbones.output_as_embedding import WithEmbedding
from extract.backbones.preprocessing import from_open_clip
from extract.backbones.weights import (
    Weights,
    WeightsFile,
    build_with_weights,
    in_cache_of_hub,
    is_named,
    tag_of,
    weights_sha256,
)
from extract.errors import InputError, unknown_name
from extract.system.optional_libraries import library

__all__ = ["describe", "load", "load_text_tower", "locate", "names"]


@dataclass(frozen=True)
class _Selection:
    """The model and weights that a request names.

    Attributes:
        name: name of the model.
        tag: tag of the weights; None for weights from a file, or random weights.
        quick: whether to force QuickGELU, because the weights need it and the model's configuration does not set it.
        architecture: what the features depend on, besides the weights.
        notes: messages for the user.
    """

    name: str
    tag: str | None
    quick: bool
    architecture: str
    notes: tuple[str, ...]


def load(request: LoadRequest) -> LoadedBackbone:
    """Load NAME or NAME:TAG of open_clip; weights: a tag, a file or "random". A text tower in a file is left out."""
    open_clip = library("open_clip", "open_clip", "open_clip/")
    selection = _select(open_clip, request)
    notes = selection.notes
    if selection.tag is None:
        tower: Any
        with quiet():
            tower, loaded, _ = build_with_weights(request, lambda: _visual(open_clip.create_model(selection.name)))
        if request.weights != "random":
            quick = f"{selection.name}-quickgelu"
            remedy = f"; for weights of OpenAI, use {quick}" if quick in open_clip.list_models() else ""
            notes = (*notes, f"the preprocessing and activation function of {selection.name} are used{remedy}")
    else:
        tower = _visual(_downloaded(open_clip, request, selection))
        loaded = Weights(f"open_clip/{selection.name} {selection.tag}", weights_sha256(tower))
    trunk = getattr(tower, "trunk", tower)  # if the tower is a timm model
    grid = getattr(tower, "grid_size", None)
    class_token = getattr(trunk, "class_embedding", getattr(trunk, "cls_token", None)) is not None
    return LoadedBackbone(
        spec=request.spec,
        architecture=selection.architecture,
        model=WithEmbedding(tower, _embed),
        weights=loaded,
        preprocessing=from_open_clip(tower.preprocess_cfg),
        prefix_tokens=int(getattr(trunk, "num_prefix_tokens", class_token)),
        patches=grid[0] * grid[1] if grid is not None else None,
        class_token=class_token,
        reads_class_token=class_token and getattr(tower, "pool_type", "") == "tok",
        notes=notes,
    )


def load_text_tower(request: LoadRequest) -> TextTower:
    """Load the text tower of a model, see `load`; a weights file must hold both towers."""
    open_clip = library("open_clip", "open_clip", "open_clip/")
    selection = _select(open_clip, request)
    if selection.tag is None:
        with quiet():
            both = replace(request, spec=f"{request.spec} with its text tower")
            model, _, _ = build_with_weights(both, lambda: open_clip.create_model(selection.name))
    else:
        model = _downloaded(open_clip, request, selection)
    tokenizer = downloading(
        request,
        lambda: open_clip.get_tokenizer(selection.name),
        lambda: "load the tokenizer on a machine with a network, and copy the cache of the Hugging Face hub",
        item="the tokenizer",
        from_hub="hf_tokenizer_name" in open_clip.get_model_config(selection.name).get("text_cfg", {}),
    )

    def tokens_of(text: str) -> dict[str, Tensor]:
        tokens = tokenizer([text])
        if not torch.equal(tokenizer([text], context_length=tokens.shape[1] + 1)[:, :-1], tokens):
            raise too_long(text, tokens.shape[1])
        return {"text": tokens}

    return TextTower(
        request.spec, selection.architecture, weights_sha256(_visual(model)), model, tokens_of, lambda model, tokens:
        model.encode_text(**tokens),
    )  # fmt: skip


def locate(request: LoadRequest) -> WeightsFile:
    """Say where the published weights are; errors for unknown names as in `load`."""
    open_clip = library("open_clip", "open_clip", "open_clip/")
    selection = _select(open_clip, request)
    name, tag = f"open_clip/{selection.name}:{selection.tag}", selection.tag or ""
    url, repository, file = _origin(open_clip, selection.name, tag)
    if repository:
        # open_clip prefers a file of safetensors, whatever the name says.
        files = ("open_clip_model.safetensors", f"{file.rpartition('.')[0]}.safetensors", file)
        return WeightsFile(name, in_cache_of_hub(repository, files), url, from_hub=True)
    path = Path("~/.cache/clip").expanduser() / url.rpartition("/")[2]
    return WeightsFile(name, path if path.is_file() else None, url)


def names(pattern: str) -> list[str]:
    """Return the names of open_clip's models."""
    return list(library("open_clip", "open_clip", "open_clip/").list_models())


def describe(spec: str, name: str, built: bool = True) -> Entry:
    """Describe a model from its configuration; count the parameters of its image tower."""
    open_clip = library("open_clip", "open_clip", "open_clip/")
    config = open_clip.get_model_config(name)
    size = config["vision_cfg"]["image_size"]
    height, width = [size] * 2 if isinstance(size, int) else size
    tower = without_weights(partial(open_clip.create_model, name)).visual if built else None
    tags = tuple(open_clip.list_pretrained_tags_by_model(name))
    return Entry(spec, config["embed_dim"], (height, width), count_parameters(tower), "", tags)


def _select(open_clip: Any, request: LoadRequest) -> _Selection:
    spec, weights = request.spec, request.weights
    name, _, tag = request.name.partition(":")
    if name not in open_clip.list_models():
        raise unknown_name(
            "backbone",
            spec,
            [f"open_clip/{known}" for known in open_clip.list_models()],
            hint="list them: layertap list open_clip",
        )
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights == "random":
        return _Selection(name, None, False, f"open_clip/{name}", ())
    tag = tag_of(request, tag)
    if weights is not None and not is_named(weights):
        return _Selection(name, None, False, f"open_clip/{name}", ())
    if not tag:
        choices = ", ".join(f"{spec}:{known}" for known in tags[:3]) or "--weights FILE"
        others = f", or one of {len(tags) - 3} others: layertap list {spec}" if tags[3:] else ""
        raise InputError(f"{spec}: no weights are named", hint=f"use {choices}{others}")
    if tag not in tags:
        raise unknown_name("weights", tag, tags, f"open_clip/{name}")
    if not open_clip.get_pretrained_cfg(name, tag).get("quick_gelu", False) or _is_quick(open_clip, name):
        return _Selection(name, tag, False, f"open_clip/{name}", ())
    # open_clip itself runs the weights of OpenAI without QuickGELU under the plain name, and warns.
    note = f"{name} uses QuickGELU, because the weights {tag} were trained with QuickGELU"
    return _Selection(name, tag, True, f"open_clip/{name} with QuickGELU", (note,))


def _downloaded(open_clip: Any, request: LoadRequest, selection: _Selection) -> Any:
    """Return the model with both towers and its published weights."""
    return downloading(
        request,
        lambda: open_clip.create_model(
            selection.name, pretrained=selection.tag, require_pretrained=True, force_quick_gelu=selection.quick
        ),
        lambda: _by_hand(open_clip, selection.name, selection.tag or ""),
        from_hub=bool(_origin(open_clip, selection.name, selection.tag or "")[1]),
    )


def _visual(model: Any) -> Any:
    tower = model.visual
    if not hasattr(tower, "preprocess_cfg"):
        raise InputError(f"the image tower, {type(tower).__name__}, has no preprocessing (preprocess_cfg)")
    return tower


def _embed(tower: Any, images: Tensor) -> Tensor:
    output = tower(images)
    embedding: Tensor = output[0] if isinstance(output, tuple) else output  # some towers return their tokens, too
    return embedding


def _is_quick(open_clip: Any, name: str) -> bool:
    return bool(open_clip.get_model_config(name).get("quick_gelu", False))


def _by_hand(open_clip: Any, name: str, tag: str) -> str:
    return f"download {_origin(open_clip, name, tag)[0]}, and give the file: -b open_clip/{name} --weights FILE"


def _origin(open_clip: Any, name: str, tag: str) -> tuple[str, str, str]:
    """Return the URL of published weights, and the repository and name of the file if it is one of the hub."""
    config = open_clip.get_pretrained_cfg(name, tag)
    if not config.get("hf_hub"):
        return str(config.get("url") or ""), "", ""
    from huggingface_hub import hf_hub_url

    repository, _, file = config["hf_hub"].rpartition("/")
    file = file or "open_clip_model.safetensors"
    return hf_hub_url(repository, file), repository, file
