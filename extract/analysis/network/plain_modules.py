"""Plain modules beside backbones: any `nn.Module` on a tensor (B, C, H, W), and the batches that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from extract.backbones.preprocessing import Preprocessing
from extract.backbones.user_code import stated_tokens
from extract.backbones.weights import Weights
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import Choice, Feature, choose_features
from extract.compute.pooling import Layout
from extract.errors import InputError
from extract.taps.layer_names import unwrap

__all__ = ["as_backbone", "pairs_of", "scores_of", "whole_layers"]


@dataclass(frozen=True)
class _LikeInputs(Preprocessing):
    """Makes inputs with the channels, dtype and range of values of a tensor; how a plain module's are made is unknown.

    Attributes:
        inputs: (B, C, H, W).
    """

    inputs: Tensor = field(default_factory=lambda: torch.empty(0))

    def to_input(self, images: Tensor) -> Tensor:
        """Convert (N, H, W, 3) uint8 to (N, C, H, W)."""
        finite = self.inputs[self.inputs.isfinite()].float()
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
        shares = images[..., :1].permute(0, 3, 1, 2).expand(-1, self.inputs.shape[1], -1, -1) / 255
        return (low + ((high - low) or 1.0) * shares).to(self.inputs.dtype)


def as_backbone(model: Backbone | nn.Module, inputs: Tensor) -> Backbone:
    """Return a backbone as it is, and a plain module as a backbone whose layers are tried on inputs like these.

    Raises:
        InputError: the model is neither, or the inputs are not a tensor (B, C, H, W) with values.
    """
    if not isinstance(model, Backbone | nn.Module):
        raise InputError(f"the model is {_kind(model)}; expected a backbone or an nn.Module")
    name = model.spec if isinstance(model, Backbone) else type(unwrap(model)).__name__
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.numel():
        raise InputError(
            f"the inputs of {name} are {_kind(inputs)}; expected a tensor (B, C, H, W)",
            hint="image[None] is a batch of one image (C, H, W); torch.from_numpy(array) makes a tensor of an array",
        )
    if isinstance(model, Backbone):
        return model
    height, width = inputs.shape[-2:]
    tokens = stated_tokens(unwrap(model), name)
    if isinstance(unwrap(model), VisionTransformer):  # torchvision states no number
        tokens |= {"prefix_tokens": 1, "class_token": True}
    preprocessing = _LikeInputs(height, (height, width), "bilinear", (0.0,) * 3, (1.0,) * 3, inputs=inputs.detach())
    return Backbone(name, name, model, Weights("of the module", ""), preprocessing, device=inputs.device, **tokens)


def whole_layers(backbone: Backbone, layers: str | Sequence[str]) -> Choice:
    """Choose the activations, without pooling, of layers that names or globs match.

    Raises:
        UnknownNameError, InputError: see `choose_features`.
    """
    choice = choose_features(backbone, [f"{layer}:none" for layer in ([layers] if isinstance(layers, str) else layers)])
    if not isinstance(backbone.preprocessing, _LikeInputs):
        return choice
    return replace(choice, features=[_by_convention(feature, backbone) for feature in choice.features])


def _by_convention(feature: Feature, backbone: Backbone) -> Feature:
    """Return a feature of a plain module with the layout of PyTorch's convention where the shape leaves it open.

    Convolutions without padding, or with a stride of 3, give maps of any size. Tokens must form a grid of square
    patches, so that one more or less is noticed.
    """
    shape, (height, width) = feature.activation_shape, backbone.preprocessing.crop_px
    if feature.layout.kind != "unknown" or feature.rows.per_image > 1:
        return feature
    if len(shape) == 3:
        return replace(feature, layout=Layout("map", "CHW", grid=(shape[1], shape[2])))
    prefix = backbone.prefix_tokens
    patches = shape[0] - prefix
    rows = round((max(0, patches) * height / width) ** 0.5)
    if len(shape) == 2 and patches > 1 and rows**2 * width == patches * height:
        grid = (rows, patches // rows)
        return replace(feature, layout=Layout("tokens", "TC", prefix, backbone.class_token, grid))
    return feature


def _kind(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def pairs_of(batches: Iterable[Any]) -> Iterator[tuple[Tensor, Any]]:
    """Yield inputs (B, ...) and targets, or None, of each batch that is not empty.

    Raises:
        InputError: a batch is neither a tensor nor a pair of a tensor and targets, or there are no batches.
    """
    empty = True
    for batch in batches:
        pair = batch if isinstance(batch, tuple | list) else (batch, None)
        if len(pair) != 2:
            raise InputError(f"a batch has {len(pair)} parts; expected a tensor (B, ...), or a tensor and targets")
        inputs, targets = pair
        if not isinstance(inputs, Tensor) or not inputs.ndim:
            name = type(inputs).__name__
            raise InputError(f"a batch is {name}; expected a tensor (B, ...), or a tensor and targets")
        if len(inputs):
            empty = False
            yield inputs, targets
    if empty:
        raise InputError("there are no batches", hint="give at least one batch")


def scores_of(output: Any) -> Any:
    """Return the class scores in what a model returns: `logits` of a mapping, as of transformers, or all of it."""
    return output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
