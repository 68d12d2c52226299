"""Backbones of Hugging Face transformers, from its hub or from a folder written by `save_pretrained`.

The embedding is the first of these that the model has: the input of the classifier of an image classification model;
the output of `get_image_features` of a model with an image and a text tower; `image_embeds` of an image tower with its
projection; `pooler_output`; the class token; the mean over the tokens or over the feature map.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extract.backbones.backbone import Asked, LoadedBackbone, downloading
from extract.backbones.catalogue_entry import Entry, count_parameters, without_weights
from extract.backbones.output_as_embedding import with_embedding
from extract.backbones.preprocessing import IDENTITY, OVERRIDES, Preprocessing, from_hf, overridden
from extract.backbones.text_tower import TextTower, too_long
from extract.backbones.weights import Weights, given_weights, is_named, weights_sha256
from extract.errors import InputError, LayertapError, first_line
from extract.system.optional_libraries import library
from extract.taps.layer_names import is_glob, named_layers

__all__ = ["describe", "load", "load_text_tower", "names"]

_CLASSIFIES = "ForImageClassification"
# Fields of a configuration that do not affect the features.
_NO_SETTINGS = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "architectures",
}
_BY_HAND = ("config.json", "preprocessor_config.json", "model.safetensors")


@dataclass(frozen=True)
class _Place:
    """The location of a model.

    Attributes:
        asked: the request.
        name: name on the hub, or absolute path of a folder.
        local: whether the model is in a local folder.
        where: keyword arguments for the library's `from_pretrained`.
    """

    asked: Asked
    name: str
    local: bool
    where: dict[str, Any]

    def ask(self, load: Callable[[], Any]) -> Any:
        """Return `load()`; convert errors of the library to errors of layertap."""
        if not self.local:
            return downloading(self.asked, load, lambda: _by_hand(self.asked.name))
        try:
            return load()
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.asked.spec}: {first_line(error)}") from error


@dataclass(frozen=True)
class _Loaded:
    """A model with its weights.

    Attributes:
        config: configuration of the model.
        model: the network.
        weights: origin and hash of the weights.
        notes: messages for the user.
    """

    config: Any
    model: Any
    weights: Weights
    notes: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """Class and settings of the model: what the features depend on, besides the weights."""
        return f"hf/{type(self.model).__name__}, settings with sha256 {_settings(self.config)}"


def load(asked: Asked) -> LoadedBackbone:
    """Load NAME from the hub, or a folder; weights: a revision, a file or "random".

    Code shipped with a model is never run.
    """
    transformers = library("transformers", "hf", "hf/")
    at = _place(asked)
    with _quiet(transformers):
        config = _config(transformers, asked, at)
        preprocessing = _preprocessing(transformers, asked, at)
        loaded = _loaded(transformers, asked, at, config)
    model = loaded.model
    classifier = _classifier(model)
    vision = getattr(config, "vision_config", config)
    tower = getattr(model, "vision_model", _trunk(model))
    embeddings = getattr(tower, "embeddings", None)
    class_token = any(getattr(embeddings, name, None) is not None for name in ("cls_token", "class_embedding"))
    why = ""
    if classifier is None:
        size = overridden(preprocessing, asked.preprocessing).crop_px
        model, why = with_embedding(model, size, _embed)
    return LoadedBackbone(
        spec=f"hf/{at.name}",
        architecture=loaded.architecture,
        model=model,
        weights=loaded.weights,
        preprocessing=preprocessing,
        classifier=classifier,
        no_embedding=why,
        prefix_tokens=class_token
        + int(getattr(vision, "num_register_tokens", 0) or 0)
        + (getattr(embeddings, "distillation_token", None) is not None),
        class_token=class_token,
        reads_class_token=class_token,
        notes=loaded.notes,
    )


def load_text_tower(asked: Asked) -> TextTower:
    """Load the text tower of a model, see `load`; its tokenizer comes from the same place."""
    transformers = library("transformers", "hf", "hf/")
    at = _place(asked)
    with _quiet(transformers):
        config = _config(transformers, asked, at)
        loaded = _loaded(transformers, asked, at, config)
        model = loaded.model
        if not hasattr(model, "get_text_features"):
            raise InputError(f"{asked.spec} is a {type(model).__name__}, which has no text tower")
        tokenizer = at.ask(lambda: transformers.AutoTokenizer.from_pretrained(at.name, **at.where))
    words = getattr(config, "text_config", None)
    known = int(getattr(words, "vocab_size", 0))
    if len(tokenizer) < known / 2:  # if its files are missing, the library returns a tokenizer without a vocabulary
        raise InputError(
            f"{asked.spec}: no matching tokenizer in {at.name} (it has {len(tokenizer):,} tokens, the model {known:,})"
            + ("; copy the tokenizer's files there" if at.local else "")
        )
    most = min(tokenizer.model_max_length, getattr(words, "max_position_embeddings", tokenizer.model_max_length))

    def tokens_of(text: str) -> dict[str, Tensor]:
        if len(tokenizer(text, verbose=False)["input_ids"]) > most:
            raise too_long(text, most)
        # Padded to the full length, as in the training of SigLIP; towers trained without padding ignore it.
        return dict(tokenizer([text], padding="max_length", max_length=most, return_tensors="pt"))

    return TextTower(asked.spec, loaded.architecture, loaded.weights.sha256, model, tokens_of, _embed_text)


def names(pattern: str) -> list[str]:
    """Return the names of the models in the hub's cache; an exact name is returned as it is, cached or not."""
    if not is_glob(pattern):
        return [pattern]
    library("transformers", "hf", "hf/")
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError):
        return []


