"""Attribution: Grad-CAM, attention weights and rollout, and principal directions of patch tokens as colours.

cam, classes = grad_cam(model, inputs, "layer4")              # (B, h, w), of a backbone or any nn.Module
cams, classes = grad_cam(model, inputs, "blocks.*.norm1")     # of several layers: name -> (B, h, w)
weights = attentions(model, inputs)                           # layers x (B, heads, T, T)
seen = rollout(weights)[:, 0, 1:]                             # (B, patches): as seen by the class token
colours = principal_colours(activations)                      # (B, h, w, C) -> (B, h, w, 3)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from extract.analysis.network.plain_modules import as_backbone, scores_of, whole_layers
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import Choice
from extract.compute.principal_axes import principal_axes
from extract.errors import InputError, LayertapError
from extract.system.torch_state import evaluating, full_float32, with_gradients
from extract.taps.layer_names import is_glob, named_layers
from extract.taps.record import Record, Site
from extract.taps.taps import Taps

__all__ = ["activations_of", "attentions", "grad_cam", "map_of", "principal_colours", "rollout"]


def activations_of(
    backbone: Backbone | nn.Module, inputs: Tensor, choice: Choice | str | Sequence[str]
) -> dict[str, Tensor]:
    """Compute activations without pooling: feature name -> (B, *shape), on the CPU.

    Args:
        backbone: loaded backbone, or any module that takes a tensor (B, C, H, W).
        inputs: (B, C, H, W), preprocessed for the network.
        choice: names or globs of layers; or the result of `choose_features(backbone, ["LAYER:none", ...])`.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: the rows of a layer are not the images.
    """
    network = as_backbone(backbone, inputs)
    with torch.no_grad(), evaluating(network.model), full_float32():
        choice = choice if isinstance(choice, Choice) else whole_layers(network, choice)
        with choice.kept_by(Taps(network.model, stop=True), torch.float32) as taps:
            taps(inputs)
            return {feature.name: taps.record[feature.site][feature.name] for feature in choice.features}


def map_of(activation: Tensor, axes: str, prefix_tokens: int, input_px: Sequence[int]) -> Tensor:
    """Convert an activation to a map (B, h, w, C); of tokens, only the patch tokens are used.

    Args:
        activation: (B, ...).
        axes: axes of one image as in `Layout.axes`: "CHW", "HWC" or "TC".
        prefix_tokens: number of tokens before the patch tokens.
        input_px: (height, width) of the input, which is cut into square patches.

    Raises:
        InputError: the activation has no positions, or its tokens do not form a grid.
    """
    if axes == "CHW":
        return activation.permute(0, 2, 3, 1)
    if axes == "HWC":
        return activation
    if axes != "TC":
        raise InputError(
            "it has no positions",
            hint="name a layer that returns a map, or tokens of patches; a network of your own states the number of "
            "tokens before them as model.num_prefix_tokens",
        )
    patches = activation[:, prefix_tokens:]
    height = round((patches.shape[1] * input_px[0] / input_px[1]) ** 0.5)
    if height < 1 or patches.shape[1] % height:
        raise InputError(f"{patches.shape[1]} tokens do not form a grid over a {input_px[0]}x{input_px[1]} input")
    return patches.reshape(len(patches), height, -1, patches.shape[-1])


def grad_cam(
    backbone: Backbone | nn.Module,
    inputs: Tensor,
    layer: str | Sequence[str],
    targets: Sequence[int] | Tensor | None = None,
) -> tuple[Any, NDArray[np.int64]]:
    """Compute Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391, equations 1 and 2): evidence for a class by position.

    The weight of a channel is the mean over positions of the gradient of the class score. The map is the weighted sum
    of the channels, with negative values set to zero.

    Args:
        backbone: backbone, or any module that takes a tensor (B, C, H, W), that returns class scores.
        inputs: (B, C, H, W) floating point, preprocessed for the network.
        layer: layer with a map or tokens; or a glob or a list of layers, which share one forward.
        targets: (B,) a class for each image; None: the class with the highest score.

    Returns:
        (B, h, w) non-negative float32 maps in the units of the score, and (B,) the classes. The maps of a glob or list
        are a dict by layer.

    Raises:
        UnknownNameError: the layer does not exist.
        InputError: the layer has no positions, several tensors or no gradient, a target is not a class, or the network
            returns no class scores, or scores without gradients.
    """
    network = as_backbone(backbone, inputs)
    if not inputs.is_floating_point():
        raise InputError(f"the inputs are {inputs.dtype}, which has no gradients", hint="give inputs.float()")
    with evaluating(network.model), full_float32():
        choice = whole_layers(network, layer)
        one = isinstance(layer, str) and not (is_glob(layer) and layer not in named_layers(network.model))
        if one and len(choice.features) > 1:
            names = ", ".join(feature.name for feature in choice.features)
            raise InputError(f"layer {layer!r} returns several tensors", hint=f"name one of {names}")
        try:
            maps, classes = _grad_cams(network, inputs, choice, targets)
        except _UnreachedError as error:
            usual = first_with_grad_cam(network, inputs[:1], normalisations(network.model))
            hint = f"name the usual layer of such a network, {usual!r}" if usual else "name an earlier layer"
            raise InputError(error.message, hint=hint) from None
    return (next(iter(maps.values())) if one else maps), classes


def first_with_grad_cam(backbone: Backbone, inputs: Tensor, layers: Iterable[str]) -> str | None:
    """Return the first of some layers that has one tensor with positions that a gradient reaches; None if none has."""
    for layer in layers:
        with contextlib.suppress(LayertapError), evaluating(backbone.model), full_float32():
            choice = whole_layers(backbone, layer)
            maps, _ = _grad_cams(backbone, inputs, choice, None)
            if len(maps) == 1 and all(cam[0].size > 1 for cam in maps.values()):
                return layer
    return None


def normalisations(model: nn.Module) -> list[str]:
    """Return the layers that normalise, the last first: the one before the last attention has all that it reads."""
    return [name for name, layer in named_layers(model).items() if "norm" in type(layer).__name__.lower()][::-1]


class _UnreachedError(InputError):
    """No gradient reaches the positions of a layer: in most transformers, only the class token is read behind it."""


def _grad_cams(
    backbone: Backbone, inputs: Tensor, choice: Choice, targets: Sequence[int] | Tensor | None
) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.int64]]:
    """Compute the maps of all features of a choice from one forward, see `grad_cam`."""
    record, chosen = _gradients(backbone, inputs, [feature.site for feature in choice.features], targets)
    cams = {}
    for feature in choice.features:
        gradient = replace(feature.site, what="grad")
        if gradient not in record.by_site:
            raise InputError(
                f"no gradient reaches layer {feature.name!r} of {backbone.spec}",
                hint="name a layer on which the scores depend, in a model that computes them from the image "
                "without torch.no_grad(), torch.inference_mode() and detach()",
            )
        layout, size = feature.layout, backbone.preprocessing.crop_px
        try:
            activation, slopes = (
                map_of(feature.rows.by_image(record[site]), layout.axes, layout.prefix_tokens, size).float()
                for site in (feature.site, gradient)
            )
        except InputError as error:
            why = f" ({layout.reason})" if layout.reason else ""
            raise InputError(f"layer {feature.name!r}: {error.message}{why}", hint=error.hint) from None
        weights = slopes.mean((1, 2))  # (B, C)
        if not bool(weights.any()):
            raise _UnreachedError(
                f"no gradient reaches the positions of {feature.name!r} (the scores may depend only on the class token "
                "after this layer)"
            )
        cams[feature.name] = torch.einsum("bhwc,bc->bhw", activation, weights).relu().numpy()
    return cams, chosen


def _gradients(
    backbone: Backbone, inputs: Tensor, sites: Sequence[Site], targets: Sequence[int] | Tensor | None
) -> tuple[Record, NDArray[np.int64]]:
    """Return the values of tensors with the gradients of the scores of classes, and the classes (B,)."""
    taps = Taps(backbone.model)
    for site in sites:
        taps.keep(site).keep(replace(site, what="grad"))
    with with_gradients(), taps:
        pixels = inputs.clone().requires_grad_()  # gradients must flow even if all parameters are frozen
        scores = scores_of(taps(pixels.clone()))
        if not isinstance(scores, Tensor) or scores.ndim != 2:
            raise InputError(f"{backbone.spec} does not return class scores of shape (images, classes)")
        if targets is None:
            chosen = scores.detach().argmax(1)
        else:
            chosen = torch.as_tensor(targets, dtype=torch.int64, device=scores.device)
        if chosen.shape != (len(inputs),) or not bool(((chosen >= 0) & (chosen < scores.shape[1])).all()):
            last = scores.shape[1] - 1
            raise InputError(f"targets: expected a class from 0 to {last} for each of {len(inputs)} images")
        if scores.requires_grad:
            torch.autograd.grad(scores.gather(1, chosen[:, None]).sum(), pixels, allow_unused=True)
        return taps.record, chosen.cpu().numpy()


def attentions(
    backbone: Backbone | nn.Module, inputs: Tensor, layers: str | Sequence[str] | None = None
) -> list[Tensor]:
    """Compute the weights (B, heads, T, T) of every attention over tokens, on the CPU, in the order of computation.

    Args:
        backbone: loaded backbone, or any module that takes a tensor (B, C, H, W).
        inputs: (B, C, H, W), preprocessed for the network.
        layers: names or globs of layers that contain attention; None: all layers.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: the backbone computes no attention of a known kind.
    """
    network = as_backbone(backbone, inputs)
    if layers is None:
        layers = [name for name in named_layers(network.model) if "." not in name]
    taps = Taps(network.model).keep(layers, "attention")
    with torch.no_grad(), evaluating(network.model), full_float32(), taps:
        taps(inputs)
        weights = list(taps.record.values())
    if not weights:
        raise InputError(f"{network.spec} computes no attention of a known kind")
    return weights


def rollout(weights: Sequence[Tensor]) -> NDArray[np.float32]:
    """Compute attention rollout (Abnar and Zuidema 2020, arXiv:2005.00928): how much each token reaches each output.

    The heads of a layer are averaged. Half of each token stays in place, for the residual connection.

    Args:
        weights: (B, heads, T, T) for each layer, in the order of computation; rows sum to 1.

    Returns:
        (B, T, T), rows sum to 1.

    Raises:
        InputError: layers differ in the number of tokens or images, or there are no layers.
    """
    sizes = {tuple(layer_weights.shape[-2:]) for layer_weights in weights}
    if len(sizes) != 1 or len({len(layer_weights) for layer_weights in weights}) != 1:
        shown = ", ".join("x".join(map(str, size)) for size in sorted(sizes))
        raise InputError(f"attention over {shown} tokens; rollout needs the same tokens in all layers")
    identity = torch.eye(weights[0].shape[-1], dtype=torch.float64)
    result = identity
    for layer_weights in weights:
        mixed = 0.5 * layer_weights.double().mean(1) + 0.5 * identity
        result = mixed / mixed.sum(-1, keepdim=True) @ result
    return result.float().numpy()


def principal_colours(maps: Tensor) -> NDArray[np.float32]:
    """Show the three principal directions over all positions of all images as red, green and blue.

    As in the figures of DINOv2 (Oquab et al. 2023, arXiv:2304.07193), without the separation of the background. Each
    colour spans the 1st to the 99th percentile of its direction. Similar colours mean similar content, also across
    images.

    Args:
        maps: (B, h, w, C).

    Returns:
        (B, h, w, 3) from 0 to 1.

    Raises:
        InputError: a value is not finite.
    """
    flat = maps.reshape(-1, maps.shape[-1]).double()
    if not bool(flat.isfinite().all()):
        raise InputError("maps contain NaN or infinity")
    if not len(flat):
        return np.zeros((*maps.shape[:-1], 3), np.float32)
    fitted = principal_axes(flat, 3)
    coordinates = ((flat - fitted.mean) @ fitted.axes.double().T).numpy()
    low, high = np.percentile(coordinates, [1, 99], axis=0)
    colours = np.zeros((len(coordinates), 3), np.float32)
    colours[:, : coordinates.shape[1]] = np.clip((coordinates - low) / np.where(high > low, high - low, 1), 0, 1)
    return colours.reshape(*maps.shape[:-1], 3)
