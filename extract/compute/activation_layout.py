"""The layout of an activation: which of its axes are channels, and which are positions.

It is recognised from the shape and the size of the input. If that is ambiguous, the layout is unknown, and only
poolings such as `none` and `flatten` are accepted: no axis that might be channels is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Layout", "recognise"]

# "Any square" would average T x T attention matrices, and XCiT's channels x channels. No table of models is needed: the
# axes of a map shrink in proportion to the input.
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
        grid: (rows, columns) of the positions of a map, or of the patch tokens, which are in the order of the rows;
            None if it is not known.
        reason: why the layout is unknown.
    """

    kind: Literal["vector", "map", "tokens", "unknown"]
    axes: str = ""
    prefix_tokens: int = 0
    class_token: bool = False
    grid: tuple[int, int] | None = None
    reason: str = ""

    def attributes(self) -> dict[str, str]:
        """Return the axes as stored with a feature, and where its positions are, if it has some."""
        attributes = {"axes": self.axes}
        if self.grid is not None:
            attributes["grid"] = ",".join(map(str, self.grid))
        if self.prefix_tokens:
            first = "class" if self.class_token else "other"
            attributes["prefix"] = ",".join([first, *["other"] * (self.prefix_tokens - 1)])
        return attributes


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
            return Layout("map", "CHW", grid=(shape[1], shape[2]))
        if last:
            return Layout("map", "HWC", grid=(shape[0], shape[1]))
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
            grid = _grid_of(shape[0] - prefix, input_px)
            return Layout("tokens", "TC", prefix, class_token and prefix > 0, grid)
        if any(fits):
            return Layout("unknown", reason="tokens could be the last axis")
    return Layout("unknown", reason=f"{shape[0]} is not the number of patches of the {_px(input_px)} input")


def _grid_of(patches: int, input_px: tuple[int, int]) -> tuple[int, int] | None:
    """Return the (rows, columns) of this number of square patches; None unless exactly one size of patch gives it."""
    # Changing one patch of the input to find its token was tried: with attention, another token may change most.
    height, width = input_px
    grids = {(height // size, width // size) for size in range(1, min(input_px) + 1)}
    fitting = [grid for grid in grids if grid[0] * grid[1] == patches]
    return fitting[0] if len(fitting) == 1 else None


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
