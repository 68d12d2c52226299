"""The figures of `layertap draw`, from arrays."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.terminal.figures import drawable

__all__ = [
    "CHANNELS_IN_A_ROW", "MOST_CHANNELS", "attention", "drawable_layer", "feature_maps", "filters",
    "overlays", "side_by_side", "top_images", "write_title",
]  # fmt: skip

Pixels = NDArray[np.uint8]  # (N, H, W, 3)
Floats = NDArray[np.floating[Any]]

CHANNELS_IN_A_ROW = 8
MOST_CHANNELS = 64  # for a single image: 8 rows of 8
_TILE_IN = 1.5
_MOST_HEADS = 8
_MOST_FILTERS = 256
_LINE_IN = 0.17  # height of a line of a title
_LETTERS_PER_IN = 12  # of a title
_CAPTION_LETTERS_PER_IN = 20
_DARKEST = 0.6  # opacity of black over the parts of an image that do not excite a channel


def drawable_layer(name: str, longest: int = 28) -> str:
    """Return the name of a layer as `drawable` does, without its beginning if it is long: layers differ at the end."""
    return drawable(name if len(name) <= longest else "…" + name[1 - longest :], longest)


def write_title(figure: Figure, title: str) -> None:
    """Write a title over a figure in as many lines as its width needs, and make the figure higher by all but one."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(title, max(20, int(_LETTERS_PER_IN * width)))
    figure.set_size_inches(width, height + _LINE_IN * (len(lines) - 1))
    figure.suptitle("\n".join(lines), fontsize=9)


def _grid(rows: int, columns: int, title: str, tile_in: float = _TILE_IN) -> tuple[Figure, Any]:
    """Return a figure and its plots without axes, as an array (rows, columns)."""
    figure = Figure(figsize=(0.3 + tile_in * columns, 0.6 + (tile_in + 0.18) * rows), layout="constrained")
    tiles = figure.subplots(rows, columns, squeeze=False)
    for tile in tiles.flat:
        tile.axis("off")
    write_title(figure, title)
    return figure, tiles


def _show(tile: Any, pixels: Pixels, caption: str = "") -> None:
    tile.imshow(pixels)
    tile.set_title(caption, fontsize=6.5, pad=2)


def _caption(name: str) -> str:
    return drawable(name.rpartition("/")[2], 32)


def _heat(tile: Any, values: Floats, pixels: Pixels, low: float, high: float, caption: str = "") -> None:
    """Draw a map over its image; larger values are brighter."""
    height, width = pixels.shape[:2]
    tile.imshow(pixels, extent=(0, width, height, 0))
    tile.imshow(
        values, extent=(0, width, height, 0), cmap="inferno", alpha=0.6, vmin=low, vmax=high if high > low else low + 1,
        interpolation="bilinear",
    )  # fmt: skip
    tile.set_title(caption, fontsize=6.5, pad=2)


