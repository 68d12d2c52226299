"""The figures of `layertap draw` and `inspect`, with and without `--edit`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from extract.analysis.network.ablation import Ablation
from extract.analysis.network.inspection import Inspection
from extract.analysis.network.reports import TensorReport
from pipelines.terminal.figures import COLOURS, add_matrix, drawable, new_figure, save_figure

__all__ = [
    "CHANNELS_IN_A_ROW", "MOST_CHANNELS", "attention", "draw_ablation", "draw_inspection", "drawable_layer",
    "feature_maps", "overlays", "side_by_side", "top_images",
]  # fmt: skip

Pixels = NDArray[np.uint8]  # (N, H, W, 3)
Floats = NDArray[np.floating[Any]]

CHANNELS_IN_A_ROW = 8
MOST_CHANNELS = 64  # for a single image: 8 rows of 8
_TILE_IN = 1.5
_MOST_HEADS = 8
_LINE_IN = 0.17  # height of a line of a title
_LETTERS_PER_IN = 12  # of a title
_CAPTION_LETTERS_PER_IN = 20
_DARKEST = 0.6  # opacity of black over the parts of an image that do not excite a channel
_BINS = 120
_OUTER = 0.001  # fraction of a layer's values beyond each edge of a histogram
_ROW_IN = 0.19  # height of a layer
_AROUND_IN = 2.0  # height of the rest
_ROWS = 45  # layers of a page: the narrowest figure is then at most 1.5 times as high as wide
_MAX_NAMES = 40  # names along the axis


def drawable_layer(name: str, longest: int = 28) -> str:
    """Return the name of a layer as `drawable` does, without its beginning if it is long: layers differ at the end."""
    return drawable(name if len(name) <= longest else "…" + name[1 - longest :], longest)


def write_title(figure: Figure, title: str) -> None:
    """Write a title over a figure in as many lines as its width needs, and make the figure higher by all but one."""
    width, height = figure.get_size_inches()
    letters = max(20, int(_LETTERS_PER_IN * width))
    lines = [line for part in title.split("\n") for line in textwrap.wrap(part, letters)]
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


def _show(tile: Any, pixels: NDArray[Any], caption: str = "", **how: Any) -> None:
    tile.imshow(pixels, **how)
    tile.set_title(caption, fontsize=6.5, pad=2)


def _caption(name: str) -> str:
    return drawable(name.rpartition("/")[2], 32)


def _heat(tile: Any, values: Floats, pixels: Pixels, low: float, high: float, caption: str = "") -> None:
    """Draw a map over its image; larger values are brighter."""
    height, width = pixels.shape[:2]
    tile.imshow(pixels, extent=(0, width, height, 0))
    _show(
        tile, values, caption, extent=(0, width, height, 0), cmap="inferno", alpha=0.6, vmin=low,
        vmax=high if high > low else low + 1, interpolation="bilinear",
    )  # fmt: skip


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
            values = "constant" if constant else f"{low[place]:.2g} to {high[place]:.2g}"
            caption = f"channel {channel}: {values}" if row == 0 or len(maps) == 1 else ""
            if constant:
                _show(tile, np.full_like(image[..., place], 0.8), caption, cmap="gray", vmin=0, vmax=1)
            else:
                how = {"cmap": "viridis", "interpolation": "nearest"}
                _show(tile, image[..., place], caption, vmin=low[place], vmax=high[place], **how)
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
            caption = f"head {head}" if row == 0 else ""
            _show(tiles[row, head + 2], maps[head], caption, cmap="inferno", interpolation="nearest")
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
    for place, (channel, rows) in enumerate(best.items()):
        for column, row in enumerate(rows):
            maps, pixels = shown[row]
            tile, values = tiles[place, column], maps[..., place]
            height, width = pixels.shape[:2]
            low, high = float(values.min()), float(values.max())
            if high <= low:
                continue
            share = (values - low) / (high - low)
            caption = f"channel {channel}: {high:.3g}" if column == 0 else f"{high:.3g}"
            _show(tile, pixels, caption, extent=(0, width, height, 0))
            black = np.zeros((*values.shape, 4))
            black[..., 3] = _DARKEST * (1 - share)
            tile.imshow(black, extent=(0, width, height, 0), interpolation="bilinear")
            if min(values.shape) > 1:
                y, x = ((np.arange(size) + 0.5) * length / size
                        for size, length in zip(values.shape, (height, width), strict=True))  # fmt: skip
                tile.contour(x, y, share, [0.5], colors="white", linewidths=0.8)
    return figure


def draw_inspection(inspection: Inspection, backbone: str, folder: Path, suffix: str) -> list[Path]:
    """Draw the figures that apply and return the files: one each, or several pages if there are many layers.

    Args:
        inspection: result with or without gradients.
        backbone: spec of the backbone, for the titles.
        folder: where they are written; it exists.
        suffix: png, svg or pdf.
    """
    written = []
    for name, (title, picture) in _PICTURES.items():
        figure = picture(inspection)
        if figure is None:
            continue
        count = len(figure.axes[0].get_yticks())
        pages = -(-count // _ROWS)
        size, rows = figure.get_size_inches(), -(-count // pages)
        source = f"{drawable(backbone, 60)} on {inspection.images:,} image{'' if inspection.images == 1 else 's'}"
        for page, first in enumerate(range(0, count, rows), 1):
            last = min(first + rows, count)
            figure.axes[0].set_ylim(last - 0.5, first - 0.5)  # all pages have the range of values of all layers
            part = f"\nlayers {first + 1} to {last} of {count}" if pages > 1 else ""
            figure.set_size_inches(size[0], _AROUND_IN + _ROW_IN * rows)
            write_title(figure, f"{source}: {title}{part}")
            written.append(save_figure(figure, folder / f"{name}{f'-{page}' if pages > 1 else ''}.{suffix}"))
    return written


def _tensors(inspection: Inspection) -> list[TensorReport]:
    """Return the reports of layers inside which no other layer ran; all reports if there are none."""
    leaves = [report for report in inspection.tensors if report.leaf]
    return leaves or inspection.tensors


def _stacked(panels: int, names: Sequence[str], width: float) -> tuple[Figure, Any]:
    """Return a figure with plots side by side that share an axis of layers, from top to bottom, named at the left."""
    figure = Figure(figsize=(2.2 + width * panels, _AROUND_IN), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    axes[0].set_yticks(range(len(names)), [drawable_layer(name) for name in names], fontsize=7)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.3)
    return figure, axes


def _layers(inspection: Inspection) -> Figure:
    """Plot range, mean and spread of each layer's values, and the percentages of zeros and dead channels."""
    tensors = _tensors(inspection)
    figure, (values, zeros) = _stacked(2, [report.name for report in tensors], 3.6)
    places = np.arange(len(tensors))
    numbers = [report.activations for report in tensors]
    mean, std = np.array([n.mean for n in numbers]), np.array([n.std for n in numbers])
    values.hlines(places, [n.min for n in numbers], [n.max for n in numbers], color="0.75", linewidth=1)
    values.hlines(places, mean - std, mean + std, color=COLOURS[0], linewidth=3)
    values.plot(mean, places, "o", color="black", markersize=2.5)
    values.set_xscale("symlog", linthresh=1)
    values.set_title("values: range, mean ± standard deviation", fontsize=9)
    zeros.barh(places, [100 * n.zeros for n in numbers], color=COLOURS[5], height=0.8, label="zero values")
    dead = [
        100 * len(report.activations.dead) / report.activations.channels if report.by_image else 0 for report in tensors
    ]
    zeros.barh(places, dead, color=COLOURS[1], height=0.4, label="constant channels")
    zeros.set_xlim(0, 100)
    zeros.set_xlabel("%")
    zeros.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def _density(inspection: Inspection, *, of_gradients: bool) -> Figure | None:
    """Draw histograms as rows of an image, darker where there are more values.

    Each row of gradients, which differ by orders of magnitude, spans minus to plus its own largest value; rows of
    activations share a scale.
    """
    numbers_of = [(report.name, report.gradients if of_gradients else report.activations)
                  for report in _tensors(inspection)]  # fmt: skip
    statistics_by_layer = [(name, numbers) for name, numbers in numbers_of if numbers is not None and numbers.total]
    if not statistics_by_layer:
        return None
    reach = np.array([max(abs(n.quantile(_OUTER)), abs(n.quantile(1 - _OUTER))) for _, n in statistics_by_layer])
    reach = np.where(reach > 0, reach, 1.0)
    if not of_gradients:
        reach = np.full(len(statistics_by_layer), np.quantile(reach, 0.9))
    rows = np.array([
        numbers.histogram(np.linspace(-far, far, _BINS + 1)) / numbers.total
        for (_, numbers), far in zip(statistics_by_layer, reach, strict=True)
    ])  # fmt: skip
    figure, (axes,) = _stacked(1, [name for name, _ in statistics_by_layer], 5.0)
    far = 1.0 if of_gradients else float(reach[0])
    image = axes.imshow(
        np.clip(rows, 1e-5, None), aspect="auto", extent=(-far, far, len(rows) - 0.5, -0.5), cmap="magma_r",
        norm=LogNorm(1e-5, 1), interpolation="nearest",
    )  # fmt: skip
    outside = float(1 - rows.sum(1).min())
    if of_gradients:
        label = f"value, relative to the {1 - _OUTER:.1%} quantile of its layer; larger ones are outside"
    elif outside > _OUTER:
        label = f"value; cut at ±{far:.3g}: at most {outside:.1%} of a layer's values lie outside"
    else:
        label = "value"
    axes.set_xlabel(label, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="fraction of the values")
    return figure


