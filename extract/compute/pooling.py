"""Pooling: from the activation of a layer to the stored feature of an image, by the layout of the activation.

The layout says which axes are channels, and which are positions. It is recognised from the shape and the size of the
input. If that is ambiguous, it is unknown, and only poolings such as `none` and `flatten` are accepted: no axis that
might be channels is averaged.

Poolings combine from left to right: `grid4:srp512` pools to a grid of 4 x 4, and projects it to 512 values. Each takes
an activation and its layout, and gives another activation with another layout.

`roi` comes last. It pools over boxes of pictures, of which a picture has several: the device computes what comes before
it, once for each picture, and the host pools (`rows_of` in `extract/extraction/pipeline.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from extract.errors import InputError, unknown_name

if TYPE_CHECKING:  # not at run time: the command line lists poolings without importing torch
    import torch
    from torch import Tensor

    from extract.compute.principal_axes import AxesProjection
    from extract.compute.sparse_projection import SparseProjection
    from extract.taps.batch_axis import BatchAxis

__all__ = [
    "POOLINGS",
    "Layout",
    "Pooling",
    "PoolingChain",
    "pooling_names",
    "recognise",
    "reduction",
    "resolve_pooling",
    "split_poolings",
]

_NUMBER = r"0|[1-9]\d{0,17}"  # in the name of a pooling, whose `arguments` check its range

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
        is_ambiguous: whether it is unknown because the first axis and the last may be its channels.
    """

    kind: Literal["vector", "map", "tokens", "unknown"]
    axes: str = ""
    prefix_tokens: int = 0
    class_token: bool = False
    grid: tuple[int, int] | None = None
    reason: str = ""
    is_ambiguous: bool = False

    def attributes(self) -> dict[str, str]:
        """Return the axes as stored with a feature, and where its positions are, if it has some."""
        attributes = {"axes": self.axes}
        if self.grid is not None:
            attributes["grid"] = ",".join(map(str, self.grid))
        if self.prefix_tokens:
            first = "class" if self.class_token else "other"
            attributes["prefix"] = ",".join([first, *["other"] * (self.prefix_tokens - 1)])
        return attributes


Numbers = tuple[str | None, ...]  # in the name of a pooling; None: left out
Named = tuple[str, dict[str, Any]]  # the name with all its numbers, and the arguments of the function


@dataclass(frozen=True)
class PoolingStep:
    """One pooling of a chain, for activations of one shape.

    Attributes:
        name: its name, with all its numbers.
        function: maps a batch of activations (B, ...) to (B, ...).
        layout: layout of its result.
        shape: shape of its result for one image.
        projection: what it projects by; None: it is no projection.
        of_boxes: whether it pools over boxes; `function` then takes them by name, see `_roi`.
    """

    name: str
    function: Callable[..., Tensor]
    layout: Layout
    shape: tuple[int, ...]
    projection: AxesProjection | SparseProjection | None
    of_boxes: bool = False

    @property
    def principal_axes(self) -> AxesProjection | None:
        """The axes that it projects on; None if it projects on none."""
        from extract.compute.principal_axes import AxesProjection

        return self.projection if isinstance(self.projection, AxesProjection) else None


