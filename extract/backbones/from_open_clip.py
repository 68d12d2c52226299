"""Backbones of open_clip: image towers of CLIP-like models; the embedding is that of `encode_image`, not normalised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from extract.backbones.backbone import Asked, Backbone, downloading
from extract.backbones.own_output import WithEmbedding
from extract.errors import InputError, unknown_name
from extract.libraries import library
from extract.preprocessing import from_open_clip
from extract.weights import Weights, given_weights, is_named, weights_sha256

__all__ = ["load", "quiet"]


def load(asked: Asked) -> Backbone:
    """NAME or NAME:TAG, as open_clip has them; weights by tag. Of a file of both towers, the text tower is left out."""
    open_clip = library("open_clip", "open_clip", "open_clip/")
    spec, weights = asked.spec, asked.weights
    name, _, tag = asked.name.partition(":")
    if name not in open_clip.list_models():
        raise unknown_name("backbone", spec, [f"open_clip/{known}" for known in open_clip.list_models()])
    notes: tuple[str, ...] = ()
    architecture, tags = name, open_clip.list_pretrained_tags_by_model(name)
    if weights is not None and not is_named(weights):
        if tag and weights != "random":
            raise InputError(f"{spec} names the weights {tag!r}, and --weights names {weights!r}; name one")
        with quiet():
            found, loaded, _ = given_weights(
                lambda: _visual(open_clip.create_model(name)), weights, asked.seed, spec, lambda model: None
            )
        tower: Any = found
        settings = {tag: _settings(open_clip, name, tag) for tag in tags}
        own = {"quick_gelu": _is_quick(open_clip, name), **tower.preprocess_cfg}
        if weights != "random" and any({**own, **other} != own for other in settings.values()):
            notes = (
                f"preprocessing and activation of {name} itself are taken; they differ between its published weights. "
                f"For those of OpenAI, take {name}-quickgelu",
            )
    else:
        if weights and tag and weights != tag:
            raise InputError(f"{spec} names the weights {tag!r}, and --weights names {weights!r}; name one")
        tag = weights or tag
        if not tag:
            there = ", ".join(f"{spec}:{one}" for one in tags[:8]) or "a file, with --weights"
            raise InputError(f"{spec}: name the weights, too: {there}")
        if tag not in tags:
            raise unknown_name("weights", tag, tags, f"open_clip/{name}")
        quick = bool(_settings(open_clip, name, tag)["quick_gelu"])
        if quick and not _is_quick(open_clip, name):
            notes = (f"{name} with QuickGELU, which the weights {tag} were trained with",)
            architecture = f"{name} with QuickGELU"
        model = downloading(
            asked,
            lambda: open_clip.create_model(name, pretrained=tag, require_pretrained=True, force_quick_gelu=quick),
            lambda: _by_hand(open_clip, name, tag),
        )
        tower = _visual(model)
        loaded = Weights(f"open_clip/{name} {tag}", weights_sha256(tower))
    trunk = getattr(tower, "trunk", tower)  # where the tower is one of timm's
    grid = getattr(tower, "grid_size", None)
    class_token = getattr(trunk, "class_embedding", getattr(trunk, "cls_token", None)) is not None
    return Backbone(
        spec=spec,
        architecture=f"open_clip/{architecture}",
        model=WithEmbedding(tower, _embed),
        weights=loaded,
        preprocessing=from_open_clip(tower.preprocess_cfg),
        prefix_tokens=int(getattr(trunk, "num_prefix_tokens", class_token)),
        patches=grid[0] * grid[1] if grid is not None else None,
        class_token=class_token,
        reads_class_token=class_token and getattr(tower, "pool_type", "") == "tok",
        notes=notes,
    )


def _visual(model: Any) -> Any:
    tower = model.visual
    if not hasattr(tower, "preprocess_cfg"):
        raise InputError(f"its image tower, {type(tower).__name__}, does not say what pictures it takes")
    return tower


def _embed(tower: Any, images: Tensor) -> Tensor:
    output = tower(images)
    embedding: Tensor = output[0] if isinstance(output, tuple) else output  # some give their tokens, too
    return embedding


def _settings(open_clip: Any, name: str, tag: str) -> dict[str, Any]:
    config = open_clip.get_pretrained_cfg(name, tag)
    found = {key: config[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in config}
    return {**found, "quick_gelu": bool(config.get("quick_gelu", False))}


def _is_quick(open_clip: Any, name: str) -> bool:
    return bool(open_clip.get_model_config(name).get("quick_gelu", False))


def _by_hand(open_clip: Any, name: str, tag: str) -> str:
    config = open_clip.get_pretrained_cfg(name, tag)
    where = config.get("url")
    if config.get("hf_hub"):
        from huggingface_hub import hf_hub_url

        repository, _, file = config["hf_hub"].rpartition("/")
        where = hf_hub_url(repository, file or "open_clip_model.safetensors")
    return f"fetch {where} and give it as -b open_clip/{name} --weights FILE"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' warnings that weights are random, where they are replaced, or not wanted at all."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