def _gradient_flow(inspection: Inspection) -> Figure | None:
    """Plot the norms of gradients through the network, and of parameter gradients relative to the parameters."""
    tensors = [report for report in _tensors(inspection) if report.gradients is not None]
    if not tensors:
        return None
    places = {report.layer: place for place, report in enumerate(tensors)}
    shown = [
        parameter
        for parameter in inspection.parameters
        if parameter.layer in places and parameter.gradient_to_weight > 0
    ]
    figure, panels = _stacked(2 if shown else 1, [report.name for report in tensors], 3.6 if shown else 5.0)
    norms = np.array([report.gradient_norm for report in tensors])
    panels[0].plot(np.where(norms > 0, norms, np.nan), range(len(tensors)), color=COLOURS[0], marker="o", markersize=3)
    panels[0].set_title("gradient norm of the activation of an image", fontsize=9)
    for kind, colour in (("weight", COLOURS[1]), ("bias", COLOURS[2])):
        parameters = [parameter for parameter in shown if parameter.name.rpartition(".")[2] == kind]
        ratios = [parameter.gradient_to_weight for parameter in parameters]
        rows = [places[parameter.layer] for parameter in parameters]
        if rows:
            panels[-1].plot(ratios, rows, "o", color=colour, markersize=3, label=kind)
    if shown:
        panels[-1].set_title("gradient norm / norm of a parameter", fontsize=9)
        panels[-1].legend(frameon=False, fontsize=7)
    for axes in panels:
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="both", labelsize=7)
        low, high = axes.get_xlim()
        if high > 10 * low:  # the powers of ten are enough
            axes.xaxis.set_minor_formatter(NullFormatter())
    return figure


