"""Backbones of Hugging Face transformers, from its hub or from a folder written by `save_pretrained`.

The embedding is the first of these that the model has: the input of the classifier of an image classification model;
the output of `get_image_features` of a model with an image and a text tower; `image_embeds` of an image tower with its
projection; `pooler_output`; the class token; the mean over the tokens or over the feature map.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from extract.backbones.output_as_embedding import with_embedding
from extract.backbones.preprocessing import IDENTITY, OVERRIDES, Preprocessing, from_hf, overridden
from extract.backbones.weights import (
    UNSAFE,
    Weights,
    WeightsFile,
    build_with_weights,
    in_cache_of_hub,
    is_named,
    weights_sha256,
)
from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import library
from extract.taps.layer_names import named_layers

__all__ = ["describe", "load", "load_text_tower", "locate", "names"]

_CLASSIFIES = "ForImageClassification"
# Fields of a configuration that do not affect the features.
_NO_SETTINGS = {
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id", "architectures",
}  # fmt: skip
_WEIGHTS_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_BY_HAND = ("config.json", "preprocessor_config.json", "model.safetensors")


@dataclass(frozen=True)
class _Location:
    """The location of a model.

    Attributes:
        request: the request.
        name: name on the hub, or absolute path of a folder.
        local: whether the model is in a local folder.
        options: keyword arguments for the library's `from_pretrained`.
    """

    request: LoadRequest
    name: str
    local: bool
    options: dict[str, Any]

    def load(self, load: Callable[[], Any]) -> Any:
        """Return `load()`; convert errors of the library to errors of layertap."""
        if not self.local:
            return downloading(self.request, load, lambda: _by_hand(self.request.name), from_hub=True)
        try:
            return load()
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.request.spec}: {first_line(error)}") from error


def load(request: LoadRequest) -> LoadedBackbone:
    """Load NAME from the hub, or a folder; weights: a revision, a file or "random".

    Code shipped with a model is never run.
    """
    transformers = library("transformers", "hf", "hf/")
    location = _location(request)
    with _quiet(transformers), _errors_of_library(request.spec):
        config = _config(transformers, request, location)
        preprocessing = _preprocessing(transformers, request, location)
        model, weights, notes = _load_model(transformers, request, location, config)
    architecture = _architecture(model, config)
    classifier = _classifier(model)
    vision = getattr(config, "vision_config", config)
    tower = getattr(model, "vision_model", _trunk(model))
    embeddings = getattr(tower, "embeddings", None)
    class_token = any(getattr(embeddings, name, None) is not None for name in ("cls_token", "class_embedding"))
    why = ""
    if classifier is None:
        size = overridden(preprocessing, request.preprocessing).crop_px
        model, why = with_embedding(model, size, _embed)
    return LoadedBackbone(
        spec=f"hf/{location.name}",
        architecture=architecture,
        model=model,
        weights=weights,
        preprocessing=preprocessing,
        classifier=classifier,
        no_embedding=why,
        prefix_tokens=class_token
        + int(getattr(vision, "num_register_tokens", 0) or 0)
        + (getattr(embeddings, "distillation_token", None) is not None),
        class_token=class_token,
        reads_class_token=class_token,
        notes=notes,
    )


def load_text_tower(request: LoadRequest) -> TextTower:
    """Load the text tower of a model, see `load`; its tokenizer comes from the same place."""
    transformers = library("transformers", "hf", "hf/")
    location = _location(request)
    with _quiet(transformers), _errors_of_library(request.spec):
        config = _config(transformers, request, location)
        model, weights, _ = _load_model(transformers, request, location, config)
        if not hasattr(model, "get_text_features"):
            raise InputError(f"{request.spec} is a {type(model).__name__}, which has no text tower")
        tokenizer = _load_tokenizer(transformers, location)
    text_config = getattr(config, "text_config", None)
    known = int(getattr(text_config, "vocab_size", 0))
    n_tokens = 0 if tokenizer is None else len(tokenizer)
    if tokenizer is None or n_tokens < known / 2:  # without its files, transformers makes an empty tokenizer
        raise InputError(
            f"{request.spec}: no matching tokenizer in {location.name} (it has {n_tokens:,} tokens, the model "
            f"{known:,})",
            hint="copy the tokenizer's files there" if location.local else "",
        )
    limit = tokenizer.model_max_length
    limit = min(limit, getattr(text_config, "max_position_embeddings", limit))

    def tokens_of(text: str) -> dict[str, Tensor]:
        if len(tokenizer(text, verbose=False)["input_ids"]) > limit:
            raise too_long(text, limit)
        # Padded to the full length, as in the training of SigLIP; towers trained without padding ignore it.
        return dict(tokenizer([text], padding="max_length", max_length=limit, return_tensors="pt"))

    return TextTower(request.spec, _architecture(model, config), weights.sha256, model, tokens_of, _embed_text)


def locate(request: LoadRequest) -> WeightsFile:
    """Say where the weights are: in a folder, in the cache of the hub, or on the hub."""
    library("transformers", "hf", "hf/")
    location = _location(request)
    if location.local:
        found = (file for name in _WEIGHTS_FILES if (file := Path(location.name) / name).is_file())
        return WeightsFile(f"hf/{location.name}", next(found, None))
    revision = location.options.get("revision")
    # With weights of a file, or random ones, only the configuration comes from there.
    files = _WEIGHTS_FILES if request.weights is None or revision else _BY_HAND[:1]
    path = in_cache_of_hub(location.name, files, revision)
    return WeightsFile(f"hf/{location.name}", path, f"https://huggingface.co/{location.name}", from_hub=True)


def names(pattern: str) -> list[str]:
    """Return the names of the models in the hub's cache; an exact name is returned as it is, cached or not.

    Raises:
        LayertapError: transformers is not installed.
    """
    if not set("*?[") & set(pattern):
        return [pattern]
    if importlib.util.find_spec("transformers") is None:
        library("transformers", "hf", "hf/")  # raises; importing it takes half a second
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError):
        return []


def describe(spec: str, name: str, built: bool = True) -> Entry:
    """Describe a model from its configuration, without its weights."""
    transformers = library("transformers", "hf", "hf/")
    with _errors_of_library(spec):
        try:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise LayertapError(f"{spec}: cannot read the configuration: {first_line(error)}") from error
        model = without_weights(partial(transformers.AutoModel.from_config, config)) if built else None
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size) if size else None
    sizes = getattr(vision, "hidden_sizes", None)
    features = getattr(config, "projection_dim", None) or getattr(vision, "hidden_size", None) or (sizes or [None])[-1]
    return Entry(spec, features, sides, count_parameters(model), "", ())


def _location(request: LoadRequest) -> _Location:
    name, weights = request.name, request.weights
    local = Path(name).expanduser().is_dir()
    if local:
        name = str(Path(name).expanduser().resolve())
    elif name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise InputError(f"{request.spec}: no such folder", hint="a model of the hub is OWNER/NAME")
    options: dict[str, Any] = {"trust_remote_code": False}
    if weights is not None and is_named(weights):
        if local:
            raise InputError(f"{request.spec} is a folder, which has no revisions", hint=f"remove --weights {weights}")
        options["revision"] = weights
    return _Location(request, name, local, options)


def _config(transformers: Any, request: LoadRequest, location: _Location) -> Any:
    config = location.load(lambda: transformers.AutoConfig.from_pretrained(location.name, **location.options))
    if config.model_type == "timm_wrapper":
        raise InputError(f"{request.spec} is a model of timm", hint=f"use -b timm/{Path(location.name).name}")
    return config


def _load_model(
    transformers: Any, request: LoadRequest, location: _Location, config: Any
) -> tuple[Any, Weights, tuple[str, ...]]:
    """Return the model, its weights, and messages for the user."""
    spec, weights = request.spec, request.weights
    notes: tuple[str, ...] = ()
    if getattr(config, "mask_ratio", 0):  # a masked autoencoder sees a random choice of patches
        config.mask_ratio = 0.0
        notes = ("masking is off (mask_ratio 0)",)
    model_class = _class_for(transformers, config)
    if weights is not None and not is_named(weights):

        def build() -> Any:
            if model_class is not transformers.AutoModel:
                return model_class(config)
            try:
                return model_class.from_config(config, trust_remote_code=False)
            except ValueError as error:  # AutoModel has no model of this kind
                raise InputError(f"{spec}: {first_line(error)}") from error

        model, origin, _ = build_with_weights(request, build, _classifier)
        return model, origin, notes
    model, unused_note = _pretrained(spec, model_class, location, config)
    commit = "" if location.local else _commit(location)
    name = Path(location.name).name if location.local else location.name
    source = f"hf/{name} at {commit[:12]}" if commit else f"hf/{name}"
    return model, Weights(source, weights_sha256(model)), (*notes, *unused_note)


def _commit(location: _Location) -> str:
    """Return the commit of a model in the hub's cache, where its files lie in `snapshots/COMMIT`; "" if unknown."""
    path = in_cache_of_hub(location.name, ["config.json"], location.options.get("revision"))
    return "" if path is None else path.parent.name