@dataclass(frozen=True)
class PoolingChain:
    """Poolings that follow each other, for activations of one shape; a function from (B, ...) to (B, ...).

    Attributes:
        steps: the poolings.
    """

    steps: tuple[PoolingStep, ...]

    @property
    def name(self) -> str:
        """The poolings with all their numbers, as they can be written behind a layer."""
        return ":".join(step.name for step in self.steps)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result for one image."""
        return self.steps[-1].shape

    @property
    def layout(self) -> Layout:
        """Layout of the result."""
        return self.steps[-1].layout

    def __call__(self, activation: Tensor) -> Tensor:
        """Pool a batch: (B, ...) -> (B, ...)."""
        for step in self.steps:
            activation = step.function(activation)
        return activation

    @property
    def principal_axes(self) -> AxesProjection | None:
        """The axes that one of the poolings projects on; None if none does."""
        return next((step.principal_axes for step in self.steps if step.principal_axes), None)

    @property
    def before_axes(self) -> PoolingChain:
        """The poolings before the projection on principal axes."""
        return PoolingChain(tuple(takewhile(lambda step: step.principal_axes is None, self.steps)))

    @property
    def before_boxes(self) -> PoolingChain:
        """The poolings before that over boxes."""
        return PoolingChain(tuple(step for step in self.steps if not step.of_boxes))

    def split(self) -> tuple[PoolingChain, PoolingChain]:
        """Return the poolings that a compiler takes, and those from a projection on; either may have no steps."""
        # Inductor unrolls the hundreds of operations of a sparse projection. For 802,816 -> 4,096, OpenVINO takes 12 ms
        # of CPU time, PyTorch 1 ms. The price is activations in memory; see `ByOpenVino`.
        compiled = tuple(takewhile(lambda step: step.projection is None, self.steps))
        return PoolingChain(compiled), PoolingChain(self.steps[len(compiled) :])


def resolve_pooling(poolings: str, activation: Tensor, layout: Layout, reads_class_token: bool = False) -> PoolingChain:
    """Return the poolings for activations like this one, after checking that each fits the result of the one before.

    `auto` is `none` for vectors and `mean_map` for maps. For tokens it is `cls_token` if the backbone itself reads its
    class token, else `mean_tokens`. Whole numbers, such as codes, are stored as they are: `auto` is `none` for them.

    Args:
        poolings: names as of `pooling_names()`, separated by colons.
        activation: (B, *shape) of a few images; pooled here, so that shapes need no second description of a pooling.
        layout: layout of the activation.
        reads_class_token: whether the backbone's own embedding is its class token.

    Raises:
        UnknownNameError: a pooling does not exist.
        InputError: a pooling does not fit.
    """
    steps: list[PoolingStep] = []
    if not activation.is_floating_point():
        poolings = "none" if poolings == "auto" else poolings
        if not set(poolings.split(":")) <= {"none", "flatten"}:
            raise InputError(f"{poolings} does not fit whole numbers ({activation.dtype})", hint="use none or flatten")
    for name in poolings.split(":"):
        shape = tuple(activation.shape[1:])
        if name == "auto":
            name = _automatic(layout, shape, reads_class_token)
        try:
            if steps and steps[-1].of_boxes:
                raise InputError(f"there is no {name}: a pooling over boxes is the last one")
            step, activation = _applied(name, layout, activation)
            if step.principal_axes and any(before.principal_axes for before in steps):
                raise InputError("axes are fitted once in a chain of poolings", hint="use one pcaK or pcawK")
        except InputError as error:
            before = f"after {steps[-1].name}, " if steps else ""
            raise InputError(before + error.message, hint=error.hint) from None
        layout = step.layout
        steps.append(step)
    # `none` changes nothing: without it, equal features have one name.
    steps = [step for step in steps if step.name != "none"] or steps[:1]
    return PoolingChain(tuple(steps))


def _automatic(layout: Layout, shape: Sequence[int], reads_class_token: bool) -> str:
    if layout.kind == "unknown":
        raise _misfit("auto", layout, shape)
    if layout.kind == "tokens" and not (reads_class_token and layout.class_token):
        return "mean_tokens"
    return {"vector": "none", "map": "mean_map", "tokens": "cls_token"}[layout.kind]


def _applied(name: str, layout: Layout, activation: Tensor) -> tuple[PoolingStep, Tensor]:
    """Return a pooling for activations like this one, and its result for this one."""
    shape = tuple(activation.shape[1:])
    arguments: dict[str, Any] = {}
    match = _entry(name)
    if match is None:
        raise unknown_name("pooling", name, pooling_names())
    entry, numbers = match
    if not entry.fits(layout):
        raise _misfit(name, layout, shape)
    if entry.arguments is not None:
        name, arguments = entry.arguments(numbers, layout, shape)
    function = partial(entry.function, layout=layout, **arguments)
    projection = arguments.get("projection")
    pooled = function(activation.to("meta") if projection else activation)  # a projection would draw its matrix
    result = entry.result(layout)
    if result.kind == "map":
        rows, columns = (pooled.shape[axis] for axis in _positions(result))
        result = replace(result, grid=(rows, columns))
    return PoolingStep(name, function, result, tuple(pooled.shape[1:]), projection, entry.kind == "boxes"), pooled


def _entry(name: str) -> tuple[Pooling, Numbers] | None:
    """Return the entry of a pooling, and the numbers in its name; None if there is none of this name."""
    for key, entry in POOLINGS.items():
        if match := re.fullmatch(entry.form or re.escape(key), name, re.ASCII):
            return entry, match.groups()
    return None


def split_poolings(text: str) -> tuple[str, str]:
    """Split `LAYER[:POOLING]...` into the layer and its poolings; these are empty if the text has none."""
    layer, poolings = text, ""
    while True:
        rest, _, last = layer.rpartition(":")
        if not rest or (last != "auto" and _entry(last) is None):
            return layer, poolings
        layer, poolings = rest, f"{last}:{poolings}" if poolings else last


def _misfit(name: str, layout: Layout, shape: Sequence[int]) -> InputError:
    fitting = [name for name, entry in POOLINGS.items() if entry.kind not in (None, "boxes") and entry.fits(layout)]
    names = fitting or [name for name, entry in POOLINGS.items() if entry.kind is None]
    names = names if layout.kind != "vector" else ["none"]
    others = f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]
    return InputError(f"{name} does not fit {_describe(layout, shape)}", hint=f"use {others}")


def _describe(layout: Layout, shape: Sequence[int]) -> str:
    size = "(" + ", ".join(map(str, shape)) + ")"
    if layout.kind == "unknown":
        return f"an activation of shape {size} per image: {layout.reason}"
    if layout.kind == "tokens":
        return f"tokens of shape {size} per image" + ("" if layout.class_token else ", which have no class token")
    return f"a {layout.kind} of shape {size} per image"


def reduction(
    features: Mapping[str, tuple[BatchAxis, PoolingChain]], dtype: torch.dtype
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function that computes all features of one activation, name -> (B, ...), on its device.

    Args:
        features: name -> position of the images in the activation, result of `resolve_pooling`.
        dtype: dtype of the features, except those that are whole numbers.
    """
    steps = [
        (name, None if (rows.axis, rows.per_image) == (0, 1) else rows.by_image, chain)
        for name, (rows, chain) in features.items()
    ]

    def reduce(activation: Tensor) -> dict[str, Tensor]:
        return {
            name: _converted(chain(activation if by_image is None else by_image(activation)), dtype)
            for name, by_image, chain in steps
        }

    return reduce


