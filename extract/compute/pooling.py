"""Pooling: from the activation of a layer to the stored feature of an image.

Whether an axis holds channels or positions is recognised from the shape and the size of the input. If that is
ambiguous, only `none` and `flatten` are accepted: no axis that might be channels is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from extract.errors import InputError, unknown_name

if TYPE_CHECKING:  # not at run time: the command line lists poolings without importing torch
    import torch
    from torch import Tensor

    from extract.taps.batch_axis import BatchAxis

__all__ = ["POOLINGS", "Layout", "Pooling", "pool", "pooling_names", "recognise", "reduction", "resolve_pooling"]

_STRIDES_PX = (1, 2, 4, 8, 14, 16, 32, 64)  # of maps; a square matrix of another size, such as T x T, is not a map
_PATCH_SIZES_PX = (4, 8, 14, 16, 32, 64)  # of vision transformers, and of the later stages of hierarchical ones


@dataclass(frozen=True)
class Layout:
    """Meaning of the axes of an activation.

    Attributes:
        kind: "vector" (B, C) or (B,), "map" with two axes of positions, "tokens" (B, T, C), or "unknown".
        axes: one letter for each axis after the batch: "C", "CHW", "HWC", "TC"; empty if unknown.
        prefix_tokens: number of tokens before the patch tokens (class token, registers).
        class_token: whether the first prefix token is a class token.
        reason: why the layout is unknown.
    """

    kind: Literal["vector", "map", "tokens", "unknown"]
    axes: str = ""
    prefix_tokens: int = 0
    class_token: bool = False
    reason: str = ""


def recognise(
    shape: Sequence[int],
    input_px: tuple[int, int],
    prefix_tokens: int = 0,
    patches: int | None = None,
    class_token: bool = False,
) -> Layout:
    """Recognise positions and channels in the activation of one image.

    The two axes of a map are the input size over one stride: (7, 7) for a (224, 224) input, (7, 14) for (224, 448).
    If both (C, H, W) and (H, W, C) fit, as in (56, 56, 56), the layout is unknown. Tokens are recognised by their
    number: a grid of patches, with or without the backbone's prefix tokens.

    Args:
        shape: shape of the activation of one image, without the batch axis.
        input_px: (height, width) of the backbone's input.
        prefix_tokens: number of tokens before the patch tokens.
        patches: number of patches of the input, if known.
        class_token: whether the first prefix token is a class token.
    """
    shape = tuple(shape)
    if len(shape) <= 1:
        return Layout("vector", "C"[: len(shape)])
    if len(shape) == 2:
        return _recognise_tokens(shape, input_px, prefix_tokens, patches, class_token)
    if len(shape) == 3:
        first, last = _is_grid(shape[1:], input_px), _is_grid(shape[:2], input_px)
        if first and last:
            return Layout("unknown", reason="channels could be the first axis or the last")
        if first:
            return Layout("map", "CHW")
        if last:
            return Layout("map", "HWC")
        return Layout("unknown", reason=f"no two neighbouring axes are a map of the {_px(input_px)} input")
    return Layout("unknown", reason=f"{len(shape)} axes are neither a vector, a map nor tokens")


def _recognise_tokens(
    shape: tuple[int, ...], input_px: tuple[int, int], prefix_tokens: int, patches: int | None, class_token: bool
) -> Layout:
    height, width = input_px
    grids = {(height // size) * (width // size) for size in _PATCH_SIZES_PX} - {0, 1}
    for counts in ({patches} if patches else set(), grids):  # the backbone's own number comes first
        fits = [any(axis == count + prefix for count in counts for prefix in (0, prefix_tokens)) for axis in shape]
        if fits == [True, False]:
            prefix = prefix_tokens if shape[0] - prefix_tokens in counts else 0
            return Layout("tokens", "TC", prefix, class_token and prefix > 0)
        if any(fits):
            return Layout("unknown", reason="tokens could be the last axis")
    return Layout("unknown", reason=f"{shape[0]} is not the number of patches of the {_px(input_px)} input")


def _px(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _is_grid(size: Sequence[int], input_px: tuple[int, int]) -> bool:
    """Return whether (h, w) is the input size over a usual stride, allowing for borders without padding."""
    if size == (1, 1):
        return True
    if input_px[0] == input_px[1] and size[0] != size[1]:
        return False
    return any(
        all(abs(side - whole / stride) <= 1 + 0.06 * side for side, whole in zip(size, input_px, strict=True))
        for stride in _STRIDES_PX
    )


def resolve_pooling(pooling: str, layout: Layout, shape: Sequence[int], reads_class_token: bool = False) -> str:
    """Return the pooling that `auto` means for an activation, or any other pooling after checking that it fits.

    `auto` is `none` for vectors and `mean_map` for maps. For tokens it is `cls_token` if the backbone itself reads its
    class token, else `mean_tokens`.

    Args:
        pooling: one of `pooling_names()`.
        layout: layout of the activation.
        shape: shape of the activation of one image.
        reads_class_token: whether the backbone's own embedding is its class token.

    Raises:
        UnknownNameError: the pooling does not exist.
        InputError: the pooling does not fit the activation.
    """
    if pooling not in pooling_names():
        raise unknown_name("pooling", pooling, pooling_names())
    if pooling != "auto" and POOLINGS[pooling].kind is None:
        return pooling
    if layout.kind == "unknown":
        raise InputError(f"{pooling} does not fit {_describe(layout, shape)}", hint=f"use {_names_for(None)}")
    if pooling == "auto":
        if layout.kind == "tokens" and not (reads_class_token and layout.class_token):
            return "mean_tokens"
        return {"vector": "none", "map": "mean_map", "tokens": "cls_token"}[layout.kind]
    entry = POOLINGS[pooling]
    if layout.kind != entry.kind or (entry.needs_class_token and not layout.class_token):
        raise InputError(
            f"{pooling} does not fit {_describe(layout, shape)}", hint=f"use {_names_for(layout.kind) or 'none'}"
        )
    return pooling


def _names_for(kind: str | None) -> str:
    fitting = [name for name, entry in POOLINGS.items() if entry.kind == kind and not entry.needs_class_token]
    return " or ".join(fitting)


def _describe(layout: Layout, shape: Sequence[int]) -> str:
    size = "(" + ", ".join(map(str, shape)) + ")"
    if layout.kind == "unknown":
        return f"an activation of shape {size} per image: {layout.reason}"
    if layout.kind == "tokens" and not layout.class_token:
        return f"tokens of shape {size} per image, which have no class token"
    return f"a {layout.kind} of shape {size} per image".replace("a tokens", "tokens")


def pool(activation: Tensor, pooling: str, layout: Layout) -> Tensor:
    """Pool a batch: (B, ...) -> (B, ...). Means of 16-bit values are computed in float32.

    `mean_tokens` leaves out prefix tokens, as timm's average pooling does (`timm.layers.global_pool_nlc`).

    Args:
        activation: (B, *shape).
        pooling: result of `resolve_pooling`.
        layout: result of `recognise`.
    """
    return POOLINGS[pooling].function(activation, layout)


def reduction(
    features: Mapping[str, tuple[BatchAxis, str, Layout]], dtype: torch.dtype
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function that computes all features of one activation, name -> (B, ...), on its device.

    Args:
        features: name -> position of the images in the activation, result of `resolve_pooling`, result of `recognise`.
        dtype: dtype of the features.
    """
    steps = [
        (name, None if (rows.axis, rows.per_image) == (0, 1) else rows.by_image, POOLINGS[pooling].function, layout)
        for name, (rows, pooling, layout) in features.items()
    ]

    def reduce(activation: Tensor) -> dict[str, Tensor]:
        return {
            name: function(activation if by_image is None else by_image(activation), layout).to(dtype)
            for name, by_image, function, layout in steps
        }

    return reduce


