"""Backbones of Hugging Face transformers: from its hub, or from a folder that `save_pretrained` wrote.

The embedding is, in this order: the input of the classifier of a model for image classification; the image features of
one with an image and a text tower (`get_image_features`); `image_embeds` of an image tower with its projection; what
the model itself calls `pooler_output`; its class token; the mean over its tokens or its map.
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
# What a configuration also holds, and what does not bear on the features.
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
    """Where a model is.

    Attributes:
        asked: what was asked for.
        name: of the hub, or the whole path of a folder.
        local: whether it is a folder.
        where: what the library must be told beside it.
    """

    asked: Asked
    name: str
    local: bool
    where: dict[str, Any]

    def ask(self, load: Callable[[], Any]) -> Any:
        """What the library loads, or an error that says what to do."""
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
        config: of the model.
        model: the network.
        weights: where its numbers come from.
        notes: what must be told.
    """

    config: Any
    model: Any
    weights: Weights
    notes: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """What the features depend on, beside the weights."""
        return f"hf/{type(self.model).__name__}, settings with sha256 {_settings(self.config)}"


def load(asked: Asked) -> LoadedBackbone:
    """NAME of the hub, or a folder; weights: a revision. Code that comes with a model is never run."""
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
    """As of `load`; the tokenizer is the one that lies beside the model."""
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
    if len(tokenizer) < known / 2:  # where its files are missing, the library makes one that knows no words
        there = f"there is no tokenizer in {at.name}" if at.local else "it has no tokenizer"
        raise InputError(f"{asked.spec}: {there} that fits ({len(tokenizer):,} tokens; the model knows {known:,})")
    most = min(tokenizer.model_max_length, getattr(words, "max_position_embeddings", tokenizer.model_max_length))

    def tokens_of(text: str) -> dict[str, Tensor]:
        if len(tokenizer(text, verbose=False)["input_ids"]) > most:
            raise too_long(text, most)
        # Filled up to the end, as SigLIP was trained; towers that were not leave the rest out by themselves.
        return dict(tokenizer([text], padding="max_length", max_length=most, return_tensors="pt"))

    return TextTower(asked.spec, loaded.architecture, loaded.weights.sha256, model, tokens_of, _embed_text)


def names(pattern: str) -> list[str]:
    """The names of the models in the cache of the hub; a pattern that is a name may name any other."""
    if not is_glob(pattern):
        return [pattern]
    library("transformers", "hf", "hf/")
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError):
        return []


def describe(spec: str, name: str) -> Entry:
    """What the configuration of a model says, and its size."""
    transformers = library("transformers", "hf", "hf/")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise LayertapError(f"{spec}: its settings cannot be read: {first_line(error)}") from error
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
        raise InputError(f"{asked.spec}: no such folder; a name of the hub is OWNER/NAME")
    where: dict[str, Any] = {"trust_remote_code": False}
    if weights is not None and is_named(weights):
        if local:
            raise InputError(f"{asked.spec} is a folder, which has no revision {weights!r}")
        where["revision"] = weights
    return _Place(asked, name, local, where)


def _config(transformers: Any, asked: Asked, at: _Place) -> Any:
    config = at.ask(lambda: transformers.AutoConfig.from_pretrained(at.name, **at.where))
    if config.model_type == "timm_wrapper":
        raise InputError(f"{asked.spec} is a model of timm; name it timm/{Path(at.name).name}")
    return config


def _loaded(transformers: Any, asked: Asked, at: _Place, config: Any) -> _Loaded:
    spec, weights = asked.spec, asked.weights
    notes: tuple[str, ...] = ()
    if getattr(config, "mask_ratio", 0):  # of masked autoencoders, which draw at random what they see
        config.mask_ratio = 0.0
        notes = ("nothing is masked (mask_ratio 0)",)
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
    """The class to load: the one the checkpoint is of, if its head matters to the embedding; else the plain model."""
    heads = (_CLASSIFIES, f"{_CLASSIFIES}WithTeacher", "WithProjection")
    names = [name for name in getattr(config, "architectures", None) or [] if name.endswith(heads)]
    return getattr(transformers, names[0], transformers.AutoModel) if names else transformers.AutoModel


def _pretrained(spec: str, kind: Any, at: _Place, config: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """The model with its weights, every one of them; and what was left over."""
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "config": config, **at.where}
    model, found = at.ask(lambda: kind.from_pretrained(at.name, **options))
    missing = sorted(found["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        # The library would draw the weights of the pooler at random.
        with contextlib.suppress(TypeError):  # not every model can do without
            model, found = at.ask(lambda: kind.from_pretrained(at.name, add_pooling_layer=False, **options))
            missing = sorted(found["missing_keys"])
    wrong = [*missing, *map(str, found["mismatched_keys"])]
    if wrong:
        raise InputError(
            f"{spec}: {len(wrong)} tensors of {type(model).__name__} are not in the checkpoint, or of another shape: "
            f"{', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}"
        )
    left = sorted(found["unexpected_keys"])
    told = (
        f"{len(left)} tensors of the checkpoint are not used: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}"
    )
    return model, (told,) if left else ()


def _classifier(model: Any) -> str | None:
    """The layer that is the classifier of a model for image classification."""
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
    """Of a model for classification, what lies below its heads; else the model."""
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
            f"{asked.spec}: no preprocessor_config.json, which says what pictures it takes; copy it there, or {instead}"
        )
    processor = at.ask(lambda: transformers.AutoImageProcessor.from_pretrained(at.name, **at.where))
    try:
        return from_hf(processor)
    except InputError as error:
        raise InputError(f"{asked.spec}: its image processor {error}; in its place, {instead}") from error


def _settings(config: Any) -> str:
    """sha256 over the settings of a model that differ from their defaults: equal weights do not make equal models."""
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in _NO_SETTINGS}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _by_hand(name: str) -> str:
    from huggingface_hub import hf_hub_url

    files = ", ".join(hf_hub_url(name, file) for file in _BY_HAND)
    return f"fetch {files} into one folder, and name it: -b hf/FOLDER"


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the library's report of keys, which is told here, and its bars."""
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