def _converted(feature: Tensor, dtype: torch.dtype) -> Tensor:
    return feature.to(dtype) if feature.is_floating_point() else feature  # whole numbers stay exact


def _positions(layout: Layout) -> list[int]:
    return [1 + axis for axis, letter in enumerate(layout.axes) if letter in "HWT"]


def _patches(x: Tensor, layout: Layout) -> Tensor:
    """Return the positions of maps, or the patch tokens."""
    return x[:, layout.prefix_tokens :] if layout.kind == "tokens" else x


def _mean(x: Tensor, axes: list[int]) -> Tensor:
    import torch

    return x.mean(axes, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)


def _deviation(x: Tensor, axes: list[int]) -> Tensor:
    """Return the standard deviation, dividing by the number of positions: a map of one position has 0."""
    return (x.float() if x.element_size() < 4 else x).std(axes, correction=0)


def _generalised_mean(x: Tensor, layout: Layout, power: float) -> Tensor:
    """Return the generalised mean, (mean of x**P)**(1 / P), of values of at least 1e-6 (Radenovic et al. 2018)."""
    axes = _positions(layout)
    x = _patches(x, layout).float().clamp(min=1e-6)
    largest = x.amax(axes, keepdim=True)  # its powers could be beyond float32
    return largest.squeeze(tuple(axes)) * ((x / largest) ** power).mean(axes) ** (1 / power)


