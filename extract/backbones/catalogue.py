"""Which backbones can be named, and what is known of them without their weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from extract.backbones.from_open_clip import quiet
from extract.errors import LayertapError, first_line, unknown_name
from extract.system.optional_libraries import library
from extract.taps.layer_names import is_glob

__all__ = ["Entry", "Listed", "describe", "listed", "matching"]


@dataclass(frozen=True)
class Listed:
    """The backbones of one source that are known here by name.

    Attributes:
        names: specs; of `hf` those in its cache here.
        note: what else can be named, or why there are none.
    """

    names: list[str]
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """What is known of a backbone.

    Attributes:
        spec: SOURCE/NAME.
        width: of the embedding; None if it has none.
        input_px: (height, width) of its input, as its default weights take it; None if nobody says.
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


def listed() -> dict[str, Listed]:
    """Source -> its backbones."""
    return {source: names() for source, names in _LISTS.items()}


def matching(pattern: str) -> list[str]:
    """The specs that a pattern means; an exact name of `hf` need not be in the cache.

    Raises:
        UnknownNameError: none.
        LayertapError: the library of the source is not installed.
    """
    source, _, name = pattern.partition("/")
    if not is_glob(source) and source not in _LISTS:
        raise unknown_name("source", source, _LISTS)
    if source == "open_clip":
        library("open_clip", "open_clip", "open_clip/")
    if source == "hf" and name and not is_glob(name):
        return [pattern]
    if source == "timm" and "." in name:
        known = [f"timm/{one}" for one in _pretrained_of_timm()]
    else:
        known = [spec for group, names in _LISTS.items() if fnmatchcase(group, source) for spec in names().names]
    found = [spec for spec in known if fnmatchcase(spec, pattern if name else f"{pattern}/*")]
    if not found:
        raise unknown_name("backbone", pattern, known)
    return found


def describe(spec: str) -> Entry:
    """What is known of one backbone; nothing but the settings of a model of `hf` is downloaded."""
    source, _, name = spec.partition("/")
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        return _ENTRIES[source](spec, name)


def _without_weights(make: Callable[[], Any]) -> Any:
    """A model whose tensors have shapes and no numbers; with numbers, where it cannot be made without."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # each model that computes with its weights while it is made has an error of its own
        return make()


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _timm(spec: str, name: str) -> Entry:
    import timm
    from timm.data.config import resolve_model_data_config

    architecture, _, tag = name.partition(".")
    model = _without_weights(partial(timm.create_model, architecture))
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    default = model.pretrained_cfg.get("tag", "")
    config = timm.get_pretrained_cfg(name) if tag else None
    licence = (config.license if config is not None else model.pretrained_cfg.get("license")) or ""
    licence = licence if tags else ""
    _, height, width = resolve_model_data_config(model)["input_size"]  # type: ignore[no-untyped-call]
    ordered = sorted(tags, key=lambda one: (one != (tag or default), one))
    features = getattr(model, "head_hidden_size", None) or getattr(model, "num_features", None)
    return Entry(spec, features, (height, width), _parameters(model), licence, tuple(filter(None, ordered)))


def _bundled(spec: str, name: str) -> Entry:
    found = _timm(spec, "tf_efficientnet_lite0")
    return Entry(spec, found.width, found.input_px, found.parameters, "apache-2.0", ())


def _torchvision(spec: str, name: str) -> Entry:
    from torchvision import models

    entry = models.get_model_weights(name).DEFAULT
    height, width = (*entry.transforms().crop_size, *entry.transforms().crop_size)[:2]
    model = _without_weights(partial(models.get_model, name))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    features = linear[-1].in_features if linear and not name.startswith("squeezenet") else None
    others = [one.name for one in models.get_model_weights(name) if one.name != entry.name]
    return Entry(spec, features, (height, width), int(entry.meta["num_params"]), "", (entry.name, *others))


def _open_clip(spec: str, name: str) -> Entry:
    open_clip = library("open_clip", "open_clip", "open_clip/")
    config = open_clip.get_model_config(name)
    size = config["vision_cfg"]["image_size"]
    height, width = [size] * 2 if isinstance(size, int) else size
    model = _without_weights(partial(open_clip.create_model, name))
    tags = tuple(open_clip.list_pretrained_tags_by_model(name))
    return Entry(spec, config["embed_dim"], (height, width), _parameters(model.visual), "", tags)


def _hf(spec: str, name: str) -> Entry:
    transformers = library("transformers", "hf", "hf/")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise LayertapError(f"{spec}: its settings cannot be read: {first_line(error)}") from error
    model = _without_weights(partial(transformers.AutoModel.from_config, config))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size) if size else None
    sizes = getattr(vision, "hidden_sizes", None)
    features = getattr(config, "projection_dim", None) or getattr(vision, "hidden_size", None) or (sizes or [None])[-1]
    return Entry(spec, features, sides, _parameters(model), "", ())


def _pretrained_of_timm() -> list[str]:
    import timm

    return list(timm.list_pretrained())


def _names_of_timm() -> Listed:
    import timm

    return Listed([f"timm/{name}" for name in timm.list_models()], "any of them with a tag, as timm/resnet50.a1_in1k")


def _names_of_torchvision() -> Listed:
    from torchvision import models

    return Listed([f"torchvision/{name}" for name in models.list_models(module=models)])


def _names_of_open_clip() -> Listed:
    try:
        open_clip = library("open_clip", "open_clip", "open_clip/")
    except LayertapError as error:
        return Listed([], str(error))
    return Listed([f"open_clip/{name}" for name in open_clip.list_models()], "with a tag, as open_clip/ViT-B-32:openai")


def _names_of_hf() -> Listed:
    try:
        library("transformers", "hf", "hf/")
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except LayertapError as error:
        return Listed([], str(error))
    note = "any vision model of the hub, as hf/facebook/dinov2-base, or a folder; these are in the cache here"
    try:
        cached = sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError):
        cached = []
    return Listed([f"hf/{name}" for name in cached], note)


_LISTS: dict[str, Callable[[], Listed]] = {
    "bundled": lambda: Listed(["bundled/efficientnet_lite0"], "comes with the installation"),
    "torchvision": _names_of_torchvision,
    "timm": _names_of_timm,
    "open_clip": _names_of_open_clip,
    "hf": _names_of_hf,
    "hub": lambda: Listed([], "hub/OWNER/REPO:ENTRY or hub/FOLDER:ENTRY, as hub/facebookresearch/dino:dino_vits16"),
    "python": lambda: Listed([], "python/FILE.py:FACTORY, a function of yours that returns (model, transform)"),
}

_ENTRIES: dict[str, Callable[[str, str], Entry]] = {
    "bundled": _bundled,
    "torchvision": _torchvision,
    "timm": _timm,
    "open_clip": _open_clip,
    "hf": _hf,
}
