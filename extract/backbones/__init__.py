"""Backbones: from a spec such as `timm/vit_small_patch16_224` to a model, its weights and its preprocessing.

A spec is SOURCE/NAME. Weights are the source's own, by name; or a file; or `random`, loudly. There is no falling back:
a key that is missing or left over is an error that names it.
"""

from __future__ import annotations

from extract.backbones.backbone import LoadedBackbone
from extract.backbones.loading import load_text_tower
from extract.backbones.text_tower import TextTower
from extract.backbones.weights import Weights

__all__ = ["LoadedBackbone", "TextTower", "Weights", "load_text_tower"]