def _generalised_mean_arguments(numbers: Numbers, layout: Layout, shape: tuple[int, ...]) -> Named:
    power = float(numbers[0] or 3)
    if not 0.01 <= power <= 100:
        raise InputError(
            f"gem{numbers[0]} has the power {power:g}; expected 0.01 to 100", hint="use gem, which is gem3"
        )
    return f"gem{power:g}", {"power": power}


def _map(x: Tensor, layout: Layout) -> Tensor:
    """Return maps as they are, and patch tokens as maps (B, H, W, C)."""
    if layout.kind == "tokens" and layout.grid:
        x = _patches(x, layout)
        x = x.reshape(len(x), *layout.grid, x.shape[-1])
    return x


def _grid(x: Tensor, layout: Layout, size: int) -> Tensor:
    """Return the means of size x size cells, which share a row or a column where sides are not divisible by size.

    The cells are those of PyTorch's adaptive average pooling. A mean over rows of means over columns needs no kernel of
    a device or compiler.
    """
    import torch

    x = _map(x, layout)
    for axis in _positions(_as_map(layout)):
        side = x.shape[axis]
        cells = [(cell * side // size, -(-(cell + 1) * side // size)) for cell in range(size)]
        x = torch.stack([_mean(x.narrow(axis, start, end - start), [axis]) for start, end in cells], axis)
    return x


def _grid_arguments(numbers: Numbers, layout: Layout, shape: tuple[int, ...], word: str = "grid") -> Named:
    name, size = "".join([word, *map(str, numbers)]), int(numbers[0] or 0) if numbers else 1
    if layout.kind == "tokens" and layout.grid is None:
        count = shape[0] - layout.prefix_tokens
        raise InputError(f"{name} does not fit {count:,} patch tokens, whose grid is not known", hint="use mean_tokens")
    sides = layout.grid or tuple(side for side, axis in zip(shape, layout.axes, strict=True) if axis in "HW")
    if not 1 <= size <= min(sides):
        raise InputError(
            f"{name} does not fit a grid of {sides[0]} x {sides[1]} positions",
            hint=f"use {word}1 to {word}{min(sides)}",
        )
    return name, {"size": size} if numbers else {}


_roi_arguments = partial(_grid_arguments, word="roi")


def _roi(
    x: Tensor, layout: Layout, size: int = 0, boxes: Tensor | None = None, input_px: tuple[int, int] = (1, 1)
) -> Tensor:
    """Return the means of size x size cells of boxes by torchvision's `roi_align` (He et al. 2017), on the CPU.

    Args:
        x: (P, ...) activations of pictures.
        layout: their layout, maps or tokens.
        size: cells in a row; 0: one, without axes of positions.
        boxes: (R, 5): the picture's number, and left, upper, right and lower edge in pixels of the input; None: the
            whole of each picture.
        input_px: (height, width) of the input.

    Returns:
        (R, C, size, size) float32, or (R, C).
    """
    import torch
    from torchvision.ops import roi_align

    maps = _map(x, layout).to("cpu", torch.float32)
    maps = maps if _as_map(layout).axes == "CHW" else maps.permute(0, 3, 1, 2)
    if boxes is None:
        boxes = torch.tensor([(picture, 0, 0, 1, 1) for picture in range(len(maps))])
    height, width = (positions / px for positions, px in zip(maps.shape[2:], input_px, strict=True))
    places = (boxes * torch.tensor([1, width, height, width, height])).float()
    # Its default is to interpolate as many points in a cell as there are positions of the map.
    pooled: Tensor = roi_align(maps, places, max(size, 1), aligned=True)
    return pooled if size else pooled.flatten(1)


def _projection_arguments(numbers: Numbers, layout: Layout, shape: tuple[int, ...]) -> Named:
    from extract.compute.sparse_projection import sparse_projection

    if numbers[0] is None:
        raise InputError("srp alone needs a number of images to choose K", hint="give K, such as srp4096")
    projection = sparse_projection(math.prod(shape), int(numbers[0]), int(numbers[1] or 0))
    return projection.name, {"projection": projection}


def _axes_arguments(numbers: Numbers, layout: Layout, shape: tuple[int, ...]) -> Named:
    from extract.compute.principal_axes import AxesProjection

    axes = AxesProjection(math.prod(shape), int(numbers[1] or 0), bool(numbers[0]))
    return axes.name, {"projection": axes}


def _as_map(layout: Layout) -> Layout:
    return Layout("map", "HWC" if layout.kind == "tokens" else layout.axes)


def _tokens(x: Tensor, layout: Layout) -> Tensor:
    """Return the positions of maps, row by row, as tokens: (B, T, C)."""
    if layout.kind == "tokens":
        return x
    return x.flatten(1, 2) if layout.axes == "HWC" else x.flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Pooling:
    """A pooling function and the layouts that it fits.

    Attributes:
        function: maps a batch of activations (B, ...) and, by name, `layout` and the `arguments` to features (B, ...).
        kind: kind of layout that it fits; "positions" is a map or tokens, and "boxes" the same, pooled over boxes; None
            fits every layout, including unknown.
        needs_class_token: whether it fits only tokens with a class token.
        result: maps the layout of activations to that of features.
        form: regular expression of the name, if numbers are part of it, with a group for each.
        arguments: maps the numbers, the layout and the shape of an image's activation to the name with all numbers and
            the arguments of `function`; raises `InputError` if they do not fit.
    """

    function: Callable[..., Tensor]
    kind: Literal["map", "tokens", "positions", "boxes"] | None
    needs_class_token: bool = False
    result: Callable[[Layout], Layout] = lambda layout: Layout("vector", "C")
    form: str = ""
    arguments: Callable[[Numbers, Layout, tuple[int, ...]], Named] | None = None

    def fits(self, layout: Layout) -> bool:
        """Return whether it fits activations of a layout."""
        if self.kind is None:
            return True
        kinds = ("map", "tokens") if self.kind in ("positions", "boxes") else (self.kind,)
        return layout.kind in kinds and (layout.class_token or not self.needs_class_token)


def _mean_and_deviation(x: Tensor, layout: Layout) -> Tensor:
    import torch

    patches, axes = _patches(x, layout), _positions(layout)
    return torch.cat([_mean(patches, axes), _deviation(patches, axes)], 1)


def _class_token_and_mean(x: Tensor, layout: Layout) -> Tensor:
    import torch

    mean = _mean(_patches(x, layout), [1])
    return torch.cat([x[:, 0].to(mean.dtype), mean], 1)


# To add a pooling, add its entry: checks, error messages, help and stored attributes read this table.
POOLINGS: dict[str, Pooling] = {
    "none": Pooling(lambda x, layout: x, None, result=lambda layout: layout),
    "flatten": Pooling(
        lambda x, layout: x.flatten(1) if x.ndim > 1 else x[:, None],
        None,
        result=lambda layout: Layout("vector", layout.axes),
    ),
    "mean_map": Pooling(lambda x, layout: _mean(x, _positions(layout)), "map"),
    "max_map": Pooling(lambda x, layout: x.amax(_positions(layout)), "map"),
    "std_map": Pooling(lambda x, layout: _deviation(x, _positions(layout)), "map"),
    "cls_token": Pooling(lambda x, layout: x[:, 0], "tokens", needs_class_token=True),
    "mean_tokens": Pooling(lambda x, layout: _mean(_patches(x, layout), [1]), "tokens"),
    "last_token": Pooling(lambda x, layout: x[:, -1], "tokens"),
    "cls+mean": Pooling(_class_token_and_mean, "tokens", needs_class_token=True),  # DINOv2's linear evaluation
    "meanstd": Pooling(_mean_and_deviation, "positions"),
    "gem[P]": Pooling(
        _generalised_mean, "positions", form=r"gem(\d+(?:\.\d+)?)?", arguments=_generalised_mean_arguments
    ),
    "tokens": Pooling(_tokens, "positions", result=lambda layout: replace(layout, kind="tokens", axes="TC")),
    "gridG": Pooling(_grid, "positions", result=_as_map, form=rf"grid({_NUMBER})", arguments=_grid_arguments),
    "roi": Pooling(_roi, "boxes", arguments=_roi_arguments),
    "roiG": Pooling(
        _roi, "boxes", result=lambda layout: Layout("map", "CHW"), form=rf"roi({_NUMBER})", arguments=_roi_arguments
    ),
    "srp[K][sSEED]": Pooling(
        lambda x, layout, projection: projection(x),
        None,
        form=rf"srp({_NUMBER})?(?:s(0|[1-9]\d{{0,9}}))?",
        arguments=_projection_arguments,
    ),
    "pca[w]K": Pooling(
        lambda x, layout, projection: projection(x),
        None,
        form=rf"pca(w)?({_NUMBER})",
        arguments=_axes_arguments,
    ),
}


def pooling_names() -> list[str]:
    """Return the names that may follow a layer: `auto` and every pooling; what is in brackets may be omitted."""
    return ["auto", *POOLINGS]


def recognise(
    shape: Sequence[int],
    input_px: tuple[int, int],
    prefix_tokens: int = 0,
    patches: int | None = None,
    class_token: bool = False,
    channels: Literal["first", "last", "unknown"] = "unknown",
) -> Layout:
    """Recognise positions and channels in the activation of one image.

    The two axes of a map are the input size over one stride: (7, 7) for a (224, 224) input, (7, 14) for (224, 448).
    Tokens are recognised by their number: a grid of patches, with or without the backbone's prefix tokens. If several
    axes fit, as in (56, 56, 56) or (256, 64), `channels` decides.

    Args:
        shape: shape of the activation of one image, without the batch axis.
        input_px: (height, width) of the backbone's input.
        prefix_tokens: number of tokens before the patch tokens.
        patches: number of patches of the input, if known.
        class_token: whether the first prefix token is a class token.
        channels: axis of a map or tokens that is known to be its channels.
    """
    shape = tuple(shape)
    if len(shape) <= 1:
        return Layout("vector", "C"[: len(shape)])
    if len(shape) == 2:
        return _recognise_tokens(shape, input_px, prefix_tokens, patches, class_token, channels)
    if len(shape) == 3:
        first, last = _is_grid(shape[1:], input_px), _is_grid(shape[:2], input_px)
        if first and last and channels == "unknown":
            return Layout("unknown", reason="channels could be the first axis or the last", is_ambiguous=True)
        if first and last:
            first = channels == "first"
        if first:
            return Layout("map", "CHW", grid=(shape[1], shape[2]))
        if last:
            return Layout("map", "HWC", grid=(shape[0], shape[1]))
        return Layout("unknown", reason=f"no two neighbouring axes are a map of the {_px(input_px)} input")
    return Layout("unknown", reason=f"{len(shape)} axes are neither a vector, a map nor tokens")


def _recognise_tokens(
    shape: tuple[int, ...], input_px: tuple[int, int], prefix_tokens: int, patches: int | None, class_token: bool,
    channels: str,
) -> Layout:  # fmt: skip
    height, width = input_px
    grids = {(height // size) * (width // size) for size in _PATCH_SIZES_PX} - {0, 1}
    # The backbone's own number of patches comes first. A stated number of prefix tokens tells 65 tokens from 64 values.
    for counts, prefix in [(counts, prefix) for counts in ({patches} - {None}, grids) for prefix in (prefix_tokens, 0)]:
        fits = [axis - prefix in counts for axis in shape]
        if fits == [True, False] or (fits == [True, True] and channels == "last"):
            grid = _grid_of(shape[0] - prefix, input_px)
            return Layout("tokens", "TC", prefix, class_token and prefix > 0, grid)
        if any(fits):
            return Layout("unknown", reason="tokens could be the last axis", is_ambiguous=True)
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