def feature_maps(
    maps: Floats, channels: Mapping[int, bool], pixels: Pixels, names: Sequence[str], title: str
) -> Figure:
    """Draw channels of a layer beside the image: a grid for a single image, one row per image for several.

    Args:
        maps: (N, h, w, C) of these channels only.
        channels: number of each channel, and whether it is constant up to rounding.
        pixels: (N, H, W, 3) images.
        names: names of the images.
        title: title of the figure.
    """
    title += ": each channel from its least (dark) to its largest value (bright); grey: constant up to rounding"
    low, high = maps.min((0, 1, 2)), maps.max((0, 1, 2))
    columns = len(channels)
    if len(maps) == 1 and columns > CHANNELS_IN_A_ROW:  # the rows that leave the fewest places empty
        columns = min(range(CHANNELS_IN_A_ROW, 4, -1), key=lambda width: -len(channels) % width)
    rows = -(-len(channels) // columns) if len(maps) == 1 else len(maps)
    figure, tiles = _grid(rows, columns + 1, title)
    for row, (image, picture) in enumerate(zip(maps, pixels, strict=True)):
        _show(tiles[row, 0], picture, _caption(names[row]))
        for place, (channel, constant) in enumerate(channels.items()):
            tile = (tiles[:, 1:] if len(maps) == 1 else tiles[row : row + 1, 1:]).flat[place]
            if constant:
                tile.imshow(np.full_like(image[..., place], 0.8), cmap="gray", vmin=0, vmax=1)
            else:
                tile.imshow(
                    image[..., place], cmap="viridis", vmin=low[place], vmax=high[place], interpolation="nearest"
                )
            values = "constant" if constant else f"{low[place]:.2g} to {high[place]:.2g}"
            tile.set_title(f"channel {channel}: {values}" if row == 0 or len(maps) == 1 else "", fontsize=6.5, pad=2)
    return figure


def side_by_side(pixels: Pixels, others: Floats, names: Sequence[str], title: str) -> Figure:
    """Draw each image (H, W, 3) beside another picture of it (N, h, w, 3)."""
    figure, pairs = _pairs(len(pixels), title)
    for (left, right), picture, other, name in zip(pairs, pixels, others, names, strict=False):
        _show(left, picture, _caption(name))
        right.imshow(other, interpolation="nearest")
    return figure


def overlays(
    maps: Floats, pixels: Pixels, names: Sequence[str], title: str, captions: Sequence[str] | None = None
) -> Figure:
    """Draw each image, and again under its map (N, h, w), which is scaled from 0 to its own maximum.

    The captions are those of the maps.
    """
    figure, pairs = _pairs(len(pixels), title)
    letters = int(_CAPTION_LETTERS_PER_IN * figure.get_size_inches()[0] / (2 * min(3, len(pixels))))
    for number, ((left, right), picture, values, name) in enumerate(zip(pairs, pixels, maps, names, strict=False)):
        _show(left, picture, _caption(name))
        caption = textwrap.wrap(captions[number], letters)[:2] if captions else []
        _heat(right, values, picture, 0.0, float(values.max()), "\n".join(caption))
    return figure


def _pairs(count: int, title: str) -> tuple[Figure, Iterator[tuple[Any, Any]]]:
    """Return a figure and its plots in pairs: up to three pairs per row."""
    across = min(3, count)
    figure, tiles = _grid(-(-count // across), 2 * across, title, 3.2 if count == 1 else 1.8)
    flat = list(tiles.flat)
    return figure, zip(flat[::2], flat[1::2], strict=True)


def attention(heads: Floats, pixels: Pixels, names: Sequence[str], title: str) -> Figure:
    """Draw a row per image: the image, the mean of the heads over it, and the first heads of (N, heads, h, w)."""
    shown = min(_MOST_HEADS, heads.shape[1])
    title += f", each map from its least to its largest value; {shown} of {heads.shape[1]} heads"
    figure, tiles = _grid(len(heads), shown + 2, title)
    for row, (maps, picture) in enumerate(zip(heads, pixels, strict=True)):
        _show(tiles[row, 0], picture, _caption(names[row]))
        mean = maps.mean(0)
        _heat(tiles[row, 1], mean, picture, float(mean.min()), float(mean.max()), "mean of heads" if row == 0 else "")
        for head in range(shown):
            tile = tiles[row, head + 2]
            tile.imshow(maps[head], cmap="inferno", interpolation="nearest")
            tile.set_title(f"head {head}" if row == 0 else "", fontsize=6.5, pad=2)
    return figure


def top_images(
    best: Mapping[int, Sequence[int]], shown: Mapping[int, tuple[Floats, Pixels]], title: str, total: int
) -> Figure:
    """Draw a row per channel: the images that excite it most, darkened where they do not, outlined at half the maximum.

    Images that do not excite the channel anywhere are left out.

    Args:
        best: channel -> rows of the images, largest value first.
        shown: row -> maps (h, w, C) of these channels, in the same order, and pixels.
        title: title of the figure.
        total: number of images compared.
    """
    title += f": largest values of each channel among {total:,} images; outlined: above half of them"
    figure, tiles = _grid(len(best), max(len(rows) for rows in best.values()), title)
    for line, (channel, rows) in enumerate(best.items()):
        place = list(best).index(channel)
        for column, row in enumerate(rows):
            maps, pixels = shown[row]
            tile, values = tiles[line, column], maps[..., place]
            height, width = pixels.shape[:2]
            low, high = float(values.min()), float(values.max())
            if high <= low:
                continue
            share = (values - low) / (high - low)
            tile.imshow(pixels, extent=(0, width, height, 0))
            black = np.zeros((*values.shape, 4))
            black[..., 3] = _DARKEST * (1 - share)
            tile.imshow(black, extent=(0, width, height, 0), interpolation="bilinear")
            if min(values.shape) > 1:
                y, x = ((np.arange(size) + 0.5) * length / size
                        for size, length in zip(values.shape, (height, width), strict=True))  # fmt: skip
                tile.contour(x, y, share, [0.5], colors="white", linewidths=0.8)
            tile.set_title(f"channel {channel}: {high:.3g}" if column == 0 else f"{high:.3g}", fontsize=6.5, pad=2)
    return figure


def filters(weights: Floats, title: str) -> Figure:
    """Draw the filters (O, I, h, w) of a convolution: in colour if I is 3, else those of the first input channel.

    All filters share a scale; grey is zero.
    """
    count = min(_MOST_FILTERS, len(weights))
    columns = min(16, count)
    colour = weights.shape[1] == 3
    shown = "in colour" if colour else "of input 0"
    size = "x".join(map(str, weights.shape[2:]))
    largest = float(np.abs(weights).max()) or 1.0
    title += f": {count} of {len(weights)} filters, {size}, {shown}; grey: 0, range ±{largest:.2g}"
    figure, tiles = _grid(-(-count // columns), columns, title, 0.7)
    for number, (tile, weight) in enumerate(zip(tiles.flat, weights[:count], strict=False)):
        tile.set_title(str(number), fontsize=5, pad=1)
        if colour:
            tile.imshow(0.5 + 0.5 * weight.transpose(1, 2, 0) / largest, interpolation="nearest")
        else:
            tile.imshow(weight[0], cmap="gray", vmin=-largest, vmax=largest, interpolation="nearest")
    return figure
