"""Load a backbone, or the text tower beside it, by its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from extract.backbones import from_hf, from_hub, from_open_clip, from_python, from_timm, from_torchvision
from extract.backbones.backbone import Asked, LoadedBackbone
from extract.backbones.preprocessing import overridden
from extract.backbones.text_tower import TextTower
from extract.errors import InputError, unknown_name
from extract.system.torch_state import device_named

__all__ = ["SOURCES", "load", "load_text_tower"]

# Optional libraries are imported inside these when they are used.
SOURCES: dict[str, Callable[[Asked], LoadedBackbone]] = {
    "bundled": from_timm.load_bundled,
    "torchvision": from_torchvision.load,
    "timm": from_timm.load,
    "open_clip": from_open_clip.load,
    "hf": from_hf.load,
    "hub": from_hub.load,
    "python": from_python.load,
}
_WITH_TEXTS: dict[str, Callable[[Asked], TextTower]] = {
    "open_clip": from_open_clip.load_text_tower,
    "hf": from_hf.load_text_tower,
}


def load(
    spec: str,
    *,
    weights: str | None,
    device: str,
    seed: int,
    allow_missing_head: bool,
    preprocessing: Mapping[str, Any] | None,
) -> LoadedBackbone:
    """What `extract.load_backbone` wraps; arguments and errors as there."""
    place = device_named(device)
    given = {key: value for key, value in (preprocessing or {}).items() if value is not None}
    asked = _asked(spec, weights, seed, allow_missing_head, given)
    backbone = SOURCES[spec.partition("/")[0]](asked)
    return replace(
        backbone,
        model=backbone.model.eval().to(place),
        preprocessing=overridden(backbone.preprocessing, given),
        device=place,
        notes=(*backbone.notes, *backbone.weights.notes),
        asked={"weights": weights, "seed": seed, "allow_missing_head": allow_missing_head, "preprocessing": given},
    )


def load_text_tower(
    spec: str,
    *,
    weights: str | None = None,
    device: str = "auto",
    seed: int = 0,
) -> TextTower:
    """Load the text tower that stands beside the image tower of a backbone (CLIP, SigLIP and the like).

        tower = load_text_tower("open_clip/ViT-B-32:laion2b_s34b_b79k")
        tower.features(["a photo of a cat"])    # (1, 512), of the space of the images' embeddings

    Args:
        spec: `open_clip/NAME:TAG`, `hf/NAME` or `hf/FOLDER`.
        weights: as of `load_backbone`; a file must hold both towers.
        device: as of `load_backbone`.
        seed: of random weights.

    Raises:
        InputError: the model has no text tower, or its file has not.
        UnknownNameError, LayertapError: as of `load_backbone`.
    """
    place = device_named(device)
    asked = _asked(spec, weights, seed, False, {})
    source = spec.partition("/")[0]
    if source not in _WITH_TEXTS:
        raise InputError(f"{spec} has no text tower; models of {' and '.join(f'{one}/' for one in _WITH_TEXTS)} have")
    tower = _WITH_TEXTS[source](asked)
    return replace(tower, model=tower.model.eval().to(place), device=place)


def _asked(
    spec: str, weights: str | None, seed: int, allow_missing_head: bool, preprocessing: Mapping[str, Any]
) -> Asked:
    source, _, name = spec.partition("/")
    if source not in SOURCES or not name:
        raise unknown_name("backbone", spec, [f"{known}/..." for known in SOURCES], hint="A spec is SOURCE/NAME")
    return Asked(spec, name, weights, seed, allow_missing_head, preprocessing)
