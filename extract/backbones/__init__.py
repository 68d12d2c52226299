"""Backbones: load a model, its weights and its preprocessing from a spec such as `timm/vit_small_patch16_224`.

A spec is SOURCE/NAME. Weights are a name that the source publishes, a file, or `random`, which is reported. There is no
fallback to random values: keys that are missing from a file, or unexpected in it, raise an error that names them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extract.backbones.backbone import LoadedBackbone
    from extract.backbones.loading import load_text_tower
    from extract.backbones.text_tower import TextTower
    from extract.backbones.weights import Weights

# Imported on first use, so that the modules that list backbones do not load torch.
_HOMES = {
    "LoadedBackbone": "extract.backbones.backbone",
    "load_text_tower": "extract.backbones.loading",
    "TextTower": "extract.backbones.text_tower",
    "Weights": "extract.backbones.weights",
}

__all__ = ["LoadedBackbone", "TextTower", "Weights", "load_text_tower"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'extract.backbones' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