def _load_tokenizer(transformers: Any, location: _Location) -> Any:
    """Load the tokenizer; if its files are missing, return None or a tokenizer without a vocabulary."""
    with contextlib.suppress(TypeError):  # transformers 4 opens a vocabulary file whose name is None
        return location.load(lambda: transformers.AutoTokenizer.from_pretrained(location.name, **location.options))
    return None


def _embed_text(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    output = model.get_text_features(**tokens)
    return _flat(output if isinstance(output, Tensor) else output.pooler_output)


def _class_for(transformers: Any, config: Any) -> Any:
    """Return the class to load: that of the checkpoint if its head affects the embedding, else `AutoModel`."""
    heads = (_CLASSIFIES, f"{_CLASSIFIES}WithTeacher", "WithProjection")
    names = [name for name in getattr(config, "architectures", None) or [] if name.endswith(heads)]
    return getattr(transformers, names[0], transformers.AutoModel) if names else transformers.AutoModel


def _pretrained(spec: str, model_class: Any, location: _Location, config: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model with all its weights, and a note on tensors of the checkpoint that are not used."""
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "config": config}
    # Refused below, with both shapes; the library's own error refers to a report that it logs.
    options |= {"ignore_mismatched_sizes": True, **location.options}
    model, info = location.load(lambda: model_class.from_pretrained(location.name, **options))
    missing = sorted(info["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        # The library would initialise the missing pooler at random.
        with contextlib.suppress(TypeError):  # not every model takes add_pooling_layer
            model, info = location.load(
                lambda: model_class.from_pretrained(location.name, add_pooling_layer=False, **options)
            )
            missing = sorted(info["missing_keys"])
    mismatched = [
        f"{entry} has another shape"  # transformers 4 gives the names alone
        if isinstance(entry, str)
        else f"{entry[0]} is {tuple(entry[1])}, expected {tuple(entry[2])}"
        for entry in sorted(info["mismatched_keys"])
    ]
    problems = [*missing, *mismatched]
    if problems:
        raise InputError(
            f"{spec}: {len(problems)} tensors of {type(model).__name__} are missing from the checkpoint or have "
            f"another shape: {', '.join(problems[:5])}{', ...' if len(problems) > 5 else ''}"
        )
    unused = sorted(info["unexpected_keys"])
    names = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
    note = f"{len(unused)} tensors of the checkpoint are not used: {names}"
    return model, (note,) if unused else ()


def _classifier(model: Any) -> str | None:
    """Return the classifier layer of an image classification model; None if there is no single one."""
    linear = [
        name
        for name, module in named_layers(model).items()
        if isinstance(module, nn.Linear) and (name == "classifier" or name.startswith("classifier."))
    ]
    return linear[0] if len(linear) == 1 else None


def _embed(model: Any, images: Tensor) -> Tensor:
    if hasattr(model, "get_image_features"):
        output = model.get_image_features(pixel_values=images)
        return _flat(output if isinstance(output, Tensor) else output.pooler_output)
    trunk = _trunk(model)
    output = trunk(pixel_values=images)
    if getattr(output, "image_embeds", None) is not None:
        return _flat(output.image_embeds)
    if getattr(output, "pooler_output", None) is not None:
        return _flat(output.pooler_output)
    hidden = output.last_hidden_state
    if hidden.ndim == 3:
        return _flat(hidden[:, 0] if _has_class_token(trunk) else hidden.mean(1))
    return _flat(hidden.mean((2, 3)))


def _has_class_token(trunk: Any) -> bool:
    """Whether the first of the last tokens is the class token; in a pyramid of stages (Pvt), the last stage adds it."""
    stages = [*getattr(getattr(trunk, "encoder", None), "patch_embeddings", ())]
    holders = [getattr(trunk, "embeddings", None), *stages[-1:]]
    return any(getattr(holder, "cls_token", None) is not None for holder in holders)


def _trunk(model: Any) -> Any:
    """Return a classification model without its heads; return any other model unchanged."""
    return model.base_model if _CLASSIFIES in type(model).__name__ else model


def _flat(values: Tensor) -> Tensor:
    return values.flatten(1)


def _preprocessing(transformers: Any, request: LoadRequest, location: _Location) -> Preprocessing:
    if not request.preprocessing.keys() < OVERRIDES:
        return overridden(IDENTITY, request.preprocessing)
    instead = "give --size --crop --interpolation --mean --std"
    files = [Path(location.name) / name for name in ("preprocessor_config.json", "processor_config.json")]
    if location.local and not any(file.is_file() for file in files):
        raise InputError(
            f"{request.spec}: no preprocessor_config.json, which holds the preprocessing",
            hint=f"copy this file there, or {instead}",
        )
    processor = location.load(
        lambda: transformers.AutoImageProcessor.from_pretrained(location.name, **location.options)
    )
    try:
        return from_hf(processor)
    except InputError as error:
        raise InputError(f"{request.spec}: its image processor {error}", hint=f"to replace it, {instead}") from error


def _architecture(model: Any, config: Any) -> str:
    """Return class and settings of the model: what the features depend on, besides the weights.

    Models with equal weights can differ in their settings, such as the activation function. The first 16 digits stand
    for the sha256 over the settings that differ from their defaults.
    """
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in _NO_SETTINGS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return f"hf/{type(model).__name__}, settings with sha256 {digest[:16]}"


def _by_hand(name: str) -> str:
    from huggingface_hub import hf_hub_url

    files = ", ".join(hf_hub_url(name, file) for file in _BY_HAND)
    return f"download {files} into one folder, and name the folder: -b hf/FOLDER"


@contextlib.contextmanager
def _errors_of_library(spec: str) -> Iterator[None]:
    """Context manager: convert exceptions of the library. A damaged or contrived file makes it raise any type.

    Raises:
        InputError: the library raised an exception.
    """
    try:
        yield
    except (LayertapError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise InputError(f"{spec}: its weights file {UNSAFE}") from error
    except Exception as error:
        raise InputError(
            f"{spec} has a damaged or unknown file: {type(error).__name__}: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Context manager: suppress the library's progress bars and its report on keys, which this module makes itself."""
    log = transformers.utils.logging
    had_bars = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        with quiet():
            yield
    finally:
        if had_bars:
            log.enable_progress_bar()
