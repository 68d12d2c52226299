"""Attribution: Grad-CAM, attention weights and rollout, and principal directions of patch tokens as colours.

cam = grad_cam(backbone, inputs, "blocks.6")                  # (B, h, w)
weights = attentions(backbone, inputs)                        # layers x (B, heads, T, T)
seen = rollout(weights)[:, 0, backbone.prefix_tokens:]        # (B, patches): as seen by the class token
colours = principal_colours(activations)                      # (B, h, w, C) -> (B, h, w, 3)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.backbone import Backbone
from extract.compute.feature_choice import Choice, choose_features
from extract.compute.principal_axes import principal_axes
from extract.errors import InputError
from extract.system.torch_state import evaluating, full_float32, with_gradients
from extract.taps.layer_names import named_layers
from extract.taps.record import Site
from extract.taps.taps import Taps

__all__ = ["activations_of", "attentions", "grad_cam", "map_of", "principal_colours", "rollout"]


def activations_of(backbone: Backbone, inputs: Tensor, choice: Choice) -> dict[str, Tensor]:
    """Compute activations without pooling: feature name -> (B, *shape), on the CPU.

    Args:
        backbone: loaded backbone.
        inputs: (B, 3, H, W), preprocessed for the backbone.
        choice: result of `choose_features(backbone, ["LAYER:none", ...])`.
    """
    taps = choice.kept_by(Taps(backbone.model, stop=True), torch.float32)
    with torch.no_grad(), evaluating(backbone.model), full_float32(), taps:
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
        raise InputError("the layer has no positions", hint="name a layer that returns a map or tokens")
    patches = activation[:, prefix_tokens:]
    height = round((patches.shape[1] * input_px[0] / input_px[1]) ** 0.5)
    if height < 1 or patches.shape[1] % height:
        raise InputError(f"{patches.shape[1]} tokens do not form a grid over a {input_px[0]}x{input_px[1]} input")
    return patches.reshape(len(patches), height, -1, patches.shape[-1])


def grad_cam(
    backbone: Backbone, inputs: Tensor, layer: str, targets: Sequence[int] | Tensor | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Compute Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391, equations 1 and 2): evidence for a class by position.

    The weight of a channel is the mean over positions of the gradient of the class score. The map is the weighted sum
    of the channels, with negative values set to zero.

    Args:
        backbone: backbone that returns class scores.
        inputs: (B, 3, H, W), preprocessed for the backbone.
        layer: layer with a map or tokens.
        targets: (B,) a class for each image; None: the class with the highest score.

    Returns:
        (B, h, w) non-negative maps in the units of the score, and (B,) the classes.

    Raises:
        UnknownNameError: the layer does not exist.
        InputError: the layer has no positions, several tensors or no gradient, a target is not a class, or the backbone
            returns no class scores, or scores without gradients.
    """
    with evaluating(backbone.model), full_float32():
        features = choose_features(backbone, [f"{layer}:none"]).features
        if len(features) > 1:
            names = ", ".join(feature.name for feature in features)
            raise InputError(f"layer {layer!r} returns several tensors", hint=f"name one of {names}")
        feature = features[0]
        site = feature.site
        gradient = Site(site.layer, site.call, site.path, "grad")
        with with_gradients(), Taps(backbone.model).keep(site).keep(gradient) as taps:
            pixels = inputs.clone().requires_grad_()  # gradients must flow even if all parameters are frozen
            scores = taps(pixels.clone())
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
            if gradient not in taps.record.by_site:
                raise InputError(
                    f"no gradient reaches layer {layer!r} of {backbone.spec}",
                    hint="name a layer on which the scores depend, in a model that computes them from the image "
                    "without torch.no_grad(), torch.inference_mode() and detach()",
                )
            values, slopes = taps.record[site], taps.record[gradient]
    values, slopes = feature.rows.by_image(values), feature.rows.by_image(slopes)
    layout, size = feature.layout, backbone.preprocessing.crop_px
    activation = map_of(values, layout.axes, layout.prefix_tokens, size).float()
    weights = map_of(slopes, layout.axes, layout.prefix_tokens, size).float().mean((1, 2))  # (B, C)
    if not bool(weights.any()):
        raise InputError(
            f"no gradient reaches the positions of {layer!r} (the scores may depend only on the class token after "
            "this layer)",
            hint="name an earlier layer",
        )
    cam = torch.einsum("bhwc,bc->bhw", activation, weights).relu()
    return cam.numpy(), chosen.cpu().numpy()


def attentions(backbone: Backbone, inputs: Tensor, layers: str | Sequence[str] | None = None) -> list[Tensor]:
    """Compute the weights (B, heads, T, T) of every attention over tokens, on the CPU, in the order of computation.

    Args:
        backbone: loaded backbone.
        inputs: (B, 3, H, W), preprocessed for the backbone.
        layers: names or globs of layers that contain attention; None: all layers.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: the backbone computes no attention of a known kind.
    """
    if layers is None:
        layers = [name for name in named_layers(backbone.model) if "." not in name]
    taps = Taps(backbone.model).keep(layers, "attention")
    with torch.no_grad(), evaluating(backbone.model), full_float32(), taps:
        taps(inputs)
        weights = list(taps.record.values())
    if not weights:
        raise InputError(f"{backbone.spec} computes no attention of a known kind")
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
    result: Tensor | None = None
    for layer_weights in weights:
        mean = layer_weights.double().mean(1)
        mixed = 0.5 * mean + 0.5 * torch.eye(mean.shape[-1], dtype=mean.dtype)
        mixed /= mixed.sum(-1, keepdim=True)
        result = mixed if result is None else mixed @ result
    assert result is not None
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