# File -> title, and what draws it.
_PICTURES: dict[str, tuple[str, Callable[[Inspection], Figure | None]]] = {
    "layers": ("values of each layer, zeros and constant channels", _layers),
    "activations": ("histograms of activations", partial(_density, of_gradients=False)),
    "gradient-flow": ("gradients of each layer and of its parameters", _gradient_flow),
    "gradients": ("histograms of gradients", partial(_density, of_gradients=True)),
}


def draw_ablation(ablation: Ablation, title: str) -> Figure:
    """Plot the effect on the embedding and the classes and, for several layers, on each later layer."""
    effects = ablation.effects
    layers = list(dict.fromkeys([effect.layer for effect in effects]))
    by_channel = effects[0].channel is not None
    if by_channel or len(layers) < 2:
        figure, axes = new_figure(min(16.0, max(5.0, 1.6 + 0.3 * len(effects))), 4.0)
    else:
        size = (min(18.0, 8.0 + 0.5 * len(layers)), max(4.0, 2.2 + 0.22 * len(layers)))
        figure = Figure(figsize=size, layout="constrained")
        axes, matrix = figure.subplots(1, 2, width_ratios=[1.4, 1])
        table = np.array([[effect.later.get(name, np.nan) for name in layers] for effect in effects])
        title_of_matrix = "cosine of later layers to their unedited values"
        add_matrix(figure, matrix, table, [drawable_layer(name) for name in layers], title=title_of_matrix)
        matrix.set_ylabel("edited")
    places = np.arange(len(effects))
    lines = {
        "cosine of the embedding, or output": [effect.cosine for effect in effects],
        "same class as before": [effect.same_class for effect in effects],
        "top-1 accuracy": [effect.accuracy for effect in effects],
    }
    for (label, values), colour in zip(lines.items(), COLOURS, strict=False):
        if np.isfinite(values).any():
            axes.plot(places, values, marker="o", markersize=3, color=colour, label=label)
    if math.isfinite(ablation.accuracy):
        axes.axhline(ablation.accuracy, color=COLOURS[2], linestyle=":", label="top-1 accuracy, unedited")
    names = [
        str(effect.channel) if by_channel and len(layers) == 1 else drawable_layer(effect.target) for effect in effects
    ]
    step = -(-len(effects) // _MAX_NAMES)
    slanted = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(places[::step], names[::step], fontsize=7, **(slanted if max(map(len, names)) > 4 else {}))
    axes.set_ylim(float(np.nanmin([*lines["cosine of the embedding, or output"], 0.0])) - 0.02, 1.02)
    axes.set_xlabel(f"channel of {drawable_layer(layers[0], 60)}" if by_channel and len(layers) == 1 else "edited")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=7)
    write_title(figure, title)
    return figure
