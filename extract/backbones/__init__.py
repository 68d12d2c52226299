"""Backbones: load a model, its weights and its preprocessing from a spec such as `timm/vit_small_patch16_224`.

A spec is SOURCE/NAME. Weights are a name that the source publishes, a file, or `random`, which is reported. There is no
fallback to random values: keys that are missing from a file, or unexpected in it, raise an error that names them.
"""

from extract.backbones.backbone import LoadedBackbone, TextTower
from extract.backbones.loading import load_text_tower
from extract.backbones.weights import Weights

__all__ = ["LoadedBackbone", "TextTower", "Weights", "load_text_tower"]
