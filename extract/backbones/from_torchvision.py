"""Backbones of torchvision: its image classification models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from extract.backbones.backbone import Entry, LoadedBackbone, LoadRequest, downloading, without_weights
from extract.backbones.preprocessing import from_torchvision
from extract.backbones.weights import (
    Weights,
    WeightsFile,
    build_with_weights,
    in_cache_of_torch,
    is_named,
    weights_sha256,
)
from extract.errors import unknown_name
from extract.taps.layer_names import named_layers

__all__ = ["describe", "load", "locate", "names"]


def load(request: LoadRequest) -> LoadedBackbone:
    """Load NAME of torchvision; weights: a name such as IMAGENET1K_V2, a file or "random"."""
    from torchvision import models

    spec, name, weights = request.spec, request.name, request.weights
    _check_name(request)
    published = list(models.get_model_weights(name))
    entry = models.get_model_weights(name).DEFAULT
    notes: tuple[str, ...] = ()
    if weights is not None and not is_named(weights):
        entry, notes = _entry_of_file(published, entry, weights)
        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):
            # As with published weights: no auxiliary classifiers, and the model rescales its input.
            options = {"transform_input": True, "aux_logits": False, "init_weights": True}
        elif name.startswith("vit_"):
            options = {"image_size": entry.transforms().crop_size[0]}  # its position embeddings fit only one size
        model, loaded, classifier = build_with_weights(
            request,
            lambda: models.get_model(name, **options),
            lambda model: _classifier(model, name),
            unused=("aux1.", "aux2.", "AuxLogits."),
        )
    else:
        entry = _published(request)
        model = downloading(request, lambda: models.get_model(name, weights=entry), lambda: _by_hand(entry))
        classifier = _classifier(model, name)
        loaded = Weights(f"torchvision/{name} {entry.name}", weights_sha256(model))
    network: Any = model
    vit = isinstance(model, models.VisionTransformer)
    return LoadedBackbone(
        spec=spec,
        architecture=f"torchvision/{name}",
        model=model,
        weights=loaded,
        preprocessing=from_torchvision(entry.transforms()),
        classifier=classifier,
        prefix_tokens=1 if vit else 0,
        patches=(network.image_size // network.patch_size) ** 2 if vit else None,
        class_token=vit,
        reads_class_token=vit,
        notes=notes,
    )


def locate(request: LoadRequest) -> WeightsFile:
    """Say where the published weights are; errors for unknown names as in `load`."""
    _check_name(request)
    entry = _published(request)
    return WeightsFile(f"torchvision/{request.name} {entry.name}", in_cache_of_torch(entry.url), entry.url)


def _check_name(request: LoadRequest) -> None:
    known = names("*")
    if request.name not in known:
        specs = [f"torchvision/{other}" for other in known]
        raise unknown_name("backbone", request.spec, specs, hint="list them: layertap list torchvision")


def _published(request: LoadRequest) -> Any:
    """Return torchvision's entry of the weights that a request names, or else its default."""
    from torchvision import models

    if request.weights is None:
        return models.get_model_weights(request.name).DEFAULT
    by_name = {entry.name: entry for entry in models.get_model_weights(request.name)}
    if request.weights not in by_name:
        raise unknown_name("weights", request.weights, by_name, request.spec)
    return by_name[request.weights]


def names(pattern: str) -> list[str]:
    """Return the names of torchvision's classification models (one picture in, one vector out)."""
    from torchvision import models

    return list(models.list_models(module=models))


def describe(spec: str, name: str, built: bool = True) -> Entry:
    """Describe a model and its default weights from torchvision's metadata."""
    from torchvision import models

    entry = models.get_model_weights(name).DEFAULT
    height, width = (*entry.transforms().crop_size, *entry.transforms().crop_size)[:2]
    features = None
    if built:
        model = without_weights(partial(models.get_model, name))
        classifier = _classifier(model, name)
        features = model.get_submodule(classifier).in_features if classifier else None
    others = [other.name for other in models.get_model_weights(name) if other.name != entry.name]
    return Entry(spec, features, (height, width), int(entry.meta["num_params"]), "", (entry.name, *others))


def _by_hand(entry: Any) -> str:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    return f"download {entry.url} into {folder}, or give the downloaded file: --weights FILE"


def _classifier(model: nn.Module, name: str) -> str | None:
    linear = [layer for layer, module in named_layers(model).items() if isinstance(module, nn.Linear)]
    return linear[-1] if linear and not name.startswith("squeezenet") else None


def _entry_of_file(published: list[Any], default: Any, weights: str) -> tuple[Any, tuple[str, ...]]:
    """Return the weights entry whose preprocessing a file needs, and notes for the user.

    This is the entry that torchvision publishes under the name of the file, else the default entry.
    """
    for entry in published:
        if Path(weights).name == entry.url.rpartition("/")[2]:
            return entry, ()
    if weights == "random" or len({str(entry.transforms()) for entry in published}) == 1:
        return default, ()
    names = ", ".join(entry.name for entry in published)
    return default, (
        f"torchvision publishes no weights file called {Path(weights).name}; the preprocessing of {default.name} is "
        f"used. The preprocessing differs between {names}",
    )
