"""The figure of `layertap inspect --edit`: the effect of each edit on the embedding, the classes and later layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from extract.analysis.network.ablation import Ablation, Effect
from pipelines.network.draw_figures import drawable_layer, write_title
from pipelines.terminal.figures import COLOURS, new_figure

__all__ = ["draw_ablation"]

_MAX_NAMES = 40  # names along the axis


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
        _later(figure, matrix, effects, layers)
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


def _later(figure: Figure, axes: Any, effects: Sequence[Effect], layers: Sequence[str]) -> None:
    table = np.array([[effect.later.get(name, np.nan) for name in layers] for effect in effects])
    image = axes.imshow(table, cmap="magma", vmin=0, vmax=1)
    names = [drawable_layer(name) for name in layers]
    axes.set_xticks(range(len(layers)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_yticks(range(len(effects)), [drawable_layer(effect.target) for effect in effects], fontsize=7)
    axes.set_ylabel("edited")
    axes.set_title("cosine of later layers to their unedited values", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.7)