def _positions(layout: Layout) -> list[int]:
    return [1 + axis for axis, letter in enumerate(layout.axes) if letter in "HWT"]


def _mean(x: Tensor, axes: list[int]) -> Tensor:
    import torch

    return x.mean(axes, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)


@dataclass(frozen=True)
class Pooling:
    """A pooling function and the layouts that it fits.

    Attributes:
        function: maps a batch of activations (B, ...) and their layout to features (B, ...).
        kind: kind of layout that it fits; None fits every layout, including unknown.
        needs_class_token: whether it fits only tokens with a class token.
        keeps_axes: whether features have the axes of the activation, flattened or not; otherwise only channels.
    """

    function: Callable[[Tensor, Layout], Tensor]
    kind: Literal["map", "tokens"] | None
    needs_class_token: bool = False
    keeps_axes: bool = False

    def axes(self, layout: Layout) -> str:
        """Return the axes of the features, one letter each, as in `Layout.axes`."""
        return layout.axes if self.keeps_axes else "C"


# To add a pooling, add its entry: checks, error messages, help and stored attributes read this table.
POOLINGS: dict[str, Pooling] = {
    "none": Pooling(lambda x, layout: x, None, keeps_axes=True),
    "flatten": Pooling(lambda x, layout: x.reshape(len(x), math.prod(x.shape[1:])), None, keeps_axes=True),
    "mean_map": Pooling(lambda x, layout: _mean(x, _positions(layout)), "map"),
    "max_map": Pooling(lambda x, layout: x.amax(_positions(layout)), "map"),
    "cls_token": Pooling(lambda x, layout: x[:, 0], "tokens", needs_class_token=True),
    "mean_tokens": Pooling(lambda x, layout: _mean(x[:, layout.prefix_tokens :], [1]), "tokens"),
}


def pooling_names() -> list[str]:
    """Return the names that may follow a layer: `auto` and every pooling."""
    return ["auto", *POOLINGS]