def describe(spec: str, name: str) -> Entry:
    """Describe a model from its configuration, without its weights."""
    transformers = library("transformers", "hf", "hf/")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise LayertapError(f"{spec}: cannot read the configuration: {first_line(error)}") from error
    model = without_weights(partial(transformers.AutoModel.from_config, config))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size) if size else None
    sizes = getattr(vision, "hidden_sizes", None)
    features = getattr(config, "projection_dim", None) or getattr(vision, "hidden_size", None) or (sizes or [None])[-1]
    return Entry(spec, features, sides, count_parameters(model), "", ())


def _place(asked: Asked) -> _Place:
    name, weights = asked.name, asked.weights
    local = Path(name).expanduser().is_dir()
    if local:
        name = str(Path(name).expanduser().resolve())
    elif name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise InputError(f"{asked.spec}: no such folder; a model of the hub is OWNER/NAME")
    where: dict[str, Any] = {"trust_remote_code": False}
    if weights is not None and is_named(weights):
        if local:
            raise InputError(f"{asked.spec} is a folder, which has no revisions; remove --weights {weights}")
        where["revision"] = weights
    return _Place(asked, name, local, where)


def _config(transformers: Any, asked: Asked, at: _Place) -> Any:
    config = at.ask(lambda: transformers.AutoConfig.from_pretrained(at.name, **at.where))
    if config.model_type == "timm_wrapper":
        raise InputError(f"{asked.spec} is a model of timm; use -b timm/{Path(at.name).name}")
    return config


def _loaded(transformers: Any, asked: Asked, at: _Place, config: Any) -> _Loaded:
    spec, weights = asked.spec, asked.weights
    notes: tuple[str, ...] = ()
    if getattr(config, "mask_ratio", 0):  # a masked autoencoder sees a random choice of patches
        config.mask_ratio = 0.0
        notes = ("masking is off (mask_ratio 0)",)
    kind = _class_for(transformers, config)
    if weights is not None and not is_named(weights):
        model, given, _ = given_weights(
            lambda: kind.from_config(config, trust_remote_code=False) if kind is transformers.AutoModel
            else kind(config),
            weights, asked.seed, spec, _classifier, allow_missing_head=asked.allow_missing_head,
        )  # fmt: skip
        return _Loaded(config, model, given, notes)
    model, left = _pretrained(spec, kind, at, config)
    found = getattr(config, "_commit_hash", None)
    name = Path(at.name).name if at.local else at.name
    named = Weights(f"hf/{name}" + (f" at {found[:12]}" if found else ""), weights_sha256(model))
    return _Loaded(config, model, named, (*notes, *left))


def _embed_text(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    output = model.get_text_features(**tokens)
    return _vectors(output if isinstance(output, Tensor) else output.pooler_output)


def _class_for(transformers: Any, config: Any) -> Any:
    """Return the class to load: that of the checkpoint if its head affects the embedding, else `AutoModel`."""
    heads = (_CLASSIFIES, f"{_CLASSIFIES}WithTeacher", "WithProjection")
    names = [name for name in getattr(config, "architectures", None) or [] if name.endswith(heads)]
    return getattr(transformers, names[0], transformers.AutoModel) if names else transformers.AutoModel


def _pretrained(spec: str, kind: Any, at: _Place, config: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model with all its weights, and a note on tensors of the checkpoint that are not used."""
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "config": config, **at.where}
    model, found = at.ask(lambda: kind.from_pretrained(at.name, **options))
    missing = sorted(found["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        # The library would initialise the missing pooler at random.
        with contextlib.suppress(TypeError):  # not every model takes add_pooling_layer
            model, found = at.ask(lambda: kind.from_pretrained(at.name, add_pooling_layer=False, **options))
            missing = sorted(found["missing_keys"])
    wrong = [*missing, *map(str, found["mismatched_keys"])]
    if wrong:
        raise InputError(
            f"{spec}: {len(wrong)} tensors of {type(model).__name__} are missing from the checkpoint or have another "
            f"shape: {', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}"
        )
    left = sorted(found["unexpected_keys"])
    told = (
        f"{len(left)} tensors of the checkpoint are not used: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}"
    )
    return model, (told,) if left else ()


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
        return _vectors(output if isinstance(output, Tensor) else output.pooler_output)
    trunk = _trunk(model)
    output = trunk(pixel_values=images)
    if getattr(output, "image_embeds", None) is not None:
        return _vectors(output.image_embeds)
    if getattr(output, "pooler_output", None) is not None:
        return _vectors(output.pooler_output)
    hidden = output.last_hidden_state
    if hidden.ndim == 3:
        embeddings = getattr(trunk, "embeddings", None)
        return _vectors(hidden[:, 0] if getattr(embeddings, "cls_token", None) is not None else hidden.mean(1))
    return _vectors(hidden.mean((2, 3)))


def _trunk(model: Any) -> Any:
    """Return a classification model without its heads; return any other model unchanged."""
    return model.base_model if _CLASSIFIES in type(model).__name__ else model


def _vectors(values: Tensor) -> Tensor:
    return values.flatten(1)


def _preprocessing(transformers: Any, asked: Asked, at: _Place) -> Preprocessing:
    if not asked.preprocessing.keys() < OVERRIDES:
        return overridden(IDENTITY, asked.preprocessing)
    instead = "give --size --crop --interpolation --mean --std"
    files = [Path(at.name) / name for name in ("preprocessor_config.json", "processor_config.json")]
    if at.local and not any(file.is_file() for file in files):
        raise InputError(
            f"{asked.spec}: no preprocessor_config.json, which holds the preprocessing; copy this file there, or "
            f"{instead}"
        )
    processor = at.ask(lambda: transformers.AutoImageProcessor.from_pretrained(at.name, **at.where))
    try:
        return from_hf(processor)
    except InputError as error:
        raise InputError(f"{asked.spec}: its image processor {error}; to replace it, {instead}") from error


def _settings(config: Any) -> str:
    """Return the first 16 digits of the sha256 over the settings that differ from their defaults.

    Models with equal weights can differ in their settings.
    """
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in _NO_SETTINGS}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _by_hand(name: str) -> str:
    from huggingface_hub import hf_hub_url

    files = ", ".join(hf_hub_url(name, file) for file in _BY_HAND)
    return f"download {files} into one folder, and name the folder: -b hf/FOLDER"


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Context manager: suppress the library's progress bars and its report on keys, which this module makes itself."""
    log = transformers.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()
